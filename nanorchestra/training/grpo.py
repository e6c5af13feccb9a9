"""GRPO on numbers: objectives by name, advantages, which ids count, and the terms of the loss.

The loss of every objective is the sum over the ids in the loss of all micro-batches and ranks

    loss = sum_i (v_i L_i + kl_coef kl_i) / ids in the loss of the whole update

train.py's `policy_loss` computes it. L is the surrogate, v = min(pi_old / pi_sampler, cap) if there
is an importance cap (else 1). The divisor is a number of the whole update, so losses and gradients
of micro-batches and ranks add up. GRPO's paper has a mean by attempt.

| objective | advantage | L | paper |
|---|---|---|---|
| grpo | (R - mean) / std | clip | arXiv 2402.03300 |
| toolorchestra | as grpo, +0.1 from 1 on | clip, dual clip | arXiv 2511.21689 |

The upper bound of the clip, 0.28, is that of ToolOrchestra's script, which has it from DAPO (arXiv
2503.14476). GRPO as published has 0.2 on both sides.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from os.path import commonprefix  # of any lists, not of paths alone
from statistics import fmean, stdev
from typing import Literal

from torch import Tensor

from nanorchestra.config import GrpoSection
from nanorchestra.records import Trajectory
from nanorchestra.training.packing import Group, Sample
from nanorchestra.training.trajectories import contexts

EPSILON = 1e-6  # of the published formula of advantages, beside the standard deviation
MAX_LOG_RATIO = 20.0  # keeps exp finite, where a surrogate has no bound of its own


@dataclass(frozen=True)
class Objective:
    """Loss, KL term, advantages and filters of one objective."""

    clip_low: float = 0.2
    clip_high: float = 0.28
    dual_clip: float = 0.0  # bounds the loss where the advantage is negative; 0: no bound
    importance_cap: float = 0.0  # of the weight between trainer and sampler; 0: no weight
    kl_coef: float = 0.0
    kl: Literal["full", "k2"] = "full"  # exact over the vocabulary, or an estimate
    min_entropy: float = 0.0  # nats, below which an id has no part in the surrogate
    boost: float = 0.0  # added to advantages of at least 1
    drop_invalid_format: bool = False  # leave badly formed turns and attempts out of the loss


OBJECTIVES = {
    "grpo": Objective(),
    "toolorchestra": Objective(dual_clip=10.0, drop_invalid_format=True, kl="k2", boost=0.1),
}


def objective_of(settings: GrpoSection) -> Objective:
    """Returns the objective that [grpo] names, with its coefficients and importance_cap."""
    return replace(
        OBJECTIVES[settings.objective],
        importance_cap=settings.importance_cap,
        kl_coef=settings.kl_coef,
        min_entropy=settings.min_entropy,
    )


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


def ids_in_loss(attempt: Trajectory, drop_invalid_format: bool = False) -> list[bool]:
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
    return answered and any(ids_in_loss(attempt, drop_invalid_format=True))


def as_group(attempts: Sequence[Trajectory], drop_invalid_format: bool = False) -> Group:
    """Returns attempts at one task as a group of samples.

    Each context that has ids in the loss is a sample: one growing session, or with rebuilt prompts
    every turn.
    """
    prompts = []
    samples = []
    for attempt in attempts:
        mask = ids_in_loss(attempt, drop_invalid_format)
        for begin, start, end in contexts(attempt):
            if any(mask[begin:end]):
                ids, logprobs = attempt.ids[begin:end], attempt.logprobs[begin:end]
                prompts.append(attempt.ids[begin:start])
                samples.append(Sample(ids, mask[begin:end], logprobs, attempt.advantage))
    return Group(samples, len(commonprefix(prompts)))


def record_logprobs(
    attempts: Sequence[Trajectory],
    trainer_logprobs: Sequence[Sequence[float]],
    drop_invalid_format: bool = False,
) -> None:
    """Writes the trainer's log-probabilities on the attempts that the samples were made of.

    trainer_logprobs[k] are those of sample k of the attempts' groups, in order, one for each id in
    the loss. Other sampled ids get None.
    """
    logprobs = iter([logprob for sample in trainer_logprobs for logprob in sample])
    for attempt in attempts:
        mask = ids_in_loss(attempt, drop_invalid_format)
        attempt.trainer_logprobs = []
        for sampled, in_loss in zip(attempt.sampled, mask, strict=True):
            if sampled:
                attempt.trainer_logprobs.append(next(logprobs) if in_loss else None)


def rewritten_share(attempts: Sequence[Trajectory]) -> float:
    """Returns the share of turns, after the first of an attempt, with a prompt of their own.

    With rebuilt context it is 1. An agent that rewrites what was said before raises it from 0.
    """
    following = sum(max(0, len(attempt.turns) - 1) for attempt in attempts)
    return sum(len(contexts(attempt)) - 1 for attempt in attempts) / max(1, following)


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """Returns exp(log_ratio), finite also for log-ratios beyond +-20."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def kl_estimate(trainer_logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Returns the estimate k2 of KL(policy || reference) at each id (Schulman 2020), [N].

    It is d^2 / 2 with d = trainer_logprobs - ref_logprobs. Its gradient on policy is that of the
    KL.
    """
    return (trainer_logprobs - ref_logprobs).square() / 2
