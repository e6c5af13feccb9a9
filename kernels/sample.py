"""Sampling from the output matrix: product and draw in one kernel, without logits in memory.

The draw is in draw.py; inside the product as in FlashSampling (arXiv 2603.15854). FLOPs: 2 * B * V
* N. Bytes: weight once, 1.24 GB for Qwen3-8B: bandwidth is the limit. One program of `_linear` owns
BLOCK_V ids for all rows, one of `_ready` READY_V ids of one row, whose logits are given.
"""

import triton
import triton.language as tl
from torch import Tensor

from kernels.common import FP32, check, output_tile, require
from kernels.draw import choose, draw

CONFIGS = {  # at 64 rows two programs fit a multiprocessor: one loads while the other chooses
    80: {"BLOCK_N": 64, "num_stages": 4},
    89: {"BLOCK_N": 64, "num_stages": 3},
    90: {"BLOCK_N": 64, "num_stages": 4},
    FP32: {"BLOCK_N": 32, "num_stages": 2},
}
BLOCK_V, READY_V = 128, 4096
MAX_BATCH = 64  # rows of a tile, always, so that the bits of a row do not depend on the batch


def sample_linear(
    hidden: Tensor,
    weight: Tensor,
    seeds: Tensor,
    positions: Tensor,
    temperature: Tensor,
    vocab: int,
) -> tuple[Tensor, Tensor]:
    """Returns tokens int64 [B] and their log-probabilities fp32 [B].

    hidden [B, N], weight [V, N] of one dtype, B <= MAX_BATCH; seeds and positions int64 [B],
    temperature fp32 [B]. Only the first `vocab` rows of weight count.
    """
    tile = output_tile(CONFIGS, hidden, weight, seeds, vocab)
    batch, width = hidden.shape
    require(batch <= MAX_BATCH, f"the batch has {batch} rows; expected at most {MAX_BATCH}")
    request, tile = (seeds, positions, temperature), tile | {"N": width, "BLOCK_B": MAX_BATCH}
    return draw(_linear, (hidden, weight), request, vocab, BLOCK_V, 1, **tile)


def sample_logits(
    logits: Tensor, seeds: Tensor, positions: Tensor, temperature: Tensor, vocab: int
) -> tuple[Tensor, Tensor]:
    """Returns what sample_linear does, with the same noise, from logits [B, >= vocab] for any B.

    The rows may lie any stride apart. Minus infinity forbids an id.
    """
    check((len(seeds), None), strided=True, logits=logits)
    batch, width = logits.shape
    require(1 <= vocab <= width, f"vocab is {vocab}; expected 1 to {width}")
    inputs, request = (logits, logits.stride(0), width), (seeds, positions, temperature)
    return draw(_ready, inputs, request, vocab, READY_V, batch)


@triton.jit(do_not_specialize=["batch"])  # the same code, and so the same bits, for any batch
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
    rows, inner = tl.arange(0, BLOCK_B), tl.arange(0, BLOCK_N)
    ids = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    hiddens = hidden + rows[:, None] * N + inner[None, :]
    weights = weight + tl.minimum(ids, vocab - 1).to(tl.int64)[:, None] * N + inner[None, :]
    logits = tl.zeros([BLOCK_B, BLOCK_V], tl.float32)
    for n in range(0, N, BLOCK_N):
        h = tl.load(hiddens + n, rows[:, None] < batch, 0.0)
        logits = tl.dot(h, tl.load(weights + n).T, logits, input_precision="ieee")
    choose(logits, ids, rows, seeds, positions, temperature, partials, winners, batch, vocab)


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
    row = tl.program_id(1)
    ids = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    # masked by the width: an odd vocabulary would make the loads narrow
    z = tl.load(logits + row.to(tl.int64) * stride + ids, ids < width, 0.0).to(tl.float32)
    rows = row + tl.arange(0, 1)
    choose(z[None, :], ids, rows, seeds, positions, temperature, partials, winners, batch, vocab)
