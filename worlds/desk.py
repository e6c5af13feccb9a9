"""The desk: questions whose next step stands in the result of the last one.

"What is the code of order 512? Keep it cheap." The records have a note on order 512. It says the
code, or names another row, a matter that only an expert knows, or two numbers to multiply. Which
words are tables, and which expert knows which matter, is said nowhere: only rewards tell. A policy
that decides on the prompt alone is right in about a third of the tasks, since the others need a
result as an argument of the next call.

`Desk` is the world: its tasks, and the environment of an attempt. `teach` demonstrates for a warm
start how notes are read and calls are written. What to do next it draws at random, so that neither
the tables nor what an expert knows is shown.
"""

import math
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import ClassVar, Literal

from nanorchestra.agent.environment import ToolEnvironment
from nanorchestra.agent.tool import Tool
from nanorchestra.agent.world import Lesson, Split
from nanorchestra.records import Bounds, Preference, Price, Task, ToolCall, ToolResult
from nanorchestra.schemas import Json, arguments_schema
from nanorchestra.tools.sandbox import Sandbox
from nanorchestra.tools.simulated import Simulation
from tools import PythonTool, RecordsTool

TABLES = ["order", "customer", "agent", "book", "author", "flight", "room", "parcel"]
MATTERS = {
    "law": ["trial", "judge", "verdict", "lawyer", "appeal", "statute", "fine", "jury"],
    "medicine": ["patient", "clinic", "fever", "nurse", "doctor", "vaccine", "dose", "ward"],
    "history": ["battle", "king", "treaty", "empire", "castle", "siege", "crown", "armada"],
}
UNSEEN = {  # of held-out tasks of the world desk:unseen alone
    "law": ["attorney", "bail", "defendant", "lawsuit", "parole"]
    + ["plaintiff", "prosecutor", "subpoena", "warrant", "witness"],
    "medicine": ["antibiotic", "asthma", "diagnosis", "insulin", "pharmacy"]
    + ["surgeon", "surgery", "syringe", "therapy", "tumor"],
    "history": ["colony", "conquest", "crusade", "dynasty", "emperor"]
    + ["gladiator", "kingdom", "knight", "monarch", "pharaoh"],
}
SUBJECT = {
    word: subject
    for matters in (MATTERS, UNSEEN)
    for subject, words in matters.items()
    for word in words
}
FIELDS = ("code", "rank", "age")
SKILLS = {  # the probability that an expert is right, by subject; hidden from the policy
    "ant": {"law": 0.95, "medicine": 0.2, "history": 0.6},
    "bee": {"law": 0.6, "medicine": 0.95, "history": 0.2},
    "cat": {"law": 0.2, "medicine": 0.6, "history": 0.95},
}
EXPERTS = tuple(SKILLS)
UNSURE_IF_RIGHT, UNSURE_IF_WRONG = 0.1, 0.4  # the probability that an expert says it is unsure
PRICES = SECONDS = (3, 40)  # of an expert, in US cents and seconds, log-uniform
STEP = 1  # the US cents and the seconds of the records and of Python
EXPERT_TOKENS = 1000  # of an expert's answer; its price is per call
VARIATION = (0.85, 1.15)  # of an answer's tokens and seconds

