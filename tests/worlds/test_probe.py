"""Probes: the policy's tasks, changed in one thing."""

from __future__ import annotations

from dataclasses import replace

import pytest
from miniature_tasks import environment, tasks_of

from benchmarks.probe import permuted, with_ban, with_ratio
from worlds.miniature.offers import title
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
            assert title(banned) in other.preference.text
        banned = with_ban(task)
        best = informed_order(replace(task, preference=replace(task.preference, tools={})))[0]
        assert banned.preference.avoided == (best["name"],)
        assert environment(banned, 0, sandbox).messages[0]["content"].count(title(best)) == 1
    cases = (t for t in tasks_of("held_out", 60) if t.kind == "knowledge")
    case = next(t for t in cases if sum(o["what"] in SKILLS for o in t.data["tools"]) > 2)
    for ratio in (1 / 16, 1.1, 16):
        tools = with_ratio(case, ratio).data["tools"]
        low, high, *others = sorted(offer["price"] for offer in tools)
        assert high / low == pytest.approx(max(ratio, 1 / ratio), rel=0.1)
        assert others and set(others) == {99} and all(o["what"] in SKILLS for o in tools)
        assert with_ratio(case, ratio).bounds.cost_usd == with_ratio(case, 2).bounds.cost_usd
