"""The fixed routers: billed like a policy, bounded by perfect play."""

from __future__ import annotations

import random
from statistics import fmean

import pytest

from worlds.miniature.offers import fits
from worlds.miniature.world import World, environment
from worlds.routers import evaluate_routers, orders, play


@pytest.mark.parametrize("kind", ["arithmetic", "lookup", "chain"])
def test_the_fitting_tool_gives_the_right_answer(kind, sandbox):
    tasks = [task for split in ("train", "held_out") for task in World(0).tasks(split, 300)]
    outcomes = []
    for task in tasks:
        fitting = [offer for offer in task.data["tools"] if fits(offer, task)]
        if task.data["kind"] == kind and fitting:
            outcomes.append(play(fitting, environment(task, 0, sandbox)).outcome)
    # A search may find another passage.
    assert len(outcomes) > 10 and fmean(outcomes) > (0.93 if kind == "lookup" else 0.99)


def test_a_play_is_billed_for_every_call(sandbox):
    for task in World(2).tasks("train", 40):
        env, spent = environment(task, 0, sandbox), []

        def recorded(call, spent=spent):
            return lambda arguments: spent.append(call(arguments)) or spent[-1]

        for tool in env.by_name.values():
            tool.call = recorded(tool.call)
        attempt = play(task.data["tools"], env)
        assert attempt.cost_usd == pytest.approx(sum(result.cost_usd for result in spent))
        assert attempt.latency_s == pytest.approx(sum(result.latency_s for result in spent))
        assert sum(attempt.calls.values()) == len(spent) > 0


def test_perfect_play_is_the_ceiling_and_the_rule_obeys(sandbox):
    tasks = World(1).tasks("held_out", 300)
    summary = evaluate_routers(tasks, 0, sandbox)
    assert max(summary, key=lambda name: summary[name]["reward"]) == "perfect"
    assert summary["rule"]["avoided_rate"] == 0.0 < summary["strongest"]["avoided_rate"]
    costs = [summary[name]["cost_usd"] for name in ("cheapest", "cascade", "strongest")]
    assert costs == sorted(costs)


def test_the_best_plan_never_begins_with_what_is_forbidden():
    for task in World(0).tasks("train", 200):
        if task.preference.avoided and len(task.data["tools"]) > 2:
            assert (
                orders(task, random.Random(0))["perfect"][0]["name"] not in task.preference.avoided
            )
