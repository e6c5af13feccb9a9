"""GRPO in formulas: rewards of a group to advantages, log-probabilities to a loss.

Everything here is a function of flat tensors over sampled ids only ([N], no padding, no mask): who calls it selects the positions.
Every loss is a sum divided by a normaliser the caller gives, the number of sampled ids in the whole optimiser step (all micro-batches,
all ranks), so losses and metrics of micro-batches and ranks simply add up. No [N, vocab] tensor ever exists: the functions that
need the vocabulary work on `chunk` positions at a time and compute them again in the backward pass.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .ops import by_kernel


def group_advantages(rewards: Sequence[float], valid: Sequence[bool], *, well_formed: Sequence[bool] | None = None,
                     drop_invalid_format: bool = True, std: bool = True, min_std: float = 1e-3,
                     clip: float | None = None) -> tuple[list[float], list[str | None]]:
    """Advantages of the members of one group, and why each member does not enter the loss (None if it does).

        A_i = (R_i - mean R) / (std R + 1e-6)      DeepSeekMath (arXiv 2402.03300) section 4.1.2; std is the sample one (n - 1)
        A_i = R_i - mean R                         with std=False: Dr. GRPO (arXiv 2503.20783) equation 3
    then clipped to [-clip, clip] if `clip` is given (ToolOrchestra: 3).

    Reasons, and what they mean for the group's mean and std:
    "infrastructure"  valid[i] is False (a time-out of the house, not of the policy): outside the statistics.
    "homogeneous"     fewer than two valid members, or their std is not above `min_std` (ToolOrchestra: 0.1): nothing to compare.
    "invalid_format"  well_formed[i] is False: stays in the statistics with the reward it was given, so its siblings are still
                      compared with it, but is itself left out of the loss, as published. `drop_invalid_format=False` keeps it in
                      the loss, so that a bad format is pushed down.
    A member that is left out has the advantage 0. The mean over the members kept therefore need not be 0.

    ValueError: lists of different length, a valid reward that is not finite, min_std < 0, clip <= 0.
    """
    well_formed = [True] * len(rewards) if well_formed is None else well_formed
    if not len(rewards) == len(valid) == len(well_formed):
        raise ValueError(f"rewards, valid and well_formed have {len(rewards)}, {len(valid)} and {len(well_formed)} entries")
    if not (min_std >= 0 and (clip is None or clip > 0)):
        raise ValueError(f"min_std must be 0 or more and clip above 0, got {min_std} and {clip}")
    counted = [float(reward) for reward, ok in zip(rewards, valid) if ok]
    if not all(math.isfinite(reward) for reward in counted):
        raise ValueError(f"rewards must be finite, got {counted}")
    mean = spread = 0.0  # so that a lone member counts as homogeneous
    if len(counted) >= 2:
        mean = math.fsum(counted) / len(counted)
        spread = math.sqrt(math.fsum((reward - mean) ** 2 for reward in counted) / (len(counted) - 1))

    advantages, reasons = [], []
    for reward, ok, formed in zip(rewards, valid, well_formed):
        if not ok:
            reason = "infrastructure"
        elif spread <= min_std:
            reason = "homogeneous"
        elif drop_invalid_format and not formed:
            reason = "invalid_format"
        else:
            reason = None
        advantage = 0.0
        if reason is None:
            advantage = (reward - mean) / (spread + 1e-6) if std else reward - mean
            advantage = advantage if clip is None else max(-clip, min(clip, advantage))
        advantages.append(advantage)
        reasons.append(reason)
    return advantages, reasons


def policy_loss(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, *, normaliser: float, clip_low: float = 0.2,
                clip_high: float = 0.28, dual_clip: float | None = None, ref_logprobs: Tensor | None = None,
                kl_coef: float = 0.0, kl_estimator: str = "k2") -> tuple[Tensor, dict[str, float]]:
    """The clipped policy-gradient loss, summed over ids and divided by `normaliser`. All tensors are [N], one entry a sampled id.

        r    = exp(logprob - old_logprob)
        L_i  = max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high))         PPO (arXiv 1707.06347) eq. 7; two bounds: DAPO (2503.14476)
        L_i  = min(L_i, -A dual_clip)  where A < 0                        dual clip (arXiv 1912.09729) eq. 5
        loss = sum_i (L_i + kl_coef * kl_i) / normaliser                  token mean: DAPO eq. 8

    kl_i estimates KL(policy || reference) from the sampled id, with d = logprob - ref_logprob (Schulman, "Approximating KL
    divergence"): "k2" is d^2 / 2, whose gradient is that of the KL when on policy; "k3" is exp(-d) - 1 + d, never negative and
    unbiased in value.

    Gradients flow into `logprobs` alone. Log-ratios are cut at +-20, where the ratio is clipped anyway, so that an overflow
    cannot turn the gradient into NaN. N = 0 gives 0 with a graph, so that a rank without work still takes part in the backward.

    Returns the loss [] and metrics, each a sum over the ids divided by `normaliser` (they add up over micro-batches and ranks):
    ratio; clip_fraction (ids whose gradient the clip stopped); dual_clip_fraction; ratio_outside (share of r outside [0.5, 2]);
    old_kl, the k3 estimate of KL(old || policy); kl, the estimate above (0 without a reference).

    ValueError: shapes that differ, normaliser <= 0, an unknown estimator, kl_coef without ref_logprobs, bounds out of order.
    """
    if not logprobs.shape == old_logprobs.shape == advantages.shape or logprobs.dim() != 1:
        raise ValueError(f"logprobs, old_logprobs, advantages must be [N]: {logprobs.shape}, {old_logprobs.shape}, {advantages.shape}")
    if not normaliser > 0:
        raise ValueError(f"normaliser is {normaliser}: it must be the number of sampled ids of the step")
    if not (0 <= clip_low <= 1 and clip_high >= 0 and (dual_clip is None or dual_clip > 1 + clip_high)):
        raise ValueError(f"need 0 <= clip_low <= 1, clip_high >= 0, dual_clip > 1 + clip_high: {clip_low}, {clip_high}, {dual_clip}")
    if kl_estimator not in ("k2", "k3"):
        raise ValueError(f"kl_estimator is {kl_estimator!r}: it must be 'k2' or 'k3'")
    if kl_coef and ref_logprobs is None:
        raise ValueError(f"kl_coef is {kl_coef}, but there are no ref_logprobs")

    advantages = advantages.detach()
    log_ratio = (logprobs - old_logprobs.detach()).clamp(-20.0, 20.0)
    ratio = log_ratio.exp()
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    losses = torch.maximum(unclipped, clipped)
    dual = torch.zeros_like(losses, dtype=torch.bool)
    if dual_clip is not None:
        dual = (advantages < 0) & (ratio > dual_clip)
        losses = torch.where(dual, -advantages * dual_clip, losses)
    kl = torch.zeros_like(losses)
    if ref_logprobs is not None:
        difference = logprobs - ref_logprobs.detach()
        kl = difference.square() / 2 if kl_estimator == "k2" else torch.expm1(-difference) + difference
        losses = losses + kl_coef * kl

    with torch.no_grad():
        columns = {"ratio": ratio, "clip_fraction": clipped > unclipped, "dual_clip_fraction": dual,
                   "ratio_outside": (ratio < 0.5) | (ratio > 2.0), "old_kl": ratio - 1 - log_ratio, "kl": kl}
        sums = torch.stack([column.sum(dtype=torch.float64) for column in columns.values()]).tolist()
    return losses.sum() / normaliser, {name: value / normaliser for name, value in zip(columns, sums)}


def supervised_loss(logprobs: Tensor, *, normaliser: float) -> Tensor:
    """Negative log-likelihood of the demonstrated ids, summed over `logprobs` [N] and divided by `normaliser` (ids of the step)."""
    if not normaliser > 0:
        raise ValueError(f"normaliser is {normaliser}: it must be the number of demonstrated ids of the step")
    return -logprobs.sum() / normaliser


def token_logprobs(hidden: Tensor, weight: Tensor, targets: Tensor, *, temperature: float = 1.0, vocab_limit: int | None = None,
                   chunk: int = 1024) -> tuple[Tensor, Tensor]:
    """log softmax(hidden @ weight.T / temperature) at `targets`, over the ids below `vocab_limit`; and the entropy in nats.

    hidden [N, H] and weight [V, H] in any float dtype; targets [N] int64. Returns logprobs [N], with gradients into hidden and
    weight, and entropy [N], detached; both fp32 (fp64 for fp64). Logits are fp32 and exist for `chunk` positions at a time.
    ValueError: temperature or chunk not positive, vocab_limit outside 1..V, shapes that do not fit, a target not below vocab_limit.
    """
    limit = _check_head(hidden, weight, temperature, vocab_limit, chunk)
    if targets.shape != hidden.shape[:1]:
        raise ValueError(f"targets {tuple(targets.shape)} must be [N] for hidden {tuple(hidden.shape)}")
    if targets.numel() and not (0 <= int(targets.min()) and int(targets.max()) < limit):
        raise ValueError(f"targets must lie in 0..{limit - 1}, got {int(targets.min())}..{int(targets.max())}")
    if by_kernel(hidden):                                            # no logits at all in the forward pass
        from kernels.logprob import linear_logprob
        logprobs, entropy = linear_logprob(hidden, weight, targets, temperature=temperature, vocab=limit)
        return logprobs, entropy.detach()
    return _TokenLogprobs.apply(hidden, weight, targets, temperature, limit, chunk)


def full_kl(hidden: Tensor, ref_hidden: Tensor, weight: Tensor, ref_weight: Tensor, *, temperature: float = 1.0,
            vocab_limit: int | None = None, chunk: int = 1024) -> Tensor:
    """KL(policy || reference) = sum_v p_v (log p_v - log q_v) at each position, exactly, over the ids below `vocab_limit`, in nats.

    hidden, ref_hidden [N, H]; weight, ref_weight [V, H]. p and q are softmaxes at `temperature`. Returns [N], fp32 (fp64 for fp64),
    with gradients into hidden and weight, none into the reference. Logits exist for `chunk` positions at a time. ValueError as above.
    """
    limit = _check_head(hidden, weight, temperature, vocab_limit, chunk)
    _check_head(ref_hidden, ref_weight, temperature, limit, chunk)
    if len(ref_hidden) != len(hidden):
        raise ValueError(f"hidden has {len(hidden)} positions, ref_hidden {len(ref_hidden)}")
    return _FullKL.apply(hidden, weight, ref_hidden, ref_weight, temperature, limit, chunk)


class _TokenLogprobs(torch.autograd.Function):
    """Chunked head. With z = h W^T / T and p = softmax(z): d logprob_t / dz = onehot(t) - p, computed from the stored logsumexp."""

    @staticmethod
    def forward(ctx, hidden, weight, targets, temperature, limit, chunk):
        logprobs = torch.empty(len(hidden), dtype=_wide(hidden), device=hidden.device)
        entropy, logsumexp = torch.empty_like(logprobs), torch.empty_like(logprobs)
        for rows in _chunks(len(hidden), chunk):
            logits = _logits(hidden[rows], weight[:limit], temperature)  # [chunk, limit]
            logsumexp[rows] = logits.logsumexp(-1)
            logprobs[rows] = logits.gather(1, targets[rows, None])[:, 0] - logsumexp[rows]
            logits -= logsumexp[rows, None]
            entropy[rows] = -torch.einsum("nv,nv->n", logits.exp(), logits)
        ctx.save_for_backward(hidden, weight, targets, logsumexp)
        ctx.options = temperature, limit, chunk
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx, grad, _):
        hidden, weight, targets, logsumexp = ctx.saved_tensors
        temperature, limit, chunk = ctx.options

        def grad_logits(rows: slice, logits: Tensor) -> Tensor:
            probabilities = logits.sub_(logsumexp[rows, None]).exp_()
            scaled = probabilities.mul_(-grad[rows, None])
            return scaled.scatter_add_(1, targets[rows, None], grad[rows, None])

        return *_head_backward(ctx, hidden, weight, grad_logits), None, None, None, None


class _FullKL(torch.autograd.Function):
    """Chunked head. dKL/dz_v = p_v (log p_v - log q_v - KL)."""

    @staticmethod
    def forward(ctx, hidden, weight, ref_hidden, ref_weight, temperature, limit, chunk):
        kl = torch.empty(len(hidden), dtype=_wide(hidden), device=hidden.device)
        for rows in _chunks(len(hidden), chunk):
            logp = _logits(hidden[rows], weight[:limit], temperature).log_softmax(-1)  # [chunk, limit]
            logq = _logits(ref_hidden[rows], ref_weight[:limit], temperature).log_softmax(-1)
            kl[rows] = torch.einsum("nv,nv->n", logp.exp(), logp - logq)
        ctx.save_for_backward(hidden, weight, ref_hidden, ref_weight, kl)
        ctx.options = temperature, limit, chunk
        return kl

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        hidden, weight, ref_hidden, ref_weight, kl = ctx.saved_tensors
        temperature, limit, _ = ctx.options

        def grad_logits(rows: slice, logits: Tensor) -> Tensor:
            logp = logits.log_softmax(-1)
            logq = _logits(ref_hidden[rows], ref_weight[:limit], temperature).log_softmax(-1)
            return logp.exp().mul_(logp.sub_(logq).sub_(kl[rows, None])).mul_(grad[rows, None])

        return *_head_backward(ctx, hidden, weight, grad_logits), None, None, None, None, None


def _head_backward(ctx, hidden: Tensor, weight: Tensor, grad_logits) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of hidden and weight, chunk by chunk, from `grad_logits(rows, logits) -> dloss/d(logits / temperature)`."""
    temperature, limit, chunk = ctx.options
    grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
    grad_weight = torch.zeros(weight.shape, dtype=_wide(weight), device=weight.device) if ctx.needs_input_grad[1] else None
    for rows in _chunks(len(hidden), chunk):
        step = grad_logits(rows, _logits(hidden[rows], weight[:limit], temperature)).div_(temperature).to(weight.dtype)
        if grad_hidden is not None:
            grad_hidden[rows] = step @ weight[:limit]
        if grad_weight is not None:
            grad_weight[:limit] += _wide_matmul(step.T, hidden[rows])
    return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype)


def _chunks(count: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def _logits(hidden: Tensor, weight: Tensor, temperature: float) -> Tensor:
    return _wide_matmul(hidden, weight.T).div_(temperature)


def _wide_matmul(a: Tensor, b: Tensor) -> Tensor:
    """a @ b in fp32 (fp64 for fp64). CUDA accumulates bf16 products in fp32 anyway; this only keeps it from rounding the result."""
    if a.is_cuda and a.dtype in (torch.bfloat16, torch.float16):
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.to(_wide(a)) @ b.to(_wide(b))


def _check_head(hidden: Tensor, weight: Tensor, temperature: float, vocab_limit: int | None, chunk: int) -> int:
    """Checks what the chunked head functions share; returns how many ids count."""
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(f"hidden {tuple(hidden.shape)} and weight {tuple(weight.shape)} must be [N, H] and [V, H]")
    if not temperature > 0 or chunk < 1:
        raise ValueError(f"temperature and chunk must be positive, got {temperature} and {chunk}")
    limit = len(weight) if vocab_limit is None else vocab_limit
    if not 1 <= limit <= len(weight):
        raise ValueError(f"vocab_limit is {limit}: it must lie in 1..{len(weight)}")
    return limit
