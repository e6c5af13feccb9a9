"""Flash attention for training, backward (Dao et al. 2022, algorithm 4), over the spans of a pack.

With p = exp(score - lse), dp = grad v^T and delta = sum(grad * out): dv = p^T grad, ds = p (dp -
delta), dq = ds k / sqrt(D), dk = ds^T q / sqrt(D). p and ds are fp32 until they meet their other
factor.

One program owns a block of queries of one head for dq, and leaves delta for the second kernel. One
program of the second owns a block of keys of one kv head for dk and dv, over all query heads and
all spans that read it, so that the gradient of a shared prefix needs no adding up. Every sum stays
in registers in a fixed order: no atomics, the same bits in every run, one rounding. The price is 7
products a tile instead of 5: 6 * H * D and 8 * H * D FLOPs a visible pair. Compute is the limit.
"""

import triton
import triton.language as tl

from kernels.attention import LOG2E
from kernels.flash import fields, load_rows, pointers, walk


@triton.jit
def backward_queries(
    grad,
    q,
    k,
    v,
    out,
    lse,
    delta,
    dq,
    items,
    visits,
    tokens,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Fills dq [T, H, D], and delta fp32 [H, T]."""
    head = tl.program_id(0) % H
    first, last, visit, end = fields(items + tl.program_id(0) // H * 4)
    rows, columns = first + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    here = rows < last
    query = load_rows(q, first, last, head, H, BLOCK_M, D)
    grads = load_rows(grad, first, last, head, H, BLOCK_M, D)
    outs = load_rows(out, first, last, head, H, BLOCK_M, D)
    deltas = tl.sum(grads.to(tl.float32) * outs.to(tl.float32), 1)  # [BLOCK_M]
    place = head.to(tl.int64) * tokens + rows
    tl.store(delta + place, deltas, here)
    log_sum = tl.load(lse + place, here, 0.0) * LOG2E
    total = tl.zeros([BLOCK_M, D], tl.float32)
    for index in range(visit, end):
        limit, begin, edge, stop = walk(visits + index * 4, rows, first, last, BLOCK_N)
        for offset in range(0, stop - begin, BLOCK_N):
            key = begin + offset
            keys = load_rows(k, key, stop, head // G, H // G, BLOCK_N, D)
            values = load_rows(v, key, stop, head // G, H // G, BLOCK_N, D)
            scores = tl.dot(query, keys.T, input_precision="ieee")  # [BLOCK_M, BLOCK_N]
            p = tl.exp2(scores * (D**-0.5 * LOG2E) - log_sum[:, None])
            if key >= edge:
                p = tl.where((key + columns)[None, :] < limit[:, None], p, 0.0)
            ds = p * (tl.dot(grads, values.T, input_precision="ieee") - deltas[:, None])
            total = tl.dot(ds.to(keys.dtype), keys, total, input_precision="ieee")
    tl.store(pointers(dq, first, head, H, BLOCK_M, D), total * D**-0.5, here[:, None])


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
    """Fills dk and dv [T, Hkv, D]; delta [H, T] is that of backward_queries."""
    UNIT: tl.constexpr = D**-0.5 * LOG2E
    HKV: tl.constexpr = H // G
    kv_head = tl.program_id(0) % HKV
    first, last, visit, stop = fields(items + tl.program_id(0) // HKV * 4)
    keys, lanes = first + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_M)
    key = load_rows(k, first, last, kv_head, HKV, BLOCK_N, D)
    value = load_rows(v, first, last, kv_head, HKV, BLOCK_N, D)
    total_k, total_v = tl.zeros([BLOCK_N, D], tl.float32), tl.zeros([BLOCK_N, D], tl.float32)
    for span in range(visit, stop):
        needs, begin, edge, end = _walk_keys(visits + span * 4, keys, first, last, BLOCK_M)
        tiles = tl.cdiv(end - begin, BLOCK_M)
        # all heads in one loop, so that the pipeline of loads fills once
        for index in range(0, G * tiles):
            row, head = begin + index % tiles * BLOCK_M, kv_head * G + index // tiles
            query = load_rows(q, row, end, head, H, BLOCK_M, D)
            grads = load_rows(grad, row, end, head, H, BLOCK_M, D)
            at, exists = head.to(tl.int64) * tokens + row + lanes, row + lanes < end
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
    here = (keys < last)[:, None]
    tl.store(pointers(dk, first, kv_head, HKV, BLOCK_N, D), total_k * D**-0.5, here)
    tl.store(pointers(dv, first, kv_head, HKV, BLOCK_N, D), total_v, here)


@triton.jit
def _walk_keys(visit, keys, first, last, BLOCK_M: tl.constexpr):
    """Returns (needs, begin, edge, end) for the block of keys first .. last over a span.

    A key is seen by the rows from its needs to below end. Rows from edge on see all keys of the
    block.
    """
    start, end, key_start, key_end = fields(visit)
    causal = start == key_start
    seen = (keys >= key_start) & (keys < key_end)
    needs = tl.where(seen, tl.where(causal, keys, start), end)
    begin = start + tl.where(causal, tl.maximum(first - start, 0) // BLOCK_M * BLOCK_M, 0)
    inside = (key_start <= first) & (last <= key_end)
    edge = tl.where(inside, tl.where(causal, last - 1, start), end)
    return needs, begin, edge, end
