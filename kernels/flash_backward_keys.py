"""Flash attention for training, gradients of keys and values (formulas: flash_backward.py).

One program owns a block of keys of one kv head for dk and dv, over all query heads and all spans
that read it, so that the gradient of a shared prefix needs no adding up. 8 * H * D FLOPs a visible
pair.
"""

import triton
import triton.language as tl

from kernels.attention import LOG2E
from kernels.common import FP32
from kernels.flash import CONFIGS, span_of

KEY_CONFIGS = {  # BLOCK_N is also the block of the work list
    80: {"BLOCK_M": 32, "BLOCK_N": 64, "num_warps": 8, "num_stages": 3},
    89: {"BLOCK_M": 64, "BLOCK_N": 64, "num_warps": 8, "num_stages": 2},
    90: {"BLOCK_M": 32, "BLOCK_N": 128, "num_warps": 8, "num_stages": 3},
    FP32: CONFIGS[FP32],
}


@triton.jit
def backward_keys(
    grad,
    q,
    k,
    v,
    lse,
    delta,
    dk,
    dv,
    items,
    visits,
    tokens,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Fills dk and dv [T, Hkv, D]; delta [H, T] is that of _backward_queries."""
    UNIT: tl.constexpr = D**-0.5 * LOG2E
    item = items + tl.program_id(0) // (H // G) * 4
    kv_head = tl.program_id(0) % (H // G)
    first, last = tl.load(item), tl.load(item + 1)
    keys, lanes = first + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_M)
    here = (keys < last)[:, None]
    base = (first.to(tl.int64) * (H // G) + kv_head) * D
    tile = tl.arange(0, BLOCK_N)[:, None] * (H // G * D) + tl.arange(0, D)
    key = tl.load(k + base + tile, here, 0.0)  # [BLOCK_N, D]
    value = tl.load(v + base + tile, here, 0.0)
    q_tile = lanes[:, None] * (H * D) + tl.arange(0, D)
    total_k, total_v = tl.zeros([BLOCK_N, D], tl.float32), tl.zeros([BLOCK_N, D], tl.float32)
    for visit in range(tl.load(item + 2), tl.load(item + 3)):
        needs, begin, edge, end = _walk_keys(visits + visit * 4, keys, first, last, BLOCK_M)
        tiles = tl.cdiv(end - begin, BLOCK_M)
        # all heads in one loop, so that the pipeline of loads fills once
        for index in range(0, G * tiles):
            row, head = begin + index % tiles * BLOCK_M, kv_head * G + index // tiles
            exists = row + lanes < end
            q_base = (row.to(tl.int64) * H + head) * D
            at = head.to(tl.int64) * tokens + row + lanes
            query = tl.load(q + q_base + q_tile, exists[:, None], 0.0)  # [BLOCK_M, D]
            grads = tl.load(grad + q_base + q_tile, exists[:, None], 0.0)
            # -lse / scale and -delta start the products: as vectors they would take registers
            log_sum = tl.load(lse + at, exists, 0.0) * (-LOG2E / UNIT)
            deltas = tl.load(delta + at, exists, 0.0)
            scores = tl.broadcast_to(log_sum[None, :], [BLOCK_N, BLOCK_M])
            scores = tl.dot(key, query.T, scores, input_precision="ieee")
            p = tl.exp2(scores * UNIT)  # [BLOCK_N, BLOCK_M]; beyond the span grads are 0
            if row < edge:
                p = tl.where((row + lanes)[None, :] >= needs[:, None], p, 0.0)
            total_v = tl.dot(p.to(grads.dtype), grads, total_v, input_precision="ieee")
            ds = tl.broadcast_to(-deltas[None, :], [BLOCK_N, BLOCK_M])
            ds = p * tl.dot(value, grads.T, ds, input_precision="ieee")
            total_k = tl.dot(ds.to(query.dtype), query, total_k, input_precision="ieee")
    tl.store(dk + base + tile, total_k * D**-0.5, here)
    tl.store(dv + base + tile, total_v, here)


@triton.jit
def _walk_keys(visit, keys, first, last, BLOCK_M: tl.constexpr):
    """Returns (needs, begin, edge, end) for the block of keys first .. last over a span.

    A key is seen by the rows from its needs to below end. Rows from edge on see all keys of the
    block.
    """
    start, end, key_start, key_end = span_of(visit)
    causal = start == key_start
    seen = (keys >= key_start) & (keys < key_end)
    needs = tl.where(seen, tl.where(causal, keys, start), end)
    begin = start + tl.where(causal, tl.maximum(first - start, 0) // BLOCK_M * BLOCK_M, 0)
    inside = (key_start <= first) & (last <= key_end)
    edge = tl.where(inside, tl.where(causal, last - 1, start), end)
    return needs, begin, edge, end
