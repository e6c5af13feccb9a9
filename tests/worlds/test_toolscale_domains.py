"""What every domain promises: a contract over the table of domains, and over one of a user's."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import random
import re
from dataclasses import asdict, fields, is_dataclass
from pathlib import Path

import pytest
from pydantic import TypeAdapter
from scripted import execute

from data_gen import main
from nanorchestra.errors import UserError
from nanorchestra.records import Task, ToolCall
from worlds.toolscale import environment
from worlds.toolscale.domain import BUILT_IN, build, load
from worlds.toolscale.domains import restaurant
from worlds.toolscale.environment import DomainEnvironment
from worlds.toolscale.expert import altered
from worlds.toolscale.generate import make_batch, vain
from worlds.toolscale.plan import LEVELS, draw, to_task
from worlds.toolscale.score import Scorer, attempt
from worlds.toolscale.toolkit import ToolError, key_of
from worlds.toolscale.verify import verify
from worlds.toolscale.wishes import Scene, UnfitError

BATCHES = int(os.environ.get("TOOLSCALE_BATCHES", "1"))  # of 50 tasks a domain
OWN = Path(restaurant.__file__).read_text()  # a domain of a user's own


@pytest.fixture(scope="module", params=BUILT_IN)
def drawn(request):
    """(domain, tasks) of every built-in domain."""
    batches = (make_batch(7, [*LEVELS], request.param, number) for number in range(BATCHES))
    tasks = [task for tasks, _ in batches for task in tasks]
    assert len(tasks) == 50 * BATCHES
    return build(request.param, 7), tasks


def test_what_is_right_scores_1_and_all_else_0(drawn):
    """All else: nothing done, a write with an argument altered, left out, or added."""
    domain, tasks = drawn
    scorers = [(task["id"], Scorer(domain, task)) for task in tasks]
    writes = [scorer.golden[place] for _, scorer in scorers for place in scorer.effects]
    writes = [call for call in writes if domain.kinds[call[0]] == "write"]
    reads = [(name, {}) for name in domain.of_kind("read")]
    for name, scorer in scorers:
        golden, infos, rng = scorer.golden, scorer.communicate_info, random.Random(name)
        assert scorer.score(attempt(golden, infos)) == 1
        assert scorer.score(attempt(golden + reads[:2], infos)) == 1, "reads are free"
        assert scorer.score([]) == scorer.score(attempt([], infos)) == 0
        assert not infos or scorer.score(attempt(golden)) == 0
        for place in scorer.effects:
            before, call, after = golden[:place], golden[place], golden[place + 1 :]
            assert scorer.score(attempt([*before, *after], infos)) == 0
            for _ in range(3 * len(call[1])):
                wrong = altered(domain, call, rng)
                assert wrong != call
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


def changed(before, after):
    """The places of the records that are not the same, but for the users'."""
    return {
        (place, key)
        for place, (old, new) in enumerate(zip(before.tables, after.tables, strict=True))
        for key in old.keys() | new.keys()
        if place and old.get(key) != new.get(key)
    }


def test_golden_calls_are_determined_and_change_what_no_other_does(drawn):
    """Arguments are said or returned and answers are not said; no new value is the present one.

    No two wishes change one record, and a hand-over is the last call.
    """
    domain, tasks = drawn
    for task in tasks:
        parts, criteria = task["user_scenario"]["instructions"], task["evaluation_criteria"]
        said = f"{parts['reason_for_call']} {parts['known_info']}".replace("_", " ")
        assert not any(mark in said for mark in ("{", "}", "None", "the none", "  ", "..", "True"))
        seen, kit, written, kinds = json.dumps(said), domain.start.copy(), set(), []
        for action in criteria["actions"]:
            for value in action["arguments"].values():
                assert str(value).replace("_", " ") in seen, (value, said)
            before = kit.copy()
            result = kit.call(action["name"], action["arguments"])
            seen += json.dumps(result).replace("_", " ")
            kinds.append(domain.kinds[action["name"]])
            assert (kit != before) == (kinds[-1] == "write"), action
            assert not changed(before, kit) & written, said
            written |= changed(before, kit)
        assert "handover" not in kinds[:-1]
        words = said.replace("$", "").replace(",", "").replace(".", " ").split()
        assert not {*criteria["communicate_info"]} & {*words}


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
NEED_NOTICE = ("refund_booking", "rebook_leg", "rename_passenger")


def test_records_and_what_is_allowed_keep_the_policy_as_it_is_written(drawn):
    domain, _ = drawn
    start, keeps, done = domain.start, KEEPS[domain.name], set()
    assert all(keeps(start))
    for seed in range(600):
        rng = random.Random(seed)
        scene = Scene(start, start.copy(), rng.choice(domain.people), rng)
        try:
            wish, record = scene.draw(rng.choice([*domain.wishes.values()]))
        except UnfitError:
            continue
        if wish.allowed:
            scene.act(wish)
            assert all(keeps(scene.kit)), wish.want
            (name, *_), *_ = wish.do or [("told",)]
            done.add(name)
            if name in NEED_NOTICE:
                assert (record.date - start.today).days >= 2
            if name == "rebook_leg":
                free = [
                    sum(t.seats_left for t in kit.trains.values()) for kit in (start, scene.kit)
                ]
                assert free[0] - free[1] == len(record.passengers)
    assert done - {"told"} == {*domain.of_kind("write"), *domain.of_kind("handover")}


