"""A clinic: patients book, move and cancel appointments, and have prescriptions renewed."""

from dataclasses import dataclass
from datetime import date, timedelta
from typing import Literal, get_args

from worlds.toolscale.toolkit import Draw, Toolkit, handover, read, spoken, write
from worlds.toolscale.wishes import Mine, Scene, Wish, hand_over, rule, wish

By = Literal["letter", "email"]
Field = Literal["general", "cardiology", "dermatology"]
Insurance = Literal["public", "private"]
Pharmacy = Literal["Green Cross", "Old Town", "Riverside"]
Purpose = Literal["check-up", "follow-up", "consultation"]
Referral = Literal["none", "cardiology", "dermatology"]
Time = Literal["08:30", "09:15", "10:45", "13:00", "14:30", "16:15"]


@dataclass(frozen=True)
class Patient:
    patient_id: str
    name: str
    born: int
    insurance: Insurance
    referral: Referral
    missed_visits: int
    contact_by: By
    pharmacy: Pharmacy


@dataclass(frozen=True)
class Slot:
    slot_id: str
    date: date
    time: Time
    free: bool


@dataclass(frozen=True)
class Doctor:
    doctor_id: str
    name: str
    field: Field
    room: str
    fee: int
    slots: tuple[Slot, ...]


@dataclass(frozen=True)
class Appointment:
    appointment_id: str
    patient_id: str
    doctor_id: str
    doctor: str
    status: Literal["booked", "kept", "cancelled"]
    date: date
    time: Time
    purpose: Purpose
    minutes: int
    moved: bool
    notes_sent: Literal["no", "letter", "email"]

    def names(self) -> list[str]:
        return [
            f"appointment {self.appointment_id}",
            f"your appointment with {self.doctor}",
            f"your appointment on {spoken(self.date)}",
            f"your {self.time} appointment with {self.doctor}",
        ]


@dataclass(frozen=True)
class Prescription:
    prescription_id: str
    patient_id: str
    drug: str
    controlled: bool
    refills_left: int
    lasts_until: date
    mg: int
    times_a_day: int
    paid: int

    def names(self) -> list[str]:
        return [f"prescription {self.prescription_id}", f"your {self.drug}"]


