"""The reward: the paper's table by hand, properties of any group, defects of the published code."""

from __future__ import annotations

import math
import random
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanorchestra.records import Preference
from reward import PRICES, Bounds, group_rewards, preference_score, reward_parts, task_reward

BOUNDS = Bounds(cost_usd=(0.0, 0.10), latency_s=(0.0, 20.0))


def attempt(outcome=1, cost=0.0, latency=0.0, **calls):
    figures = {"outcome": outcome, "cost_usd": cost, "latency_s": latency}
    return SimpleNamespace(status="answered", calls=calls, **figures)


def changed(member, **fields):
    return SimpleNamespace(**{**vars(member), **fields})


def draw_group(rng, size=8):
    def member():
        calls = {"search": rng.randint(0, 3), "expert": rng.randint(0, 3)}
        return attempt(rng.randint(0, 1), rng.uniform(0, 0.1), rng.uniform(0, 50), **calls)

    return [member() for _ in range(size)]


def draw_preference(rng):
    weights = [rng.uniform(0.1, 3) for _ in range(3)]
    tools = {"search": rng.uniform(-1, 1), "expert": rng.uniform(-1, 1)}
    return Preference("", *weights, tools)


def test_a_group_by_hand():
    group = [
        attempt(1, 0.01, 10, expert=2),
        attempt(1, 0.03, 20),
        attempt(0, 0.05, 5, expert=1),
        attempt(1, 0.05, 30, expert=1, not_named=9),
    ]
    preference = Preference("", 1.0, 0.5, 0.2, {"expert": 0.4, "unused": 1.0})
    # Mn: outcome 1 1 0 1; -cost 1 .5 0 0; -latency .8 .4 1 0; expert 1 0 .5 .5; unused 0 0 0 0
    expected = [1 + 0.5 + 0.16 + 0.4, 1 + 0.25 + 0.08, 0.0, 1 + 0.2]
    assert group_rewards(group, preference) == pytest.approx(expected)
    partial = [changed(group[0], outcome=0.5), *group[1:]]  # its place among the outcomes falls too
    assert group_rewards(partial, preference)[0] == pytest.approx(0.5 * (0.5 + 0.5 + 0.16 + 0.4))
    assert group_rewards([], preference) == [] and group_rewards(group[:1], preference) == [0.0]


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32))
def test_properties_of_any_group(seed):
    rng = random.Random(seed)
    group, preference = draw_group(rng), draw_preference(rng)
    rewards = group_rewards(group, preference)
    # Wrong is 0, and right is never below it.
    most = preference.outcome + preference.cost + preference.latency
    most += sum(map(abs, preference.tools.values()))
    for member, value in zip(group, rewards, strict=True):
        assert 0 <= value <= most + 1e-9 and (member.outcome == 1 or value == 0)
    # Rewards follow their members.
    order = rng.sample(range(len(group)), len(group))
    reordered = group_rewards([group[i] for i in order], preference)
    assert reordered == pytest.approx([rewards[i] for i in order])
    # Cents or dollars, and a fee on every attempt: the same rewards.
    other = [changed(m, cost_usd=100 * m.cost_usd + 7) for m in group]
    assert group_rewards(other, preference) == pytest.approx(rewards, abs=1e-9)
    # Of two right attempts that differ in cost or latency only, the lower one earns more.
    for field in ("cost_usd", "latency_s"):
        twins = [changed(group[0], outcome=1, **{field: value}) for value in (0.01, 0.05)]
        *_, low, high = group_rewards([*group, *twins], preference)
        assert low > high
    # An infrastructure failure moves no extremum, whatever its numbers.
    broken = changed(attempt(0, math.nan, 1e9, expert=50), status="infrastructure")
    assert group_rewards([*group, broken], preference) == [*rewards, 0.0]


