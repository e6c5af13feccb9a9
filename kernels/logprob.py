"""Log-probabilities of given ids as a differentiable function of hidden states and output matrix.

    z[t, v] = hidden[t] . weight[v] / temperature  for the ids v < vocab;  p = softmax(z)
    logprob[t] = z[t, target] - logsumexp(z[t])
    entropy[t] = logsumexp(z[t]) - sum_v p[t, v] z[t, v]
    d logprob[t] / d z[t, v] = (v == target[t]) - p[t, v];  g = grad[t] * this / temperature
    dhidden = g @ weight;  dweight = g.T @ hidden

The forward pass is in logprob_forward.py. No pass holds [T, vocab] logits. Backward is exact, over
chunks of the vocabulary that are sized by memory. The forward pass left logsumexp, so each chunk of
ids is finished by itself: recompute its logits in fp32 (cuBLAS), turn them into g with one Triton
kernel, multiply twice. With chunks of the vocabulary, a row of dweight is one product over all T
rows, accumulated in fp32 and rounded once. Chunks of rows would need an fp32 copy of dweight, 2.5
GB for Qwen3-8B. dhidden is added up over the chunks in fp32.

Backward FLOPs: 6 * T * vocab * N. Memory: CHUNK_BYTES, and dhidden in fp32: 638 MB at T = 8192, N =
4096, bf16. Extra bytes moved: 10 * T * vocab, and 16 * T * N a chunk. Deterministic. One program of
`_gradient` owns BLOCK ids of one row.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.logprob_forward import logprob_forward

BLOCK = 2048
CHUNK_BYTES = 512_000_000  # of a chunk's logits, fp32, and their gradient


def linear_logprob(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, vocab: int
) -> tuple[Tensor, Tensor]:
    """Returns log-probabilities and entropies fp32 [T], in nats.

    hidden [T, N], weight [V, N] of one dtype, targets int64 [T]. The log-probabilities are
    differentiable in hidden and weight, the entropies are not; gradients have the dtype of hidden,
    so fp16 needs loss scaling. Only the first `vocab` rows of weight count. A negative target is
    ignored: its log-probability and gradient are 0, so a mask meets no infinity. A target from
    vocab on has the log-probability minus infinity: a check would cost a synchronisation.
    """
    return _LinearLogprob.apply(hidden, weight, targets, temperature, vocab)


class _LinearLogprob(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, targets, *options):
        logprobs, entropy, logsumexp = logprob_forward(hidden, weight, targets, *options)
        ctx.save_for_backward(hidden, weight, targets, logsumexp)
        ctx.options = options
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx, grad, _):
        hidden, weight, targets, logsumexp = ctx.saved_tensors
        (temperature, vocab), (tokens, width) = ctx.options, hidden.shape
        grad = grad.contiguous()
        ids = chunk_width(tokens, vocab, hidden.element_size())
        logits = hidden.new_empty(tokens * max(ids, width), dtype=torch.float32)
        gradient = hidden.new_empty(tokens * ids)
        dhidden = torch.zeros_like(hidden, dtype=torch.float32)
        dweight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        for start in range(0, vocab, ids):
            rows = weight[start : min(start + ids, vocab)]  # [ids of the chunk, N]
            count = len(rows)
            z, g = (flat[: tokens * count].view(tokens, count) for flat in (logits, gradient))
            _product(hidden, rows.T, z)
            _gradient[(tokens, triton.cdiv(count, BLOCK))](
                z, g, targets, logsumexp, grad, 1 / temperature, start, count, BLOCK
            )
            if dweight is not None:
                _product(g.T, hidden, dweight[start : start + count])
            # z is used up, and its memory is free
            dhidden += _product(g, rows, logits[: tokens * width].view(tokens, width))
        return dhidden.to(hidden.dtype), dweight, None, None, None


def chunk_width(tokens: int, vocab: int, element_size: int) -> int:
    """Returns the ids of a chunk within CHUNK_BYTES, a multiple of 256 for full tiles."""
    fitting = CHUNK_BYTES // ((4 + element_size) * max(tokens, 1))
    return min(vocab, max(256, fitting // 256 * 256))


@triton.jit
def _gradient(logits, out, targets, logsumexp, grad, scale, start, width, BLOCK: tl.constexpr):
    """Fills out [T, width] from logits fp32 [T, width] of the ids from `start` on."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here, inside = row * width + columns, columns < width
    logp = tl.load(logits + here, inside, 0.0) * scale - tl.load(logsumexp + row)
    target = tl.load(targets + row)
    onehot = tl.where(start + columns == target, 1.0, 0.0)
    slope = tl.where(target < 0, 0.0, tl.load(grad + row) * scale)
    tl.store(out + here, slope * (onehot - tl.exp(logp)), inside)


def _product(a, b, out) -> Tensor:
    """Writes a @ b to out, accumulated in fp32; out may have a wider dtype than the factors."""
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=out.dtype, out=out)
    return out.copy_(a.float() @ b.float())


def reference(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, vocab: int
) -> tuple[Tensor, Tensor]:
    """Returns what linear_logprob does, in the dtype of hidden."""
    logp = (hidden @ weight[:vocab].T / temperature).log_softmax(-1)  # [T, vocab]
    return logp.gather(1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1)
