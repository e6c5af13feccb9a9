"""Log-probabilities, entropies and divergences from hidden states, without logits in memory.

No [N, vocab] tensor ever exists. On a GPU a Triton kernel fuses the output matrix with the softmax.
Elsewhere logits are computed for a few positions at a time, and again in the backward pass. Beside
arguments and results the functions hold about WORKSPACE bytes, for any N and vocabulary.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernels.common import wide_product
from kernels.logprob import linear_logprob
from nanorchestra.model.ops import by_kernel

WORKSPACE = 256 << 20  # bytes of logits and of what is made of them, of one position at least


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
    entropy = hidden.new_empty(len(hidden), dtype=_wide(hidden))

    def logprobs(rows, logits, grad):
        chosen = targets[rows, None]
        logits -= logits.logsumexp(-1, keepdim=True)
        if grad is not None:  # onehot(target) - p, times the gradient
            return logits.exp_().mul_(-grad).scatter_add_(1, chosen, grad)
        entropy[rows] = -torch.einsum("nv,nv->n", logits.exp(), logits)
        return logits.gather(1, chosen)[:, 0]

    head = _Head(logprobs, temperature, vocab_limit, buffers=2)
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

    def divergence(rows, logits, grad):
        logq = _logits(ref_hidden[rows], ref_weight, temperature).log_softmax(-1)
        logp = logits.log_softmax(-1)
        p, difference = logp.exp(), logp.sub_(logq)
        kl = torch.einsum("nv,nv->n", p, difference)
        return kl if grad is None else p.mul_(difference.sub_(kl[:, None])).mul_(grad)

    return _Chunked.apply(hidden, weight, _Head(divergence, temperature, vocab_limit, buffers=5))


@dataclass(frozen=True)
class _Head:
    """A function of the logits z = hidden @ weight.T / temperature below `limit`, by chunks.

    function(rows, z, None) returns its values [chunk], and function(rows, z, grad) the gradient in
    z, if that in the values is grad [chunk, 1]. It may write to z. Up to `buffers` tensors as large
    as z are alive at once.
    """

    function: Callable[[slice, Tensor, Tensor | None], Tensor]
    temperature: float
    limit: int
    buffers: int

    def chunks(
        self, hidden: Tensor, weight: Tensor, grad: Tensor | None = None
    ) -> Iterator[tuple[slice, Tensor]]:
        """Yields positions and what the function returns for them."""
        row = self.buffers * self.limit * _wide(hidden).itemsize
        for rows in _slices(len(hidden), min(1024, WORKSPACE // row)):
            logits = _logits(hidden[rows], weight[: self.limit], self.temperature)
            values = self.function(rows, logits, None if grad is None else grad[rows, None])
            del logits  # only what is returned stays alive
            yield rows, values


class _Chunked(torch.autograd.Function):
    """Computes logits a chunk at a time, in the forward and again in the backward pass."""

    @staticmethod
    def forward(ctx, hidden, weight, head):
        values = hidden.new_empty(len(hidden), dtype=_wide(hidden))
        for rows, some in head.chunks(hidden, weight):
            values[rows] = some
        ctx.save_for_backward(hidden, weight)
        ctx.head = head
        return values

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        (hidden, weight), head = ctx.saved_tensors, ctx.head
        grad_hidden = torch.empty_like(hidden)
        grad_weight = None
        if ctx.needs_input_grad[1]:
            grad_weight = torch.zeros_like(weight, dtype=_wide(weight))
        piece = WORKSPACE // (2 * _wide(weight).itemsize * hidden.shape[1])
        for rows, step in head.chunks(hidden, weight, grad):
            step = step.div_(head.temperature).to(weight.dtype)
            grad_hidden[rows] = step @ weight[: head.limit]
            if grad_weight is not None:
                for ids in _slices(head.limit, piece):  # the product is as large as the gradient
                    grad_weight[ids] += wide_product(step[:, ids].T, hidden[rows])
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), None


def _slices(count, size) -> list[slice]:
    size = max(1, size)
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]


def _wide(tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _logits(hidden, weight, temperature) -> Tensor:
    return wide_product(hidden, weight.T).div_(temperature)
