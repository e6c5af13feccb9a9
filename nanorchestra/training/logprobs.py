"""Log-probabilities, entropies and divergences from hidden states, without logits in memory.

No [N, vocab] tensor ever exists: the functions work on a few positions at a time and compute them again in the backward pass. What they
hold beside their arguments and results stays near WORKSPACE bytes, whatever N and the vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from nanorchestra.model.ops import by_kernel

WORKSPACE = (
    512 << 20
)  # bytes that logits, and what is made of them, may take; the least is one position's


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    vocab_limit: int | None = None,
    chunk: int | None = None,
) -> tuple[Tensor, Tensor]:
    """log softmax(hidden @ weight.T / temperature) at `targets`, over the ids below `vocab_limit`; and the entropy in nats.

    hidden [N, H] and weight [V, H] in any float dtype; targets [N] int64. Returns logprobs [N], with gradients into hidden and
    weight, and entropy [N], detached; both fp32 (fp64 for fp64). Logits are fp32 and exist for `chunk` positions at a time (as many as fit
    WORKSPACE, 1024 at most).
    ValueError: temperature or chunk not positive, vocab_limit outside 1..V, shapes that do not fit, a target not below vocab_limit.
    """
    limit = _check_head(hidden, weight, temperature, vocab_limit, chunk)
    if targets.shape != hidden.shape[:1]:
        raise ValueError(
            f"targets {tuple(targets.shape)} must be [N] for hidden {tuple(hidden.shape)}"
        )
    if targets.numel() and not (0 <= int(targets.min()) and int(targets.max()) < limit):
        raise ValueError(
            f"targets must lie in 0..{limit - 1}, got {int(targets.min())}..{int(targets.max())}"
        )
    if by_kernel(hidden):  # no logits at all in the forward pass
        from kernels.logprob import linear_logprob

        logprobs, entropy = linear_logprob(
            hidden, weight, targets, temperature=temperature, vocab=limit
        )
        return logprobs, entropy.detach()
    return _TokenLogprobs.apply(
        hidden, weight, targets, temperature, limit, chunk or _fitting(limit, hidden, buffers=2)
    )


def full_kl(
    hidden: Tensor,
    ref_hidden: Tensor,
    weight: Tensor,
    ref_weight: Tensor,
    *,
    temperature: float = 1.0,
    vocab_limit: int | None = None,
    chunk: int | None = None,
) -> Tensor:
    """KL(policy || reference) = sum_v p_v (log p_v - log q_v) at each position, exactly, over the ids below `vocab_limit`, in nats.

    hidden, ref_hidden [N, H]; weight, ref_weight [V, H]. p and q are softmaxes at `temperature`. Returns [N], fp32 (fp64 for fp64),
    with gradients into hidden and weight, none into the reference. Logits exist for `chunk` positions at a time. ValueError as above.
    """
    limit = _check_head(hidden, weight, temperature, vocab_limit, chunk)
    _check_head(ref_hidden, ref_weight, temperature, limit, chunk)
    if len(ref_hidden) != len(hidden):
        raise ValueError(f"hidden has {len(hidden)} positions, ref_hidden {len(ref_hidden)}")
    return _FullKL.apply(
        hidden,
        weight,
        ref_hidden,
        ref_weight,
        temperature,
        limit,
        chunk or _fitting(limit, hidden, buffers=5),
    )


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
            logp = _logits(hidden[rows], weight[:limit], temperature).log_softmax(
                -1
            )  # [chunk, limit]
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


def _head_backward(
    ctx, hidden: Tensor, weight: Tensor, grad_logits
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of hidden and weight, chunk by chunk, from `grad_logits(rows, logits) -> dloss/d(logits / temperature)`."""
    temperature, limit, chunk = ctx.options
    grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
    grad_weight = (
        torch.zeros(weight.shape, dtype=_wide(weight), device=weight.device)
        if ctx.needs_input_grad[1]
        else None
    )
    for rows in _chunks(len(hidden), chunk):
        step = (
            grad_logits(rows, _logits(hidden[rows], weight[:limit], temperature))
            .div_(temperature)
            .to(weight.dtype)
        )
        if grad_hidden is not None:
            grad_hidden[rows] = step @ weight[:limit]
        if grad_weight is not None:
            for ids in _chunks(
                limit, max(1, WORKSPACE // (2 * grad_weight.itemsize * hidden.shape[1]))
            ):  # a product as large as the gradient, in pieces
                grad_weight[ids] += _wide_matmul(step[:, ids].T, hidden[rows])
    return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype)


def _fitting(vocab: int, hidden: Tensor, buffers: int) -> int:
    """How many positions at a time, where `buffers` of [positions, vocab] are alive at once."""
    return min(1024, max(1, WORKSPACE // (buffers * vocab * _wide(hidden).itemsize)))


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


def _check_head(
    hidden: Tensor, weight: Tensor, temperature: float, vocab_limit: int | None, chunk: int | None
) -> int:
    """Checks what the chunked head functions share; returns how many ids count."""
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(
            f"hidden {tuple(hidden.shape)} and weight {tuple(weight.shape)} must be [N, H] and [V, H]"
        )
    if not temperature > 0 or (chunk is not None and chunk < 1):
        raise ValueError(f"temperature and chunk must be positive, got {temperature} and {chunk}")
    limit = len(weight) if vocab_limit is None else vocab_limit
    if not 1 <= limit <= len(weight):
        raise ValueError(f"vocab_limit is {limit}: it must lie in 1..{len(weight)}")
    return limit
