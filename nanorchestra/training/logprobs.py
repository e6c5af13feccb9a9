"""Log-probabilities, entropies and divergences from hidden states, by chunks of the vocabulary.

    z[n, v] = hidden[n] . weight[v] / temperature  for the ids v < vocab_limit;  p = softmax(z)
    logprob[n] = z[n, target] - logsumexp(z[n])    d logprob / dz = onehot(target) - p
    entropy[n] = logsumexp(z[n]) - sum_v p z
    kl[n] = sum_v p d - logsumexp(z[n]) + logsumexp(z_ref[n])  with d = z - z_ref
                                                   d kl / dz = p (d - sum_v p d)

No [N, vocab] tensor ever exists: logits are computed for all positions and a chunk of ids, and
again in the backward pass. Forward, a chunk leaves its logsumexp and means under its softmax,
which merge exactly (docs/kernels.md). Backward, the logsumexp of all ids is known, so a chunk is
finished by itself: its rows of the weight's gradient are one product over all positions, rounded
once. The gradient of hidden is added up over the chunks in fp32. Beside arguments, results and this
sum, the functions hold about WORKSPACE bytes.
"""

from collections.abc import Callable
from functools import cache, wraps

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernels.common import wide_product

WORKSPACE = 256 << 20  # bytes of a chunk's logits and of what is made of them
FULL_TILES = 256  # ids; a chunk is a multiple of it


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    reference: tuple[Tensor, Tensor] | None = None,
    temperature: float = 1.0,
    vocab_limit: int,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Returns log p at `targets`, the entropy of p in nats, and KL(p || q), exact, in nats.

    p = softmax(hidden @ weight.T / temperature) over the ids below `vocab_limit`; q is that of the
    `reference`, its hidden states and weight. Without one the KL is None.

    hidden [N, H] and weight [V, H] in one float dtype, targets int64 [N]. Results are [N] in fp32
    (fp64 for fp64). Gradients flow from log-probabilities and KL into hidden and weight; the
    entropy has none.
    """
    ref_hidden, ref_weight = reference or (None, None)
    return _TokenLogprobs.apply(
        hidden, weight, ref_hidden, ref_weight, targets, temperature, vocab_limit
    )


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, ref_hidden, ref_weight, targets, temperature, limit):
        ctx.temperature = temperature
        ctx.chunks = _chunks(hidden, limit, logits=1 if ref_hidden is None else 2)
        zeros = hidden.new_zeros(len(hidden), 1, dtype=_wide(hidden))
        seen = ref_seen = _of_no_ids(hidden)
        chosen = ref_chosen = zeros  # logits of the targets
        for ids in ctx.chunks:
            column, inside = _column(targets, ids)
            logits = wide_product(hidden, weight[ids].T)  # [N, ids]
            chosen = torch.where(inside, logits.gather(1, column), chosen)
            values = [logits]
            if ref_hidden is not None:
                ref_logits = wide_product(ref_hidden, ref_weight[ids].T)
                ref_chosen = torch.where(inside, ref_logits.gather(1, column), ref_chosen)
                ref_seen = _merge(ref_seen, _softmax_means(ref_logits, temperature, []))
                values.append(logits - ref_logits)
            seen = _merge(seen, _softmax_means(logits, temperature, values))
        logsumexp, means = seen
        logprobs = _of_positions(chosen.double() / temperature - logsumexp, hidden)
        entropy = _of_positions(logsumexp - means[:, :1] / temperature, hidden)
        ctx.mark_non_differentiable(entropy)
        kl, mean = None, zeros  # mean: of logits - ref_logits under p
        if ref_hidden is not None:
            ref_logsumexp, _ = ref_seen
            kl = _of_positions(means[:, 1:] / temperature - logsumexp + ref_logsumexp, hidden)
            mean = means[:, 1:]
        rows = logsumexp.to(logprobs.dtype), mean.to(logprobs.dtype), chosen - ref_chosen
        ctx.save_for_backward(hidden, weight, ref_hidden, ref_weight, targets, logprobs, *rows)
        return logprobs, entropy, kl

    @staticmethod
    @once_differentiable
    def backward(ctx, grad, _, grad_of_kl):
        hidden, weight, ref_hidden, ref_weight, targets, logprobs, *rows = ctx.saved_tensors
        logsumexp, mean, chosen_difference = rows
        grad = (grad / ctx.temperature)[:, None]
        of_target = -grad * logprobs.expm1()[:, None]  # grad (1 - p)
        if ref_hidden is not None:
            # d = (logits - ref_logits) / temperature, and z = logits / temperature
            grad_of_kl = (grad_of_kl / ctx.temperature**2)[:, None]
            of_target += logprobs.exp()[:, None] * (chosen_difference - mean) * grad_of_kl

        def grad_logits(ids):
            logits, factor = wide_product(hidden, weight[ids].T), -grad
            if ref_hidden is not None:
                ref_logits = wide_product(ref_hidden, ref_weight[ids].T)
                factor = (logits - ref_logits).sub_(mean).mul_(grad_of_kl).sub_(grad)
            grads = _softmax_times(factor, logits, logsumexp, ctx.temperature, weight.dtype)
            column, inside = _column(targets, ids)
            there = torch.where(inside, of_target.to(grads.dtype), grads.gather(1, column))
            return grads.scatter_(1, column, there)

        return *_gradients(ctx, hidden, weight, grad_logits), None, None, None, None, None


def compiled_on_gpu(function: Callable) -> Callable:
    """Returns the function; on CUDA tensors torch.compile makes it one kernel, at its first call.

    One compilation serves every number of positions and ids. A row is summed in an order that does
    not depend on the sizes of the first call.
    """

    @cache
    def compiled():
        return torch.compile(function, dynamic=True, options={"split_reductions": False})

    @wraps(function)
    def choose(first, *others):
        return (compiled() if first.is_cuda else function)(first, *others)

    return choose


@compiled_on_gpu
def _softmax_means(logits, temperature, values):
    """Returns the logsumexp of logits / temperature, and the means of values under its softmax.

    logits and each of values [N, ids] -> [N, 1] and [N, len(values)].
    """
    z = logits / temperature
    top = z.amax(1, keepdim=True)
    weights = z.sub_(top).exp_()
    total = weights.sum(1, keepdim=True)
    means = [(weights * value).sum(1) for value in values]
    means = torch.stack(means, 1) / total if means else total[:, :0]
    return top + total.log(), means


@compiled_on_gpu
def _softmax_times(factor, logits, logsumexp, temperature, dtype):
    """Returns factor * exp(logits / temperature - logsumexp) [N, ids], rounded to dtype."""
    return (logits / temperature).sub_(logsumexp).exp_().mul_(factor).to(dtype)


def _of_no_ids(hidden):
    """Returns what _softmax_means would of no ids, in fp64; its one mean stands for any number.

    Chunks are merged in fp64: in fp32 their shares do not quite add up to 1, which costs an entropy
    of logits around 30 about 1e-4 nats.
    """
    zeros = hidden.new_zeros(len(hidden), 1, dtype=torch.float64)
    return zeros - torch.inf, zeros


def _merge(one, other):
    """Returns the logsumexp [N, 1] and the means over the ids of both, from those over each."""
    (one_lse, one_means), (other_lse, other_means) = one, other
    lse = torch.logaddexp(one_lse, other_lse)
    return lse, one_means * (one_lse - lse).exp() + other_means * (other_lse - lse).exp()


def _column(targets, ids):
    """Returns the column of each target in a chunk, or any if it has none, and if it has one.

    targets [N] -> [N, 1] each.
    """
    column = targets[:, None] - ids.start
    last = ids.stop - ids.start - 1
    return column.clamp(0, last), (column >= 0) & (column <= last)


def _gradients(ctx, hidden, weight, grad_logits):
    """Returns the gradients of hidden and of weight, None if nothing wants the latter.

    grad_logits(ids) returns that of hidden @ weight[ids].T, [N, ids] in the dtype of weight.
    """
    grad_hidden = torch.zeros_like(hidden, dtype=_wide(hidden))
    grad_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
    for ids in ctx.chunks:
        grads = grad_logits(ids)
        grad_hidden += wide_product(grads, weight[ids])
        if grad_weight is not None:
            torch.mm(grads.T, hidden, out=grad_weight[ids])
        del grads  # before there are those of the next chunk
    return grad_hidden.to(hidden.dtype), grad_weight


def _chunks(hidden, limit, logits) -> list[slice]:
    """Returns the ids below limit in slices.

    WORKSPACE holds, in fp32, so many tensors of logits, as many of what is made of them, and one.
    """
    bytes_of_id = (2 * logits + 1) * _wide(hidden).itemsize * max(len(hidden), 1)
    width = max(1, WORKSPACE // bytes_of_id // FULL_TILES) * FULL_TILES
    return [slice(start, min(start + width, limit)) for start in range(0, limit, width)]


def _of_positions(column, hidden) -> Tensor:
    """Returns a column, fp64 [N, 1], as a result [N]."""
    return column[:, 0].to(_wide(hidden))


def _wide(tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)
