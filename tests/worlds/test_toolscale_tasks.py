"""Tasks of the built-in author, what throws tasks away, and how attempts are scored."""

from __future__ import annotations

import copy
import random
from contextlib import suppress

import pytest

from worlds.toolscale.act import Act, UnfitError
from worlds.toolscale.blueprint import BUILT_IN, build
from worlds.toolscale.expert import altered
from worlds.toolscale.pipeline import make_batch
from worlds.toolscale.planner import LEVELS, MOST_CALLS, Planner
from worlds.toolscale.program import rules
from worlds.toolscale.score import Scorer, attempt, communicated
from worlds.toolscale.tasks import to_task
from worlds.toolscale.verify import mentions, signature, task_text, verify
from worlds.toolscale.wishes import Wish


@pytest.fixture(scope="module")
def batch():
    return build("railway", 1)[0], make_batch(1, (1, 2, 3, 4, 5), "railway", 0)


@pytest.fixture(scope="module")
def drawn():
    """[(world, level, act, task), ...]: a few of every domain and level."""
    tasks = []
    for number, level in [(n, level) for n in range(4) for level in LEVELS]:
        for name in BUILT_IN:
            domain, w = build(name, 1)
            planner = Planner(domain, w, random.Random(f"{name}{number}{level}"))
            act = planner.generate(level, number)
            tasks.append((domain, level, act, to_task(act, f"{name}-{number}-{level}", level)))
    return tasks


def find(batch, fits):
    domain, part = batch
    return domain, copy.deepcopy(next(task for task in part["tasks"] if fits(task)))


def actions(task):
    return task["evaluation_criteria"]["actions"]


def told_and_done(domain, task):
    return Scorer(domain, task).effects and task["evaluation_criteria"]["communicate_info"]


def words(task):
    return task["user_scenario"]["instructions"]


def test_every_task_is_solved_by_its_golden_calls_and_not_without_them(batch):
    domain, part = batch
    assert len(part["tasks"]) == 50
    for task in part["tasks"]:
        scorer = Scorer(domain, task)
        calls, infos = scorer.golden, scorer.communicate_info
        writes = [calls[place] for place in scorer.effects]
        assert scorer.score(attempt(calls, infos)) == 1 and verify(domain, task) is None
        known = calls[:1] * (words(task)["unknown_info"] is not None)
        assert scorer.score(attempt([*known, *writes], infos)) == 1, "reads are free"
        assert scorer.score([]) == (not writes and not infos)
        assert len(calls) <= MOST_CALLS
        for skipped in range(len(writes)):
            wrong = altered(domain, writes[skipped : skipped + 1], random.Random(0))
            for other in ([], wrong)[: 1 + (wrong[0][0] != "transfer_to_human_agents")]:
                changed = [*known, *writes[:skipped], *other, *writes[skipped + 1 :]]
                assert scorer.score(attempt(changed, infos)) == 0
        if infos:
            assert scorer.score(attempt(calls)) == 0
        text = task_text(task)
        assert not any(mark in text for mark in ("{", "}", "<", "None", "  ", "..", " .", "_"))
        sentences = [wish["say"] for wish in task["wishes"] if "first" not in wish]
        assert all(each in words(task)["reason_for_call"] for each in sentences)


def test_a_rule_that_no_tool_enforces_costs_who_breaks_it_the_task(drawn):
    broken = 0
    for domain, _, act, task in drawn:
        scorer = Scorer(domain, task)
        steps = attempt(scorer.golden, scorer.communicate_info)
        for rule in task["rules"]:
            assert rule["text"] in domain.policy
            if rule["check"] == "never":
                (name,), arguments = rule["args"]["tools"], rule["args"]["where"]
                tables = dict(domain.tables)
                domain.call(tables, name, arguments)  # the tool lets it be done
                broken += 1
                tried = attempt([(name, arguments)])
                assert scorer.score(steps) == 1 and scorer.score(steps + tried) == 0
        if act.tables != domain.tables:
            silent = [step for step in steps if step[0] == "call"]
            assert scorer.score(silent) == 0, "nothing was confirmed"
    assert broken > 20
    for name in BUILT_IN:
        domain, w = build(name, 1)
        enforced = {rule for t in domain.tools for rule in rules(t)}
        assert len(w.data["rules"]) > (len(w.data["rules"]) + len(enforced)) / 3


# --- verification: each reason, by a task that was sound until one thing was changed


