"""The scheduler on a virtual clock: near the bound that no schedule passes, nobody starves, and a pool too small degrades gently."""

from __future__ import annotations

import dataclasses

import pytest

from nanorchestra.engine.simulate import H200, Costs, Episode, lower_bound, simulate, workloads
from nanorchestra.model.qwen3 import PRESETS

COSTS = Costs.of(PRESETS["qwen3-8b"])


def test_the_costs_are_those_of_the_model():
    assert (
        COSTS.weight_bytes == pytest.approx(15.14e9, rel=1e-3)
        and COSTS.kv_bytes == 147_456
        and COSTS.pair_flops == 589_824
    )


@pytest.mark.parametrize(
    "name, most", [("chat", 1.35), ("groups of 16", 1.11), ("tool loops", 1.15)]
)
def test_a_tenth_of_each_workload_is_near_its_bound(name, most):
    """A tenth, for time; the smaller a workload, the more of it is its tail, when few rows are left to share a step."""
    episodes = workloads(scale=0.1)[name]
    result = simulate(episodes, COSTS)
    assert 1 <= result.makespan / result.bound < most
    assert result.gap <= 2, "a running request waited for its next token"
    assert result.sampled_tokens == sum(e.sampled for e in episodes)
    once = {e.group: e.prompt for e in episodes}
    given = sum(given + 1 for e in episodes for _, _, given in e.turns[:-1])
    assert result.prefill_tokens == sum(once.values()) + given, "something was computed twice"


def test_a_pool_for_half_of_the_sessions_does_not_thrash():
    """If whoever waited longest for its tool gave way, each session would lose its KV right before it needs it: 17 times the tokens."""
    episodes = [Episode(i, 200, [(5, 0.05, 60)] * 20) for i in range(24)]
    device = dataclasses.replace(H200, pool_bytes=12 * (200 + 20 * 65) * COSTS.kv_bytes)
    result = simulate(episodes, COSTS, device, page_size=16)
    assert result.prefill_tokens < 3 * sum(200 + 19 * 61 for _ in episodes)


def test_the_bound_is_what_one_request_takes_alone():
    alone = [Episode(0, 1, [(100, 0.0, 0)])]
    result = simulate(alone, COSTS)
    assert (
        result.makespan
        == pytest.approx(result.bound, rel=1e-3)
        == pytest.approx(lower_bound(alone, COSTS, H200))
    )
