"""What every domain promises: a contract over the table of domains, and over one of a user's."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import random
import re
from dataclasses import asdict, fields, is_dataclass

import pytest
from pydantic import TypeAdapter
from scripted import execute

from nanorchestra.errors import UserError
from nanorchestra.records import Task, ToolCall
from worlds.toolscale import environment
from worlds.toolscale.domain import BUILT_IN, build, load
from worlds.toolscale.environment import DomainEnvironment
from worlds.toolscale.expert import altered
from worlds.toolscale.generate import make_batch
from worlds.toolscale.plan import LEVELS, draw, to_task
from worlds.toolscale.score import Scorer, attempt
from worlds.toolscale.toolkit import ToolError, key_of
from worlds.toolscale.verify import vain, verify
from worlds.toolscale.wishes import Scene, UnfitError

BATCHES = int(os.environ.get("TOOLSCALE_BATCHES", "1"))  # of 50 tasks a domain


@pytest.fixture(scope="module", params=BUILT_IN)
def drawn(request):
    """(domain, tasks) of every built-in domain."""
    batches = (make_batch(7, [*LEVELS], request.param, number) for number in range(BATCHES))
    return build(request.param, 7), [task for batch in batches for task in batch["tasks"]]


def scorers(drawn):
    domain, tasks = drawn
    assert len(tasks) == 50 * BATCHES
    return [(task, Scorer(domain, task)) for task in tasks]


def test_what_is_right_scores_1_and_all_else_0(drawn):
    domain, _ = drawn
    writes = [scorer.golden[place] for _, scorer in scorers(drawn) for place in scorer.effects]
    writes = [call for call in writes if domain.kinds[call[0]] == "write"]
    reads = [(name, {}) for name in domain.of_kind("read")]
    for task, scorer in scorers(drawn):
        golden, infos = scorer.golden, scorer.communicate_info
        assert scorer.score(attempt(golden, infos)) == 1
        assert scorer.score([*attempt(golden + reads[:2], infos)]) == 1, "reads are free"
        assert scorer.score([]) == scorer.score(attempt([], infos)) == 0
        assert not infos or scorer.score(attempt(golden)) == 0
        rng = random.Random(task["id"])
        for place in scorer.effects:
            before, (name, given), after = golden[:place], golden[place], golden[place + 1 :]
            assert scorer.score(attempt([*before, *after], infos)) == 0
            for _ in range(3 * len(given)):
                wrong = altered(domain, (name, given), rng)
                assert wrong != (name, given)
                assert scorer.score(attempt([*before, wrong, *after], infos)) == 0, wrong
        added = 0
        for extra in rng.sample(writes, 8):
            kit = scorer.gold.copy()
            try:
                kit.call(*extra)
            except ToolError:
                continue
            if kit != scorer.gold:
                added += 1
                assert scorer.score(attempt([*golden, extra], infos)) == 0, extra
        assert added


def test_a_hand_over_is_the_last_of_the_golden_calls(drawn):
    domain, tasks = drawn
    handovers = domain.of_kind("handover")
    names = [[each["name"] for each in t["evaluation_criteria"]["actions"]] for t in tasks]
    assert not any(name in handovers for calls in names for name in calls[:-1])


def test_arguments_are_said_or_returned_and_answers_are_not_said(drawn):
    domain, tasks = drawn
    for task in tasks:
        parts, kit = task["user_scenario"]["instructions"], domain.start.copy()
        said = f"{parts['reason_for_call']} {parts['known_info']}".replace("_", " ")
        seen = json.dumps(said)
        assert not any(mark in said for mark in ("{", "}", "None", "  ", "..", "True"))
        for action in task["evaluation_criteria"]["actions"]:
            for value in action["arguments"].values():
                assert str(value).replace("_", " ") in seen, (value, said)
            seen += json.dumps(kit.call(action["name"], action["arguments"])).replace("_", " ")
        words = said.replace("$", "").replace(",", "").replace(".", " ").split()
        for info in task["evaluation_criteria"]["communicate_info"]:
            assert info not in words


def test_the_schema_of_a_tool_is_what_pydantic_says_of_its_signature(drawn):
    domain, _ = drawn
    assert len(domain.functions) >= 12 and len(domain.start.tables) >= 3
    assert sum(map(len, domain.start.tables)) >= 200
    assert [domain.of_kind(kind) != [] for kind in ("read", "write", "handover")] == [True] * 3
    for name, function in domain.functions.items():
        wanted = TypeAdapter(getattr(domain.start, name)).json_schema()
        told = inspect.getdoc(getattr(domain.start, name)).partition("\nArgs:\n")[2]
        for argument, shape in wanted["properties"].items():
            del shape["title"]
            if description := re.search(rf"^ +{argument}: (.+)$", told, re.MULTILINE):
                shape["description"] = description[1]
        assert told.count("\n") + bool(told) == str(wanted).count("'description'")
        assert function["function"]["parameters"] == wanted
        assert function["function"]["description"]


def texts(value):
    """The texts in a record that are drawn: no choices."""
    if isinstance(value, tuple):
        for inner in value:
            yield from texts(inner)
    elif is_dataclass(value):
        for each in fields(value):
            inner = getattr(value, each.name)
            if each.type is str:
                yield inner
            elif not isinstance(inner, str):
                yield from texts(inner)


def test_no_value_of_a_held_out_domain_is_in_training(drawn):
    name, found = drawn[0].name, {}
    for split in ("train", "held_out"):
        tables = build(name, 3, split).start.tables
        found[split] = {text for rows in tables for row in rows.values() for text in texts(row)}
        assert len(found[split]) > 200
    assert found["train"] & found["held_out"] <= {""}


def test_every_wish_can_be_had_and_every_rule_forbids_and_allows(drawn):
    assert vain(drawn[0]) == []


def bank_breaks(kit):
    """Yields which sentences of the bank's policy its records break."""
    for account in kit.accounts.values():
        if any(fee.waived and fee.what == "late fee" for fee in account.fees):
            yield "a late fee that was given back"
    for payment in kit.payments.values():
        if payment.status == "disputed" and payment.amount < 15:
            yield "a dispute about less than $15"