@dataclass
class Clinic(Toolkit):
    """You are at the desk of a clinic."""

    patients: dict[str, Patient]
    doctors: dict[str, Doctor]
    appointments: dict[str, Appointment]
    prescriptions: dict[str, Prescription]

    def booked(self, appointment_id: str) -> Appointment:
        visit = self.appointments[appointment_id]
        self.require(visit.status == "booked", f"It is {visit.status}.")
        return visit

    def take(self, doctor_id: str, slot_id: str) -> Slot:
        doctor = self.doctors[doctor_id]
        slot = self.one(doctor.slots, "The doctor has no such slot.", slot_id=slot_id)
        self.require(slot.free, "The slot is taken.")
        self.change(self.doctors, doctor, slots=self.change_part(doctor.slots, slot, free=False))
        return slot

    @read
    def patient_by_name(self, name: str, born: int) -> Patient:
        """Finds a patient by name and year of birth."""
        return self.one(self.patients.values(), "There is no such patient.", name=name, born=born)

    @read
    def patient_card(self, patient_id: str) -> Patient:
        """Reads a patient's card: insurance, referral, missed visits, contact, pharmacy."""
        return self.patients[patient_id]

    @read
    def appointments_of(self, patient_id: str) -> list[Appointment]:
        """Lists the appointments of a patient, past and to come."""
        return [each for each in self.appointments.values() if each.patient_id == patient_id]

    @read
    def appointment(self, appointment_id: str) -> Appointment:
        """Reads an appointment."""
        return self.appointments[appointment_id]

    @read
    def doctor_by_name(self, name: str) -> Doctor:
        """Finds a doctor by name: field, room, fee, slots."""
        return self.one(self.doctors.values(), "There is no doctor of this name.", name=name)

    @read
    def doctors_of_field(self, field: Field, highest_fee: int) -> list[Doctor]:
        """Lists the doctors of a field up to a fee."""
        doctors = self.doctors.values()
        return [doctor for doctor in doctors if doctor.field == field and doctor.fee <= highest_fee]

    @read
    def prescriptions_of(self, patient_id: str) -> list[Prescription]:
        """Lists the prescriptions of a patient."""
        return [p for p in self.prescriptions.values() if p.patient_id == patient_id]

    @read
    def prescription(self, prescription_id: str) -> Prescription:
        """Reads a prescription."""
        return self.prescriptions[prescription_id]

    @write
    def book_appointment(self, patient_id: str, doctor_id: str, slot_id: str) -> str:
        """Books a free slot of a doctor for a patient; returns the appointment's number."""
        patient, doctor = self.patients[patient_id], self.doctors[doctor_id]
        slot, key = self.take(doctor_id, slot_id), self.new_key("V", patient_id, slot_id)
        self.appointments[key] = Appointment(
            key,
            patient.patient_id,
            doctor_id,
            doctor=doctor.name,
            status="booked",
            date=slot.date,
            time=slot.time,
            purpose="consultation",
            minutes=15,
            moved=False,
            notes_sent="no",
        )
        return key

    @write
    def move_appointment(self, appointment_id: str, slot_id: str) -> str:
        """Moves a booked appointment to another slot of its doctor; returns the new time.

        The old slot stays taken.
        """
        visit = self.booked(appointment_id)
        slot = self.take(visit.doctor_id, slot_id)
        self.change(self.appointments, visit, date=slot.date, time=slot.time, moved=True)
        return slot.time

    @write
    def cancel_appointment(self, appointment_id: str) -> str:
        """Cancels a booked appointment. Its slot stays taken."""
        self.change(self.appointments, self.booked(appointment_id), status="cancelled")
        return "cancelled"

    @write
    def send_notes(self, appointment_id: str, by: By) -> By:
        """Sends the notes of a visit that was kept to the patient.

        Args:
            by: the way in which the notes are sent
        """
        visit = self.appointments[appointment_id]
        self.require(visit.status == "kept", "There are no notes.")
        self.change(self.appointments, visit, notes_sent=by)
        return by

    @write
    def refill_prescription(self, prescription_id: str) -> int:
        """Renews a prescription that has refills; returns how many are left."""
        old = self.prescriptions[prescription_id]
        self.require(old.refills_left > 0, "No refill is left.")
        new = self.change(self.prescriptions, old, refills_left=old.refills_left - 1)
        return new.refills_left

    @write
    def stop_prescription(self, prescription_id: str) -> str:
        """Ends a prescription."""
        ended = self.prescriptions.pop(prescription_id)
        return f"{ended.drug} is ended."

    @write
    def set_pharmacy(self, patient_id: str, pharmacy: Pharmacy) -> Pharmacy:
        """Sets the pharmacy of a patient."""
        self.change(self.patients, self.patients[patient_id], pharmacy=pharmacy)
        return pharmacy

    @handover
    def transfer_to_human_agents(self, reason: Literal["pain", "results", "insurance"]) -> str:
        """Passes the patient to a nurse or the office."""
        return "Please hold the line."


# Rules of the clinic, which no tool enforces.


@rule("Appointments are moved or cancelled up to two days ahead.")
def ahead(kit: Clinic, visit: Appointment) -> bool:
    return visit.date >= kit.today + timedelta(2)


@rule("An appointment is moved once only.")
def not_yet_moved(visit: Appointment) -> bool:
    return not visit.moved


@rule("Controlled drugs are not renewed at the desk.")
def uncontrolled(drug: Prescription) -> bool:
    return not drug.controlled


@rule("A prescription is renewed only if it runs out within seven days.")
def runs_out_soon(kit: Clinic, drug: Prescription) -> bool:
    return drug.lasts_until <= kit.today + timedelta(7)


@rule("Cardiology and dermatology are booked only with a referral to that field on the card.")
def referred(patient: Patient, doctor: Doctor) -> bool:
    return doctor.field in ("general", patient.referral)


@rule("A patient with three missed visits cannot book here.")
def misses_few_visits(patient: Patient) -> bool:
    return patient.missed_visits < 3


@rule("Notes are sent only in the way that the patient's card names as contact.")
def way_on_card(patient: Patient, by: By) -> bool:
    return by == patient.contact_by


