"""Probes: the policy's tasks, changed in one thing."""

from __future__ import annotations

from dataclasses import replace

import pytest
from miniature_tasks import environment, tasks_of

from benchmarks.probe import (
    nearest_name,
    over_groups,
    permuted,
    value_of_prices,
    with_ban,
    with_ratio,
)
from nanorchestra.records import ToolCall, Trajectory, Turn
from worlds.metrics import interval
from worlds.miniature.tables import SKILLS
from worlds.routers import informed_order


def test_probes_change_one_thing(sandbox):
    for task in tasks_of("held_out", 60):
        other = permuted(task)
        assert other.data["tools"] != task.data["tools"]
        assert sorted(other.preference.avoided) != sorted(task.preference.avoided) or not (
            task.preference.avoided
        )
        for name in other.preference.avoided:
            (banned,) = (o for o in other.data["tools"] if o["name"] == name)
            (before,) = task.preference.avoided
            said = task.preference.text
            assert other.preference.text == said.replace(before, banned["name"])
        banned = with_ban(task)
        best = informed_order(replace(task, preference=replace(task.preference, tools={})))[0]
        assert banned.preference.avoided == (best["name"],)
        assert best["what"] in environment(banned, 0, sandbox).messages[0]["content"].casefold()
    cases = (t for t in tasks_of("held_out", 60) if t.kind == "knowledge")
    case = next(t for t in cases if sum(o["what"] in SKILLS for o in t.data["tools"]) > 2)
    for ratio in (1 / 16, 1.1, 16):
        tools = with_ratio(case, ratio).data["tools"]
        low, high, *others = sorted(offer["price"] for offer in tools)
        assert high / low == pytest.approx(max(ratio, 1 / ratio), rel=0.1)
        assert others and set(others) == {99} and all(o["what"] in SKILLS for o in tools)
        assert with_ratio(case, ratio).bounds.cost_usd == with_ratio(case, 2).bounds.cost_usd


def test_the_rule_captures_the_whole_value_of_prices_and_one_without_prices_nothing(sandbox):
    def first_calls(tasks, choose):
        calls = []
        for task in tasks:
            call = ToolCall(choose(task), {})
            calls.append(Trajectory(task.id, 0, turns=[Turn(0, 0, "stop", [call])]))
        return calls

    def at_equal_prices(task):
        equal = [offer | {"price": 40, "latency": 30} for offer in task.data["tools"]]
        return informed_order(replace(task, data=task.data | {"tools": equal}))[0]["name"]

    tasks = tasks_of("held_out", 120)
    rule = value_of_prices(tasks, first_calls(tasks, lambda t: informed_order(t)[0]["name"]))
    assert rule["value of prices captured, all"] == (1, 1, 1)
    assert rule["regret of the first choice, cheap"] == (0, 0, 0)
    assert rule["value of prices, cheap"].low > 0 == rule["value of prices, right"].high
    equal = value_of_prices(tasks, first_calls(tasks, at_equal_prices))
    assert equal["value of prices captured, all"].mean < 0.35
    nothing = value_of_prices(tasks, first_calls(tasks, lambda task: "none"))
    assert nothing["value of prices captured, all"].high < 0


def test_an_interval_over_phrases_is_as_wide_as_few_phrases_make_it():
    values, phrases = [1.0] * 60 + [0.0] * 20, [f"{i // 10}" for i in range(80)]
    over_tasks = over_groups(values, list(map(str, range(80))))
    over_phrases = over_groups(values, phrases)  # eight, each read alike in ten tasks
    assert over_tasks.mean == over_phrases.mean == 0.75
    assert over_tasks == interval(values)
    assert over_phrases.high - over_phrases.low > 2 * (over_tasks.high - over_tasks.low)
    assert nearest_name("clauded-x", ["gemini", "claude-x", "x"]) == "claude-x"
