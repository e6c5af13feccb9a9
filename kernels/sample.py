"""Sampling from the output matrix: the product, the noise and the choice in one kernel, without logits in memory.

    token = argmax over v < vocab of z[v] - log E[v],   z = hidden . weight[v] / temperature,   E exponentially distributed (noise.py)
draws exactly from softmax(z): -log E is Gumbel noise (Gumbel-max; inside the product as in FlashSampling, arXiv 2603.15854). Within a chunk of ids
the same order is that of exp(z - max z) / E, which needs no second logarithm. A temperature below 1e-5 is greedy: no noise, z at temperature 1.
The lowest id wins a tie. The log-probability is the token's under softmax(z), and NaN if a logit is NaN or plus infinity, or all are minus
infinity; the token is below vocab even then.

Bytes: weight once (1.24 GB for Qwen3-8B); FLOPs: 2 * B * V * N. One program of `_linear` owns BLOCK_V ids for all rows, one of `_ready` BLOCK_V ids
of one row; each leaves its best score, that id and its z, the maximum of z and sum exp(z - maximum). One program of `_merge` owns a row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.common import Config, check, pick, require
from kernels.noise import exponential
from kernels.noise import reference as noise

CONFIGS: dict[
    int, Config
] = {  # at 64 rows two programs fit an SM: one loads while the other chooses
    80: {"BLOCK_V": 128, "BLOCK_N": 64, "num_warps": 8, "num_stages": 4},
    89: {"BLOCK_V": 128, "BLOCK_N": 64, "num_warps": 8, "num_stages": 3},
    90: {"BLOCK_V": 128, "BLOCK_N": 64, "num_warps": 8, "num_stages": 4},
}
FP32 = {"BLOCK_N": 32, "num_stages": 2}  # without tensor cores the operands pass through registers
READY: dict[int, Config] = {
    arch: {"BLOCK_V": 4096, "num_warps": 8, "num_stages": 1} for arch in (80, 89, 90)
}
MAX_BATCH = 64  # rows of a tile, always, so that a row's bits do not depend on the batch


def sample_linear(
    hidden: Tensor,
    weight: Tensor,
    seeds: Tensor,
    positions: Tensor,
    temperature: Tensor,
    *,
    vocab: int,
    out: tuple[Tensor, Tensor] | None = None,
    config: Config | None = None,
) -> tuple[Tensor, Tensor]:
    """hidden [B, N], weight [V, N] of one dtype, B <= 64; seeds, positions int64 [B], temperature fp32 [B] -> tokens int64 [B] and
    their log-probabilities fp32 [B]. Only the first `vocab` rows of weight count."""
    check("hidden", hidden, (None, None), inner=2)
    batch, width = hidden.shape
    check("weight", weight, (None, width), (hidden.dtype,), inner=2)
    require(
        batch <= MAX_BATCH,
        f"the batch has {batch} rows; at most {MAX_BATCH} are supported, use torch.mm and sample_logits for more",
    )
    require(
        width % 16 == 0 and width > 0, f"the hidden size is {width}; it must be a multiple of 16"
    )
    tile = pick(CONFIGS, (FP32 if hidden.dtype == torch.float32 else {}) | (config or {}))
    tile["BLOCK_N"] = min(tile["BLOCK_N"], width & -width)  # a divisor of the hidden size
    partials, winners, tokens, logprobs = _buffers(
        batch, len(weight), tile["BLOCK_V"], seeds, positions, temperature, vocab, out
    )
    _linear[(winners.shape[1],)](
        hidden,
        weight,
        seeds,
        positions,
        temperature,
        partials,
        winners,
        batch,
        vocab,
        N=width,
        BLOCK_B=MAX_BATCH,
        **tile,
    )
    return _merged(partials, winners, tokens, logprobs, vocab)


def sample_logits(
    logits: Tensor,
    seeds: Tensor,
    positions: Tensor,
    temperature: Tensor,
    *,
    vocab: int,
    out: tuple[Tensor, Tensor] | None = None,
    config: Config | None = None,
) -> tuple[Tensor, Tensor]:
    """As sample_linear with the same noise, from ready logits [B, >= vocab] with any row stride, for any B. Minus infinity forbids an id."""
    check("logits", logits, (None, None))
    tile = pick(READY, config)
    partials, winners, tokens, logprobs = _buffers(
        *logits.shape, tile["BLOCK_V"], seeds, positions, temperature, vocab, out
    )
    batch, width = logits.shape
    _ready[winners.shape[::-1]](
        logits,
        logits.stride(0),
        width,
        seeds,
        positions,
        temperature,
        partials,
        winners,
        batch,
        vocab,
        **tile,
    )
    return _merged(partials, winners, tokens, logprobs, vocab)


def _buffers(
    batch: int,
    width: int,
    block: int,
    seeds: Tensor,
    positions: Tensor,
    temperature: Tensor,
    vocab: int,
    out: tuple[Tensor, Tensor] | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What the kernels write, after the checks that both launchers share."""
    require(
        1 <= vocab <= width,
        f"vocab is {vocab}; it must lie in 1..{width}, as many ids as there are logits",
    )
    new = lambda dtype, *shape: torch.empty(shape, dtype=dtype, device=seeds.device)
    tokens, logprobs = out or (new(torch.int64, batch), new(torch.float32, batch))
    for name, x, dtype in (
        ("seeds", seeds, torch.int64),
        ("positions", positions, torch.int64),
        ("temperature", temperature, torch.float32),
        ("out[0], the tokens,", tokens, torch.int64),
        ("out[1], the log-probabilities,", logprobs, torch.float32),
    ):
        check(name, x, (batch,), (dtype,))
    chunks = triton.cdiv(vocab, block)
    return (
        new(torch.float32, 4, batch, chunks),
        new(torch.int32, batch, chunks),
        tokens,
        logprobs,
    )  # 4: best score, its z, maximum, sum


