"""Flash attention for training, backward (Dao et al. 2022, algorithm 4), for the spans of a pack.

With p = exp(score - lse), dp = grad v^T and delta = sum(grad * out): dv = p^T grad, ds = p (dp - delta), dq = ds k / sqrt(D), dk = ds^T q / sqrt(D).
One program owns a block of queries of one head for dq, and a block of keys of one kv head for dk and dv, over all query heads and spans that read
it. So every sum stays in registers in a fixed order: no atomics, bitwise repeatable, one rounding, and gradients of a shared prefix need no adding
up. The price is 7 matrix products a tile in place of 5: 14 * H * D FLOPs a visible pair. p and ds are fp32 until they meet their other factor.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.common import Config, check
from kernels.flash import LOG2E, Work, _visit, check_inputs, check_lse, settings, visible

QUERY_CONFIGS: dict[int, Config] = {  # for dq: BLOCK_M is what the work list must be made for
    80: {"BLOCK_M": 64, "BLOCK_N": 64, "num_warps": 8, "num_stages": 2},
    89: {"BLOCK_M": 64, "BLOCK_N": 64, "num_warps": 8, "num_stages": 2},
    90: {"BLOCK_M": 128, "BLOCK_N": 64, "num_warps": 8, "num_stages": 2},
}
KEY_CONFIGS: dict[int, Config] = {  # for dk and dv: BLOCK_N is what the work list must be made for
    80: {"BLOCK_M": 32, "BLOCK_N": 64, "num_warps": 8, "num_stages": 3},
    89: {"BLOCK_M": 64, "BLOCK_N": 64, "num_warps": 8, "num_stages": 2},
    90: {"BLOCK_M": 32, "BLOCK_N": 128, "num_warps": 8, "num_stages": 3},
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
    query_config: Config | None = None,
    key_config: Config | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """grad [T, H, D] of out, and what flash_forward took and gave -> dq [T, H, D], dk and dv [T, Hkv, D], in the dtype of q.

    The work lists have blocks of queries and blocks of keys of the same spans; rows that these do not cover are left unwritten. `out` and `lse`
    may be over more spans than the work lists: then the result is these spans' share of the gradients, and the shares add up.
    """
    tokens, heads, dim = q.shape
    check_inputs(q, k, v, queries)
    check_inputs(q, k, v, keys)
    grad = grad.contiguous()  # that of a sum has stride 0
    check("grad", grad, (tokens, heads, dim), (q.dtype,), inner=3)
    check("out", out, (tokens, heads, dim), (q.dtype,), inner=3)
    check_lse(lse, tokens, heads)
    dq, dk, dv = (torch.empty(x.shape, dtype=q.dtype, device=q.device) for x in (q, k, v))
    delta = torch.empty((heads, tokens), dtype=torch.float32, device=q.device)
    shape = {
        "H": heads,
        "G": heads // k.shape[1],
        "D": dim,
        "SCALE": dim**-0.5,
        "UNIT": dim**-0.5 * LOG2E,
    }
    if len(queries.items) and len(keys.items):
        _delta[(triton.cdiv(tokens, 64) * heads,)](grad, out, delta, tokens, heads, dim, 64)
        _backward_queries[(len(queries.items) * heads,)](
            grad,
            q,
            k,
            v,
            lse,
            delta,
            dq,
            queries.items,
            queries.visits,
            tokens,
            **shape,
            **settings(QUERY_CONFIGS, q.dtype, query_config) | {"BLOCK_M": queries.block},
        )
        _backward_keys[(len(keys.items) * k.shape[1],)](
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
            **settings(KEY_CONFIGS, q.dtype, key_config) | {"BLOCK_N": keys.block},
        )
    return dq, dk, dv


@triton.jit
def _delta(grad, out, delta, tokens, H: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr):
    """delta [H, T]: one program owns BLOCK rows of a head."""
    rows = tl.program_id(0) // H * BLOCK + tl.arange(0, BLOCK)
    head = tl.program_id(0) % H
    here = rows < tokens
    tile = (rows.to(tl.int64)[:, None] * H + head) * D + tl.arange(0, D)
    product = tl.load(grad + tile, mask=here[:, None], other=0.0).to(tl.float32) * tl.load(
        out + tile, mask=here[:, None], other=0.0
    ).to(tl.float32)
    tl.store(delta + head.to(tl.int64) * tokens + rows, tl.sum(product, 1), mask=here)


@triton.jit
def _backward_queries(
    grad,
    q,
    k,
    v,
    lse,
    delta,
    dq,
    items,
    visits,
    tokens,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    SCALE: tl.constexpr,
    UNIT: tl.constexpr,
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
    query = tl.load(q + base + tile, mask=here[:, None], other=0.0)  # [BLOCK_M, D]
    grads = tl.load(grad + base + tile, mask=here[:, None], other=0.0)  # [BLOCK_M, D]
    log_mass = (
        tl.load(lse + head.to(tl.int64) * tokens + rows, mask=here, other=0.0) * 1.4426950408889634
    )
    deltas = tl.load(delta + head.to(tl.int64) * tokens + rows, mask=here, other=0.0)
    kv_tile = columns[:, None] * (H // G * D) + head // G * D + tl.arange(0, D)
    total = tl.zeros([BLOCK_M, D], tl.float32)
    for visit in range(tl.load(item + 2), tl.load(item + 3)):
        limit, begin, edge, stop = _visit(visits + visit * 4, rows, first, last, BLOCK_N)
        for offset in range(0, stop - begin, BLOCK_N):
            key = begin + offset
            at = key.to(tl.int64) * (H // G * D)
            exists = (key + columns < stop)[:, None]
            keys = tl.load(k + at + kv_tile, mask=exists, other=0.0)  # [BLOCK_N, D]
            values = tl.load(v + at + kv_tile, mask=exists, other=0.0)
            p = tl.exp2(
                tl.dot(query, keys.T, input_precision="ieee") * UNIT - log_mass[:, None]
            )  # [BLOCK_M, BLOCK_N]
            if key >= edge:
                p = tl.where((key + columns)[None, :] < limit[:, None], p, 0.0)
            ds = p * (tl.dot(grads, values.T, input_precision="ieee") - deltas[:, None])
            total = tl.dot(ds.to(keys.dtype), keys, total, input_precision="ieee")
    tl.store(dq + base + tile, (total * SCALE).to(dq.dtype.element_ty), mask=here[:, None])


@triton.jit
def _backward_keys(
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
    SCALE: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    item = items + tl.program_id(0) // (H // G) * 4
    kv_head = tl.program_id(0) % (H // G)
    first, last = tl.load(item), tl.load(item + 1)
    keys, lanes = first + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_M)
    here = (keys < last)[:, None]
    base = (first.to(tl.int64) * (H // G) + kv_head) * D
    tile = tl.arange(0, BLOCK_N)[:, None] * (H // G * D) + tl.arange(0, D)
    key = tl.load(k + base + tile, mask=here, other=0.0)  # [BLOCK_N, D]
    value = tl.load(v + base + tile, mask=here, other=0.0)
    q_tile = lanes[:, None] * (H * D) + tl.arange(0, D)
    total_k, total_v = tl.zeros([BLOCK_N, D], tl.float32), tl.zeros([BLOCK_N, D], tl.float32)
    for visit in range(tl.load(item + 2), tl.load(item + 3)):
        span = visits + visit * 4
        start, end, key_start, key_end = (
            tl.load(span),
            tl.load(span + 1),
            tl.load(span + 2),
            tl.load(span + 3),
        )
        causal = start == key_start
        needs = tl.where(
            (keys >= key_start) & (keys < key_end), tl.where(causal, keys, start), end
        )  # the first row that sees a key
        begin = tl.where(causal, start + tl.maximum(first - start, 0) // BLOCK_M * BLOCK_M, start)
        edge = tl.where(
            (key_start <= first) & (last <= key_end), tl.where(causal, last - 1, start), end
        )  # rows from here on see all keys
        tiles = tl.cdiv(end - begin, BLOCK_M)
        for index in range(
            0, G * tiles
        ):  # all heads in one loop, so that the pipeline of loads fills once
            row, head = begin + index % tiles * BLOCK_M, kv_head * G + index // tiles
            exists = row + lanes < end
            q_base = (row.to(tl.int64) * H + head) * D
            at = head.to(tl.int64) * tokens + row
            query = tl.load(q + q_base + q_tile, mask=exists[:, None], other=0.0)  # [BLOCK_M, D]
            grads = tl.load(grad + q_base + q_tile, mask=exists[:, None], other=0.0)
            # - lse / scale and - delta are what the products start from: as vectors along the queries they would take 32 registers
            log_mass = tl.load(lse + at + lanes, mask=exists, other=0.0) * (
                -1.4426950408889634 / UNIT
            )  # beyond the span grads are 0
            deltas = tl.load(delta + at + lanes, mask=exists, other=0.0)
            scores = tl.dot(
                key,
                query.T,
                tl.broadcast_to(log_mass[None, :], [BLOCK_N, BLOCK_M]),
                input_precision="ieee",
            )
            p = tl.exp2(scores * UNIT)  # [BLOCK_N, BLOCK_M]
            if row < edge:
                p = tl.where((row + lanes)[None, :] >= needs[:, None], p, 0.0)
            total_v = tl.dot(p.to(grads.dtype), grads, total_v, input_precision="ieee")
            ds = p * tl.dot(
                value,
                grads.T,
                tl.broadcast_to(-deltas[None, :], [BLOCK_N, BLOCK_M]),
                input_precision="ieee",
            )
            total_k = tl.dot(ds.to(query.dtype), query, total_k, input_precision="ieee")
    tl.store(dk + base + tile, (total_k * SCALE).to(dk.dtype.element_ty), mask=here)
    tl.store(dv + base + tile, total_v.to(dv.dtype.element_ty), mask=here)


def reference(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, spans: list
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv as above, in the dtype of its arguments."""
    groups, scale = (*k.shape[:2], q.shape[1] // k.shape[1], k.shape[2]), q.shape[-1] ** -0.5
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    p = (torch.einsum("thd,shd->ths", q, k) * scale - lse[..., None]).exp() * visible(
        spans, len(q), q.device
    )[:, None]
    ds = p * (torch.einsum("thd,shd->ths", grad, v) - (grad * out).sum(-1, keepdim=True)) * scale
    dk, dv = (
        torch.einsum("ths,thd->shd", *pair).view(groups).sum(2) for pair in ((ds, q), (p, grad))
    )
    return torch.einsum("ths,shd->thd", ds, k), dk, dv