def clinic_breaks(kit):
    for visit in kit.appointments.values():
        field = kit.doctors[visit.doctor_id].field
        if field not in ("general", kit.patients[visit.patient_id].referral):
            yield f"an appointment in {field} without a referral"


def ecommerce_breaks(kit):
    for order in kit.orders.values():
        is_member = kit.customers[order.customer_id].plus
        if order.shipping == "express" and not is_member:
            yield "express shipping without plus"
        if max(line.quantity for line in order.lines) > 4 and not is_member:
            yield "more than 4 pieces without plus"
        if order.shipping_refunded and (order.delivered_on - order.placed_on).days <= 6:
            yield "a shipping fee paid back for a delivery in time"


def railway_breaks(kit):
    for booking in kit.bookings.values():
        if any(leg.bicycles and leg.kind != "regional" for leg in booking.legs):
            yield "a bicycle in a train that is not regional"
        if len({leg.train_id for leg in booking.legs}) < len(booking.legs):
            yield "two legs on a train"
        if booking.compensated and max(leg.minutes_late for leg in booking.legs) < 60:
            yield "compensation for less than an hour"


def restaurant_breaks(kit):
    for table in kit.reservations.values():
        if table.seats > 8 or table.high_chairs > 2:
            yield "more than 8 people or 2 high chairs at a table"
        if table.seats == 8 and table.area != "hall":
            yield "a party of 8 outside of the hall"
        allergy = kit.guests[table.guest_id].allergy
        if allergy in {kit.dishes[order.dish_id].contains for order in table.orders} - {"none"}:
            yield f"a dish with {allergy} for a guest with that allergy"


def university_breaks(kit):
    for student in kit.students.values():
        mine = [each for each in kit.transcript(student.student_id) if each.running]
        if not student.credits_now == sum(each.credits for each in mine) <= 30:
            yield f"{student.credits_now} credits"
        if student.exchange and any(each.grading != "letter" for each in mine):
            yield "an exchange student graded pass or fail"
    for enrolment in kit.enrolments.values():
        needs = kit.courses[enrolment.course_id].needs
        if needs not in ("nothing", *kit.students[enrolment.student_id].passed):
            yield f"a course that needs {needs} without it"


NEED_NOTICE = ("refund_booking", "rebook_leg", "rename_passenger")


def railway_misses(before, calls, kit):
    """Yields what calls of the railway break, beside what their records show."""
    for name, booking_id, *_ in calls:
        is_near = name in NEED_NOTICE and (before.bookings[booking_id].date - kit.today).days < 2
        if is_near:
            yield f"{name} of a trip that departs within two days"
        if name == "rebook_leg":
            taken = sum(each.seats_left for each in before.trains.values())
            taken -= sum(each.seats_left for each in kit.trains.values())
            if taken != len(kit.bookings[booking_id].passengers):
                yield f"{taken} seats for {kit.bookings[booking_id].passengers}"


