"""The reward: the paper's table by hand, properties of any group, defects of the published code."""

from __future__ import annotations

import random
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanorchestra.records import Bounds, Preference
from reward import (
    PRICES,
    features,
    group_rewards,
    normalise,
    reward_parts,
    task_rewards,
    weights,
)

BOUNDS = Bounds(cost_usd=(0.0, 0.10), latency_s=(0.0, 20.0))


def attempt(outcome=1, cost=0.0, latency=0.0, **calls):
    return SimpleNamespace(outcome=outcome, cost_usd=cost, latency_s=latency, calls=calls)


def changed(member, **fields):
    return SimpleNamespace(**{**vars(member), **fields})


def draw_group(rng, size=8):
    def member():
        calls = {"search": rng.randint(0, 3), "expert": rng.randint(0, 3)}
        outcome = rng.choice((0, 0, 1, 1, rng.random()))
        return attempt(outcome, rng.uniform(0, 0.1), rng.uniform(0, 50), **calls)

    return [member() for _ in range(size)]


def draw_preference(rng):
    preferred = [rng.uniform(0.1, 3) for _ in range(3)]
    tools = {"search": rng.uniform(-1, 1), "expert": rng.uniform(-1, 1)}
    return Preference("", *preferred, tools)


def near(expected, **tolerance):
    return pytest.approx(np.array(expected), **tolerance)


def test_a_group_by_hand():
    group = [
        attempt(1, 0.01, 10, expert=2),
        attempt(1, 0.03, 20),
        attempt(0, 0.05, 5, expert=1),
        attempt(1, 0.05, 30, expert=1, not_named=9),
    ]
    preference = Preference("", 1.0, 0.5, 0.2, {"expert": 0.4, "unused": 1.0})
    table = features(group, preference)
    assert table.tolist() == [
        [1, -0.01, -10, 2, 0],
        [1, -0.03, -20, 0, 0],
        [0, -0.05, -5, 1, 0],
        [1, -0.05, -30, 1, 0],
    ]
    assert normalise(table, table.min(axis=0), table.max(axis=0)) == near([
        [1, 1.0, 0.8, 1.0, 0],
        [1, 0.5, 0.4, 0.0, 0],
        [0, 0.0, 1.0, 0.5, 0],
        [1, 0.0, 0.0, 0.5, 0],
    ])  # fmt: skip
    assert weights(preference).tolist() == [1.0, 0.5, 0.2, 0.4, 1.0]
    expected = [1 + 0.5 + 0.16 + 0.4, 1 + 0.25 + 0.08, 0.0, 1 + 0.2]
    assert group_rewards(group, preference) == near(expected)
    partial = [changed(group[0], outcome=0.5), *group[1:]]  # its place among the outcomes falls too
    assert group_rewards(partial, preference)[0] == pytest.approx(0.5 * (0.5 + 0.5 + 0.16 + 0.4))
    assert group_rewards([], preference).shape == (0,)
    assert group_rewards(group[:1], preference).tolist() == [0.0]


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32))
def test_properties_of_any_group(seed):
    rng = random.Random(seed)
    group, preference = draw_group(rng), draw_preference(rng)
    order = rng.sample(range(len(group)), len(group))
    outcomes = np.array([member.outcome for member in group])
    reordered = [group[i] for i in order]
    rewards = group_rewards(group, preference)
    absolute = task_rewards(group, preference, BOUNDS)
    # Wrong is 0, and right is never below it.
    most = np.abs(weights(preference)).sum()
    for values, limit in ((rewards, most + 1e-9), (absolute, 1.0)):
        assert (values >= 0).all() and (values <= limit).all()
        assert (values[outcomes == 0] == 0).all()
    # Rewards follow their members; those in absolute form depend on no other member.
    assert group_rewards(reordered, preference) == near(rewards[order])
    alone = [task_rewards([member], preference, BOUNDS)[0] for member in reordered]
    assert alone == near(absolute[order])
    parts = reward_parts(group, preference, BOUNDS)
    assert np.clip(sum(parts.values()), 0, 1) == near(absolute)
    # Cents or dollars, and a fee on every attempt: the same rewards.
    other = [changed(m, cost_usd=100 * m.cost_usd + 7) for m in group]
    assert group_rewards(other, preference) == near(rewards, abs=1e-9)
    # Of two right attempts that differ in cost or latency only, the lower one earns more.
    for field in ("cost_usd", "latency_s"):
        twins = [changed(group[0], outcome=1, **{field: value}) for value in (0.01, 0.05)]
        *_, low, high = group_rewards([*group, *twins], preference)
        assert low > high
        low, high = task_rewards(twins, Preference("", 1.0, 1.0, 1.0), BOUNDS)
        assert low > high


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
        assert group_rewards(group, preference) == near(expected), defect


def test_task_rewards_by_hand():
    preference = Preference("", 1.0, 0.5, 0.5, {"expert": -0.8})
    table = [
        (attempt(), 1.0),
        (attempt(1, 0.05, 5.0), (1 + 0.25 + 0.375) / 2),
        (attempt(1, 0.05, 5.0, expert=3), (1 + 0.25 + 0.375 - 0.8) / 2),
        (attempt(0), 0.0),
        (attempt(0.4, 0.05, 5.0), 0.4 * (1 + 0.25 + 0.375) / 2),  # partial credit
        (attempt(1, 9.0, 99.0), 0.5),
    ]
    members = [member for member, _ in table]
    expected = [value for _, value in table]
    assert task_rewards(members, preference, BOUNDS) == near(expected)
    favour = Preference("", 1.0, tools={"search": 1.0})
    rewards = task_rewards([attempt(search=n) for n in (0, 1, 50)], favour, BOUNDS)
    assert rewards.tolist() == [0.5, 1.0, 1.0]  # repeated calls earn nothing more
    forbid = Preference("", 1.0, tools={"expert": -5.0})
    assert task_rewards([attempt(expert=1)], forbid, BOUNDS).tolist() == [0.0]
    # No weight above 0: there is nothing to earn.
    nothing = Preference("", 0.0, tools={"expert": -1.0})
    assert task_rewards([attempt(), attempt(expert=1)], nothing, BOUNDS).tolist() == [0.0, 0.0]
    # Prices are for a million tokens; the published evaluation divides one by ten million.
    assert PRICES["gpt-5"].cost(1_000_000, 0) == 1.25
