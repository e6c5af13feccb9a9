"""The draw of a token from a tile of logits: what the sampling kernels do after their product.

    token = argmax over v < vocab of z[v] - log E[v];  z = logits / temperature

E is exponentially distributed (noise.py), so -log E is Gumbel noise and the token an exact draw
from softmax(z). Within a chunk of ids, exp(z - max z) / E has the same order and needs no second
logarithm. A temperature below 1e-5 is greedy: no noise, z at temperature 1. The lowest id wins a
tie. The log-probability is that of the token under softmax(z). It is NaN if a logit is NaN or plus
infinity, or if all are minus infinity; the token is below vocab even then.

`choose` writes the results of one chunk of ids. One program of `_merge` owns a row and adds its
chunks.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.common import check
from kernels.noise import exponential
from kernels.noise import reference as noise


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


def reference(
    logits: Tensor, seeds: Tensor, positions: Tensor, temperature: Tensor, vocab: int
) -> tuple[Tensor, Tensor]:
    """Returns the draw from logits [B, V] with the same noise, in the dtype of the logits."""
    warm = (temperature >= 1e-5)[:, None]  # [B, 1]
    z = logits[:, :vocab] / torch.where(warm, temperature[:, None], 1.0)
    tokens = (z - noise(seeds, positions, vocab).log() * warm).argmax(-1)
    return tokens, z.log_softmax(-1).gather(1, tokens[:, None])[:, 0]
