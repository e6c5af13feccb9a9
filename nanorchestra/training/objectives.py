"""Turns the rewards of a group into advantages, and log-probabilities into the loss of a step.

The loss of every objective is the sum over the sampled ids of all micro-batches and ranks

    loss = sum_i w_i (v_i L_i + kl_coef kl_i) / normaliser

L is the surrogate, w and the normaliser are the aggregation, and v = min(pi_old / pi_sampler, cap)
if there is an importance cap (else 1). The normaliser is that of the whole step, so losses and
gradients of micro-batches and ranks add up.

| objective | advantage | L | aggregation | paper |
|---|---|---|---|---|
| GRPO | (R - mean) / std | clip | token (the paper: sequence) | arXiv 2402.03300 |
| ToolOrchestra | as GRPO, cut at 3, +0.1 from 1 on | clip, dual clip | token | arXiv 2511.21689 |
| Dr. GRPO | R - mean | clip | constant | arXiv 2503.20783 |
| DAPO | as GRPO, overlong punishment | clip, higher upper bound | token | arXiv 2503.14476 |
| GSPO | as GRPO | gspo | sequence | arXiv 2507.18071 |
| CISPO | as GRPO | cispo | token | arXiv 2506.13585 |

`OBJECTIVES` holds the settings of each of them.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from nanorchestra.config import GrpoSection
from nanorchestra.training.packing import Group, Packed, samples_in

ADVANTAGE_CLIP = 3.0
MIN_SCALE = 0.05  # of advantages: attempts with the same calls and outcome spread less
MAX_LOG_RATIO = 20.0  # keeps exp finite; the bounds of every surrogate lie far inside


@dataclass(frozen=True)
class Objective:
    """What distinguishes the objectives: loss, aggregation, KL term, advantages and filters."""

    surrogate: Literal["clip", "gspo", "cispo"] = "clip"
    aggregation: Literal["token", "sequence", "constant"] = "token"  # what the loss is a mean over
    clip_low: float = 0.2
    clip_high: float = 0.28
    dual_clip: float = 0.0  # bounds the loss where the advantage is negative; 0: no bound
    importance_cap: float = 0.0  # of the weight between trainer and sampler; 0: no weight
    kl_coef: float = 0.0
    min_entropy: float = 0.0  # nats, below which an id has no part in the surrogate
    kl: Literal["full", "k2"] = "full"  # exact over the vocabulary, or an estimate
    normalise_std: bool = True
    boost: float = 0.0  # added to advantages of at least 1
    drop_invalid_format: bool = False  # leave badly formed turns and attempts out of the loss
    resample: int = 0  # further rollouts per step while too few groups have an advantage
    overlong_share: float = 0.0  # of the context, within which the reward falls by up to 1


OBJECTIVES = {
    "grpo": Objective(),
    "toolorchestra": Objective(dual_clip=10.0, drop_invalid_format=True, kl="k2", boost=0.1),
    "dr_grpo": Objective(aggregation="constant", normalise_std=False),
    "dapo": Objective(resample=3, overlong_share=0.2),
    "gspo": Objective("gspo", "sequence", clip_low=3e-4, clip_high=4e-4),
    # No lower bound, as published; the upper one is that of ScaleRL (arXiv 2510.13786).
    "cispo": Objective("cispo", clip_low=1.0, clip_high=4.0),
}


def objective_of(settings: GrpoSection) -> Objective:
    """Returns the objective that [grpo] names, with its coefficients and importance_cap."""
    return replace(
        OBJECTIVES[settings.objective],
        importance_cap=settings.importance_cap,
        kl_coef=settings.kl_coef,
        min_entropy=settings.min_entropy,
    )


# Rewards to advantages.


def group_advantages(
    rewards: Sequence[float],
    valid: Sequence[bool],
    answered: Sequence[bool],
    objective: Objective,
    min_std: float,
) -> tuple[list[float], list[str | None]]:
    """Returns the advantage of each member of a group, and why a member is left out of the loss.

        A_i = (R_i - mean R) / std R     DeepSeekMath section 4.1.2; std over n - 1
        A_i = R_i - mean R               without normalise_std: Dr. GRPO equation 3

    cut to +- ADVANTAGE_CLIP, plus the objective's boost where it is at least 1. The divisor is at
    least MIN_SCALE: a smaller spread comes from a few tokens more or less, which would otherwise
    count as much as a wrong answer. A member that is left out has the advantage 0. The reason is
    None for a member that enters the loss, else

    "infrastructure"  valid[i] is False: a tool failed, not the policy. Not in mean and std.
    "homogeneous"     at most one member counts, or their std is not above `min_std`.
    "invalid_format"  answered[i] is False and drop_invalid_format is True. In mean and std.
    """
    counted = [reward for reward, ok in zip(rewards, valid, strict=True) if ok]
    mean = spread = 0.0
    if len(counted) > 1:
        mean = math.fsum(counted) / len(counted)
        squares = math.fsum((reward - mean) ** 2 for reward in counted)
        spread = math.sqrt(squares / (len(counted) - 1))
    scale = max(spread, MIN_SCALE) + 1e-6 if objective.normalise_std else 1.0

    advantages = []
    reasons = []
    for reward, ok, formed in zip(rewards, valid, answered, strict=True):
        advantage, reason = 0.0, None
        if not ok:
            reason = "infrastructure"
        elif spread <= min_std:
            reason = "homogeneous"
        elif objective.drop_invalid_format and not formed:
            reason = "invalid_format"
        else:
            advantage = max(-ADVANTAGE_CLIP, min(ADVANTAGE_CLIP, (reward - mean) / scale))
            advantage += objective.boost if advantage >= 1 else 0.0
        advantages.append(advantage)
        reasons.append(reason)
    return advantages, reasons


def overlong_punishment(length: int, limit: int, buffer: int) -> float:
    """Returns DAPO's soft punishment (equation 13) of a sample of `length` ids.

    It is 0 up to limit - buffer ids, and falls linearly to -1 at `limit` and beyond.
    """
    return max(-1.0, min(0.0, (limit - buffer - length) / buffer))


# Log-probabilities to a loss. Tensors are [N], one entry per sampled id.


def surrogate(
    logprobs: Tensor, old_logprobs: Tensor, batch: Packed, objective: Objective
) -> tuple[Tensor, Tensor]:
    """Returns the loss L per id, and which ids the clip stopped.

    With A the advantage, r = exp(logprob - old_logprob), sg a stop of gradients, and
    c(r) = clip(r, 1 - clip_low, 1 + clip_high):

    "clip"   L = max(-A r, -A c(r)): PPO (arXiv 1707.06347) equation 7, with two bounds as in DAPO.
             With dual_clip L is at most -A dual_clip where A < 0 (arXiv 1912.09729, equation 5).
    "gspo"   as "clip", with the sequence's ratio in place of r: GSPO equations 7 and 14. That is
             sg[exp(mean over the sequence of log r)] exp(logprob - sg[logprob]).
    "cispo"  L = -sg[c(r)] A logprob: MiniMax-M1 equations 4 and 5. A clipped id still has a
             gradient, with a bounded weight. There is no dual clip.
    """
    log_ratio = _log_ratio(logprobs, old_logprobs)
    if objective.surrogate == "gspo":
        means = _sequence_means(log_ratio.detach(), batch.sequences)
        log_ratio = means + logprobs - logprobs.detach()
    ratio, advantages = log_ratio.exp(), batch.advantages
    bounded = ratio.clamp(1 - objective.clip_low, 1 + objective.clip_high)
    if objective.surrogate == "cispo":
        return -bounded.detach() * advantages * logprobs, bounded != ratio
    free, clipped = -advantages * ratio, -advantages * bounded
    losses = torch.maximum(free, clipped)
    if objective.dual_clip:
        dual = (advantages < 0) & (ratio > objective.dual_clip)
        losses = torch.where(dual, -advantages * objective.dual_clip, losses)
    return losses, clipped > free


def _sequence_means(values, sequences) -> Tensor:
    count = torch.bincount(sequences)
    sums = values.new_zeros(len(count)).index_add_(0, sequences, values)
    return (sums / count.clamp(min=1))[sequences]


def _log_ratio(logprobs, others) -> Tensor:
    return (logprobs - others).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Returns the estimate k2 of KL(policy || reference) from each sampled id (Schulman 2020).

    It is d^2 / 2 with d = logprob - ref_logprob. Its gradient on policy is that of the KL.
    """
    return (logprobs - ref_logprobs).square() / 2


