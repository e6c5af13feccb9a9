"""Flash attention for training, backward (Dao et al. 2022, algorithm 4), over the spans of a pack.

With p = exp(score - lse), dp = grad v^T and delta = sum(grad * out): dv = p^T grad, ds = p (dp -
delta), dq = ds k / sqrt(D), dk = ds^T q / sqrt(D). p and ds are fp32 until they meet their other
factor.

One program owns a block of queries of one head for dq, and leaves delta for the second kernel
(flash_backward_keys.py). Every sum stays in registers in a fixed order: no atomics, the same bits
in every run, one rounding. The price is 7 products a tile instead of 5, 14 * H * D FLOPs a visible
pair, of which 6 are here. Compute is the limit.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.attention import LOG2E
from kernels.common import FP32, pick
from kernels.flash import CONFIGS, Work, check_inputs, walk
from kernels.flash_backward_keys import KEY_CONFIGS, backward_keys

QUERY_CONFIGS = {  # for dq: BLOCK_M is also the block of the work list
    80: {"BLOCK_M": 64, "BLOCK_N": 64, "num_warps": 8, "num_stages": 2},
    89: {"BLOCK_M": 64, "BLOCK_N": 64, "num_warps": 8, "num_stages": 2},
    90: {"BLOCK_M": 128, "BLOCK_N": 64, "num_warps": 8, "num_stages": 2},
    FP32: CONFIGS[FP32],
}


def flash_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    queries: Work,
    keys: Work,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns dq [T, H, D], dk and dv [T, Hkv, D], in the dtype of q.

    grad [T, H, D] of out, and what flash_forward took and gave; blocks of queries and blocks of
    keys of the same spans, which cover the pack.
    """
    shape = check_inputs(q, k, v)
    tokens, heads, _ = q.shape
    dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
    delta = q.new_empty(heads, tokens, dtype=torch.float32)
    _backward_queries[(len(queries.items) * heads,)](
        grad,
        q,
        k,
        v,
        out,
        lse,
        delta,
        dq,
        queries.items,
        queries.visits,
        tokens,
        **shape,
        **pick(QUERY_CONFIGS, q.dtype),
    )
    backward_keys[(len(keys.items) * k.shape[1],)](
        grad,
        q,
        k,
        v,
        lse,
        delta,
        dk,
        dv,
        keys.items,
        keys.visits,
        tokens,
        **shape,
        **pick(KEY_CONFIGS, q.dtype),
    )
    return dq, dk, dv


@triton.jit
def _backward_queries(
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
    item = items + tl.program_id(0) // H * 4
    head = tl.program_id(0) % H
    first, last = tl.load(item), tl.load(item + 1)
    rows, columns = first + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    here = rows < last
    base = (first.to(tl.int64) * H + head) * D
    tile = tl.arange(0, BLOCK_M)[:, None] * (H * D) + tl.arange(0, D)
    query = tl.load(q + base + tile, here[:, None], 0.0)  # [BLOCK_M, D]
    grads = tl.load(grad + base + tile, here[:, None], 0.0)
    outs = tl.load(out + base + tile, here[:, None], 0.0)
    deltas = tl.sum(grads.to(tl.float32) * outs.to(tl.float32), 1)  # [BLOCK_M]
    place = head.to(tl.int64) * tokens + rows
    tl.store(delta + place, deltas, here)
    log_sum = tl.load(lse + place, here, 0.0) * LOG2E
    kv_tile = columns[:, None] * (H // G * D) + head // G * D + tl.arange(0, D)
    total = tl.zeros([BLOCK_M, D], tl.float32)
    for visit in range(tl.load(item + 2), tl.load(item + 3)):
        limit, begin, edge, stop = walk(visits + visit * 4, rows, first, last, BLOCK_N)
        for offset in range(0, stop - begin, BLOCK_N):
            key = begin + offset
            at = key.to(tl.int64) * (H // G * D)
            exists = (key + columns < stop)[:, None]
            keys = tl.load(k + at + kv_tile, exists, 0.0)  # [BLOCK_N, D]
            values = tl.load(v + at + kv_tile, exists, 0.0)
            scores = tl.dot(query, keys.T, input_precision="ieee")  # [BLOCK_M, BLOCK_N]
            p = tl.exp2(scores * (D**-0.5 * LOG2E) - log_sum[:, None])
            if key >= edge:
                p = tl.where((key + columns)[None, :] < limit[:, None], p, 0.0)
            ds = p * (tl.dot(grads, values.T, input_precision="ieee") - deltas[:, None])
            total = tl.dot(ds.to(keys.dtype), keys, total, input_precision="ieee")
    tl.store(dq + base + tile, total * D**-0.5, here[:, None])
