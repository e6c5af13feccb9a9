"""The registrar's office of a university: enrolments with marks, absences, holds and papers."""

from dataclasses import dataclass
from datetime import date, timedelta
from typing import Literal, get_args

from worlds.toolscale.toolkit import Draw, Toolkit, handover, read, write
from worlds.toolscale.wishes import Mine, Scene, Wish, hand_over, rule, wish

HELD_OUT = True
Area = Literal["nothing", "statistics", "writing", "anatomy", "drawing"]
Grading = Literal["letter", "pass_or_fail"]
Paper = Literal["enrolment", "transcript", "fees"]
Piece = Literal["essay", "midterm", "report", "presentation", "project"]
Weekday = Literal["Monday", "Tuesday", "Thursday"]


@dataclass(frozen=True)
class Student:
    student_id: str
    name: str
    entry_year: int
    hold: Literal["none", "library", "tuition"]
    credits_now: int
    passed: tuple[Area, ...]
    exchange: bool
    papers: tuple[Paper, ...]


@dataclass(frozen=True)
class Course:
    course_id: str
    name: str
    credits: int
    needs: Area
    places: int
    weekday: Weekday
    room: str


@dataclass(frozen=True)
class Mark:
    piece: Piece
    points: int
    released: date
    review: Literal["never", "asked", "done"]


@dataclass(frozen=True)
class Enrolment:
    enrolment_id: str
    student_id: str
    course_id: str
    course: str
    credits: int
    running: bool
    since: date
    grading: Grading
    absences: int
    marks: tuple[Mark, ...]

    def names(self) -> list[str]:
        return [f"enrolment {self.enrolment_id}", f"your course {self.course}"]


@dataclass
class University(Toolkit):
    """You work in the registrar's office of a university."""

    students: dict[str, Student]
    courses: dict[str, Course]
    enrolments: dict[str, Enrolment]

    def running(self, enrolment_id: str) -> Enrolment:
        enrolment = self.enrolments[enrolment_id]
        self.require(enrolment.running, "The course is over.")
        return enrolment

    def add_credits(self, student_id: str, credits: int) -> int:
        student = self.students[student_id]
        more = student.credits_now + credits
        self.change(self.students, student, credits_now=more)
        return more

    @read
    def student_by_entry(self, name: str, entry_year: int) -> Student:
        """Finds a student by name and year of entry."""
        problem = "Nobody by this name entered in that year."
        return self.one(self.students.values(), problem, name=name, entry_year=entry_year)

    @read
    def student_file(self, student_id: str) -> Student:
        """Reads the file of a student: hold, credits, areas passed, exchange."""
        return self.students[student_id]

    @read
    def transcript(self, student_id: str) -> list[Enrolment]:
        """Lists the enrolments of a student, with marks."""
        return [e for e in self.enrolments.values() if e.student_id == student_id]

    @read
    def enrolment(self, enrolment_id: str) -> Enrolment:
        """Reads an enrolment with its marks."""
        return self.enrolments[enrolment_id]

    @read
    def course_page(self, name: str) -> Course:
        """Reads a course of the catalogue by its exact name."""
        return self.one(self.courses.values(), "There is no course of this name.", name=name)

    @read
    def courses_on(self, weekday: Weekday, most_credits: int) -> list[Course]:
        """Lists the courses on a weekday up to a number of credits."""
        courses = self.courses.values()
        return [c for c in courses if c.weekday == weekday and c.credits <= most_credits]

    @write
    def enrol(self, student_id: str, course_id: str) -> int:
        """Enrols a student in a course that has a place; returns the student's credits."""
        course, key = self.courses[course_id], self.new_key("E", student_id, course_id)
        self.require(course.places > 0, f"{course.name} is full.")
        self.require(key not in self.enrolments, "The student is enrolled.")
        self.change(self.courses, course, places=course.places - 1)
        self.enrolments[key] = Enrolment(
            key,
            student_id,
            course_id,
            course=course.name,
            credits=course.credits,
            running=True,
            since=self.today,
            grading="letter",
            absences=0,
            marks=(),
        )
        return self.add_credits(student_id, course.credits)

    @write
    def leave_course(self, enrolment_id: str) -> int:
        """Takes a student out of a running course; returns the student's credits."""
        enrolment = self.running(enrolment_id)
        del self.enrolments[enrolment_id]
        return self.add_credits(enrolment.student_id, -enrolment.credits)

    @write
    def ask_review(self, enrolment_id: str, piece: Piece) -> int:
        """Has a mark looked at again; returns its points."""
        enrolment = self.enrolments[enrolment_id]
        mark = self.one(enrolment.marks, "There is no such mark.", piece=piece)
        self.require(mark.review != "asked", "It is being looked at.")
        marks = self.change_part(enrolment.marks, mark, review="asked")
        self.change(self.enrolments, enrolment, marks=marks)
        return mark.points

    @write
    def set_grading(self, enrolment_id: str, grading: Grading) -> Grading:
        """Sets how a running course is graded."""
        enrolment = self.running(enrolment_id)
        self.require(enrolment.grading != grading, "It is graded so already.")
        self.change(self.enrolments, enrolment, grading=grading)
        return grading

    @write
    def excuse_absences(self, enrolment_id: str) -> int:
        """Sets the absences in a course to none; returns how many there were."""
        enrolment = self.enrolments[enrolment_id]
        self.require(enrolment.absences > 0, "There is none.")
        self.change(self.enrolments, enrolment, absences=0)
        return enrolment.absences

    @write
    def issue_paper(self, student_id: str, paper: Paper) -> str:
        """Prints a paper for a student."""
        student = self.students[student_id]
        self.require(paper not in student.papers, "It was printed today.")
        papers = tuple(sorted((*student.papers, paper)))
        self.change(self.students, student, papers=papers)
        return "printed"

    @handover
    def transfer_to_human_agents(
        self, reason: Literal["scholarship", "plagiarism", "programme"]
    ) -> str:
        """Leads the student to a colleague."""
        return "Please take a seat."