# What patients want.

visits = Mine(find="appointments_of", look="appointment")
coming = visits.that(lambda visit: visit.status == "booked")
kept = visits.that(lambda visit: visit.status == "kept")
drugs = Mine(find="prescriptions_of", look="prescription")
renewable = drugs.that(lambda drug: drug.refills_left > 0)


@wish()
def book(scene: Scene) -> Wish:
    doctor = scene.choose_unused(list(scene.kit.doctors.values()))
    slot = scene.choose(doctor.slots)
    return Wish(
        f"book an appointment with {doctor.name} on {spoken(slot.date)} at {slot.time}",
        do=[("book_appointment", scene.key, doctor.doctor_id, slot.slot_id)],
        reads=[("patient_card", scene.key), ("doctor_by_name", doctor.name)],
        rules=[referred.of(scene.me, doctor), misses_few_visits.of(scene.me)],
        facts=[(slot.free, "this time is free"), scene.near(doctor.fee, "the fee is below ${}")],
    )


@wish(coming)
def move(scene: Scene, visit: Appointment) -> Wish:
    doctor = scene.choose_unused([scene.kit.doctors[visit.doctor_id]])
    times = [s for s in doctor.slots if (s.date, s.time) != (visit.date, visit.time)]
    slot = scene.choose(times)
    return Wish(
        f"have {scene.name(visit)} moved to {spoken(slot.date)} at {slot.time}",
        do=[("move_appointment", visit.appointment_id, slot.slot_id)],
        reads=[("doctor_by_name", visit.doctor)],
        rules=[ahead.of(scene.kit, visit), not_yet_moved.of(visit)],
        facts=[(slot.free, "this time is free"), (visit.minutes > 20, "it takes over 20 minutes")],
        instead=[cancel],
    )


@wish(coming, every="cancel all your booked appointments")
def cancel(scene: Scene, visit: Appointment) -> Wish:
    return Wish(
        f"cancel {scene.name(visit)}",
        do=[("cancel_appointment", visit.appointment_id)],
        rules=[ahead.of(scene.kit, visit)],
        facts=[
            (visit.purpose == "check-up", "it is a check-up"),
            scene.near(visit.minutes, "it takes less than {} minutes"),
        ],
        instead=[move],
    )


@wish(kept)
def notes(scene: Scene, visit: Appointment) -> Wish:
    by = scene.rng.choice(get_args(By))
    return Wish(
        f"have the notes of {scene.name(visit)} sent by {by}",
        do=[("send_notes", visit.appointment_id, by)],
        reads=[("patient_card", scene.key)],
        rules=[way_on_card.of(scene.me, by)],
        facts=[(visit.purpose == "follow-up", "it was a follow-up")],
    )


@wish(renewable, every="have all your prescriptions renewed that have a refill left")
def refill(scene: Scene, drug: Prescription) -> Wish:
    return Wish(
        f"have {scene.name(drug)} renewed",
        do=[("refill_prescription", drug.prescription_id)],
        rules=[uncontrolled.of(drug), runs_out_soon.of(scene.kit, drug)],
        facts=[
            (drug.refills_left > 2, "more than 2 refills are left"),
            scene.near(drug.mg, "its dose is below {} mg"),
        ],
        ask="How many refills are left then?",
        instead=[stop],
    )


@wish(drugs)
def stop(scene: Scene, drug: Prescription) -> Wish:
    return Wish(
        f"have {scene.name(drug)} taken off your list",
        do=[("stop_prescription", drug.prescription_id)],
        facts=[
            (drug.refills_left == 0, "no refill is left"),
            (drug.times_a_day == 1, "it is taken once a day"),
        ],
        instead=[refill],
    )


@wish()
def pharmacy(scene: Scene) -> Wish:
    others = [each for each in get_args(Pharmacy) if each != scene.me.pharmacy]
    wanted = scene.choose(others)
    return Wish(
        f"change your pharmacy to {wanted}",
        do=[("set_pharmacy", scene.key, wanted)],
        reads=[("patient_card", scene.key)],
        facts=[(scene.me.insurance == "public", "your card says public insurance")],
    )