def _merged(
    partials: Tensor, winners: Tensor, tokens: Tensor, logprobs: Tensor, vocab: int
) -> tuple[Tensor, Tensor]:
    batch, chunks = winners.shape
    _merge[(batch,)](
        partials,
        winners,
        tokens,
        logprobs,
        batch,
        vocab,
        chunks,
        CHUNKS=triton.next_power_of_2(chunks),
        num_warps=4,
    )
    return tokens, logprobs


@triton.jit
def _choose(
    logits, ids, rows, seeds, positions, temperature, partials, winners, batch, vocab, chunk, chunks
):
    """Writes the partial results of one chunk: logits fp32 [rows, BLOCK_V], rows [rows], ids [BLOCK_V]."""
    inside = rows < batch
    degrees = tl.load(temperature + rows, mask=inside, other=1.0)
    seed, position = (
        tl.load(seeds + rows, mask=inside, other=0),
        tl.load(positions + rows, mask=inside, other=0),
    )
    greedy = degrees < 1e-5
    z = tl.where(
        ids[None, :] < vocab,
        logits * (1.0 / tl.where(greedy, 1.0, degrees))[:, None],
        float("-inf"),
    )
    top = tl.maximum(
        tl.max(z, 1), -1e30
    )  # finite: -inf - -inf in a chunk of forbidden ids would be NaN
    weights = tl.exp(z - top[:, None])
    race = tl.where(
        greedy[:, None], z, weights / exponential(seed[:, None], position[:, None], ids[None, :])
    )
    best, index = tl.max(race, 1, return_indices=True)
    score = tl.where(greedy, best, top + tl.log(best))
    winner = chunk * ids.shape[0] + index
    plane, here = batch * chunks, partials + rows * chunks + chunk
    tl.store(here, score, mask=inside)
    tl.store(
        here + plane, tl.sum(tl.where(ids[None, :] == winner[:, None], z, 0.0), 1), mask=inside
    )
    tl.store(here + 2 * plane, top, mask=inside)
    tl.store(here + 3 * plane, tl.sum(weights, 1), mask=inside)
    tl.store(winners + rows * chunks + chunk, winner, mask=inside)


