"""Log-probabilities of given ids as a differentiable function of hidden states and output matrix.

    z[t, v] = hidden[t] . weight[v] / temperature  for the ids v < vocab;  p = softmax(z)
    logprob[t] = z[t, target] - logsumexp(z[t])
    entropy[t] = logsumexp(z[t]) - sum_v p[t, v] z[t, v]

The kernels are in logprob_forward.py and logprob_backward.py. No pass holds [T, vocab] logits.
"""

import torch
from torch import Tensor

from kernels.logprob_backward import logprob_backward
from kernels.logprob_forward import logprob_forward


def linear_logprob(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, vocab: int
) -> tuple[Tensor, Tensor]:
    """Returns log-probabilities and entropies fp32 [T], in nats.

    hidden [T, N], weight [V, N] of one dtype, targets int64 [T]. The log-probabilities are
    differentiable in hidden and weight, the entropies are not. Only the first `vocab` rows of
    weight count. A target outside 0..vocab-1 has the log-probability minus infinity: a check would
    cost a synchronisation.
    """
    return _LinearLogprob.apply(hidden, weight, targets, temperature, vocab)


class _LinearLogprob(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, vocab: int
    ) -> tuple[Tensor, Tensor]:
        logprobs, entropy, logsumexp = logprob_forward(hidden, weight, targets, temperature, vocab)
        ctx.save_for_backward(hidden, weight, targets, logsumexp)
        ctx.options = temperature, vocab
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[:2]
        grads = logprob_backward(grad.contiguous(), *ctx.saved_tensors, *ctx.options, needed)
        return *grads, None, None, None


def reference(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, vocab: int
) -> tuple[Tensor, Tensor]:
    """Returns what linear_logprob does, in the dtype of hidden."""
    logp = (hidden @ weight[:vocab].T / temperature).log_softmax(-1)  # [T, vocab]
    return logp.gather(1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1)
