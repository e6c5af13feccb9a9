"""The objectives in formulas: rewards of a group to advantages, log-probabilities to a loss.

Losses are functions of flat tensors over sampled ids only ([N], no padding, no mask): who calls them selects the positions.
Every loss is a sum divided by a normaliser the caller gives, that of the whole optimiser step (all micro-batches, all ranks), so losses
and metrics of micro-batches and ranks simply add up.

| objective | advantage | loss of an id | mean over | paper |
|---|---|---|---|---|
| GRPO | (R - mean) / std | clipped ratio | ids (the paper: sequences) | DeepSeekMath, arXiv 2402.03300 |
| ToolOrchestra | the same, clipped at 3 | clipped ratio, dual clip | ids | arXiv 2511.21689 |
| Dr. GRPO | R - mean | clipped ratio | a constant length | arXiv 2503.20783 |
| DAPO | (R - mean) / std | clipped ratio, more room upwards; dynamic sampling, overlong treatment | ids | arXiv 2503.14476 |
| GSPO | (R - mean) / std | clipped ratio of the sequence | sequences | arXiv 2507.18071 |
| CISPO | (R - mean) / std | clipped ratio as a weight | ids | MiniMax-M1, arXiv 2506.13585 |
| RLOO | R - mean of the others | log-probability | a constant length | arXiv 2402.14740 |
| GDPO | each part of R normalised by itself | clipped ratio | ids | arXiv 2601.05242 |

`config.OBJECTIVES` has the settings that make each of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

SURROGATES = ("clip", "gspo", "cispo", "reinforce")


def group_advantages(
    rewards: Sequence[float],
    valid: Sequence[bool],
    *,
    well_formed: Sequence[bool] | None = None,
    overlong: Sequence[bool] | None = None,
    drop_invalid_format: bool = True,
    std: bool = True,
    leave_one_out: bool = False,
    min_std: float = 1e-3,
    clip: float | None = None,
) -> tuple[list[float], list[str | None]]:
    """Advantages of the members of one group, and why each member does not enter the loss (None if it does).

        A_i = (R_i - mean R) / (std R + 1e-6)      DeepSeekMath (arXiv 2402.03300) section 4.1.2; std is the sample one (n - 1)
        A_i = R_i - mean R                         with std=False: Dr. GRPO (arXiv 2503.20783) equation 3
        A_i = R_i - mean of the others' R          with leave_one_out: RLOO (Kool et al. 2019; arXiv 2402.14740); it is n / (n - 1) times R_i - mean R
    then clipped to [-clip, clip] if `clip` is given (ToolOrchestra: 3).

    Reasons, and what they mean for the group's mean and std:
    "infrastructure"  valid[i] is False (a time-out of the house, not of the policy): outside the statistics.
    "overlong"        overlong[i] is True (cut by a limit; DAPO section 3.4 filters these): outside the statistics too, for a zero that is
                      not pushed down would still push its siblings up.
    "homogeneous"     fewer than two members are left, or their std is not above `min_std` (ToolOrchestra: 0.1): nothing to compare.
    "invalid_format"  well_formed[i] is False: stays in the statistics with the reward it was given, so its siblings are still
                      compared with it, but is itself left out of the loss, as published. `drop_invalid_format=False` keeps it in
                      the loss, so that a bad format is pushed down.
    A member that is left out has the advantage 0. The mean over the members kept therefore need not be 0.

    ValueError: lists of different length, a reward that counts and is not finite, min_std < 0, clip <= 0.
    """
    well_formed = [True] * len(rewards) if well_formed is None else well_formed
    overlong = [False] * len(rewards) if overlong is None else overlong
    if not len(rewards) == len(valid) == len(well_formed) == len(overlong):
        raise ValueError(
            f"rewards, valid, well_formed and overlong have {len(rewards)}, {len(valid)}, {len(well_formed)} and {len(overlong)} entries"
        )
    if not (min_std >= 0 and (clip is None or clip > 0)):
        raise ValueError(f"min_std must be 0 or more and clip above 0, got {min_std} and {clip}")
    counted = [
        float(reward) for reward, ok, long in zip(rewards, valid, overlong) if ok and not long
    ]
    if not all(math.isfinite(reward) for reward in counted):
        raise ValueError(f"rewards must be finite, got {counted}")
    mean, spread = _mean_and_std(counted)

    advantages, reasons = [], []
    for reward, ok, formed, long in zip(rewards, valid, well_formed, overlong):
        if not ok:
            reason = "infrastructure"
        elif long:
            reason = "overlong"
        elif spread <= min_std:
            reason = "homogeneous"
        elif drop_invalid_format and not formed:
            reason = "invalid_format"
        else:
            reason = None
        advantage = 0.0
        if reason is None:
            advantage = (reward - mean) / (spread + 1e-6) if std else reward - mean
            if leave_one_out:
                advantage *= len(counted) / (len(counted) - 1)
            advantage = advantage if clip is None else max(-clip, min(clip, advantage))
        advantages.append(advantage)
        reasons.append(reason)
    return advantages, reasons


def _mean_and_std(values: Sequence[float]) -> tuple[float, float]:
    """The sample std (n - 1); of fewer than two values 0, 0, so that a lone member counts as homogeneous."""
    if len(values) < 2:
        return 0.0, 0.0
    mean = math.fsum(values) / len(values)
    return mean, math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))


def per_objective(
    parts: Sequence[tuple[float, Sequence[float]]], valid: Sequence[bool]
) -> list[float]:
    """GDPO (arXiv 2601.05242): every part of the reward is normalised in the group by itself, then they are summed with their weights.

        R_i = sum_k w_k (r_ik - mean_k) / (std_k + 1e-6)          parts = [(w_k, [r_1k, ..., r_nk]), ...]

    Normalising the sum instead gives attempts that differ in what they are good at the same advantage. What is returned stands for the
    rewards in `group_advantages(std=False)`; `over_batch` completes it. Members with valid[i] False get 0 and are outside the statistics.
    """
    totals = [0.0] * len(valid)
    for weight, values in parts:
        mean, spread = _mean_and_std([value for value, ok in zip(values, valid, strict=True) if ok])
        for i, (value, ok) in enumerate(zip(values, valid)):
            if ok:
                totals[i] += weight * (value - mean) / (spread + 1e-6)
    return totals


def moments(advantages: Iterable[float]) -> list[float]:
    """[count, sum, sum of squares], which add up over ranks; for `over_batch`."""
    values = list(advantages)
    return [float(len(values)), math.fsum(values), math.fsum(value * value for value in values)]


def over_batch(advantages: Sequence[float], moments: Sequence[float]) -> list[float]:
    """(A - mean) / (std + 1e-6) with the mean and std of the whole step's advantages: GDPO's last step, which keeps the scale of the update
    independent of the number of parts. Fewer than two of them are returned as they are."""
    count, total, squares = moments
    if count < 2:
        return list(advantages)
    mean = total / count
    spread = math.sqrt(max(0.0, squares - count * mean * mean) / (count - 1))
    return [(advantage - mean) / (spread + 1e-6) for advantage in advantages]


def overlong_punishment(length: int, limit: int, buffer: int) -> float:
    """DAPO's soft punishment (arXiv 2503.14476, equation 13), added to the reward: 0 up to limit - buffer ids, then linearly down to -1 at
    `limit` and beyond."""
    return (
        0.0
        if length <= limit - buffer
        else max(-1.0, (limit - buffer - length) / buffer)
        if buffer
        else -1.0
    )


def turn_shares(advantage: float, lengths: Sequence[int]) -> list[float]:
    """The advantage of an id in each turn, where the turns have `lengths` ids: A n / (K n_k), n = sum of the K lengths.

    Every turn has the same share of the trajectory's credit, however long it thinks, and the sum over ids stays that of one advantage a
    trajectory. Turns without ids have no share.
    """
    turns = sum(length > 0 for length in lengths)
    return [advantage * sum(lengths) / (turns * length) if length else 0.0 for length in lengths]


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    *,
    normaliser: float,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    dual_clip: float | None = None,
    ref_logprobs: Tensor | None = None,
    kl_coef: float = 0.0,
    kl_estimator: str = "k2",
    surrogate: str = "clip",
    sequences: Tensor | None = None,
    weights: Tensor | None = None,
    sampler_logprobs: Tensor | None = None,
    importance_cap: float | None = None,
    count: float | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """The policy-gradient loss, summed over ids and divided by `normaliser`. All tensors are [N], one entry a sampled id.

        r    = exp(logprob - old_logprob)
    surrogate "clip":
        L_i  = max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high))         PPO (arXiv 1707.06347) eq. 7; two bounds: DAPO (2503.14476)
        L_i  = min(L_i, -A dual_clip)  where A < 0                        dual clip (arXiv 1912.09729) eq. 5
    "gspo": the same with the sequence's ratio for r, in its form for ids, so that these may have advantages of their own:
        s_i  = sg[exp(mean over the sequence of log r)] exp(logprob - sg[logprob])        GSPO (arXiv 2507.18071) eqs. 7, 14
    "cispo": a clipped id still teaches, with a bounded weight; sg stops the gradient:
        L_i  = -sg[clip(r, 1 - clip_low, 1 + clip_high)] A logprob        MiniMax-M1 (arXiv 2506.13585) eqs. 4, 5
    "reinforce":
        L_i  = -A logprob                                                 REINFORCE, as in RLOO (arXiv 2402.14740)
    and with any of them
        L_i  = L_i sg[min(exp(old_logprob - sampler_logprob), importance_cap)]
                                                                          truncated importance sampling: Ionides 2008; Yao et al. 2025,
                                                                          "Your efficient RL framework secretly brings you off-policy RL"
        loss = sum_i w_i (L_i + kl_coef * kl_i) / normaliser

    w and the normaliser make the aggregation. "token": w = 1 and the number of ids, DAPO eq. 8. "sequence": w = 1 / |o|, |o| the ids of the
    trajectory, and the number of trajectories, DeepSeekMath eq. 3. "constant": w = 1 and the number of trajectories times the most ids that one
    may have, Dr. GRPO section 3.2: a long wrong answer is then not pushed down less for each of its ids.

    kl_i estimates KL(policy || reference) from the sampled id, with d = logprob - ref_logprob (Schulman, "Approximating KL
    divergence"): "k2" is d^2 / 2, whose gradient is that of the KL when on policy; "k3" is exp(-d) - 1 + d, never negative and
    unbiased in value.

    old_logprobs are those of the policy before the step: the sampler's, if it is the same policy; else the trainer's own, and
    sampler_logprobs with an importance_cap account for the difference, be it in arithmetic or in weights (the decoupled objective of
    Hilton et al., arXiv 2110.00641). sequences int64 [N] numbers the sequence of each id, for "gspo". weights [N] are all 1 by default.

    Gradients flow into `logprobs` alone. Log-ratios are cut at +-20, where the ratio is clipped anyway, so that an overflow
    cannot turn the gradient into NaN. N = 0 gives 0 with a graph, so that a rank without work still takes part in the backward.

    Returns the loss [] and metrics, each a sum over the ids divided by `count`, the sampled ids of the step (by default the normaliser); they
    add up over micro-batches and ranks. About r against the sampler: ratio; ratio_outside (share of r outside [0.5, 2]); old_kl, the k3
    estimate of KL(sampler || policy). clip_fraction (ids whose gradient the clip stopped, or whose weight it changed); dual_clip_fraction; kl,
    the estimate above (0 without a reference); with a cap importance, the mean weight, and importance_capped, the share at the cap.

    ValueError: shapes that differ, normaliser <= 0, an unknown surrogate or estimator, kl_coef without ref_logprobs, bounds out of order.
    """
    if not logprobs.shape == old_logprobs.shape == advantages.shape or logprobs.dim() != 1:
        raise ValueError(
            f"logprobs, old_logprobs, advantages must be [N]: {logprobs.shape}, {old_logprobs.shape}, {advantages.shape}"
        )
    if not normaliser > 0:
        raise ValueError(
            f"normaliser is {normaliser}: it must be the number of sampled ids of the step"
        )
    if not (
        0 <= clip_low <= 1 and clip_high >= 0 and (dual_clip is None or dual_clip > 1 + clip_high)
    ):
        raise ValueError(
            f"need 0 <= clip_low <= 1, clip_high >= 0, dual_clip > 1 + clip_high: {clip_low}, {clip_high}, {dual_clip}"
        )
    if surrogate not in SURROGATES or (dual_clip is not None and surrogate not in ("clip", "gspo")):
        raise ValueError(
            f"surrogate is {surrogate!r}: it must be one of {', '.join(SURROGATES)}, with dual_clip one of the first two"
        )
    if surrogate == "gspo" and sequences is None:
        raise ValueError("surrogate 'gspo' needs sequences")
    if kl_estimator not in ("k2", "k3"):
        raise ValueError(f"kl_estimator is {kl_estimator!r}: it must be 'k2' or 'k3'")
    if kl_coef and ref_logprobs is None:
        raise ValueError(f"kl_coef is {kl_coef}, but there are no ref_logprobs")
    if importance_cap is not None and (sampler_logprobs is None or not importance_cap > 0):
        raise ValueError(
            f"importance_cap is {importance_cap}: it must be above 0, and needs sampler_logprobs"
        )

    advantages, old_logprobs = advantages.detach(), old_logprobs.detach()
    log_ratio = (logprobs - old_logprobs).clamp(-20.0, 20.0)
    if surrogate == "gspo":
        log_ratio = _sequence_mean(log_ratio.detach(), sequences) + logprobs - logprobs.detach()
    ratio = log_ratio.exp()
    bounded = ratio.clamp(1 - clip_low, 1 + clip_high)
    dual = torch.zeros_like(ratio, dtype=torch.bool)
    if surrogate in ("clip", "gspo"):
        unclipped, clipped = -advantages * ratio, -advantages * bounded
        losses = torch.maximum(unclipped, clipped)
        stopped = clipped > unclipped
        if dual_clip is not None:
            dual = (advantages < 0) & (ratio > dual_clip)
            losses = torch.where(dual, -advantages * dual_clip, losses)
    elif surrogate == "cispo":
        losses, stopped = -bounded.detach() * advantages * logprobs, bounded != ratio
    else:
        losses, stopped = -advantages * logprobs, torch.zeros_like(dual)
    if importance_cap is not None:
        importance = (old_logprobs - sampler_logprobs).clamp(-20.0, 20.0).exp()
        losses = losses * importance.clamp(max=importance_cap)
    kl = torch.zeros_like(losses)
    if ref_logprobs is not None:
        difference = logprobs - ref_logprobs.detach()
        kl = (
            difference.square() / 2
            if kl_estimator == "k2"
            else torch.expm1(-difference) + difference
        )
        losses = losses + kl_coef * kl
    if weights is not None:
        losses = losses * weights

    with torch.no_grad():
        drift = (logprobs - (old_logprobs if sampler_logprobs is None else sampler_logprobs)).clamp(
            -20.0, 20.0
        )
        against = drift.exp()
        columns = {
            "ratio": against,
            "clip_fraction": stopped,
            "dual_clip_fraction": dual,
            "ratio_outside": (against < 0.5) | (against > 2.0),
            "old_kl": against - 1 - drift,
            "kl": kl,
        }
        if importance_cap is not None:
            columns |= {
                "importance": importance.clamp(max=importance_cap),
                "importance_capped": importance > importance_cap,
            }
        sums = torch.stack(
            [column.sum(dtype=torch.float64) for column in columns.values()]
        ).tolist()
    return losses.sum() / normaliser, {
        name: value / (count or normaliser) for name, value in zip(columns, sums)
    }


def _sequence_mean(values: Tensor, sequences: Tensor) -> Tensor:
    """[N] -> [N]: the mean of the values with the same number in `sequences`, for each of them."""
    if not len(values):
        return values
    sums = values.new_zeros(int(sequences.max()) + 1).index_add_(0, sequences, values)
    return (sums / torch.bincount(sequences).clamp(min=1))[sequences]


def supervised_loss(logprobs: Tensor, *, normaliser: float) -> Tensor:
    """Negative log-likelihood of the demonstrated ids, summed over `logprobs` [N] and divided by `normaliser` (ids of the step)."""
    if not normaliser > 0:
        raise ValueError(
            f"normaliser is {normaliser}: it must be the number of demonstrated ids of the step"
        )
    return -logprobs.sum() / normaliser
