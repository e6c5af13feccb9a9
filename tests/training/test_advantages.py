"""Advantages: the papers' formulas, known answers, and who is left out of the loss."""

from __future__ import annotations

import math
import random

import pytest
import torch

from nanorchestra.training.grpo import OBJECTIVES, Advantage, Objective, group_advantages


def advantages_of(rewards, answered=None, min_std=0.0, **settings):
    answered = answered or [True] * len(rewards)
    return group_advantages(rewards, answered, Objective(**settings), min_std)


def values(advantages):
    return [advantage.value for advantage in advantages]


def reasons(advantages):
    return [advantage.left_out for advantage in advantages]


@pytest.mark.parametrize("name", sorted(OBJECTIVES))
@pytest.mark.parametrize("size", [2, 8, 16])
def test_advantages_are_those_of_the_papers(name, size):
    """torch's std is over n - 1, as in the trainers of DeepSeekMath, TRL and verl."""
    rng = random.Random(size)
    drawn = [rng.choice((0.0, 0.3, 1.0, 1.2)) + rng.random() / 10 for _ in range(size)]
    rewards = torch.tensor(drawn, dtype=torch.float64)
    expected = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
    if name == "toolorchestra":
        expected = torch.where(expected >= 1, expected + 0.1, expected)
        assert size == 2 or (expected >= 1.1).any()
    advantages = group_advantages(drawn, [True] * size, OBJECTIVES[name], 0.05)
    assert values(advantages) == pytest.approx(expected.tolist(), abs=1e-12)
    assert reasons(advantages) == [None] * size


@pytest.mark.parametrize("size", [8, 16])
def test_no_cut_acts_on_the_largest_z_score(size):
    advantages = advantages_of([1.0] + [0.0] * (size - 1))
    assert advantages[0].value == pytest.approx((size - 1) / math.sqrt(size), abs=1e-4)
    assert size > 8 or advantages[0].value < 2.48
    boosted = advantages_of([1.0] + [0.0] * (size - 1), boost=0.1)
    assert boosted[0].value == advantages[0].value + 0.1 and boosted[1:] == advantages[1:]


def test_a_group_that_spreads_too_little_is_left_out():
    for rewards, min_std, reason in (
        ([0.7] * 4, 0.0, "homogeneous"),
        ([0.1] * 3, 0.0, "homogeneous"),  # a mean that is rounded would leave a spread of 1e-17
        ([1.0, 0.9], 0.1, "homogeneous"),  # std 0.0707
        ([1.0, 0.9], 0.07, None),
        ([1.0, 0.75, 0.5], 0.25, "homogeneous"),  # std 0.25: up to min_std
        ([1.0], 0.0, "homogeneous"),
    ):
        advantages = advantages_of(rewards, min_std=min_std)
        assert reasons(advantages) == [reason] * len(rewards), rewards
        assert reason is None or set(values(advantages)) == {0.0}


def test_what_the_infrastructure_failed_is_in_no_mean():
    advantages = advantages_of([1.0, None, 0.0, 0.5])
    without = advantages_of([1.0, 0.0, 0.5])
    assert advantages == [without[0], Advantage(0.0, "infrastructure"), *without[1:]]
    assert reasons(advantages_of([1.0, None])) == ["homogeneous", "infrastructure"]
    assert reasons(advantages_of([None, None])) == ["infrastructure"] * 2
    assert advantages_of([]) == []
    # It is no fault of form, with or without an answer.
    failed = advantages_of([1.0, None, 0.0], [True, False, True], drop_invalid_format=True)
    assert reasons(failed) == [None, "infrastructure", None]


def test_an_attempt_without_an_answer_is_left_out_but_in_the_mean():
    rewards, answered = [1.0, 0.0, 0.5], [True, False, True]
    kept = advantages_of(rewards, answered)
    dropped = advantages_of(rewards, answered, drop_invalid_format=True)
    assert reasons(kept) == [None] * 3 and kept[1].value < 0
    assert dropped == [kept[0], Advantage(0.0, "invalid_format"), kept[2]]
    same = advantages_of([0.5] * 3, answered, drop_invalid_format=True)
    assert reasons(same) == ["homogeneous"] * 3
