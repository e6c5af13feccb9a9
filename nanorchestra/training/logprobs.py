"""Log-probabilities, entropies and divergences from hidden states, without logits in memory.

No [N, vocab] tensor ever exists. On a GPU a Triton kernel fuses the output matrix with the softmax.
Elsewhere logits are computed for a few positions at a time, and again in the backward pass. Beside
arguments and results the functions hold about WORKSPACE bytes, for any N and vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

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
        return linear_logprob(hidden, weight, targets, temperature, vocab_limit)
    entropy, logsumexp = (hidden.new_empty(len(hidden), dtype=_wide(hidden)) for _ in range(2))

    def values(rows: slice, logits: Tensor) -> Tensor:
        logsumexp[rows] = logits.logsumexp(-1)
        logprobs = logits.gather(1, targets[rows, None])[:, 0] - logsumexp[rows]
        logits -= logsumexp[rows, None]
        entropy[rows] = -torch.einsum("nv,nv->n", logits.exp(), logits)
        return logprobs

    def grad_logits(rows: slice, logits: Tensor, _: Tensor, grad: Tensor) -> Tensor:
        """The gradient in the logits, onehot(target) - p, times `grad`; in their place."""
        probabilities = logits.sub_(logsumexp[rows, None]).exp_()
        return probabilities.mul_(-grad[:, None]).scatter_add_(
            1, targets[rows, None], grad[:, None]
        )

    size = _chunk_size(vocab_limit, hidden, 2)
    head = _Head(values, grad_logits, temperature, vocab_limit, size)
    return _Chunked.apply(hidden, weight, head), entropy


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
    ref_hidden, ref_weight = ref_hidden.detach(), ref_weight.detach()[:vocab_limit]

    def both(rows: slice, logits: Tensor) -> tuple[Tensor, Tensor]:
        logq = _logits(ref_hidden[rows], ref_weight, temperature).log_softmax(-1)
        return logits.log_softmax(-1), logq

    def values(rows: slice, logits: Tensor) -> Tensor:
        logp, logq = both(rows, logits)
        return torch.einsum("nv,nv->n", logp.exp(), logp - logq)

    def grad_logits(rows: slice, logits: Tensor, kl: Tensor, grad: Tensor) -> Tensor:
        """P (log p - log q - KL), times the gradient."""
        logp, logq = both(rows, logits)
        return logp.exp().mul_(logp.sub_(logq).sub_(kl[:, None])).mul_(grad[:, None])

    size = _chunk_size(vocab_limit, hidden, 5)
    head = _Head(values, grad_logits, temperature, vocab_limit, size)
    return _Chunked.apply(hidden, weight, head)


@dataclass(frozen=True)
class _Head:
    """A function of the logits z = hidden @ weight.T / temperature below `limit`, by chunks.

    values(rows, z) -> [chunk]; grad_logits(rows, z, values, gradient of values) -> [chunk, limit].
    """

    values: Callable[[slice, Tensor], Tensor]
    grad_logits: Callable[[slice, Tensor, Tensor, Tensor], Tensor]
    temperature: float
    limit: int
    size: int


class _Chunked(torch.autograd.Function):
    """Computes logits a chunk at a time, in the forward and again in the backward pass."""

    @staticmethod
    def forward(ctx, hidden, weight, head):
        values = hidden.new_empty(len(hidden), dtype=_wide(hidden))
        for rows in _chunks(len(hidden), head.size):
            logits = _logits(hidden[rows], weight[: head.limit], head.temperature)
            values[rows] = head.values(rows, logits)
        ctx.save_for_backward(hidden, weight, values)
        ctx.head = head
        return values

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        (hidden, weight, values), head = ctx.saved_tensors, ctx.head
        grad_hidden = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_hidden = torch.empty_like(hidden)
        if ctx.needs_input_grad[1]:
            grad_weight = torch.zeros_like(weight, dtype=_wide(weight))
        piece = max(1, WORKSPACE // (2 * _wide(weight).itemsize * hidden.shape[1]))
        for rows in _chunks(len(hidden), head.size):
            logits = _logits(hidden[rows], weight[: head.limit], head.temperature)
            step = head.grad_logits(rows, logits, values[rows], grad[rows])
            step = step.div_(head.temperature).to(weight.dtype)
            if grad_hidden is not None:
                grad_hidden[rows] = step @ weight[: head.limit]
            if grad_weight is not None:
                for ids in _chunks(head.limit, piece):  # the product is as large as the gradient
                    grad_weight[ids] += _wide_matmul(step[:, ids].T, hidden[rows])
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), None


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
