"""What every domain promises: a contract over the table of domains, and over one of a user's."""

from __future__ import annotations

import asyncio
import os
import random
import re
from pathlib import Path

import pytest
from scripted import execute

from nanorchestra.errors import UserError
from nanorchestra.records import Task, ToolCall
from worlds.toolscale import environment
from worlds.toolscale.domain import BUILT_IN, build
from worlds.toolscale.domains import restaurant
from worlds.toolscale.environment import DomainEnvironment
from worlds.toolscale.expert import altered
from worlds.toolscale.generate import make_all, vain
from worlds.toolscale.plan import LEVELS, draw, to_task
from worlds.toolscale.score import Scorer, attempt
from worlds.toolscale.toolkit import ToolError
from worlds.toolscale.verify import verify
from worlds.toolscale.wishes import Scene, UnfitError

TASKS = int(os.environ.get("TOOLSCALE_TASKS", "50"))  # of a domain
OWN = Path(restaurant.__file__).read_text()  # a domain of a user's own


@pytest.fixture(scope="module", params=BUILT_IN)
def drawn(request):
    """(domain, tasks) of every built-in domain."""
    domain = build(request.param, 7)
    tasks, _ = make_all([domain], TASKS, 7, [*LEVELS])
    assert len(tasks) == TASKS
    return domain, tasks


def test_what_is_right_scores_1_and_all_else_0(drawn):
    """All else: nothing done, nothing said, a write with an argument altered, or left out."""
    domain, tasks = drawn
    reads = [(name, {}) for name in domain.of_kind("read")]
    for task in tasks:
        scorer, rng = Scorer(domain, task), random.Random(task["id"])
        golden, infos = scorer.golden, scorer.communicate_info
        assert scorer.score(attempt(golden, infos)) == 1
        assert scorer.score(attempt(golden + reads[:2], infos)) == 1, "reads are free"
        assert scorer.score([]) == scorer.score(attempt([], infos)) == 0
        assert not infos or scorer.score(attempt(golden)) == 0
        for place in scorer.effects:
            before, call, after = golden[:place], golden[place], golden[place + 1 :]
            assert scorer.score(attempt([*before, *after], infos)) == 0
            for _ in call[1]:
                wrong = altered(domain, call, rng)
                assert wrong != call
                assert scorer.score(attempt([*before, wrong, *after], infos)) == 0, wrong


def test_no_key_and_no_user_of_a_held_out_domain_is_in_training(drawn):
    found = {}
    for split in ("train", "held_out"):
        users, *others = build(drawn[0].name, 3, split).start.tables
        found[split] = {user.name for user in users.values()}.union(users, *others)
        assert len(found[split]) > 100
    assert not found["train"] & found["held_out"]


def bank_keeps(kit):
    """Yields whether its records keep each sentence of the policy that they can break."""
    for account in kit.accounts.values():
        yield not any(fee.waived and fee.what == "late fee" for fee in account.fees)
    for payment in kit.payments.values():
        yield payment.status != "disputed" or payment.amount >= 15


def clinic_keeps(kit):
    for visit in kit.appointments.values():
        field = kit.doctors[visit.doctor_id].field
        yield field in ("general", kit.patients[visit.patient_id].referral)


def ecommerce_keeps(kit):
    for order in kit.orders.values():
        most = max(line.quantity for line in order.lines)
        yield kit.customers[order.customer_id].plus or order.shipping == "standard" and most <= 4
        yield not order.shipping_refunded or (order.delivered_on - order.placed_on).days > 6


def railway_keeps(kit):
    for booking in kit.bookings.values():
        yield not any(leg.bicycles and leg.kind != "regional" for leg in booking.legs)
        yield len({leg.train_id for leg in booking.legs}) == len(booking.legs)
        yield not booking.compensated or max(leg.minutes_late for leg in booking.legs) >= 60


def restaurant_keeps(kit):
    for table in kit.reservations.values():
        eaten = {kit.dishes[order.dish_id].contains for order in table.orders}
        yield table.seats <= 8 and table.high_chairs <= 2
        yield table.seats < 8 or table.area == "hall"
        yield kit.guests[table.guest_id].allergy not in eaten - {"none"}


def university_keeps(kit):
    for student in kit.students.values():
        mine = [each for each in kit.transcript(student.student_id) if each.running]
        yield student.credits_now == sum(each.credits for each in mine) <= 30
        yield not student.exchange or {each.grading for each in mine} <= {"letter"}
    for enrolment in kit.enrolments.values():
        passed = kit.students[enrolment.student_id].passed
        yield kit.courses[enrolment.course_id].needs in ("nothing", *passed)