def test_each_reason_to_throw_a_task_away(batch):
    domain, task = find(batch, lambda t: told_and_done(batch[0], t))
    given = actions(task)[Scorer(domain, task).effects[0]]["arguments"]
    given |= {next(iter(given)): "unknown"}
    assert verify(domain, task) == "a golden call errs"

    _, task = find(batch, lambda t: told_and_done(domain, t))
    task["evaluation_criteria"] |= {"actions": [], "reward_basis": ["DB"]}
    assert verify(domain, task) == "solved by doing nothing"

    _, task = find(batch, lambda t: actions(t)[0]["name"] == "show_bookings")
    words(task)["known_info"] = "You are a customer."
    assert verify(domain, task) == "an argument is not determined by the text"

    people = next(iter(domain.tables.values()))
    _, task = find(batch, lambda t: "first_name" in actions(t)[0]["arguments"] and actions(t)[1:])
    given = [value for action in actions(task)[1:] for value in action["arguments"].values()]
    person = next(value for value in given if isinstance(value, str) and value in people)
    words(task)["known_info"] += f" Your number is {person}."
    assert verify(domain, task) == "an identifier that a lookup reveals is in the text"

    _, task = find(batch, lambda t: t["evaluation_criteria"]["communicate_info"])
    info = task["evaluation_criteria"]["communicate_info"][0]
    words(task)["task_instructions"] += f" You think of {info}."
    assert verify(domain, task) == "the answer is in the text"

    _, task = find(batch, lambda t: told_and_done(domain, t))
    task["evaluation_criteria"]["reward_basis"] = ["COMMUNICATE"]  # what is called does not matter
    assert verify(domain, task) == "solved with an argument altered"


def test_what_the_user_says_fits_one_record_alone():
    """With a twin of every record, no words for one fit it alone."""
    for name in BUILT_IN:
        domain, w = build(name, 1)
        double = copy.copy(domain)
        double.tables = {
            table: rows | {f"{key}9": row for key, row in rows.items()}
            for table, rows in domain.tables.items()
        }
        person = next(iter(domain.tables[next(iter(w.data["tables"]))]))
        for place, ok in ((domain, True), (double, False)):
            act = Act(place, w, person, random.Random(3), named=False)
            act.by_id = dict.fromkeys(act.by_id, False)
            for table in (name for name, ref in w.data["refs"].items() if "own" in ref):
                references = []
                for row in act.rows(table):
                    act.mentioned.clear()
                    with suppress(UnfitError):
                        references.append(act.refer(table, row, row))
                assert len(references) == len(set(references)) and (ok or not references)


def test_words_by_relation_are_said_of_the_record_for_which_their_test_holds():
    domain, w = build("railway", 1)
    w = copy.deepcopy(w)
    first = "your first trip | count(select(mine, date < it.date)) == 0"
    w.data["refs"]["bookings"] |= {"by": [first], "listed": True}
    right = 0
    for person in domain.tables["travellers"]:
        act = Act(domain, w, person, random.Random(0), named=False)
        act.by_id = dict.fromkeys(act.by_id, False)
        rows = act.rows("bookings")
        firsts = [row for row in rows if row["date"] == min(each["date"] for each in rows)]
        for row in rows:
            act.mentioned.clear()
            with suppress(UnfitError):
                assert act.refer("bookings", row, row) == "your first trip" and [row] == firsts
                right += 1
    assert right > 10


def test_a_wish_about_all_records_includes_none_that_another_wish_is_about():
    domain, w = build("ecommerce", 1)
    done = refused = 0
    for seed in range(200):
        rng = random.Random(seed)
        act = Act(domain, w, rng.choice([*domain.tables["customers"]]), rng, named=True)
        orders = [row["order_id"] for row in act.rows("orders") if row["status"] == "pending"]
        try:
            Planner(domain, w, rng)._all(act, Wish(act, "cancel"), True)
        except UnfitError:
            continue
        done += 1
        again = Act(domain, w, act.me["customer_id"], random.Random(seed), named=True)
        again.used.add(orders[0])
        with suppress(UnfitError):
            wish = Wish(again, "cancel")
            with pytest.raises(UnfitError, match="another wish"):
                Planner(domain, w, rng)._all(again, wish, True)
            refused += 1
    assert done and refused


def test_a_wish_sees_the_caller_as_earlier_wishes_left_the_record():
    domain, w = build("university", 1)
    running = [row for row in domain.tables["enrolments"].values() if row["state"] == "running"]
    me = running[0]["student_id"]
    act = Act(domain, w, me, random.Random(0), named=False)
    before = act.me["credits_now"]
    act.call("leave_course(it.enrolment_id)", {"it": running[0]})
    assert Wish(act, "paper").scope["me"]["credits_now"] < before


