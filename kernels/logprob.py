"""Log-probabilities of given ids, and entropies, from hidden states and the output matrix, without logits in memory.

    z[t, v] = hidden[t] . weight[v] / temperature  for the ids v < vocab;   p = softmax(z)
    logprob[t] = z[t, target] - logsumexp(z[t])         entropy[t] = logsumexp(z[t]) - sum_v p[t, v] z[t, v]
The running maximum and sum are those of Milakov & Gimelshein (arXiv 1805.02867). The backward pass is in logprob_backward.py.

FLOPs: 2 * T * vocab * N. Bytes: weight once per GROUP * BLOCK_T rows, hidden once per vocab / BLOCK_V tiles of which most come from L2, and
12 bytes per row and chunk of partial results. One program of `_chunk` owns BLOCK_T rows and one chunk of BLOCK_V ids: with logits that stay in
registers it leaves their maximum m, s = sum exp(z - m), w = sum exp(z - m) (z - m), and the target's logit if the target is in its chunk. One
program of `_merge` owns BLOCK_ROWS rows and puts their chunks together. All in natural logarithms; w is taken about m so that the entropy of
large logits does not cancel. Tiles come through tensor descriptors: bulk copies (TMA) on sm_90, 16-byte copies before.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.common import Config, check, pick, require
from kernels.logprob_backward import logprob_backward

CONFIGS: dict[int, Config] = {
    80: {
        "BLOCK_T": 128,
        "BLOCK_V": 128,
        "BLOCK_N": 64,
        "GROUP": 16,
        "num_warps": 8,
        "num_stages": 4,
    },
    89: {
        "BLOCK_T": 128,
        "BLOCK_V": 128,
        "BLOCK_N": 64,
        "GROUP": 16,
        "num_warps": 8,
        "num_stages": 3,
    },
    90: {
        "BLOCK_T": 128,
        "BLOCK_V": 256,
        "BLOCK_N": 64,
        "GROUP": 16,
        "num_warps": 8,
        "num_stages": 4,
    },
}
FP32 = {
    "BLOCK_T": 64,
    "BLOCK_V": 64,
    "BLOCK_N": 32,
    "num_stages": 2,
}  # without tensor cores the operands pass through registers
BLOCK_ROWS = 8  # rows a program of _merge owns: 32 bytes of each chunk


def linear_logprob(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    vocab: int | None = None,
) -> tuple[Tensor, Tensor]:
    """hidden [T, N], weight [V, N] of one dtype, targets int64 [T] -> log-probabilities fp32 [T] and entropies fp32 [T], in nats.

    Differentiable in hidden and weight, through both results. Only the first `vocab` rows of weight count (None: all). A target outside
    0..vocab-1 has the log-probability minus infinity; looking for one would cost a synchronisation, so callers check their data.
    """
    vocab = len(weight) if vocab is None else vocab
    return _op(hidden, weight, targets, temperature, vocab)[:2]


def logprob_forward(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float,
    vocab: int,
    config: Config | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """As linear_logprob, without gradients; also returns logsumexp fp32 [T], which the backward pass needs."""
    check("hidden", hidden, (None, None), inner=2)
    tokens, width = hidden.shape
    check("weight", weight, (None, width), (hidden.dtype,), inner=2)
    check("targets", targets, (tokens,), (torch.int64,))
    require(
        width % 16 == 0 and width > 0, f"the hidden size is {width}; it must be a multiple of 16"
    )
    require(
        1 <= vocab <= len(weight),
        f"vocab is {vocab}; it must lie in 1..{len(weight)}, the rows of weight",
    )
    require(temperature > 0, f"temperature is {temperature}; it must be positive")
    tile = pick(CONFIGS, (FP32 if hidden.dtype == torch.float32 else {}) | (config or {}))
    tile["BLOCK_N"] = min(tile["BLOCK_N"], width & -width)  # divides the hidden size
    chunks = triton.cdiv(vocab, tile["BLOCK_V"])
    partials = torch.empty(
        3, chunks, tokens, dtype=torch.float32, device=hidden.device
    )  # m, s, w of every chunk
    chosen, logprobs, entropy, logsumexp = (
        torch.empty(tokens, dtype=torch.float32, device=hidden.device) for _ in range(4)
    )
    triton.set_allocator(_scratch)  # context-local: set where it is used
    grid = (triton.cdiv(tokens, tile["BLOCK_T"]) * chunks,)
    _chunk[grid](
        hidden, weight, targets, partials, chosen, 1 / temperature, tokens, vocab, N=width, **tile
    )
    _merge[(triton.cdiv(tokens, BLOCK_ROWS),)](
        partials,
        chosen,
        targets,
        logprobs,
        entropy,
        logsumexp,
        tokens,
        vocab,
        chunks,
        BLOCK_ROWS,
        128,
    )
    return logprobs, entropy, logsumexp


def _scratch(size: int, alignment: int, stream: int | None) -> Tensor:
    return torch.empty(size, dtype=torch.int8, device="cuda")  # holds the tensor descriptors


@triton.jit(do_not_specialize=["tokens"])  # the same code whatever the batch: the same bits
def _chunk(
    hidden_ptr,
    weight_ptr,
    targets_ptr,
    partials_ptr,
    chosen_ptr,
    scale,
    tokens,
    vocab,
    N: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUP: tl.constexpr,
):
    chunks = tl.cdiv(vocab, BLOCK_V)
    # programs that run together share GROUP tiles of rows and few chunks, and so both stay in L2
    tile, chunk = tl.swizzle2d(
        tl.program_id(0) // chunks,
        tl.program_id(0) % chunks,
        tl.cdiv(tokens, BLOCK_T),
        chunks,
        GROUP,
    )
    hidden = tl.make_tensor_descriptor(hidden_ptr, [tokens, N], [N, 1], [BLOCK_T, BLOCK_N])
    weight = tl.make_tensor_descriptor(weight_ptr, [vocab, N], [N, 1], [BLOCK_V, BLOCK_N])
    logits = tl.zeros([BLOCK_T, BLOCK_V], tl.float32)
    for n in range(0, N, BLOCK_N):
        logits = tl.dot(
            hidden.load([tile * BLOCK_T, n]),
            weight.load([chunk * BLOCK_V, n]).T,
            logits,
            input_precision="ieee",
        )
    ids = chunk * BLOCK_V + tl.arange(0, BLOCK_V)
    logits = tl.where(
        ids[None, :] < vocab, logits * scale, -1e30
    )  # finite: 0 * -inf in w would be NaN
    top = tl.max(logits, 1)  # [BLOCK_T]
    shifted = logits - top[:, None]
    weights = tl.exp(shifted)
    rows = tile * BLOCK_T + tl.arange(0, BLOCK_T)
    inside = rows < tokens
    plane = chunks.to(tl.int64) * tokens
    here = partials_ptr + chunk.to(tl.int64) * tokens + rows
    tl.store(here, top, mask=inside)
    tl.store(here + plane, tl.sum(weights, 1), mask=inside)
    tl.store(here + 2 * plane, tl.sum(weights * shifted, 1), mask=inside)
    targets = tl.load(targets_ptr + rows, mask=inside, other=-1)
    chosen = tl.sum(tl.where(ids[None, :] == targets[:, None], logits, 0.0), 1)
    tl.store(
        chosen_ptr + rows,
        chosen,
        mask=inside & (targets >= chunk * BLOCK_V) & (targets < (chunk + 1) * BLOCK_V),
    )


@triton.jit(do_not_specialize=["tokens"])
def _merge(
    partials_ptr,
    chosen_ptr,
    targets_ptr,
    logprobs_ptr,
    entropy_ptr,
    logsumexp_ptr,
    tokens,
    vocab,
    chunks,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = rows < tokens
    chunk = tl.arange(0, BLOCK)[:, None]
    plane = chunks.to(tl.int64) * tokens
    highest = tl.full([BLOCK, ROWS], -1e30, tl.float32)
    for start in range(0, chunks, BLOCK):
        here, mask = (
            partials_ptr + (start + chunk).to(tl.int64) * tokens + rows[None, :],
            (start + chunk < chunks) & inside[None, :],
        )
        highest = tl.maximum(highest, tl.load(here, mask=mask, other=-1e30))
    top = tl.max(highest, 0)  # [ROWS]
    totals, weights = tl.zeros([BLOCK, ROWS], tl.float32), tl.zeros([BLOCK, ROWS], tl.float32)
    for start in range(0, chunks, BLOCK):
        here, mask = (
            partials_ptr + (start + chunk).to(tl.int64) * tokens + rows[None, :],
            (start + chunk < chunks) & inside[None, :],
        )
        shift = tl.load(here, mask=mask, other=-1e30) - top[None, :]
        sums = tl.load(here + plane, mask=mask, other=0.0)
        totals += sums * tl.exp(shift)
        weights += (tl.load(here + 2 * plane, mask=mask, other=0.0) + sums * shift) * tl.exp(shift)
    total, weighted = tl.sum(totals, 0), tl.sum(weights, 0)
    targets = tl.load(targets_ptr + rows, mask=inside, other=-1)
    known = (targets >= 0) & (targets < vocab)
    chosen = tl.where(known, tl.load(chosen_ptr + rows, mask=known, other=0.0), float("-inf"))
    tl.store(logprobs_ptr + rows, chosen - top - tl.log(total), mask=inside)
    tl.store(entropy_ptr + rows, tl.log(total) - weighted / total, mask=inside)
    tl.store(logsumexp_ptr + rows, top + tl.log(total), mask=inside)


def reference(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, vocab: int
) -> tuple[Tensor, Tensor]:
    logp = (hidden @ weight[:vocab].T / temperature).log_softmax(-1)  # [T, vocab]
    return logp.gather(1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1)


@torch.library.custom_op("nanorchestra::linear_logprob", mutates_args=())
def _op(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, vocab: int
) -> tuple[Tensor, Tensor, Tensor]:
    return logprob_forward(hidden, weight, targets, temperature, vocab)


@_op.register_fake
def _(hidden, weight, targets, temperature, vocab):
    return tuple(hidden.new_empty(len(hidden), dtype=torch.float32) for _ in range(3))


def _setup(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:3], *output[1:])  # hidden, weight, targets, entropy, logsumexp
    ctx.options = inputs[3:]


def _backward(ctx, grad_logprobs, grad_entropy, _):
    grads = logprob_backward(
        *ctx.saved_tensors,
        grad_logprobs.contiguous(),
        grad_entropy.contiguous(),
        *ctx.options,
        *ctx.needs_input_grad[:2],
    )
    return (
        *(grad if needed else None for grad, needed in zip(grads, ctx.needs_input_grad)),
        None,
        None,
        None,
    )


_op.register_autograd(_backward, setup_context=_setup)
