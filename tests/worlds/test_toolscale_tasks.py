"""Tasks of the built-in author, what throws tasks away, and how attempts are scored."""

from __future__ import annotations

import copy
import json
import random

import pytest

from worlds.toolscale.act import UnfitError
from worlds.toolscale.domains import build
from worlds.toolscale.expert import altered
from worlds.toolscale.pipeline import make_batch
from worlds.toolscale.plan import LEVELS, Planner
from worlds.toolscale.program import ToolError
from worlds.toolscale.score import Scorer, attempt, communicated
from worlds.toolscale.tasks import to_task
from worlds.toolscale.verify import mentions, signature, task_text, verify
from worlds.toolscale.wishes import act_out


@pytest.fixture(scope="module")
def batch():
    return build("railway", 1)[0], make_batch(1, (1, 2, 3, 4, 5), "railway", 0)


def find(batch, fits):
    world, part = batch
    return world, copy.deepcopy(next(task for task in part["tasks"] if fits(task)))


def actions(task):
    return task["evaluation_criteria"]["actions"]


def words(task):
    return task["user_scenario"]["instructions"]


def test_every_task_is_solved_by_its_golden_calls_and_not_without_them(batch):
    world, part = batch
    assert len(part["tasks"]) == 50
    for task in part["tasks"]:
        scorer = Scorer(world, task)
        calls, said = scorer.golden, scorer.told
        writes = [calls[place] for place in scorer.effects]
        wrong = altered(world, writes, random.Random(0)) if writes else []
        scores = [scorer.score(attempt(*a)) for a in ((calls, said), ([], []), (wrong, said[1:]))]
        assert scores == [1, 0, 0]
        assert scorer.score(attempt(writes, said)) == 1, "reads are free"
        assert 1 <= len(calls) <= 12 and verify(world, task) is None
        assert {name for name, _ in calls} <= set(task["tools"])
        for skipped in range(len(writes)):
            assert scorer.score(attempt(writes[:skipped] + writes[skipped + 1 :], said)) == 0
        if said:
            assert scorer.score(attempt(calls)) == 0
        text = task_text(task)
        assert not any(mark in text for mark in ("{", "}", "<", "None", "  ", "..", " .", "_"))
        assert words(task)["reason_for_call"].startswith(("You ", "Today "))


def test_the_level_is_a_dial():
    world, w = build("weather", 2)
    calls, tools = {}, {}
    for level in LEVELS:
        made = [Planner(world, w, random.Random(n)).generate(level, n) for n in range(25)]
        # A draft is JSON, and acting it out is a function of it.
        draft, act = made[0]
        assert act_out(world, w, json.loads(json.dumps(draft))).calls == act.calls
        calls[level] = sum(len(act.calls) for _, act in made)
        tools[level] = sum(len(to_task(draft, act, "t")["tools"]) for draft, act in made)
    assert all(calls[level] < calls[level + 1] for level in (1, 2, 3, 4))
    assert tools[1] < tools[3] < tools[5]


# --- verification: each reason, by a task that was sound until one thing was changed


def test_each_reason_to_throw_a_task_away(batch):
    world, task = find(batch, lambda t: True)
    actions(task)[-1]["arguments"] |= {next(iter(actions(task)[-1]["arguments"])): "unknown"}
    assert verify(world, task) == "a golden call errs"

    _, task = find(batch, lambda t: True)
    task["evaluation_criteria"] |= {"actions": [], "reward_basis": ["DB"]}
    assert verify(world, task) == "solved by doing nothing"

    _, task = find(batch, lambda t: " number is " in words(t)["known_info"])
    words(task)["known_info"] = "You are a customer."
    assert verify(world, task) == "an argument is not determined by the text"

    people = next(iter(world.tables.values()))
    _, task = find(batch, lambda t: "first_name" in actions(t)[0]["arguments"] and actions(t)[1:])
    given = [value for action in actions(task)[1:] for value in action["arguments"].values()]
    person = next(value for value in given if isinstance(value, str) and value in people)
    words(task)["known_info"] += f" Your number is {person}."
    assert verify(world, task) == "an identifier that a lookup reveals is in the text"

    _, task = find(batch, lambda t: t["evaluation_criteria"]["communicate_info"])
    told = task["evaluation_criteria"]["communicate_info"][0]
    words(task)["task_instructions"] += f" You think of {told}."
    assert verify(world, task) == "the answer is in the text"

    _, task = find(batch, lambda t: t["evaluation_criteria"]["communicate_info"])
    task["evaluation_criteria"]["reward_basis"] = ["COMMUNICATE"]  # what is called does not matter
    assert verify(world, task) == "solved with an argument altered"