def test_near_duplicates_share_a_signature_and_others_do_not(batch):
    tasks = batch[1]["tasks"]
    assert len(set(map(signature, tasks))) == len(tasks)
    _, twin = find(batch, lambda t: "1" in words(t)["reason_for_call"])
    before = signature(twin)
    words(twin)["reason_for_call"] = words(twin)["reason_for_call"].replace("1", "7")
    words(twin)["known_info"] = "You are another customer."
    assert signature(twin) == before
    words(twin)["reason_for_call"] += " Also this."
    assert signature(twin) != before


# --- scoring


def test_extra_reads_and_failed_calls_do_no_harm_and_an_extra_write_does(batch):
    domain, task = find(batch, lambda t: t["evaluation_criteria"]["communicate_info"])
    scorer = Scorer(domain, task)
    calls, infos = scorer.golden, scorer.communicate_info
    failed = [("call", calls[-1][0], {}, True)]
    harmless = [*attempt([("calculate", {"expression": "1 + 1"}), ("nothing", {})]), *failed]
    golden = attempt(calls, ["hello", *infos])
    assert scorer.score([*harmless, *golden, *harmless]) == 1
    other = find(batch, lambda t: t["id"] != task["id"] and told_and_done(domain, t))[1]
    extra = [Scorer(domain, other).golden[Scorer(domain, other).effects[0]]]
    assert scorer.score([*golden, *attempt(extra)]) == 0
    scorer.basis = ["ACTION", "COMMUNICATE"]
    assert scorer.score([*golden, *attempt(extra)]) == 1


def test_a_dump_of_numbers_or_of_all_values_tells_nothing(batch):
    domain, task = find(batch, lambda t: True)
    number = task["evaluation_criteria"] | {"communicate_info": ["37"], "actions": []}
    tier = next(field for field, texts in domain.columns.items() if 3 <= len(texts) <= 4)
    word = task["evaluation_criteria"] | {"communicate_info": [min(domain.columns[tier])]}

    def informed(criteria, *messages):
        scorer = Scorer(domain, task | {"evaluation_criteria": criteria, "rules": []})
        scorer.basis = ["COMMUNICATE"]
        return scorer.score(attempt([], messages)) == 1

    assert informed(number, "You have 37 points, 5 more than in 2024, and pay $12.50.")
    assert informed(number, *(f"Of these {n} is one." for n in range(5)), "It is 37.")
    assert not informed(number, " ".join(map(str, range(100))))
    assert not informed(number, *(" ".join(map(str, range(n, n + 5))) for n in range(0, 100, 5)))
    assert informed(word, f"It is {min(domain.columns[tier])}.")
    assert not informed(word, " ".join(domain.columns[tier]))


def test_what_is_communicated_and_mentioned():
    message = (
        "It costs 1,000 dollars, or 12.50 each, 5% less on 2026-03-15 at 15:30. You are GOLD now."
    )
    for info in ("1000", "$1,000.00", "12.5", "5", "Gold", "2026-03-15", "each"):
        assert communicated(info, ["hello", message])
    for info in ("100", "10000", "2", "15", "3", "golden", "go", "26", "2026-03-1"):
        assert not communicated(info, ["hello", message])
    assert mentions(message, 12.5) and mentions("a side effect, please", "side_effect")
    assert not mentions("train T155", 155) and not mentions("T1234", "T123")


def test_rules_that_no_tool_enforces_are_checked_on_the_trace(batch):
    domain, task = find(batch, lambda t: True)

    def kept(check, *trace, **args):
        rule = {"text": "", "check": check, "args": args}
        scorer = Scorer(domain, task | {"rules": [rule]})
        scorer.basis = []
        return scorer.score(trace) == 1

    write, other = ("call", "write", {"x": 1}, False), ("call", "read", {}, False)
    failed, asked = ("call", "write", {"x": 1}, True), ("agent", "It costs $5. Shall I?")
    yes, no = ("user", "Yes, please."), ("user", "No, but yesterday.")
    assert kept("confirmed", asked, yes, other, write, write, tools=["write"])
    assert not kept("confirmed", asked, no, write, tools=["write"])
    assert not kept("confirmed", asked, yes, asked, no, write, tools=["write"])
    assert not kept("confirmed", yes, write, tools=["write"]), "the opening is no answer"
    assert kept("confirmed", write, tools=["write"], where={"x": 2})
    assert kept("before", other, write, first=["read"], then=["write"])
    assert not kept("before", write, other, first=["read"], then=["write"])
    assert kept("never", failed, tools=["write"]) and not kept("never", write, tools=["write"])