KEEPS = {
    "bank": bank_keeps,
    "clinic": clinic_keeps,
    "ecommerce": ecommerce_keeps,
    "railway": railway_keeps,
    "restaurant": restaurant_keeps,
    "university": university_keeps,
}


def test_records_and_what_is_allowed_keep_the_policy_as_it_is_written(drawn):
    domain, _ = drawn
    keeps, done = KEEPS[domain.name], set()
    assert all(keeps(domain.start))
    for seed in range(600):
        rng = random.Random(seed)
        scene = Scene(domain.start, domain.start.copy(), rng.choice(domain.people), rng)
        try:
            wish, _ = scene.draw(rng.choice([*domain.wishes.values()]))
        except UnfitError:
            continue
        if wish.allowed:
            scene.act(wish)
            assert all(keeps(scene.kit)), wish.want
            done.update(name for name, *_ in wish.do[:1])
    assert done == {*domain.of_kind("write"), *domain.of_kind("handover")}


def test_every_wish_is_proved_and_every_rule_forbids_and_allows(drawn):
    assert vain(drawn[0]) == []


def test_a_task_that_another_argument_solves_is_thrown_away():
    domain, reasons = build("bank", 7), set()
    tasks, _ = make_all([domain], 50, 7, [*LEVELS])
    for task in tasks:
        criteria = task["evaluation_criteria"]
        wrote = {action["name"] for action in criteria["actions"]} & {*domain.of_kind("write")}
        if wrote and criteria["communicate_info"]:
            criteria["reward_basis"] = ["COMMUNICATE"]
            reasons.add(re.sub(r"with \w+", "with X", verify(domain, task), count=1))
    assert reasons == {"solved with X with another argument"}


# --- a domain of a user's own


@pytest.fixture
def own(tmp_path):
    (tmp_path / "mine.py").write_text(OWN)
    return tmp_path / "mine.py"


def test_a_domain_of_ones_own_is_one_file_and_what_it_states_in_vain_is_named(own):
    domain = build(str(own), 0)
    tasks, _ = make_all([domain], 50, 0, [1, 2])
    assert len(tasks) == 50 and domain.name == "mine"
    own.write_text(OWN.replace("table.seats + scene", "table.seats + 0 * scene"))
    (problem, *_) = vain(build(str(own), 0))
    assert problem.startswith("the wish seats is never proved: set_seats changes nothing: ")
    own.write_text(OWN.replace("def draw", "def drew"))
    with pytest.raises(UserError, match="mine.py: AttributeError: .* 'draw'"):
        build(str(own), 0)


BROKEN = '''
    @write
    def broken(self, how: str) -> object:
        """Fails after it has written."""
        self.reservations.clear()
        if how == "raises":
            raise RuntimeError("out of order")
        if how == "is cancelled":
            raise asyncio.CancelledError
        while how == "loops":
            time.sleep(0.01)
        loop = []
        loop.append(loop)
        return loop

    @handover'''


@pytest.mark.parametrize("how", ["raises", "is cancelled", "loops", "returns nonsense"])
def test_a_tool_that_fails_fails_that_call_alone(own, how, monkeypatch):
    monkeypatch.setattr(environment, "CALL_SECONDS", 0.3)
    source = OWN.replace("\n    @handover", BROKEN)
    own.write_text(source.replace("from typing", "import asyncio\nimport time\nfrom typing"))
    domain = build(str(own), 0)
    task = to_task(domain, draw(domain, ["plain"], random.Random(1)), "t", 1)
    env = DomainEnvironment(domain, Task("t", "", data={"task": task, "experts": []}), 0)
    assert execute(env, ToolCall("broken", {"how": how})).error and env.kit == domain.start
    if how in ("raises", "returns nonsense"):
        with pytest.raises(ToolError):
            env.kit.call("broken", {"how": how})
        assert env.kit == domain.start
    for name, arguments in env.scorer.golden:
        if env.domain.kinds[name] == "write":
            asyncio.run(env.reply(f"Shall I do this: {arguments}?"))
        assert not execute(env, ToolCall(name, arguments)).error
    for wrong in ({"reservation_id": "R0", "seats": "many"}, {"reservation_id": "R0"}, [], "x"):
        assert execute(env, ToolCall("set_seats", wrong)).content.startswith("Error: set_seats: ")
    assert env.score("") == 1
