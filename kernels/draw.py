"""The draw of a token from a tile of logits: what the sampling kernels do after their product.

    token = argmax over v < vocab of z[v] - log E[v];  z = logits / temperature

E is exponentially distributed, so -log E is Gumbel noise and the token an exact draw
from softmax(z). Within a chunk of ids, exp(z - max z) / E has the same order and needs no second
logarithm. A temperature below 1e-5 is greedy: no noise, z at temperature 1. The lowest id wins a
tie. The log-probability is that of the token under softmax(z). It is NaN if a logit is NaN or plus
infinity, or if all are minus infinity; the token is below vocab even then.

E depends on (seed, position, id) alone, so a request draws the same token in any batch:

    E = -log(1 - w);  w = (x + 1/2) / 2^32;  x = hash of (key, id)

The 64-bit key of a row is mix(mix(seed + 0x9E3779B97F4A7C15) ^ position), where mix is the
finaliser of splitmix64 (Steele et al. 2014). x is the finaliser of MurmurHash3 over the id plus the
low half of the key, with the high half put in midway. It is one-to-one in the id: no two ids of a
row share an x. w lies strictly between 0 and 1 and is finest near 0, where the small E are, which
win. (-log(w) is finest at the large E: the winner among 150,000 equal ids would have one of some
fifty values, and low ids would win the ties.)

`choose` writes the results of one chunk of ids. One program of `_merge` owns a row and adds its
chunks.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.common import check


def draw(
    kernel: triton.JITFunction,
    inputs: tuple[Any, ...],
    request: tuple[Tensor, Tensor, Tensor],
    vocab: int,
    block: int,
    programs: int,
    **constants: int,
) -> tuple[Tensor, Tensor]:
    """Returns tokens int64 [B] and log-probabilities fp32 [B].

    kernel: one that ends in `choose`, for chunks of `block` ids and so many programs a chunk, with
    its first arguments. request: seeds and positions int64 [B], temperature fp32 [B].
    """
    seeds, positions, temperature = request
    batch, chunks = len(seeds), triton.cdiv(vocab, block)
    check((batch,), torch.int64, seeds=seeds, positions=positions)
    check((batch,), torch.float32, temperature=temperature)
    # best score, its z, maximum of z, sum exp(z - maximum)
    partials = temperature.new_empty(4, batch, chunks)
    winners = seeds.new_empty(batch, chunks, dtype=torch.int32)
    sizes = batch, vocab
    kernel[(chunks, programs)](
        *inputs, *request, partials, winners, *sizes, BLOCK_V=block, num_warps=8, **constants
    )
    tokens, logprobs = seeds.new_empty(batch), temperature.new_empty(batch)
    block = triton.next_power_of_2(chunks)
    _merge[(batch,)](partials, winners, tokens, logprobs, *sizes, chunks, block)
    return tokens, logprobs


@triton.jit
def choose(logits, ids, rows, seeds, positions, temperature, partials, winners, batch, vocab):
    """Writes the results of a chunk: logits fp32 [rows, BLOCK_V], ids [BLOCK_V], rows [rows]."""
    chunk, chunks, inside = tl.program_id(0), tl.num_programs(0), rows < batch
    degrees = tl.load(temperature + rows, inside, 1.0)
    seed = tl.load(seeds + rows, inside, 0)[:, None]
    position = tl.load(positions + rows, inside, 0)[:, None]
    greedy = degrees < 1e-5
    scale = (1.0 / tl.where(greedy, 1.0, degrees))[:, None]
    z = tl.where(ids[None, :] < vocab, logits * scale, float("-inf"))
    top = tl.maximum(tl.max(z, 1), -1e30)  # finite: all ids of a chunk may be forbidden
    weights = tl.exp(z - top[:, None])
    race = tl.where(greedy[:, None], z, weights / exponential(seed, position, ids[None, :]))
    best, index = tl.max(race, 1, return_indices=True)
    winner = chunk * ids.shape[0] + index
    chosen = tl.sum(tl.where(ids[None, :] == winner[:, None], z, 0.0), 1)
    plane, here = batch * chunks, partials + rows * chunks + chunk
    tl.store(here, tl.where(greedy, best, top + tl.log(best)), inside)
    tl.store(here + plane, chosen, inside)
    tl.store(here + 2 * plane, top, inside)
    tl.store(here + 3 * plane, tl.sum(weights, 1), inside)
    tl.store(winners + rows * chunks + chunk, winner, inside)


@triton.jit(do_not_specialize=["batch"])
def _merge(partials, winners, tokens, logprobs, batch, vocab, chunks, CHUNKS: tl.constexpr):
    row, chunk = tl.program_id(0), tl.arange(0, CHUNKS)
    here, plane, inside = partials + row * chunks + chunk, batch * chunks, chunk < chunks
    _, index = tl.max(tl.load(here, inside, float("-inf")), 0, return_indices=True)
    index = tl.minimum(index, chunks - 1)  # among NaNs it is any
    tops = tl.load(here + 2 * plane, inside, -1e30)
    top = tl.max(tops, 0)
    total = tl.sum(tl.load(here + 3 * plane, inside, 0.0) * tl.exp(tops - top), 0)
    chosen = tl.load(partials + plane + row * chunks + index)
    winner = tl.minimum(tl.load(winners + row * chunks + index), vocab - 1)
    tl.store(logprobs + row, chosen - top - tl.log(total))
    tl.store(tokens + row, winner.to(tl.int64))


@triton.jit
def _mix(x):
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def exponential(seeds, positions, ids):
    """Returns E, fp32; seeds and positions int64, ids int32, of shapes that broadcast."""
    key = _mix(_mix(seeds.to(tl.uint64) + 0x9E3779B97F4A7C15) ^ positions.to(tl.uint64))
    x = ids.to(tl.uint32) + key.to(tl.uint32)
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13) ^ (key >> 32).to(tl.uint32)) * 0xC2B2AE35
    x = x ^ (x >> 16)
    # the fp32 below 2^-32: x may round up to 2^32, and w must stay below 1
    w = (x.to(tl.float32) + 0.5) * 2.3283062977608182e-10
    series = w * (1.0 + w * (0.5 + w * 0.33333333))  # 1 - w would lose the digits of a small w
    return tl.where(w < 0.015625, series, -tl.log(1.0 - w))


def reference(
    logits: Tensor, seeds: Tensor, positions: Tensor, temperature: Tensor, vocab: int
) -> tuple[Tensor, Tensor]:
    """Returns the draw from logits [B, V] with the same noise, in the dtype of the logits."""
    warm = (temperature >= 1e-5)[:, None]  # [B, 1]
    z = logits[:, :vocab] / torch.where(warm, temperature[:, None], 1.0)
    tokens = (z - noise(seeds, positions, vocab).log() * warm).argmax(-1)
    return tokens, z.log_softmax(-1).gather(1, tokens[:, None])[:, 0]


def noise(seeds: Tensor, positions: Tensor, vocab: int) -> Tensor:
    """Returns E of the ids 0..vocab-1, float64 [B, vocab]; seeds and positions int64 [B]."""
    key = _mixed(_mixed(seeds + (0x9E3779B97F4A7C15 - 2**64)) ^ positions)[:, None]
    x = (torch.arange(vocab, device=seeds.device) + key) & 0xFFFFFFFF  # [B, vocab]
    x = (x ^ x >> 16) * 0x85EBCA6B & 0xFFFFFFFF
    x = (x ^ x >> 13 ^ _shifted(key, 32)) * 0xC2B2AE35 & 0xFFFFFFFF
    w = ((x ^ x >> 16).float() + 0.5).double() * 2.3283062977608182e-10
    return -torch.log1p(-w)


def _mixed(x: Tensor) -> Tensor:
    x = (x ^ _shifted(x, 30)) * (0xBF58476D1CE4E5B9 - 2**64)
    x = (x ^ _shifted(x, 27)) * (0x94D049BB133111EB - 2**64)
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, by: int) -> Tensor:
    return (x >> by) & ((1 << 64 - by) - 1)  # int64 has no logical shift of its own
