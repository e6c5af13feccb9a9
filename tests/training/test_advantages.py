"""Advantages: the papers' formulas, known answers, and who is left out of the loss."""

from __future__ import annotations

import math
import random
from collections import Counter

import pytest
import torch

import train
from nanorchestra.config import GrpoSection
from nanorchestra.records import Task, Trajectory, Turn
from nanorchestra.training.distributed import Ranks
from nanorchestra.training.grpo import OBJECTIVES, group_advantages


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
    advantages = group_advantages(drawn, 0.05, OBJECTIVES[name].boost)
    assert advantages == pytest.approx(expected.tolist(), abs=1e-12)


@pytest.mark.parametrize("size", [8, 16])
def test_no_cut_acts_on_the_largest_z_score(size):
    rewards = [1.0] + [0.0] * (size - 1)
    advantages = group_advantages(rewards, 0.0)
    assert advantages[0] == pytest.approx((size - 1) / math.sqrt(size), abs=1e-4)
    assert size > 8 or advantages[0] < 2.48
    boosted = group_advantages(rewards, 0.0, 0.1)
    assert boosted[0] == advantages[0] + 0.1 and boosted[1:] == advantages[1:]


def test_a_group_that_spreads_too_little_teaches_nothing():
    for rewards, min_std, learns in (
        ([0.7] * 4, 0.0, False),
        ([0.1] * 3, 0.0, False),  # a mean that is rounded would leave a spread of 1e-17
        ([1.0, 0.9], 0.1, False),  # std 0.0707
        ([1.0, 0.9], 0.07, True),
        ([1.0, 0.75, 0.5], 0.25, False),  # std 0.25: up to min_std
        ([1.0], 0.0, False),
        ([], 0.0, False),
    ):
        assert (group_advantages(rewards, min_std) is not None) == learns, rewards


@pytest.fixture
def advantages_of(monkeypatch):
    """advantages_of(rewards) are those of a group, None for attempts left out, and the reasons.

    A reward of None: the infrastructure failed the attempt.
    """

    def scored(rewards, answered=None, **settings):
        attempts = []
        for reward, has_answer in zip(rewards, answered or [True] * len(rewards), strict=True):
            status = "infrastructure" if reward is None else "answered"
            turns, ids = [Turn(1, 2, "stop")], [5, len(attempts)]
            attempt = Trajectory("t", 0, 1, ids, [False, True], [0.0, -1.0], turns=turns)
            attempt.status, attempt.answer = status, "42" if has_answer else ""
            attempts.append(attempt)
        paid = [reward for reward in rewards if reward is not None]
        monkeypatch.setattr(train, "group_rewards", lambda attempts, preference: paid)
        grpo = GrpoSection(min_std=0.0, **settings)
        train.reward_group(Task("t", "?"), attempts, grpo, None, Ranks())
        assert [attempt.reward for attempt in attempts] == [reward or 0.0 for reward in rewards]
        group, left_out = train.group_in_loss(attempts, grpo)
        advantages = [None] * len(attempts)
        for sample in group.samples:
            _, number = sample.ids
            advantages[number] = sample.advantage
        assert [attempt.advantage for attempt in attempts] == [a or 0.0 for a in advantages]
        return advantages, Counter(left_out)

    return scored


def test_what_the_infrastructure_failed_is_in_no_mean(advantages_of):
    (first, failed, *others), reasons = advantages_of([1.0, None, 0.0, 0.5])
    assert [first, *others] == group_advantages([1.0, 0.0, 0.5], 0.0) and failed is None
    assert reasons == {"infrastructure": 1}
    assert advantages_of([1.0, None]) == ([None, None], {"homogeneous": 1, "infrastructure": 1})
    assert advantages_of([None, None]) == ([None, None], {"infrastructure": 2})
    # It is no fault of form, with or without an answer.
    answered = [True, False, True]
    _, reasons = advantages_of([1.0, None, 0.0], answered, objective="toolorchestra")
    assert reasons == {"infrastructure": 1}


def test_an_attempt_without_an_answer_is_left_out_but_in_the_mean(advantages_of):
    rewards, answered = [1.0, 0.0, 0.5], [True, False, True]
    kept, reasons = advantages_of(rewards, answered)
    assert kept == group_advantages(rewards, 0.0) and not reasons
    dropped, reasons = advantages_of(rewards, answered, objective="toolorchestra")
    boosted = group_advantages(rewards, 0.0, 0.1)
    assert dropped == [boosted[0], None, boosted[2]] and reasons == {"invalid_format": 1}
    _, reasons = advantages_of([0.5] * 3, answered, objective="toolorchestra")
    assert reasons == {"homogeneous": 3}
