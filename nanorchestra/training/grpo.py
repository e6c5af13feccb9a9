"""GRPO on numbers: objectives by name, advantages, which ids count, samples.

The loss of every objective is the sum over the ids in the loss of all micro-batches and ranks

    loss = sum_i (v_i L_i + kl_coef kl_i) / ids in the loss of the whole update

train.py's `policy_loss` computes it. L is the surrogate, v = min(pi_old / pi_sampler, cap) if there
is an importance cap (else 1). The divisor is a number of the whole update, so losses and gradients
of micro-batches and ranks add up. GRPO's paper has a mean by attempt, Dr. GRPO's a constant
divisor.

| objective | advantage | L | paper |
|---|---|---|---|
| grpo | (R - mean) / std | clip | arXiv 2402.03300 |
| dr_grpo | R - mean | clip | arXiv 2503.20783 |
| toolorchestra | as grpo, +0.1 from 1 on | clip, dual clip | arXiv 2511.21689 |

The upper bound of the clip, 0.28, is that of ToolOrchestra's script, which has it from DAPO (arXiv
2503.14476). GRPO as published has 0.2 on both sides.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from os.path import commonprefix  # of any lists, not of paths alone
from statistics import fmean, stdev
from typing import Literal

from torch import Tensor

from nanorchestra.records import Trajectory
from nanorchestra.training.packing import Group, Sample

CLIP_LOW, CLIP_HIGH = 0.2, 0.28  # the ratio is clipped to 1 - CLIP_LOW .. 1 + CLIP_HIGH
EPSILON = 1e-6  # of the published formula of advantages, beside the standard deviation
MAX_LOG_RATIO = 20.0  # keeps exp finite, where a surrogate has no bound of its own


@dataclass(frozen=True)
class Objective:
    """What a method is: surrogate, KL term, advantages, and what it leaves out of the loss.

    What a run chooses beside it, kl_coef and the like, stands in [grpo] of its config.
    """

    dual_clip: float = 0.0  # bounds the loss where the advantage is negative; 0: no bound
    kl: Literal["full", "k2"] = "full"  # exact over the vocabulary, or an estimate
    divide_by_std: bool = True  # advantages, by the standard deviation of the group
    boost: float = 0.0  # added to advantages of at least 1
    drop_invalid_format: bool = False  # leave badly formed turns and attempts out of the loss


OBJECTIVES = {
    "grpo": Objective(),
    "dr_grpo": Objective(divide_by_std=False),
    "toolorchestra": Objective(dual_clip=10.0, drop_invalid_format=True, kl="k2", boost=0.1),
}


def group_advantages(
    rewards: Sequence[float], min_std: float, objective: Objective = OBJECTIVES["grpo"]
) -> list[float] | None:
    """Returns the advantages of the attempts at one task: how far a reward lies above their mean.

        A_i = (R_i - mean R) / (std R + 1e-6)    DeepSeekMath section 4.1.2; std over n - 1
        A_i = R_i - mean R                       Dr. GRPO, for rewards on one scale for all tasks

    plus the objective's boost where it is at least 1. None if there is nothing to learn: fewer than
    two rewards, or their std is not above `min_std`. Division by a small std makes a few cents more
    or less count as much as a wrong answer.

    The published cut at +-3 is missing. The largest z-score of n attempts is (n - 1) / sqrt(n), of
    one that differs from n - 1 equal ones: 2.48 in groups of 8, above 3 only from 11 attempts on.
    """
    std = stdev(rewards) if len(rewards) > 1 else 0.0
    if std <= min_std:
        return None
    mean = fmean(rewards)
    advantages = []
    for reward in rewards:
        advantage = reward - mean
        if objective.divide_by_std:
            advantage /= std + EPSILON
        if advantage >= 1:
            advantage += objective.boost
        advantages.append(advantage)
    return advantages


def loss_mask(attempt: Trajectory, drop_invalid_format: bool = False) -> list[bool]:
    """Returns which ids enter the loss: sampled ones.

    drop_invalid_format: without those of badly formed turns.
    """
    mask = list(attempt.sampled)
    for turn in attempt.turns:
        if drop_invalid_format and not turn.well_formed:
            mask[turn.start : turn.end] = [False] * (turn.end - turn.start)
    return mask


def gave_answer(attempt: Trajectory) -> bool:
    """Returns whether an attempt ended with an answer, and has a well-formed turn to learn from."""
    answered = attempt.status == "answered" and bool(attempt.answer)
    return answered and any(loss_mask(attempt, drop_invalid_format=True))


def as_group(attempts: Sequence[Trajectory], drop_invalid_format: bool = False) -> Group:
    """Returns attempts at one task as a group of samples.

    Each context that has ids in the loss is a sample: one growing session, or with rebuilt prompts
    every turn.
    """
    prompts = []
    samples = []
    for attempt in attempts:
        mask = loss_mask(attempt, drop_invalid_format)
        for begin, start, end in attempt.contexts():
            if any(mask[begin:end]):
                ids, logprobs = attempt.ids[begin:end], attempt.logprobs[begin:end]
                prompts.append(attempt.ids[begin:start])
                samples.append(Sample(ids, mask[begin:end], logprobs, attempt.advantage))
    return Group(samples, len(commonprefix(prompts)))


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """Returns exp(log_ratio), finite also for log-ratios beyond +-20."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
