"""The reward: the paper's table by hand, properties that must hold for any group, and the published code's defects, one by one."""

from __future__ import annotations

import dataclasses
import math
import random
from types import SimpleNamespace

import pytest

import reward
from nanorchestra.records import Preference
from reward import Bounds, Price, group_rewards, preference_score, task_reward

BOUNDS = Bounds(cost_usd=(0.0, 0.10), latency_s=(0.0, 20.0))


def attempt(outcome=1, cost=0.0, latency=0.0, **calls):
    return SimpleNamespace(outcome=outcome, cost_usd=cost, latency_s=latency, calls=calls)


def random_group(rng, size=8):
    return [
        attempt(
            rng.randint(0, 1),
            rng.uniform(0, 0.1),
            rng.uniform(0, 50),
            search=rng.randint(0, 3),
            expert=rng.randint(0, 3),
        )
        for _ in range(size)
    ]


def random_preference(rng, low=0.0):
    return Preference(
        outcome=rng.uniform(0.1, 3),
        cost=rng.uniform(0.1, 1),
        latency=rng.uniform(0.1, 1),
        tools={"search": rng.uniform(low, 1), "expert": rng.uniform(low, 1)},
    )


SEEDS = range(50)


# ---- the paper's form ----


def test_a_group_by_hand():
    group = [
        attempt(1, 0.01, 10, expert=2),
        attempt(1, 0.03, 20),
        attempt(0, 0.05, 5, expert=1),
        attempt(1, 0.05, 30, expert=1),
    ]
    preference = Preference(
        outcome=1.0, cost=0.5, latency=0.2, tools={"expert": 0.4, "unused": 1.0}
    )
    # Mn: outcome 1 1 0 1; -cost 1 .5 0 0; -latency .8 .4 1 0; expert 1 0 .5 .5; unused 0 0 0 0
    assert group_rewards(group, preference) == pytest.approx(
        [1 + 0.5 + 0.16 + 0.4, 1 + 0.25 + 0.08, 0.0, 1 + 0.2]
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_wrong_is_zero_and_right_is_bounded(seed):
    rng = random.Random(seed)
    group, preference = random_group(rng), random_preference(rng, low=-1.0)
    best = (
        preference.outcome
        + preference.cost
        + preference.latency
        + sum(abs(w) for w in preference.tools.values())
    )
    for member, value in zip(group, group_rewards(group, preference)):
        assert 0 <= value <= best + 1e-9 and (member.outcome == 1 or value == 0)


@pytest.mark.parametrize("seed", SEEDS)
def test_of_two_right_attempts_that_differ_in_cost_the_cheaper_scores_higher(seed):
    rng = random.Random(seed)
    for field in ("cost_usd", "latency_s"):
        group, preference = random_group(rng), random_preference(rng)
        group[0].outcome = 1
        less, more = sorted([rng.uniform(0, 0.1), rng.uniform(0, 0.1)])
        group += [
            SimpleNamespace(**{**vars(group[0]), field: less}),
            SimpleNamespace(**{**vars(group[0]), field: more}),
        ]
        *_, cheap, dear = group_rewards(group, preference)
        assert cheap > dear


@pytest.mark.parametrize("seed", SEEDS)
def test_units_of_cost_and_latency_do_not_matter(seed):
    """Cents or dollars, and a fee on every attempt: the same rewards."""
    rng = random.Random(seed)
    group, preference = random_group(rng), random_preference(rng, low=-1.0)
    other = [
        SimpleNamespace(
            **{**vars(m), "cost_usd": 100 * m.cost_usd + 7, "latency_s": m.latency_s / 60 + 1}
        )
        for m in group
    ]
    assert group_rewards(other, preference) == pytest.approx(
        group_rewards(group, preference), abs=1e-9
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_rewards_follow_their_members_when_these_are_reordered(seed):
    rng = random.Random(seed)
    group, preference = random_group(rng), random_preference(rng, low=-1.0)
    order = rng.sample(range(len(group)), len(group))
    rewards = group_rewards(group, preference)
    assert group_rewards([group[i] for i in order], preference) == pytest.approx(
        [rewards[i] for i in order]
    )


def test_a_tool_that_is_not_named_weighs_nothing_and_one_not_used_counts_zero():
    preference = Preference(tools={"search": 1.0})
    assert (
        group_rewards([attempt(search=0), attempt(search=2)], preference)
        == group_rewards([attempt(), attempt(search=2, expert=9)], preference)
        == [0.0, 1.0]
    )


def test_equal_features_are_worth_nothing_even_when_rounding_makes_them_differ():
    """0.1 + 0.2 and 0.3 are the same bill; min-max would make that difference of 6e-17 a whole point."""
    preference = Preference(outcome=1.0, cost=1.0)
    assert group_rewards([attempt(cost=0.1 + 0.2), attempt(cost=0.3)], preference) == [0.0, 0.0]


def test_infrastructure_failures_do_not_move_the_extrema():
    preference = Preference(outcome=1.0, cost=1.0)
    group = [attempt(cost=0.01), attempt(cost=0.02), attempt(0, 0.0), attempt(0, 5.0)]
    without = group_rewards(group[:3], preference)
    assert group_rewards(group, preference, valid=[True, True, True, False]) == without + [0.0]
    broken = attempt(0, float("nan"))
    assert group_rewards(
        group[:3] + [broken], preference, valid=[True, True, True, False]
    ) == without + [0.0]
    with pytest.raises(ValueError):
        group_rewards(group, preference, valid=[True])


def test_using_an_avoided_tool_costs_its_weight_but_is_never_worse_than_failing():
    preference = Preference(outcome=1.0, tools={"expert": -2.0})
    assert preference.avoided == ("expert",)
    obedient, disobedient, wrong = group_rewards(
        [attempt(), attempt(expert=3), attempt(0)], preference
    )
    assert obedient - disobedient == pytest.approx(2.0) and disobedient > wrong == 0.0
    # once all are right, obedience is all that is left to learn, and it must still show
    obedient, disobedient = group_rewards([attempt(), attempt(expert=1)], preference)
    assert obedient - disobedient == pytest.approx(2.0)


def test_an_empty_group_and_a_group_of_one():
    assert group_rewards([], Preference()) == [] and group_rewards([attempt()], Preference()) == [
        0.0
    ]


# ---- the published code's defects: each gives the wrong number on the left of `!=` ----


def test_defect_sign_error_of_cost():
    """The published trainer pays 3.23, 3.24, 3.28, 3.33 for these costs: more for the dearer."""
    group = [attempt(cost=c) for c in (0.01, 0.02, 0.05, 0.10)] + [attempt(0, 0.05)]
    rewards = group_rewards(group, Preference(outcome=3.0, cost=0.1))
    assert rewards == pytest.approx([3.1, 3 + 0.1 * 8 / 9, 3 + 0.1 * 5 / 9, 3.0, 0.0])
    slow = group_rewards(
        [attempt(latency=1), attempt(latency=2), attempt(latency=5)], Preference(latency=0.1)
    )
    assert slow == pytest.approx([0.1, 0.075, 0.0])


def test_defect_no_explosion_when_costs_are_nearly_equal():
    """(C + Cmax) / (Cmax - Cmin) is 2,001 here."""
    assert group_rewards(
        [attempt(cost=1.000), attempt(cost=1.001)], Preference(cost=1.0)
    ) == pytest.approx([1.0, 0.0])


def test_defect_tool_minimum_without_zeros():
    """Counts 0, 1, 2: the published minimum is 1 (zeros are skipped), so one use would be worth 0 and none -1."""
    rewards = group_rewards(
        [attempt(), attempt(expert=1), attempt(expert=2)], Preference(tools={"expert": 1.0})
    )
    assert rewards == pytest.approx([0.0, 0.5, 1.0])


def test_defect_only_the_first_call_of_a_turn_counted():
    """Both attempts take one turn; the second calls twice in it. Counted per turn they would tie."""
    assert group_rewards(
        [attempt(expert=1), attempt(expert=2)], Preference(tools={"expert": 1.0})
    ) == [0.0, 1.0]


def test_defect_cost_of_the_final_answer_dropped():
    """Same path, but one asks gpt-5 for the answer: without that last call's bill both would cost the same and score the same."""
    shared = reward.PRICES["Qwen/Qwen3-32B"].cost(2000, 500)
    own, bought = (
        shared + reward.PRICES[name].cost(6000, 2000) for name in ("Qwen/Qwen3-32B", "gpt-5")
    )
    assert bought - own == pytest.approx(0.0275 - 0.0064)
    assert group_rewards(
        [attempt(cost=own), attempt(cost=bought)], Preference(cost=1.0)
    ) == pytest.approx([1.0, 0.0])


def test_defect_constant_added_by_visiting_features_twice():
    """Nothing is paid to an attempt that is worst in everything the user asked for."""
    worst = attempt(cost=0.1, latency=9)
    assert (
        group_rewards(
            [worst, attempt(cost=0.0, latency=0)], Preference(outcome=1.0, cost=1.0, latency=1.0)
        )[0]
        == 0.0
    )


# ---- the absolute form ----


def test_absolute_rewards_by_hand():
    preference = Preference(outcome=1.0, cost=0.5, latency=0.5, tools={"expert": -0.8})
    assert task_reward(1, 0.0, 0.0, {}, preference, BOUNDS) == 1.0
    assert task_reward(1, 0.05, 5.0, {}, preference, BOUNDS) == pytest.approx(
        (1 + 0.25 + 0.375) / 2
    )
    assert task_reward(1, 0.05, 5.0, {"expert": 3}, preference, BOUNDS) == pytest.approx(
        (1 + 0.25 + 0.375 - 0.8) / 2
    )
    assert task_reward(0, 0.0, 0.0, {}, preference, BOUNDS) == 0.0
    assert task_reward(1, 9.0, 99.0, {}, preference, BOUNDS) == pytest.approx(0.5)
    favour = Preference(outcome=1.0, tools={"search": 1.0})
    assert (
        task_reward(1, 0, 0, {}, favour, BOUNDS) == 0.5
        and task_reward(1, 0, 0, {"search": 1}, favour, BOUNDS) == 1.0
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_absolute_rewards_are_in_the_unit_interval_and_fall_with_cost(seed):
    rng = random.Random(seed)
    preference = random_preference(rng, low=-2.0)
    calls = {"search": rng.randint(0, 2), "expert": rng.randint(0, 2)}
    values = [
        task_reward(1, cost, 3.0, calls, preference, BOUNDS) for cost in (0.0, 0.02, 0.05, 0.1, 0.5)
    ]
    assert all(0 <= value <= 1 for value in values) and values == sorted(values, reverse=True)
    values = [
        task_reward(1, 0.03, seconds, calls, preference, BOUNDS)
        for seconds in (0.0, 1.0, 19.0, 30.0)
    ]
    assert all(0 <= value <= 1 for value in values) and values == sorted(values, reverse=True)
    scaled = Preference(
        outcome=preference.outcome * 5,
        cost=preference.cost * 5,
        latency=preference.latency * 5,
        tools={tool: 5 * weight for tool, weight in preference.tools.items()},
    )
    assert task_reward(1, 0.03, 3.0, calls, scaled, BOUNDS) == pytest.approx(
        task_reward(1, 0.03, 3.0, calls, preference, BOUNDS)
    )


def test_an_avoided_tool_that_weighs_more_than_all_else_leaves_nothing_but_not_less():
    preference = Preference(outcome=1.0, tools={"expert": -5.0})
    assert task_reward(1, 0, 0, {"expert": 1}, preference, BOUNDS) == 0.0
    assert task_reward(1, 0, 0, {"expert": 0}, preference, BOUNDS) == 1.0


def test_calling_a_favoured_tool_again_and_again_earns_nothing_more():
    favour = Preference(outcome=1.0, tools={"search": 1.0})
    assert task_reward(1, 0, 0, {"search": 50}, favour, BOUNDS) == task_reward(
        1, 0, 0, {"search": 1}, favour, BOUNDS
    )


def test_bounds_of_no_width():
    """Everything on offer costs the same: nobody could be cheaper, so cheapness is given in full."""
    flat = Bounds(cost_usd=(0.02, 0.02), latency_s=(0.0, 0.0))
    assert task_reward(1, 0.02, 0.0, {}, Preference(cost=1.0, latency=1.0), flat) == 1.0
    assert task_reward(1, 0.03, 0.0, {}, Preference(cost=1.0, latency=1.0), flat) == pytest.approx(
        2 / 3
    )


def test_share_of_the_preference_honoured():
    assert preference_score(0.1, 20, {"expert": 1}, Preference(), BOUNDS) == 1.0
    assert preference_score(0.025, 20, {}, Preference(cost=1.0), BOUNDS) == pytest.approx(0.75)
    both = Preference(outcome=3.0, cost=1.0, latency=1.0)
    assert preference_score(0.0, 20.0, {}, both, BOUNDS) == pytest.approx(0.5)
    avoid = Preference(cost=1.0, tools={"expert": -3.0})
    assert preference_score(0.0, 0, {"expert": 2}, avoid, BOUNDS) == pytest.approx(0.25)
    assert preference_score(0.1, 0, {"expert": 0}, avoid, BOUNDS) == pytest.approx(0.75)
    favour = Preference(tools={"search": 1.0, "expert": 0.0})
    assert (
        preference_score(0.1, 0, {"search": 1}, favour, BOUNDS) == 1.0
        and preference_score(0.1, 0, {}, favour, BOUNDS) == 0.0
    )


# ---- prices ----


def test_prices_are_dollars_for_a_million_tokens():
    """The published evaluation divides gpt-5's input price by ten million."""
    assert (
        reward.PRICES["gpt-5"].cost(1_000_000, 0) == 1.25
        and reward.PRICES["gpt-5"].cost(0, 1_000_000) == 10.0
    )
    assert Price(0.25, 2.0).cost(1000, 500) == pytest.approx(0.00125)
    assert reward.PRICES[reward.POLICY].cost(500_000, 500_000) == pytest.approx(0.2)
    assert reward.sandbox_cost(60) == pytest.approx(0.000498) and reward.search_cost(
        30
    ) == pytest.approx(0.07)


# ---- bad numbers ----


@pytest.mark.parametrize(
    "field,value",
    [
        ("cost_usd", math.nan),
        ("cost_usd", -0.01),
        ("cost_usd", math.inf),
        ("latency_s", math.nan),
        ("latency_s", -1.0),
        ("outcome", 0.5),
        ("outcome", math.nan),
        ("calls", {"expert": -1}),
    ],
)
def test_bad_attempts_are_refused_by_name(field, value):
    bad = attempt()
    setattr(bad, field, value)
    with pytest.raises(ValueError, match=field):
        group_rewards([attempt(), bad], Preference(cost=1.0))
    with pytest.raises(ValueError, match=field):
        task_reward(
            bad.outcome, bad.cost_usd, bad.latency_s, bad.calls, Preference(cost=1.0), BOUNDS
        )
    if field != "outcome":
        with pytest.raises(ValueError, match=field):
            preference_score(bad.cost_usd, bad.latency_s, bad.calls, Preference(cost=1.0), BOUNDS)


def test_bad_preferences_bounds_and_prices_are_refused():
    for preference in (
        Preference(cost=-1.0),
        Preference(outcome=math.nan),
        Preference(tools={"expert": math.nan}),
    ):
        with pytest.raises(ValueError, match="preference"):
            group_rewards([attempt(), attempt()], preference)
        with pytest.raises(ValueError, match="preference"):
            task_reward(1, 0, 0, {}, preference, BOUNDS)
    with pytest.raises(ValueError, match="positive weight"):
        task_reward(1, 0, 0, {}, Preference(outcome=0.0, tools={"expert": -1.0}), BOUNDS)
    for wrong in (
        dict(cost_usd=(1.0, 0.5)),
        dict(latency_s=(-1.0, 5.0)),
        dict(cost_usd=(0.0, math.nan)),
    ):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            dataclasses.replace(BOUNDS, **wrong)