# Kind of question: share, rows to read, what their notes lead to.
KINDS = {
    "matter": (0.17, (0,), "matter"),
    "product": (0.05, (0,), "product"),
    "value": (0.09, (1,), "value"),
    "chain": (0.15, (2, 3), "value"),
    "chain product": (0.16, (1, 2), "product"),
    "chain matter": (0.38, (1, 2), "matter"),
}
# A user's wish: the weights of outcome, cost and latency, and its words. All are equally frequent.
WISHES = {
    "right": (
        (1.0, 0.0, 0.0),
        ("It must be right.", "Be sure of it.", "No mistakes, please.", "Take your time."),
    ),
    "cheap": (
        (0.4, 0.6, 0.0),
        ("Keep it cheap.", "Money is short.", "Spend little.", "Mind the price."),
    ),
    "fast": (
        (0.4, 0.0, 0.6),
        ("Be quick.", "I am in a hurry.", "I cannot wait.", "As fast as you can."),
    ),
}
# A note that names a row, a matter or a value, such as "our trial 388". It mentions another, too,
# so that only a reader of the sentence knows which one to follow: the other leads to a number, too,
# and is a row, a matter or a value as often as what is to be followed.
NOTES = (
    "As {other} is closed, see {word}.",
    "Filed under {word}, not under {other}.",
    "Gone from {other}, it moved to {word}.",
    "It is {word} that came after {other}.",
    "See {word}, since {other} knows no more.",
    "Ask about {word}, for {other} left.",
    "Kept by {word} since {other} left.",
    "Ask not {other} but {word}.",
    "It came from {other} and went to {word}.",
    "Once {other}, now {word}.",
    "Now {word} has it, {other} has not.",
    "Look for {word}, not for {other}.",
)
DETERMINERS = ("a", "the", "our", "that", "some", "one", "their", "another")  # before each word
PRODUCTS = (
    "Price {}, count {}.",
    "{} each, count {}.",
    "Sold at {}, count {}.",
    "Unit price {}, {} pieces.",
)
MENTIONED = {"row": 0.44, "matter": 0.34, "value": 0.22}
EVERY_NTH = 7  # held-out tasks alone have numbers divisible by it: rows, matters, first factors
# The teacher draws from what is possible with these weights; that of asking an expert is 1.
LOOK_UP, ANSWER = 3.0, 2.0
SIGNS = {"times": "*", "plus": "+"}  # what it does with two numbers
MOST_CALLS = 6
LESSONS = 4  # demonstrations of a task

Place = tuple[str | int, int]  # a word and a number, or two numbers to multiply


