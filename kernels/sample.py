"""Draws a token a row from its logits by inversion, with the noise of the CPU's sampler.

    token = the first id v with p[0] + ... + p[v] > u;  p = softmax(logits[: vocab] / temperature)

u is uniform in [0, 1), a hash of (seed, position) that the host makes: a request draws the same
token in any batch, and on a CPU. A temperature below 1e-5 is greedy: the lowest id among the
largest logits, and p at temperature 1. The log-probability is that of the token under p. It is NaN
if a logit is NaN or plus infinity, or if all are minus infinity; the token is below vocab even
then.

Reads the logits once, and BLOCK of each row twice: bandwidth is the limit. One program of `_chunks`
owns BLOCK ids of a row and writes the largest z = logit / temperature, and the sum of the weights
exp(z - largest). One program of `_choose` owns a row: it finds the chunk, then the id within. Sums
of chunks are fp64, as on the CPU.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.common import check, require

BLOCK = 2048


def sample(
    logits: Tensor, uniform: Tensor, temperature: Tensor, vocab: int, floors: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Returns tokens int64 [B] and their log-probabilities fp32 [B].

    logits [B, >= vocab], rows any stride apart; uniform fp64 and temperature fp32 [B]. Minus
    infinity forbids an id, and so do floors fp32 [B] all with smaller logits (truncate.py).
    """
    batch = len(uniform)
    check((batch, None), strided=True, logits=logits)
    check((batch,), torch.float64, uniform=uniform)
    check((batch,), torch.float32, temperature=temperature)
    require(1 <= vocab <= logits.shape[1], f"vocab is {vocab}; expected 1 to {logits.shape[1]}")
    chunks = triton.cdiv(vocab, BLOCK)
    partials = temperature.new_empty(2, batch, chunks)
    tokens, logprobs = uniform.new_empty(batch, dtype=torch.int64), temperature.new_empty(batch)
    inputs = logits, temperature, floors, partials, batch, logits.stride(0), vocab
    _chunks[(chunks, batch)](*inputs, BLOCK)
    results, count = (uniform, tokens, logprobs), triton.next_power_of_2(chunks)
    _choose[(batch,)](*inputs, *results, chunks, BLOCK, count, num_warps=8)
    return tokens, logprobs


@triton.jit
def _weighed(logits, temperature, floors, row, chunk, stride, vocab, BLOCK: tl.constexpr):
    """Returns z of a chunk of a row, fp32 [BLOCK]: minus infinity where an id cannot be drawn."""
    ids, degrees = chunk * BLOCK + tl.arange(0, BLOCK), tl.load(temperature + row)
    place = logits + row.to(tl.int64) * stride + ids
    z = tl.load(place, ids < vocab, float("-inf")).to(tl.float32)
    if floors is not None:
        z = tl.where(z < tl.load(floors + row), float("-inf"), z)  # NaN stays
    return z * (1.0 / tl.where(degrees < 1e-5, 1.0, degrees))


@triton.jit(do_not_specialize=["batch"])
def _chunks(logits, temperature, floors, partials, batch, stride, vocab, BLOCK: tl.constexpr):
    chunk, row = tl.program_id(0), tl.program_id(1)
    z = _weighed(logits, temperature, floors, row, chunk, stride, vocab, BLOCK)
    top = tl.maximum(tl.max(z, 0), -1e30)  # finite: all ids of a chunk may be forbidden
    here = partials + row * tl.num_programs(0) + chunk
    tl.store(here, top)
    tl.store(here + batch * tl.num_programs(0), tl.sum(tl.exp(z - top), 0))


@triton.jit(do_not_specialize=["batch"])
def _choose(
    logits,
    temperature,
    floors,
    partials,
    batch,
    stride,
    vocab,
    uniform,
    tokens,
    logprobs,
    chunks,
    BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    row, each = tl.program_id(0), tl.arange(0, CHUNKS)
    here, inside = partials + row * chunks + each, each < chunks
    tops = tl.load(here, inside, -1e30)
    sums = tl.load(here + batch * chunks, inside, 0.0)
    peak, first = tl.max(tops, 0, return_indices=True)
    weights = (sums * tl.exp(tops - peak)).to(tl.float64)
    total, u = tl.sum(weights, 0), tl.load(uniform + row)
    chunk, rest = _invert(weights, u * total)
    greedy = tl.load(temperature + row) < 1e-5
    chunk = tl.minimum(tl.where(greedy, first, chunk), chunks - 1)
    z = _weighed(logits, temperature, floors, row, chunk, stride, vocab, BLOCK)
    largest, best = tl.max(z, 0, return_indices=True)
    index, _ = _invert(tl.exp(z - peak).to(tl.float64), rest)
    index = tl.minimum(tl.where(greedy, best, index), BLOCK - 1)
    chosen = tl.sum(tl.where(tl.arange(0, BLOCK) == index, z, 0.0), 0)
    tl.store(logprobs + row, chosen - peak - tl.log(total.to(tl.float32)))
    tl.store(tokens + row, tl.minimum(chunk * BLOCK + index, vocab - 1).to(tl.int64))


@triton.jit
def _invert(weights, target):
    """Returns the first index whose cumulative weight exceeds the target, and what is left of it.

    The target is kept inside, so that rounding never leads to an index without weight.
    """
    upto = tl.cumsum(weights, 0)
    target = tl.minimum(tl.maximum(target, 0.0), tl.max(upto, 0) * (1 - 1e-12))
    passed = upto <= target
    return tl.sum(passed.to(tl.int32), 0), target - tl.max(tl.where(passed, upto, 0.0), 0)


def reference(
    logits: Tensor, uniform: Tensor, temperature: Tensor, vocab: int
) -> tuple[Tensor, Tensor]:
    """Returns the draw from logits [B, V], in their dtype."""
    warm = (temperature >= 1e-5)[:, None]  # [B, 1]
    z = logits[:, :vocab] / torch.where(warm, temperature[:, None], 1.0)
    drawn = (z.softmax(-1).cumsum(-1) <= uniform[:, None]).sum(-1).clamp(max=vocab - 1)
    tokens = torch.where(warm[:, 0], drawn, z.argmax(-1))
    return tokens, z.log_softmax(-1).gather(1, tokens[:, None])[:, 0]