def test_every_wish_is_proved_and_every_rule_forbids_and_allows(drawn):
    assert vain(drawn[0]) == []


def test_words_for_a_record_fit_no_other_of_the_user(drawn):
    domain, _ = drawn
    for seed in range(200):
        rng = random.Random(seed)
        try:
            scene = draw(domain, ["plain", "mind"], rng)
        except UnfitError:
            continue
        mine = [kind.mine for kind in domain.wishes.values() if kind.mine]
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


def unknown(criteria, parts, domain):
    criteria["actions"][-1]["arguments"] = {"card_id": "nothing"}
    return True


def stranger(criteria, parts, domain):
    parts["known_info"] = "You are a client."
    return True


def answered(criteria, parts, domain):
    parts["known_info"] += f" {' '.join(criteria['communicate_info'])}"
    return criteria["communicate_info"]


def anything(criteria, parts, domain):
    criteria["reward_basis"] = ["COMMUNICATE"]
    wrote = {action["name"] for action in criteria["actions"]} & {*domain.of_kind("write")}
    return criteria["communicate_info"] and wrote


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (unknown, r"a golden call errs: \w+: "),
        (stranger, "name of client_by_birth is neither in the text nor returned"),
        (answered, "the answer is in the text"),
        (anything, r"solved with \w+ with another argument"),
    ],
)
def test_each_reason_to_throw_a_task_away(change, reason):
    domain, (tasks, _) = build("bank", 7), make_batch(7, [*LEVELS], "bank", 0)
    for task in tasks:
        if change(task["evaluation_criteria"], task["user_scenario"]["instructions"], domain):
            assert re.match(reason, verify(domain, task))
            return
    raise AssertionError("no task fits")


# --- a domain of a user's own


@pytest.fixture
def own(tmp_path):
    (tmp_path / "mine.py").write_text(OWN)
    return tmp_path / "mine.py"


def test_a_domain_of_ones_own_is_one_file(own):
    domain = build(str(own), 0)
    tasks, _ = make_batch(0, [1, 2], str(own), 0)
    assert len(tasks) == 50 and domain.name == "mine"
    assert vain(domain) == [] and not any(verify(domain, task) for task in tasks)
    for wrong, says in (
        (OWN.replace("def draw", "def drew"), "mine.py: AttributeError: .* 'draw'"),
        (OWN.replace("(Toolkit)", ""), "mine.py: ValueError: "),
        (OWN + "\nimport nothing_of_this_name", "mine.py: ModuleNotFoundError: "),
    ):
        own.write_text(wrong)
        with pytest.raises(UserError, match=says) as refused:
            build(str(own), 0)
        assert "\n" not in str(refused.value)
    with pytest.raises(UserError, match="domain 'ferry': there are bank, clinic, .* NAME.py"):
        build("ferry", 0)


@pytest.mark.parametrize(
    ("old", "new", "wish", "reason"),
    [
        ("table.seats + scene", "table.seats + 0 * scene", "seats", "set_seats changes nothing: "),
        ("how many portions", "that {ordered} portions", "portions", "the answer is in the text: "),
        ("rules=[chairs", "can=False, rules=[chairs", "chair", "no wish with the twist plain (it "),
        ('chair", table.', 'chair", "R" + table.', "chair", "(add_high_chair: there is no 'RRES-"),
    ],
)
def test_a_wish_that_is_never_done_is_named_with_the_reason(own, capsys, old, new, wish, reason):
    assert OWN.count(old) == 1
    own.write_text(OWN.replace(old, new))
    options = ["--domains", str(own)]
    main([*options, "--show", "3", "--wish", wish])
    shown = capsys.readouterr().err
    assert f"mine.{wish}: thrown away: " in shown and reason in shown
    if "there is no" in reason:
        with pytest.raises(ToolError, match="add_high_chair: there is no 'RRES-"):
            vain(build(str(own), 0))
    else:
        (problem, *_) = vain(build(str(own), 0))
        assert problem.startswith(f"the wish {wish} is never proved: {reason}")
    if "with the twist" in shown:
        return  # no task of it is drawn, so none is thrown away
    out = str(own.with_name("data"))
    assert main([*options, "--tasks", "40", "--workers", "1", "--out", out]) == 0
    printed = capsys.readouterr().out
    assert f"(mine.{wish} " in printed or f"never proved: mine.{wish}\n" in printed


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
    unknown = {"reservation_id": "R0", "seats": 4}
    for wrong in (unknown, unknown | {"seats": "many"}, {"reservation_id": "R0"}, [], "x"):
        assert execute(env, ToolCall("set_seats", wrong)).content.startswith("Error: set_seats: ")
    assert env.score("") == 1