@triton.jit(do_not_specialize=["batch"])  # the same code whatever the batch: the same bits
def _linear(
    hidden,
    weight,
    seeds,
    positions,
    temperature,
    partials,
    winners,
    batch,
    vocab,
    N: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    chunk, rows, inner = tl.program_id(0), tl.arange(0, BLOCK_B), tl.arange(0, BLOCK_N)
    ids = chunk * BLOCK_V + tl.arange(0, BLOCK_V)
    hiddens = hidden + rows[:, None] * N + inner[None, :]
    weights = weight + tl.minimum(ids, vocab - 1).to(tl.int64)[:, None] * N + inner[None, :]
    logits = tl.zeros([BLOCK_B, BLOCK_V], tl.float32)
    for n in range(0, N, BLOCK_N):
        h = tl.load(hiddens + n, mask=rows[:, None] < batch, other=0.0)
        logits = tl.dot(h, tl.load(weights + n).T, logits, input_precision="ieee")
    _choose(
        logits,
        ids,
        rows,
        seeds,
        positions,
        temperature,
        partials,
        winners,
        batch,
        vocab,
        chunk,
        tl.num_programs(0),
    )


@triton.jit(do_not_specialize=["batch"])
def _ready(
    logits,
    stride,
    width,
    seeds,
    positions,
    temperature,
    partials,
    winners,
    batch,
    vocab,
    BLOCK_V: tl.constexpr,
):
    chunk, row = tl.program_id(0), tl.program_id(1)
    ids = chunk * BLOCK_V + tl.arange(0, BLOCK_V)
    # masked by the width: by vocab, an odd number, loads would be narrow
    z = tl.load(logits + row.to(tl.int64) * stride + ids, mask=ids < width, other=0.0).to(
        tl.float32
    )
    _choose(
        z[None, :],
        ids,
        row + tl.arange(0, 1),
        seeds,
        positions,
        temperature,
        partials,
        winners,
        batch,
        vocab,
        chunk,
        tl.num_programs(0),
    )


@triton.jit(do_not_specialize=["batch"])
def _merge(partials, winners, tokens, logprobs, batch, vocab, chunks, CHUNKS: tl.constexpr):
    row, chunk = tl.program_id(0), tl.arange(0, CHUNKS)
    here, plane, inside = partials + row * chunks + chunk, batch * chunks, chunk < chunks
    _, index = tl.max(tl.load(here, mask=inside, other=float("-inf")), 0, return_indices=True)
    index = tl.minimum(index, chunks - 1)  # among NaNs it is any
    tops = tl.load(here + 2 * plane, mask=inside, other=-1e30)
    top = tl.max(tops, 0)
    total = tl.sum(tl.load(here + 3 * plane, mask=inside, other=0.0) * tl.exp(tops - top), 0)
    chosen = tl.load(partials + plane + row * chunks + index)
    tl.store(logprobs + row, chosen - top - tl.log(total))
    tl.store(
        tokens + row, tl.minimum(tl.load(winners + row * chunks + index), vocab - 1).to(tl.int64)
    )


def reference(
    logits: Tensor, seeds: Tensor, positions: Tensor, temperature: Tensor, vocab: int
) -> tuple[Tensor, Tensor]:
    warm = (temperature >= 1e-5)[:, None]  # [B, 1]
    z = logits[:, :vocab] / torch.where(warm, temperature[:, None], 1.0)
    tokens = (z - noise(seeds, positions, vocab).log() * warm).argmax(-1)
    return tokens, z.log_softmax(-1).gather(1, tokens[:, None])[:, 0]