def test_records_and_what_is_allowed_keep_the_policy_as_it_is_written(drawn):
    domain, _ = drawn
    breaks = globals()[f"{domain.name}_breaks"]
    assert list(breaks(domain.start)) == []
    done = set()
    for seed in range(600):
        rng = random.Random(seed)
        scene = Scene(domain.start, domain.start.copy(), rng.choice(domain.people), rng)
        try:
            wish, _ = scene.draw(rng.choice(domain.wishes))
        except UnfitError:
            continue
        if wish.allowed:
            scene.act(wish)
            done.update(name for name, *_ in wish.do)
            assert list(breaks(scene.kit)) == [], wish.want
            if domain.name == "railway":
                assert list(railway_misses(domain.start, wish.do, scene.kit)) == [], wish.want
    assert done == {*domain.of_kind("write"), *domain.of_kind("handover")}


def changed(before, after):
    """The places of the records that are not the same, but for the users'."""
    return {
        (place, key)
        for place, (old, new) in enumerate(zip(before.tables, after.tables, strict=True))
        for key in old.keys() | new.keys()
        if place and old.get(key) != new.get(key)
    }


def test_each_golden_write_changes_records_that_no_other_does(drawn):
    """A new value is never the present one, and no two wishes are about one record."""
    domain, tasks = drawn
    for task in tasks:
        kit, written = domain.start.copy(), set()
        for action in task["evaluation_criteria"]["actions"]:
            before = kit.copy()
            kit.call(action["name"], action["arguments"])
            assert kit != before or domain.kinds[action["name"]] != "write", task["id"]
            assert not changed(before, kit) & written, task["id"]
            written |= changed(before, kit)


def test_words_for_a_record_fit_no_other_of_the_user(drawn):
    domain, _ = drawn
    for seed in range(200):
        rng = random.Random(seed)
        try:
            scene = draw(domain, ["plain", "mind"], rng)
        except UnfitError:
            continue
        mine = [kind.mine for kind in domain.wishes if kind.mine]
        for record in (each for one in mine for each in one.all(domain.start, scene.key)):
            for key, words in scene.names.items():
                assert words not in record.names() or key == key_of(record)


def test_a_domain_is_written_and_read_back(drawn, tmp_path):
    domain, tasks = drawn
    domain.save(tmp_path / domain.name)
    again = load(tmp_path / domain.name)
    assert asdict(again.start) == asdict(domain.start) and again.policy == domain.policy
    assert again.functions == domain.functions and verify(again, tasks[0]) is None
    (tmp_path / domain.name / "db.json").write_text("{}")
    with pytest.raises(UserError, match=r"db.json: Field required"):
        load(tmp_path / domain.name)


def test_each_reason_to_throw_a_task_away():
    domain = build("bank", 7)

    def changed(change):
        """The reason of the first task that the change fits."""
        for task in make_batch(7, [*LEVELS], "bank", 0)["tasks"]:
            criteria, parts = task["evaluation_criteria"], task["user_scenario"]["instructions"]
            if change(criteria, parts, criteria["actions"]) is not False:
                return verify(domain, task)

    def unknown(criteria, parts, actions):
        actions[-1]["arguments"] = {"card_id": "nothing"}

    def stranger(criteria, parts, actions):
        parts["known_info"] = "You are a client."

    def said(criteria, parts, actions):
        parts["known_info"] += f" {' '.join(criteria['communicate_info'])}"
        return bool(criteria["communicate_info"])

    def anything(criteria, parts, actions):
        criteria["reward_basis"] = ["COMMUNICATE"]
        wrote = {action["name"] for action in actions} & {*domain.of_kind("write")}
        return bool(criteria["communicate_info"] and wrote)

    assert changed(unknown).startswith("a golden call errs: ")
    assert changed(stranger) == "an argument is not determined by the text"
    assert changed(said) == "the answer is in the text"
    assert changed(anything) == "solved with an argument altered"


# --- a domain of a user's own