def loss_normaliser(groups: Sequence[Group], aggregation: str, length: int) -> float:
    """Returns the divisor of a step's loss.

    "token": the sampled ids, for a mean over ids (DAPO equation 8). "sequence": the trajectories,
    for a mean of their means (DeepSeekMath equation 3). "constant": trajectories times `length`,
    the most ids that one may have (Dr. GRPO section 3.2): an id then weighs the same in every one.
    """
    samples = [sample for sample in samples_in(groups) if sample.count]
    if aggregation == "token":
        return float(sum(sample.count for sample in samples))
    trajectories = sum(sample.count / (sample.trajectory_ids or sample.count) for sample in samples)
    return trajectories * (length if aggregation == "constant" else 1)


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    batch: Packed,
    objective: Objective,
    *,
    normaliser: float,
    kl: Tensor | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """Returns a micro-batch's part of the loss, a scalar, and sums over its ids for the metrics.

    old_logprobs: those of the policy before the step. Either the sampler's, or the trainer's own
    with an importance cap that corrects for the difference to the sampler, in arithmetic or in
    weights (truncated importance sampling: Ionides 2008; decoupled as in arXiv 2110.00641).
    kl: per id, with its gradient. Gradients flow into `logprobs` and `kl`. With N = 0 the loss is 0
    and has a graph.

    The sums: `clip_fraction`, of ids that the clip stopped; `kl`; with a cap `importance`, the
    weight v.
    """
    old_logprobs = old_logprobs.detach()
    losses, stopped = surrogate(logprobs, old_logprobs, batch, objective)
    columns = {
        "clip_fraction": stopped,
        "kl": torch.zeros_like(losses) if kl is None else kl.detach(),
    }
    if objective.importance_cap:
        importance = _log_ratio(old_logprobs, batch.sampler_logprobs).exp()
        capped = importance.clamp(max=objective.importance_cap)
        losses = losses * capped
        columns |= {"importance": capped}
    if kl is not None:
        losses = losses + objective.kl_coef * kl
    if objective.aggregation == "sequence":
        losses = losses / batch.trajectory_ids
    sums = torch.stack([column.sum(dtype=torch.float64) for column in columns.values()])
    return losses.sum() / normaliser, dict(zip(columns, sums.tolist(), strict=True))