# Rules of the office, which no tool enforces.


@rule("A course that needs an area is open to those alone who have passed that area.")
def prepared(student: Student, course: Course) -> bool:
    return course.needs in ("nothing", *student.passed)


@rule("While there is a hold on a file, neither enrolment nor papers are possible.")
def no_hold(student: Student) -> bool:
    return student.hold == "none"


@rule("Nobody takes more than 30 credits at a time.")
def within_load(student: Student, course: Course) -> bool:
    return student.credits_now + course.credits <= 30


@rule("Courses are left within 15 days of enrolment.")
def early(kit: University, enrolment: Enrolment) -> bool:
    return enrolment.since >= kit.today - timedelta(15)


@rule("A mark is looked at again within 10 days of its release.")
def fresh(kit: University, mark: Mark) -> bool:
    return mark.released >= kit.today - timedelta(10)


@rule("No mark is looked at a second time.")
def first_review(mark: Mark) -> bool:
    return mark.review == "never"


@rule("Up to three absences can be excused; from the fourth on, none.")
def few_absences(enrolment: Enrolment) -> bool:
    return enrolment.absences <= 3


@rule("Exchange students are graded by letter.")
def regular(student: Student) -> bool:
    return not student.exchange


# What students want.

everything = Mine(find="transcript", look="enrolment")
running = everything.that(lambda enrolment: enrolment.running)
lettered = everything.that(lambda each: each.running and each.grading == "letter")
missed = everything.that(lambda each: each.running and each.absences > 0)


@wish()
def join(scene: Scene) -> Wish:
    mine = {enrolment.course_id for enrolment in everything.all(scene.start, scene.key)}
    courses = [c for c in scene.kit.courses.values() if c.course_id not in mine]
    course = scene.choose_unused(courses)
    return Wish(
        f"enrol in {course.name}",
        do=[("enrol", scene.key, course.course_id)],
        reads=[("student_file", scene.key), ("course_page", course.name)],
        rules=[
            prepared.of(scene.me, course),
            no_hold.of(scene.me),
            within_load.of(scene.me, course),
        ],
        facts=[
            (course.places > 0, "a place is left"),
            (course.weekday != "Monday", "it is not on a Monday"),
            (course.credits > 3, "it has more than 3 credits"),
        ],
        ask="How many credits do you have in all then?",
    )


@wish(running, every="leave all your courses that are running")
def leave(scene: Scene, enrolment: Enrolment) -> Wish:
    return Wish(
        f"leave {scene.name(enrolment)}",
        do=[("leave_course", enrolment.enrolment_id)],
        rules=[early.of(scene.kit, enrolment)],
        facts=[
            (enrolment.credits < 6, "it has less than 6 credits"),
            (enrolment.absences > 2, "you have more than 2 absences there"),
        ],
        instead=[grading, excuse],
    )


@wish(everything)
def review(scene: Scene, enrolment: Enrolment) -> Wish:
    mark = scene.choose([mark for mark in enrolment.marks if mark.review != "asked"])
    return Wish(
        f"have the mark of the {mark.piece} in {scene.name(enrolment)} looked at again",
        do=[("ask_review", enrolment.enrolment_id, mark.piece)],
        rules=[fresh.of(scene.kit, mark), first_review.of(mark)],
        facts=[scene.near(mark.points, "it is below {} points")],
        ask="How many points is it now?",
    )