def test_what_the_user_says_fits_one_record_alone():
    """With a twin of every record, a draft that refers to one by its properties is unfit."""
    world, w = build("railway", 1)
    for role, ways in (("item", {"title"}), ("deal", {"title", "quantity", "when"})):
        table, key, met = getattr(w, role).table, getattr(w, role).key, set()
        rows = world.tables[table]
        twins = {f"{name}9": row | {key: f"{name}9"} for name, row in rows.items()}
        double = copy.copy(world)
        double.tables = world.tables | {table: rows | twins}
        for n in range(60):
            draft, _ = Planner(world, w, random.Random(n)).generate(5, n)
            used = {wish[role]["by"] for wish in draft["wishes"] if role in wish} & ways
            met |= used
            if used:
                with pytest.raises((UnfitError, ToolError)):
                    act_out(double, w, draft)
        assert met == ways


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
    world, task = find(batch, lambda t: t["evaluation_criteria"]["communicate_info"])
    scorer = Scorer(world, task)
    calls, said = scorer.golden, scorer.told
    harmless = [("calculate", {"expression": "1 + 1"}), ("nothing", {}), (calls[-1][0], {})]
    assert scorer.score(attempt([*harmless, *calls, *harmless], ["hello", *said])) == 1
    email = next(name for name in world.by_name if "email" in name)
    person, *_ = world.by_name[email]["function"]["parameters"]["properties"]
    active = [row for row in next(iter(world.tables.values())).values() if "active" in row.values()]
    extra = (email, {person: active[0][person], "email": "x@y.example"})
    assert scorer.score(attempt([*calls, extra], said)) == 0
    scorer.basis = ["ACTION", "COMMUNICATE"]
    assert scorer.score(attempt([*calls, extra], said)) == 1


def test_a_dump_of_numbers_or_of_all_values_tells_nothing(batch):
    world, task = find(batch, lambda t: True)
    number = task["evaluation_criteria"] | {"communicate_info": ["37"], "actions": []}
    tier = next(field for field, texts in world.columns.items() if 3 <= len(texts) <= 4)
    word = task["evaluation_criteria"] | {"communicate_info": [min(world.columns[tier])]}

    def told(criteria, *messages):
        scorer = Scorer(world, task | {"evaluation_criteria": criteria, "rules": []})
        scorer.basis = ["COMMUNICATE"]
        return scorer.score(attempt([], messages)) == 1

    assert told(number, "You have 37 points, 5 more than in 2024, and pay $12.50.")
    assert told(number, *(f"Of these {n} is one." for n in range(5)), "It is 37.")
    assert not told(number, " ".join(map(str, range(100))))
    assert not told(number, *(" ".join(map(str, range(n, n + 5))) for n in range(0, 100, 5)))
    assert told(word, f"It is {min(world.columns[tier])}.")
    assert not told(word, " ".join(world.columns[tier]))


def test_what_is_communicated_and_mentioned():
    said = (
        "It costs 1,000 dollars, or 12.50 each, 5% less on 2026-03-15 at 15:30. You are GOLD now."
    )
    for info in ("1000", "$1,000.00", "12.5", "5", "Gold", "2026-03-15", "each"):
        assert communicated(info, ["hello", said])
    for info in ("100", "10000", "2", "15", "3", "golden", "go", "26", "2026-03-1"):
        assert not communicated(info, ["hello", said])
    assert mentions(said, 12.5) and mentions("a side effect, please", "side_effect")
    assert not mentions("train T155", 155) and not mentions("T1234", "T123")


def test_rules_that_no_tool_enforces_are_checked_on_the_trace(batch):
    world, task = find(batch, lambda t: True)

    def kept(check, *trace, **args):
        rule = {"text": "", "check": check, "args": args}
        scorer = Scorer(world, task | {"rules": [rule]})
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
    assert kept("unsaid", asked, infos=["6"]) and not kept("unsaid", asked, infos=["6", "5"])
    assert kept("never", failed, tools=["write"]) and not kept("never", write, tools=["write"])
