"""Turns the rewards of a group into advantages, and leaves out attempts that teach nothing."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from nanorchestra.training.objectives import Objective

EPSILON = 1e-6  # of the published formula, beside the standard deviation


@dataclass(frozen=True)
class Advantage:
    """The advantage of an attempt: how far its reward lies above the mean of its group.

    `left_out` says why the attempt has no part in the loss; its value is then 0. None: it has one.
    """

    value: float
    left_out: str | None


def group_advantages(
    rewards: Sequence[float | None],
    answered: Sequence[bool],
    objective: Objective,
    min_std: float,
) -> list[Advantage]:
    """Returns the advantage of each attempt at one task.

        A_i = (R_i - mean R) / (std R + 1e-6)    DeepSeekMath section 4.1.2; std over n - 1

    plus objective.boost where it is at least 1. rewards[i] is None for an attempt that the
    infrastructure failed. An attempt is left out for the first of these reasons:

    "infrastructure"  rewards[i] is None: a tool failed, not the policy. Not in mean and std.
    "homogeneous"     fewer than two rewards, or their std is not above `min_std`. Division by a
                      small std would make a few tokens more or less count as much as a wrong
                      answer.
    "invalid_format"  answered[i] is False, with drop_invalid_format. In mean and std: what is left
                      is not centred again, as published.

    The published cut at +-3 is missing. The largest z-score of n attempts is (n - 1) / sqrt(n), of
    one that differs from n - 1 equal ones: 2.48 in groups of 8, above 3 only from 11 attempts on.
    """
    counted = [reward for reward in rewards if reward is not None]
    mean = fmean(counted) if counted else 0.0
    std = stdev(counted) if len(counted) > 1 else 0.0

    advantages = []
    for reward, has_answer in zip(rewards, answered, strict=True):
        if reward is None:
            advantages.append(Advantage(0.0, "infrastructure"))
        elif std <= min_std:
            advantages.append(Advantage(0.0, "homogeneous"))
        elif objective.drop_invalid_format and not has_answer:
            advantages.append(Advantage(0.0, "invalid_format"))
        else:
            value = (reward - mean) / (std + EPSILON)
            if value >= 1:
                value += objective.boost
            advantages.append(Advantage(value, None))
    return advantages