def test_defects_of_the_published_code():
    """Each of these groups gets other numbers there."""
    cost, latency = Preference("", cost=1.0), Preference("", latency=0.1)
    expert = Preference("", tools={"expert": 1.0})
    for defect, preference, group, expected in (
        ("sign of cost", cost, [attempt(cost=c) for c in (0.01, 0.04, 0.05)], [1.0, 0.25, 0.0]),
        ("sign of latency", latency, [attempt(latency=s) for s in (1, 2, 5)], [0.1, 0.075, 0.0]),
        ("range in the numerator", cost, [attempt(cost=1.0), attempt(cost=1.001)], [1.0, 0.0]),
        ("zero calls skipped", expert, [attempt(expert=n) for n in (0, 1, 2)], [0.0, 0.5, 1.0]),
        ("rounding counts", cost, [attempt(cost=0.1 + 0.2), attempt(cost=0.3)], [0.0, 0.0]),
    ):
        assert group_rewards(group, preference) == pytest.approx(expected), defect


def test_an_avoided_tool_costs_its_weight_but_is_never_worse_than_failing():
    preference = Preference("", 1.0, tools={"expert": -2.0})
    group = [attempt(), attempt(expert=3), attempt(0)]
    obeyed, disobeyed, wrong = group_rewards(group, preference)
    assert obeyed - disobeyed == pytest.approx(2.0) and disobeyed > wrong == 0.0
    obeyed, disobeyed = group_rewards(group[:2], preference)  # it shows when all are right too
    assert obeyed - disobeyed == pytest.approx(2.0)


def test_task_rewards_by_hand():
    preference = Preference("", 1.0, 0.5, 0.5, {"expert": -0.8})
    for member, expected in (
        (attempt(), 1.0),
        (attempt(1, 0.05, 5.0), (1 + 0.25 + 0.375) / 2),
        (attempt(1, 0.05, 5.0, expert=3), (1 + 0.25 + 0.375 - 0.8) / 2),
        (attempt(0), 0.0),
        (attempt(0.4, 0.05, 5.0), 0.4 * (1 + 0.25 + 0.375) / 2),  # partial credit
        (attempt(1, 9.0, 99.0), 0.5),
    ):
        assert task_reward(member, preference, BOUNDS) == pytest.approx(expected)
        parts = reward_parts(member, preference, BOUNDS)
        assert list(parts) == ["outcome", "cost", "latency", "tools"]
        assert sum(parts.values()) == pytest.approx(expected)
    favour = Preference("", 1.0, tools={"search": 1.0})
    rewards = [task_reward(attempt(search=n), favour, BOUNDS) for n in (0, 1, 50)]
    assert rewards == [0.5, 1.0, 1.0]  # repeated calls earn nothing more
    forbid = Preference("", 1.0, tools={"expert": -5.0})
    assert task_reward(attempt(expert=1), forbid, BOUNDS) == 0.0
    # Everything on offer costs the same: no attempt could save anything.
    flat, both = Bounds((0.02, 0.02), (0.0, 0.0)), Preference("", 1.0, 1.0, 1.0)
    assert task_reward(attempt(1, 0.02), both, flat) == 1.0
    assert task_reward(attempt(1, 0.03), both, flat) == pytest.approx(2 / 3)
    # Prices are for a million tokens; the published evaluation divides one by ten million.
    assert PRICES["gpt-5"].cost(1_000_000, 0) == 1.25


def test_share_of_the_preference_honoured():
    avoid = Preference("", cost=1.0, tools={"expert": -3.0})
    favour = Preference("", tools={"search": 1.0, "expert": 0.0})
    for member, preference, expected in (
        (attempt(0, 0.1, 20, expert=1), Preference(), 1.0),
        (attempt(0, 0.025, 20), Preference("", cost=1.0), 0.75),
        (attempt(1, 0.0, 20.0), Preference("", 3.0, 1.0, 1.0), 0.5),
        (attempt(1, 0.0, 0, expert=2), avoid, 0.25),
        (attempt(1, 0.1, 0, expert=0), avoid, 0.75),
        (attempt(1, 0.1, 0, search=1), favour, 1.0),
        (attempt(1, 0.1), favour, 0.0),
    ):
        assert preference_score(member, preference, BOUNDS) == pytest.approx(expected)
