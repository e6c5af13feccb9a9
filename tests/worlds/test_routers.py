"""The fixed routers: billed like a policy, bounded by perfect play."""

from __future__ import annotations

from statistics import fmean

import pytest

from nanorchestra.config import TaskSection
from worlds.miniature.offers import fits
from worlds.miniature.world import World, environment
from worlds.mixture import Worlds
from worlds.routers import play


def test_the_fitting_tool_gives_the_right_answer(sandbox):
    outcomes = {"arithmetic": [], "lookup": [], "chain": []}
    for task in World(0).tasks("train", 300) + World(0).tasks("held_out", 300):
        if fitting := [offer for offer in task.data["tools"] if fits(offer, task)]:
            played = play(fitting, environment(task, 0, sandbox))
            outcomes[task.data["kind"]].append(played.outcome)
    assert fmean(outcomes["arithmetic"]) == fmean(outcomes["chain"]) == 1.0
    assert fmean(outcomes["lookup"]) > 0.9  # a search may find another passage


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


def test_what_each_router_knows_shows_in_its_reward(sandbox):
    worlds = Worlds(TaskSection("miniature"), 1, sandbox)
    summary = worlds.routers(worlds.held_out(500))
    reward = {name: scores["reward"] for name, scores in summary.items()}
    assert reward["perfect"] > reward["informed"] > reward["vote"] > reward["until_sure"]
    assert reward["until_sure"] > reward["teacher"]
    assert reward["sense"] > reward["teacher"] > reward["random"]
    assert reward["informed"] > reward["no_wish"] > reward["no_prices"]
    obedient = ("teacher", "sense", "until_sure", "vote", "no_wish", "no_prices", "informed")
    assert not any(summary[name]["avoided_rate"] for name in (*obedient, "perfect"))
    assert summary["strongest"]["avoided_rate"] > 0.0
    costs = [summary[name]["cost_usd"] for name in ("cheapest", "cascade", "strongest")]
    assert costs == sorted(costs)