OWN = '''"""A library that lends instruments."""

import asyncio
import time
from dataclasses import dataclass

from worlds.toolscale.toolkit import Draw, Toolkit, handover, read, write
from worlds.toolscale.wishes import Mine, Scene, Wish, rule, wish


@dataclass(frozen=True)
class Reader:
    reader_id: str
    name: str


@dataclass(frozen=True)
class Loan:
    loan_id: str
    reader_id: str
    what: str
    weeks: int

    def names(self) -> list[str]:
        return [f"loan {self.loan_id}", f"your {self.what}"]


@dataclass
class Library(Toolkit):
    """You work in a library that lends instruments."""

    readers: dict[str, Reader]
    loans: dict[str, Loan]

    @read
    def reader(self, name: str) -> Reader:
        """Finds a reader by name."""
        return self.one(self.readers.values(), "There is no such reader.", name=name)

    @read
    def loans_of(self, reader_id: str) -> list[Loan]:
        """Lists the loans of a reader."""
        return [loan for loan in self.loans.values() if loan.reader_id == reader_id]

    @read
    def loan(self, loan_id: str) -> Loan:
        """Reads a loan."""
        return self.loans[loan_id]

    @write
    def prolong(self, loan_id: str, weeks: int) -> int:
        """Prolongs a loan; returns its weeks."""
        loan = self.loans[loan_id]
        return self.change(self.loans, loan, weeks=loan.weeks + weeks).weeks

    @write
    def broken(self, how: str) -> object:
        """Fails after it has written."""
        self.loans.clear()
        if how == "raises":
            raise RuntimeError("out of order")
        if how == "is cancelled":
            raise asyncio.CancelledError
        while how == "loops":
            time.sleep(0.01)
        loop = []
        loop.append(loop)
        return loop

    @handover
    def transfer_to_human_agents(self) -> str:
        """Hands over."""
        return "Please wait."


@rule("A loan is prolonged up to 8 weeks.")
def short(loan: Loan, weeks: int) -> bool:
    return loan.weeks + weeks <= 8


loans = Mine(find="loans_of", look="loan")


@wish(loans)
def longer(scene: Scene, loan: Loan) -> Wish:
    weeks = scene.rng.randint(2, 5)
    return Wish(
        f"prolong {scene.name(loan)} by {weeks} weeks",
        do=[("prolong", loan.loan_id, weeks)],
        rules=[short.of(loan, weeks)],
        facts=[scene.near(loan.weeks, "it is lent for less than {} weeks")],
    )


def identify(reader: Reader) -> tuple[str, tuple]:
    return f"Your name is {reader.name}.", ("reader", reader.name)


def draw(rng: Draw) -> Library:
    kit = Library(rng.today(), {}, {})
    for name in rng.people(30):
        key = rng.number("R")
        kit.readers[key] = Reader(key, name)
        for what in ("lute", "flute", "viola", "horn", "harp"):
            loan = rng.number("L")
            kit.loans[loan] = Loan(loan, key, what, rng.randint(1, 6))
    return kit
'''


@pytest.fixture
def own(tmp_path):
    (tmp_path / "library.py").write_text(OWN)
    return tmp_path / "library.py"


def test_a_domain_of_ones_own_is_one_file(own):
    domain = build(str(own), 0)
    tasks = make_batch(0, [1, 2], str(own), 0)["tasks"]
    assert len(tasks) == 50 and domain.name == "library"
    assert all(verify(domain, task) is None for task in tasks)
    for wrong, says in (
        (OWN.replace("def draw", "def drew"), "library.py: AttributeError: .* 'draw'"),
        (OWN.replace("(Toolkit)", ""), "library.py: ValueError: "),
        (OWN + "\nimport nothing_of_this_name", "library.py: ModuleNotFoundError: "),
    ):
        own.write_text(wrong)
        with pytest.raises(UserError, match=says) as refused:
            build(str(own), 0)
        assert "\n" not in str(refused.value)
    with pytest.raises(UserError, match="domain 'ferry': there are bank, clinic, .* NAME.py"):
        build("ferry", 0)


@pytest.mark.parametrize("how", ["raises", "is cancelled", "loops", "returns nonsense"])
def test_a_tool_that_fails_fails_that_call_alone(own, how, monkeypatch):
    monkeypatch.setattr(environment, "CALL_SECONDS", 0.3)
    domain = build(str(own), 0)
    rng = random.Random(0)
    task = to_task(domain, draw(domain, ["plain"], rng), "t", 1)
    env = DomainEnvironment(domain, Task("t", "", data={"task": task, "experts": []}), 0)
    result = execute(env, ToolCall("broken", {"how": how}))
    assert result.error and env.kit == domain.start
    if how in ("raises", "returns nonsense"):
        with pytest.raises(ToolError):
            env.kit.call("broken", {"how": how})
        assert env.kit == domain.start
    for name, arguments in env.scorer.golden:
        if env.domain.kinds[name] == "write":
            asyncio.run(env.reply(f"Shall I do this: {arguments}?"))
        assert not execute(env, ToolCall(name, arguments)).error
    assert env.score("") == 1
    for wrong in ({"loan_id": "L0", "weeks": 1}, {"loan_id": "L0"}, {"weeks": "many"}, [], "x"):
        assert execute(env, ToolCall("prolong", wrong)).content.startswith("Error: prolong: ")
    assert env.score("") == 1