@wish(lettered, every="have all your running courses that have letters graded pass or fail")
def grading(scene: Scene, enrolment: Enrolment) -> Wish:
    return Wish(
        f"have {scene.name(enrolment)} graded pass or fail",
        do=[("set_grading", enrolment.enrolment_id, "pass_or_fail")],
        rules=[regular.of(scene.me)],
        reads=[("student_file", scene.key)],
        facts=[(len(enrolment.marks) < 2, "there are less than 2 marks in it")],
        instead=[leave, excuse],
    )


@wish(missed)
def excuse(scene: Scene, enrolment: Enrolment) -> Wish:
    return Wish(
        f"have your absences in {scene.name(enrolment)} excused",
        do=[("excuse_absences", enrolment.enrolment_id)],
        rules=[few_absences.of(enrolment)],
        facts=[(enrolment.grading == "letter", "it is graded by letter")],
        ask="How many were there?",
        instead=[leave, grading],
    )


@wish()
def paper(scene: Scene) -> Wish:
    kind = scene.choose([kind for kind in get_args(Paper) if kind not in scene.me.papers])
    return Wish(
        f'have a paper of the kind "{kind}" printed',
        do=[("issue_paper", scene.key, kind)],
        reads=[("student_file", scene.key)],
        rules=[no_hold.of(scene.me)],
        facts=[scene.near(scene.me.credits_now, "you have less than {} credits now")],
    )


@wish(everything)
def points(scene: Scene, enrolment: Enrolment) -> Wish:
    told = sum(mark.points for mark in enrolment.marks)
    want = f"know how many points you have in {scene.name(enrolment)} in all"
    return Wish(want, told=told)


@wish()
def room(scene: Scene) -> Wish:
    course = scene.choose_unused(list(scene.kit.courses.values()))
    reads = [("course_page", course.name)]
    return Wish(f"know in which room {course.name} is taught", reads=reads, told=course.room)


colleague = hand_over(
    "speak with a colleague about",
    scholarship="a scholarship that was cut",
    plagiarism="a case of plagiarism",
    programme="a change of programme",
)


def identify(student: Student) -> tuple[str, tuple]:
    """Returns what a student says of itself, and the call that finds it by that."""
    said = f"Your name is {student.name} and you entered in {student.entry_year}."
    return said, ("student_by_entry", student.name, student.entry_year)


# The records.

AREAS = ("statistics", "writing", "anatomy", "drawing")
SUBJECTS = (
    "Optics, Roman History, Palliative Care, Typography, Research Ethics, Acoustics, Cartography, "
    "Cell Biology, Thermodynamics, Medieval Trade, Colour Theory, Pharmacology, Oral History, "
    "Furniture Design, Nutrition"
).split(", ")
FORMS = ("Introduction to", "Advanced", "Seminar in", "Topics in")


def draw(rng: Draw) -> University:
    """Draws the students, the courses and the enrolments."""
    kit = University(rng.today(), {}, {}, {})
    for subject in rng.of_split(SUBJECTS):
        for form in FORMS:
            key = rng.number("C")
            kit.courses[key] = Course(
                key,
                f"{form} {subject}",
                credits=rng.choice((3, 6, 9)),
                needs="nothing" if form == FORMS[0] else rng.choice(("nothing", *AREAS)),
                places=rng.randint(0, 6),
                weekday=rng.one_of(Weekday),
                room=rng.number("H", 3),
            )
    for name in rng.people(45):
        key = rng.number("s", 7)
        student = kit.students[key] = Student(
            key,
            name,
            entry_year=rng.randint(2019, 2025),
            hold=rng.choice(("none", "none", "library", "tuition")),
            credits_now=0,
            passed=tuple(rng.sample(AREAS, 2)),
            exchange=rng.random() < 0.4,
            papers=(),
        )
        courses = [course for course in kit.courses.values() if prepared.kept(student, course)]
        for course in rng.sample(courses, rng.randint(4, 5)):
            enrolment = _enrolment(rng, kit.today, kit.students[key], course)
            kit.enrolments[enrolment.enrolment_id] = enrolment
            if enrolment.running:
                kit.add_credits(key, course.credits)
    return kit


def _enrolment(rng, today, student, course) -> Enrolment:
    key = rng.number("E", 6)
    is_running = within_load.kept(student, course) and rng.random() < 0.7
    since = rng.day(today, -28, -2) if is_running else rng.day(today, -250, -150)
    marks = []
    for piece in rng.sample(get_args(Piece), rng.randint(1, 3)):
        reviewed = rng.choice(("never", "never", "never", "done"))
        marks.append(Mark(piece, rng.randint(30, 98), rng.day(today, -20, -1), reviewed))
    return Enrolment(
        key,
        student.student_id,
        course.course_id,
        course=course.name,
        credits=course.credits,
        running=is_running,
        since=since,
        grading="letter" if student.exchange else rng.one_of(Grading),
        absences=rng.randint(0, 6),
        marks=tuple(marks),
    )
