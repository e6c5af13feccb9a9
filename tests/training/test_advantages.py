"""Who learns in a group, and who is left out of the loss; test_policy_loss.py has the formula."""

from __future__ import annotations

from collections import Counter

import pytest

import train
from nanorchestra.config import GrpoSection
from nanorchestra.records import Task, Trajectory, Turn
from nanorchestra.training.distributed import Ranks
from nanorchestra.training.grpo import OBJECTIVES, group_advantages


@pytest.mark.parametrize(
    "rewards, min_std, learns",
    [
        ([0.1] * 3, 0.0, False),  # a mean that is rounded would leave a spread of 1e-17
        ([1.0, 0.75, 0.5], 0.25, False),  # std 0.25: up to min_std
        ([1.0, 0.9], 0.07, True),
        ([1.0], 0.0, False),
    ],
)
def test_a_group_that_spreads_too_little_teaches_nothing(rewards, min_std, learns):
    assert (group_advantages(rewards, min_std) is not None) == learns


@pytest.fixture
def advantages_of(monkeypatch):
    """advantages_of(rewards) are those of a group, None for attempts left out, and the reasons.

    A reward of None: the infrastructure failed the attempt.
    """

    def scored(rewards, answered, objective="grpo"):
        attempts = []
        for number, (reward, has_answer) in enumerate(zip(rewards, answered, strict=True)):
            turns, ids = [Turn(1, 2, "stop")], [5, number]
            attempt = Trajectory("t", 0, 1, ids, [False, True], [0.0, -1.0], turns=turns)
            attempt.status = "infrastructure" if reward is None else "answered"
            attempt.answer = "42" if has_answer else ""
            attempts.append(attempt)
        paid = [reward for reward in rewards if reward is not None]
        monkeypatch.setattr(train, "group_rewards", lambda attempts, preference: paid)
        grpo = GrpoSection(min_std=0.0, objective=objective)
        train.reward_group(Task("t", "?"), attempts, grpo, None, Ranks())
        group, left_out = train.group_in_loss(attempts, grpo)
        advantages = {sample.ids[1]: sample.advantage for sample in group.samples}
        return [advantages.get(number) for number in range(len(attempts))], Counter(left_out)

    return scored


def test_what_the_infrastructure_failed_is_in_no_mean(advantages_of):
    (first, failed, *others), reasons = advantages_of([1.0, None, 0.0, 0.5], [True] * 4)
    assert [first, *others] == group_advantages([1.0, 0.0, 0.5], 0.0) and failed is None
    assert reasons == {"infrastructure": 1}
    alone = advantages_of([1.0, None], [True] * 2)
    assert alone == ([None, None], {"homogeneous": 1, "infrastructure": 1})


def test_an_attempt_without_an_answer_is_left_out_but_in_the_mean(advantages_of):
    rewards, answered = [1.0, 0.0, 0.5], [True, False, True]
    kept, reasons = advantages_of(rewards, answered)
    assert kept == group_advantages(rewards, 0.0) and not reasons
    dropped, reasons = advantages_of(rewards, answered, "toolorchestra")
    boosted = group_advantages(rewards, 0.0, OBJECTIVES["toolorchestra"])
    assert dropped == [boosted[0], None, boosted[2]] and reasons == {"invalid_format": 1}