@dataclass(frozen=True)
class Desk:
    """The world. Its tasks have no end; it demonstrates them, too.

    Tasks are of the splits "train" and "held_out" or, as `held_out` says, "unseen": the matters of
    its held-out tasks are then words that no training task has.
    """

    seed: int
    sandbox: Sandbox
    held_out: Literal["held_out", "unseen"] = "held_out"
    name: ClassVar[str] = "desk"

    def size(self, split: Split) -> None:
        """Returns None: there are tasks without end."""

    def task(self, split: Split, index: int) -> Task:
        """Returns one task; "all" is "held_out"."""
        split = "train" if split == "train" else self.held_out
        rng = random.Random(f"desk/{self.seed}/{split}/{index}")
        kind = rng.choices(list(KINDS), [share for share, *_ in KINDS.values()])[0]
        field = rng.choice(FIELDS)
        trail, answer = draw_trail(rng, kind, split, field)
        name = f"desk-{split}-{self.seed}-{index}"
        return make_task(rng, name, kind, split, field, trail, answer)

    def environment(self, task: Task, seed: int) -> ToolEnvironment:
        """Returns one attempt at a task; `seed` decides what the simulated experts say."""
        data = task.data
        # All words are tables of the records, so that an error does not tell which ones have rows.
        words = (*TABLES, *matters_of("train"), *matters_of(self.held_out), *FIELDS)
        tables = {word: data["notes"].get(word, {}) for word in words}
        terms = f"{STEP:02d}c {STEP:02d}s"
        tools = [
            RecordsTool("records", f"notes, {terms}", tables, STEP / 100, STEP),
            DeskPython("python", f"runs code, {terms}", self.sandbox, STEP / 100, STEP),
            AskTool(data["offers"], data["answers"], f"{task.id}/{seed}"),
        ]
        return ToolEnvironment(
            task, tools, grade=lambda answer: float(answer.strip() == data["answer"])
        )

    def lesson(self, index: int, most_tools: int = 0) -> tuple[ToolEnvironment, list[Lesson]]:
        """Returns an environment, and the turns of the teacher that has acted in it.

        A task is demonstrated LESSONS times in a row, each time with other choices.
        """
        env = self.environment(self.task("train", index // LESSONS), index % LESSONS)
        return env, teach(env, random.Random(f"{self.seed}/teacher/{index}"))


class DeskPython(PythonTool):
    """Python in the words that nano was trained on, which have no description of the code."""

    parameters = arguments_schema(code="string")


class AskTool(Tool):
    """Asks a simulated expert about a matter such as "trial 388"; it says how sure it is.

    `offers` are the US cents and seconds of each expert, `answers` those of the task's matters. A
    question about anything else gets a number at random.
    """

    name, kind, blocking = "ask", "expert", False
    parameters: ClassVar[Json] = {
        "type": "object",
        "properties": {"expert": {"enum": list(EXPERTS)}, "question": {"type": "string"}},
        "required": ["expert", "question"],
    }

    def __init__(self, offers: dict[str, Sequence[int]], answers: dict[str, int], seed: str):
        self.offers, self.answers, self.seed = offers, answers, seed
        cheapest = [f"{name} {offers[name][0]:02d}c" for name in ranked(offers, 0)]
        fastest = [f"{name} {offers[name][1]:02d}s" for name in ranked(offers, 1)]
        self.description = (
            f"a simulated expert, cheapest first: {', '.join(cheapest)}, "
            f"fastest first: {', '.join(fastest)}"
        )

    def alias(self, arguments: Json) -> str:
        """Returns the name of the expert that is asked."""
        return arguments["expert"]

    def most_usd(self, arguments: Json) -> float:
        """Returns the US dollars of the longest answer."""
        simulation = self._simulation(arguments["expert"])
        return simulation.price.cost(0, simulation.most_output_tokens())

    def call(self, arguments: Json) -> ToolResult:
        """Returns "sure: NUMBER" or "unsure: NUMBER"."""
        expert, matter = arguments["expert"], " ".join(arguments["question"].split())
        answer = self.answers.get(matter)  # None: no matter of this task
        skill = SKILLS[expert][SUBJECT[matter.split()[0]]] if answer else 0.0
        others = [number for number in range(10, 100) if number != answer]
        said, bill = self._simulation(expert, skill).reply(
            f"{self.seed}/{matter}/{expert}",
            input_tokens=0,
            right=lambda rng: _said(rng.random() < UNSURE_IF_RIGHT, answer),
            wrong=lambda rng: _said(rng.random() < UNSURE_IF_WRONG, rng.choice(others)),
        )
        return replace(bill, content=said, findings={"attempts": [[expert, said]]})

    @property
    def prices(self) -> dict[str, float]:
        """The US dollars of a usual answer of each expert."""
        return {f"answer of {name}": cents / 100 for name, (cents, _) in self.offers.items()}

    def _simulation(self, expert: str, skill: float = 0.0) -> Simulation:
        cents, seconds = self.offers[expert]
        price = Price(0.0, cents / 100 * 1e6 / EXPERT_TOKENS)
        return Simulation(skill, price, EXPERT_TOKENS, float(seconds), VARIATION, VARIATION)


def _said(unsure: bool, number: int) -> str:
    return f"unsure: {number}" if unsure else f"sure: {number}"


def matters_of(split: str) -> list[str]:
    """Returns the words of the matters in the tasks of a split."""
    subjects = UNSEEN if split == "unseen" else MATTERS
    return [word for words in subjects.values() for word in words]


def draw_trail(rng: random.Random, kind: str, split: str, field: str) -> tuple[list[Place], int]:
    """Returns the trail of a question of a kind for a field, and the answer at its end.

    A trail has rows of tables, then a matter, the field with its value, or two numbers to multiply.
    """
    _, lengths, _ = KINDS[kind]
    rows = [(table, draw_number(rng, split)) for table in rng.sample(TABLES, rng.choice(lengths))]
    end, answer = draw_end(rng, kind, split, field)
    return [*rows, end], answer


def draw_end(rng: random.Random, kind: str, split: str, field: str) -> tuple[Place, int]:
    """Returns what the last note of a kind of question leads to, and the answer there."""
    answer = rng.randint(10, 99)
    match KINDS[kind][2]:
        case "matter":
            return (rng.choice(matters_of(split)), draw_number(rng, split)), answer
        case "value":
            return (field, answer), answer
        case "product":
            factors = draw_number(rng, split, 11, 99), rng.randint(3, 9)
            return factors, math.prod(factors)


def make_task(
    rng: random.Random,
    name: str,
    kind: str,
    split: str,
    field: str,
    trail: Sequence[Place],
    answer: int,
) -> Task:
    """Returns a task with a trail; notes, the user's wish and the experts' terms are drawn."""
    on_trail: dict[Place, str] = {}  # the notes of rows
    mentioned: dict[Place, str] = {}
    for (table, row), following in pairwise(trail):
        other = draw_other(rng, split, field, {table, following[0]})
        names_a_product = isinstance(following[0], int)  # and mentions nothing else
        if other[0] in TABLES and not names_a_product:  # its note leads to a wrong end
            wrong_end, _ = draw_end(rng, kind, split, field)
            beyond = draw_other(rng, split, field, {other[0], wrong_end[0]})
            mentioned[other] = draw_note(rng, wrong_end, beyond)
        on_trail[table, row] = draw_note(rng, following, other)
    notes: dict[str, dict[str, Json]] = {}  # the rows of a table, by its word and their numbers
    for (table, row), note in (mentioned | on_trail).items():
        notes.setdefault(table, {})[str(row)] = {"note": note}
    word, number = trail[-1]
    answers = {f"{word} {number}": answer} if word in SUBJECT else {}

    wish = rng.choice(list(WISHES))
    weights, words = WISHES[wish]
    offers = {name: [log_uniform(rng, PRICES), log_uniform(rng, SECONDS)] for name in EXPERTS}
    most_cents = max(cents for cents, _ in offers.values()) + 4 * STEP
    most_seconds = max(seconds for _, seconds in offers.values()) + 4 * STEP
    return Task(
        name,
        ask_for(field, *trail[0]),
        Preference(rng.choice(words), *weights),
        Bounds((0.0, most_cents / 100), (0.0, float(most_seconds))),
        Desk.name,
        kind,
        {name: name for name in ("records", "python", *EXPERTS)},
        {"answer": str(answer), "notes": notes, "answers": answers, "offers": offers},
    )


def ranked(offers: dict[str, Sequence[int]], column: int) -> list[str]:
    """Returns the experts from the lowest price (column 0), or from the fewest seconds (1), on."""
    return sorted(offers, key=lambda name: offers[name][column])


def draw_number(rng: random.Random, split: str, lowest: int = 100, highest: int = 999) -> int:
    """Returns the number of a row or a matter, or a factor; train and held-out tasks share none."""
    while True:
        number = rng.randint(lowest, highest)
        if (number % EVERY_NTH == 0) == (split != "train"):
            return number


def log_uniform(rng: random.Random, bounds: tuple[int, int]) -> int:
    """Returns a whole number whose logarithm is uniform between those of the bounds."""
    low, high = map(math.log, bounds)
    return round(math.exp(rng.uniform(low, high)))


def ask_for(field: str, word: str | int, number: int) -> str:
    """Returns the question that a trail answers, by its beginning."""
    if isinstance(word, int):
        return f"What is {word} * {number}?"
    return f"What is the {field} of {word} {number}?"


def draw_other(rng: random.Random, split: str, field: str, words: set[str | int]) -> Place:
    """Returns what a note mentions besides: a value, or a row or a matter of none of `words`."""
    (end,) = rng.choices(list(MENTIONED), list(MENTIONED.values()))
    if end == "value":
        return field, rng.randint(10, 99)
    candidates = TABLES if end == "row" else matters_of(split)
    word = rng.choice([word for word in candidates if word not in words])
    return word, draw_number(rng, split)


def draw_note(rng: random.Random, following: Place, other: Place) -> str:
    """Returns a note that leads to `following` and mentions `other`, if it names no product."""
    word, number = following
    if isinstance(word, int):
        return rng.choice(PRODUCTS).format(word, number)
    return rng.choice(NOTES).format(
        word=f"{rng.choice(DETERMINERS)} {word} {number}",
        other=f"{rng.choice(DETERMINERS)} {other[0]} {other[1]}",
    )


# What reads the sentences again.

SENTENCES = [
    re.compile(note.format(word=r"\w+ (?P<word>\w+) (?P<number>\d+)", other=r"\w+ \w+ \d+"))
    for note in NOTES
]


def asked(question: str) -> tuple[str, str]:
    """Returns what a question is about: a word and a number, or two numbers to multiply."""
    return re.search(r"(\w+) (?:\* )?(\d+)\?", question).groups()


def named(text: str) -> tuple[str, ...]:
    """Returns what a result names: a word and a number, two numbers to multiply, or a number."""
    for sentence in SENTENCES:
        if found := sentence.search(text):
            return found["word"], found["number"]
    return tuple(re.findall(r"\d+", text))


# The teacher.


@dataclass
class Step:
    """What a turn is about, and what was done about it so far.

    `about` has a word and a number ("trial", "388"), two numbers to multiply, or one number.
    `said` is what experts said, by their names. `failed`: the records have no such row. `tried` are
    the choices that were made.
    """

    about: tuple[str, ...]
    said: dict[str, str] = field(default_factory=dict)
    failed: bool = False
    tried: list[str] = field(default_factory=list)

    def choices(self) -> dict[str, float]:
        """Returns the weights of the calls of the right form that were not tried, by name."""
        if len(self.about) < 2:
            weights = {}
        elif self.about[0].isdigit():
            weights = dict.fromkeys(SIGNS, 1.0)
        else:
            weights = {"records": LOOK_UP} | dict.fromkeys(EXPERTS, 1.0)
        return {name: weight for name, weight in weights.items() if name not in self.tried}

    def call(self, choice: str) -> ToolCall:
        """Returns the call of a choice."""
        first, second = self.about
        if choice in SIGNS:
            return ToolCall("python", {"code": f"{first} {SIGNS[choice]} {second}"})
        if choice == "records":
            return ToolCall("records", {"table": first, "id": int(second)})
        return ToolCall("ask", {"expert": choice, "question": f"{first} {second}"})

    def answers(self) -> list[str]:
        """Returns the numbers that may be the answer."""
        said = [text.split()[1] for text in self.said.values()]
        return sorted(set(said or filter(str.isdigit, self.about)))


def teach(env: ToolEnvironment, rng: random.Random) -> list[Lesson]:
    """Returns the turns of one attempt that has the right form and chooses at random."""
    task, lessons = env.task, []
    step = Step(asked(task.question))
    while True:
        weights = step.choices() if len(lessons) < MOST_CALLS else {}
        if lessons:
            weights |= {"answer": ANSWER}
        (choice,) = rng.choices(list(weights), list(weights.values()))
        logprob = math.log(weights[choice] / sum(weights.values()))
        text = thought(task, step, choice)
        if choice == "answer":
            answers = step.answers()
            logprob -= math.log(len(answers))
            return [*lessons, Lesson(text, rng.choice(answers), logprob=logprob)]
        call = step.call(choice)
        result = env.by_name[call.name].call(call.arguments)
        lessons.append(Lesson(text, call=call, result=result, logprob=logprob))
        step = after_call(step, choice, result)


def thought(task: Task, step: Step, choice: str) -> str:
    """Returns what the policy writes before it acts: "cheap cat ant. unsure 42. 388 trial ant".

    It is the wish; the experts that were not asked, cheapest or fastest first; what the others
    said; what the turn is about; and the choice, one word after the word that it depends on.
    """
    wish = task.preference.name
    experts = ranked(task.data["offers"], 1 if wish == "fast" else 0)
    left = [name for name in experts if name not in step.said]
    notes = ["failed"] if step.failed else []
    said = ", ".join(notes + list(step.said.values()))
    about = " ".join([*reversed(step.about), choice])
    return ". ".join(filter(None, [" ".join([wish, *left]), said, about]))


def after_call(step: Step, choice: str, result: ToolResult) -> Step:
    """Returns the next step after a call: what the result names, or the same with what was said."""
    text, tried = result.content, [*step.tried, choice]
    if result.error:
        return replace(step, failed=True, tried=tried)
    if choice in EXPERTS:
        return replace(step, said=step.said | {choice: text.replace(":", "")}, tried=tried)
    return Step(named(text))
