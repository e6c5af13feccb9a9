"""Log-probabilities, entropies and divergences from hidden states, without logits in memory.

No [N, vocab] tensor ever exists. On a GPU a Triton kernel fuses the output matrix with the softmax.
Elsewhere logits are computed for a few positions at a time, and again in the backward pass. Beside
arguments and results the functions hold about WORKSPACE bytes, for any N and vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernels.logprob import linear_logprob
from nanorchestra.model.ops import by_kernel

WORKSPACE = 512 << 20  # bytes of logits and of what is made of them, of one position at least


def token_logprobs(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, temperature: float = 1.0, vocab_limit: int
) -> tuple[Tensor, Tensor]:
    """Returns log softmax(hidden @ weight.T / temperature) at `targets`, and the entropy in nats.

    The softmax is over the ids below `vocab_limit`. hidden [N, H] and weight [V, H] in one float
    dtype, targets int64 [N]. Both results are [N] in fp32 (fp64 for fp64). Gradients flow from the
    log-probabilities into hidden and weight; the entropy has none.
    """
    if by_kernel(hidden):
        logprobs, entropy = linear_logprob(
            hidden, weight, targets, temperature=temperature, vocab=vocab_limit
        )
        return logprobs, entropy.detach()
    return _TokenLogprobs.apply(hidden, weight, targets, temperature, vocab_limit)


def full_kl(
    hidden: Tensor,
    ref_hidden: Tensor,
    weight: Tensor,
    ref_weight: Tensor,
    *,
    temperature: float = 1.0,
    vocab_limit: int,
) -> Tensor:
    """Returns KL(p || q) = sum_v p_v (log p_v - log q_v) at each position, exactly, in nats.

    p and q are the softmaxes of policy and reference at `temperature` over the ids below
    `vocab_limit`. hidden, ref_hidden [N, H]; weight, ref_weight [V, H] -> [N] in fp32 (fp64 for
    fp64). Gradients flow into hidden and weight.
    """
    return _FullKL.apply(hidden, weight, ref_hidden, ref_weight, temperature, vocab_limit)


class _TokenLogprobs(torch.autograd.Function):
    """With z = h W^T / T and p = softmax(z): d logprob_t / dz = onehot(t) - p."""

    @staticmethod
    def forward(ctx, hidden, weight, targets, temperature, limit):
        size = _chunk_size(limit, hidden, 2)
        logprobs = torch.empty(len(hidden), dtype=_wide(hidden), device=hidden.device)
        entropy, logsumexp = torch.empty_like(logprobs), torch.empty_like(logprobs)
        for rows in _chunks(len(hidden), size):
            logits = _logits(hidden[rows], weight[:limit], temperature)  # [chunk, limit]
            logsumexp[rows] = logits.logsumexp(-1)
            logprobs[rows] = logits.gather(1, targets[rows, None])[:, 0] - logsumexp[rows]
            logits -= logsumexp[rows, None]
            entropy[rows] = -torch.einsum("nv,nv->n", logits.exp(), logits)
        ctx.save_for_backward(hidden, weight, targets, logsumexp)
        ctx.options = temperature, limit, size
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx, grad, _):
        hidden, weight, targets, logsumexp = ctx.saved_tensors

        def grad_logits(rows: slice, logits: Tensor) -> Tensor:
            probabilities = logits.sub_(logsumexp[rows, None]).exp_()
            scaled = probabilities.mul_(-grad[rows, None])
            return scaled.scatter_add_(1, targets[rows, None], grad[rows, None])

        return *_head_backward(ctx, hidden, weight, grad_logits), None, None, None


class _FullKL(torch.autograd.Function):
    """With z as above: dKL / dz_v = p_v (log p_v - log q_v - KL)."""

    @staticmethod
    def forward(ctx, hidden, weight, ref_hidden, ref_weight, temperature, limit):
        size = _chunk_size(limit, hidden, 5)
        kl = torch.empty(len(hidden), dtype=_wide(hidden), device=hidden.device)
        for rows in _chunks(len(hidden), size):
            logits = _logits(hidden[rows], weight[:limit], temperature)  # [chunk, limit]
            logp = logits.log_softmax(-1)
            logq = _logits(ref_hidden[rows], ref_weight[:limit], temperature).log_softmax(-1)
            kl[rows] = torch.einsum("nv,nv->n", logp.exp(), logp - logq)
        ctx.save_for_backward(hidden, weight, ref_hidden, ref_weight, kl)
        ctx.options = temperature, limit, size
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

        return *_head_backward(ctx, hidden, weight, grad_logits), None, None, None, None


def _head_backward(
    ctx: torch.autograd.function.FunctionCtx,
    hidden: Tensor,
    weight: Tensor,
    grad_logits: Callable[[slice, Tensor], Tensor],
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of hidden and weight, chunk by chunk.

    grad_logits(rows, logits) returns dloss / dz of a chunk, in place of its logits.
    """
    temperature, limit, size = ctx.options
    grad_hidden = grad_weight = None
    if ctx.needs_input_grad[0]:
        grad_hidden = torch.empty_like(hidden)
    if ctx.needs_input_grad[1]:
        grad_weight = torch.zeros(weight.shape, dtype=_wide(weight), device=weight.device)
    piece = max(1, WORKSPACE // (2 * _wide(weight).itemsize * hidden.shape[1]))
    for rows in _chunks(len(hidden), size):
        logits = _logits(hidden[rows], weight[:limit], temperature)
        step = grad_logits(rows, logits).div_(temperature).to(weight.dtype)
        if grad_hidden is not None:
            grad_hidden[rows] = step @ weight[:limit]
        if grad_weight is not None:
            for ids in _chunks(limit, piece):  # the whole product is as large as the gradient
                grad_weight[ids] += _wide_matmul(step[:, ids].T, hidden[rows])
    return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype)


def _chunk_size(vocab: int, hidden: Tensor, buffers: int) -> int:
    """Positions at a time, if `buffers` tensors [positions, vocab] are alive at once."""
    return min(1024, max(1, WORKSPACE // (buffers * vocab * _wide(hidden).itemsize)))


def _chunks(count: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def _logits(hidden: Tensor, weight: Tensor, temperature: float) -> Tensor:
    return _wide_matmul(hidden, weight.T).div_(temperature)


def _wide_matmul(a: Tensor, b: Tensor) -> Tensor:
    """The product in fp32 (fp64 for fp64). On CUDA bf16 accumulates in fp32; this keeps it."""
    if a.is_cuda and a.dtype in (torch.bfloat16, torch.float16):
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.to(_wide(a)) @ b.to(_wide(b))