@wish(drugs)
def cost(scene: Scene, drug: Prescription) -> Wish:
    return Wish(f"know what you have paid for {scene.name(drug)} so far", told=drug.paid)


@wish(coming)
def minutes(scene: Scene, visit: Appointment) -> Wish:
    return Wish(f"know how many minutes {scene.name(visit)} takes", told=visit.minutes)


@wish()
def room(scene: Scene) -> Wish:
    doctor = scene.choose_unused(list(scene.kit.doctors.values()))
    reads = [("doctor_by_name", doctor.name)]
    return Wish(f"know in which room {doctor.name} is", reads=reads, told=doctor.room)


nurse = hand_over(
    "talk to a person about",
    pain="an acute pain in your shoulder",
    results="the results of a test",
    insurance="a dispute with your insurance",
)


def identify(patient: Patient) -> tuple[str, tuple]:
    """Returns what a patient says of itself, and the call that finds it by that."""
    said = f"Your name is {patient.name} and you were born in {patient.born}."
    return said, ("patient_by_name", patient.name, patient.born)


# The records.

DRUGS = (
    "amlodipine metformin cetirizine omeprazole levothyroxine sertraline tramadol lorazepam "
    "codeine diazepam bisoprolol ramipril"
).split()
CONTROLLED = ("tramadol", "lorazepam", "codeine", "diazepam")


def draw(rng: Draw) -> Clinic:
    """Draws the patients, the doctors with their slots, the appointments and prescriptions."""
    kit, people = Clinic(rng.today(), {}, {}, {}, {}), rng.people(57)
    for field, name in zip(get_args(Field) * 4, people[45:], strict=True):
        key = rng.number("D", 4)
        kit.doctors[key] = Doctor(
            key,
            f"Dr. {name}",
            field=field,
            room=rng.number("R", 3),
            fee=rng.randrange(20, 150, 5),
            slots=_slots(rng, kit.today),
        )
    for name in people[:45]:
        key = rng.number("P", 6)
        patient = kit.patients[key] = Patient(
            key,
            name,
            born=rng.randint(1940, 2006),
            insurance=rng.one_of(Insurance),
            referral=rng.one_of(Referral),
            missed_visits=rng.choice((0, 1, 2, 3)),
            contact_by=rng.one_of(By),
            pharmacy=rng.one_of(Pharmacy),
        )
        for _ in range(rng.randint(3, 5)):
            visit = _appointment(rng, kit, patient)
            kit.appointments[visit.appointment_id] = visit
        for name in rng.sample(rng.of_split(DRUGS), rng.randint(2, 4)):
            drug = _prescription(rng, kit.today, key, name)
            kit.prescriptions[drug.prescription_id] = drug
    return kit


def _slots(rng, today) -> tuple[Slot, ...]:
    slots = []
    for days in rng.sample(range(1, 21), 4):
        is_free = rng.random() < 0.65
        slots.append(Slot(rng.number("S"), today + timedelta(days), rng.one_of(Time), is_free))
    return tuple(slots)


def _appointment(rng, kit, patient) -> Appointment:
    doctors = [doctor for doctor in kit.doctors.values() if referred.kept(patient, doctor)]
    key, doctor = rng.number("V", 6), rng.choice(doctors)
    status = rng.choice(("booked", "booked", "booked", "kept", "kept", "cancelled"))
    day = rng.day(kit.today, 0, 14) if status == "booked" else rng.day(kit.today, -60, -1)
    return Appointment(
        key,
        patient.patient_id,
        doctor.doctor_id,
        doctor=doctor.name,
        status=status,
        date=day,
        time=rng.one_of(Time),
        purpose=rng.one_of(Purpose),
        minutes=rng.randrange(10, 60, 5),
        moved=rng.random() < 0.3,
        notes_sent="no",
    )


def _prescription(rng, today, patient_id, drug) -> Prescription:
    return Prescription(
        rng.number("RX", 6),
        patient_id,
        drug,
        controlled=drug in CONTROLLED,
        lasts_until=rng.day(today, -5, 20),
        paid=rng.randint(4, 90),
        refills_left=rng.randint(0, 4),
        mg=rng.randrange(5, 500, 5),
        times_a_day=rng.randint(1, 3),
    )
