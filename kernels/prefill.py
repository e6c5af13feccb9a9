"""Prefill attention over the paged KV cache: chunks of new tokens against their whole context, causally (FlashAttention-2; Dao, 2023).

    out[t, h] = sum_j softmax_j(q[t, h] . k[j] / sqrt(D)) v[j],   j <= position of t,   kv head h // (H / Hkv)

4 * H * D FLOPs a (query, visible key) pair; q and out are moved once, K and V once a work item and head, mostly through L2: compute is
the limit. A program owns BLOCK_M query rows of one head of a work item: first the tiles of keys that all of its rows see, without a mask,
then those at the diagonal. P is rounded to the dtype of V for the second product, as the tensor cores want it. The host lays out the work,
longest first. A tile starts at a multiple of BLOCK_N from position 0, so a row's result does not depend on where its chunk began.
"""

from __future__ import annotations

from typing import Sequence

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.common import Config, check, pick, require
from kernels.decode import check_cache

ROWS = 128  # query rows of a work item, on all cards
CONFIGS = {
    arch: {"ROWS": ROWS, "BLOCK_M": 128, "BLOCK_N": 64, "num_warps": 8, "num_stages": 3}
    for arch in (80, 89, 90)
}
TILE_BYTES = 16384  # of K or V: BLOCK_N shrinks where D or the dtype is wide


def prefill_work(starts: Sequence[int], counts: Sequence[int], block: int = ROWS) -> np.ndarray:
    """What prefill_attention computes for sequences with counts[i] new tokens at positions starts[i].., whose queries follow one another in q.

    int32 [W, 4]: sequence, first row of q, number of rows (at most block), position of the first row; those that see most keys first.
    """
    firsts = np.cumsum([0, *counts])
    items = [
        (i, firsts[i] + done, min(block, count - done), start + done)
        for i, (start, count) in enumerate(zip(starts, counts, strict=True))
        for done in range(0, count, block)
    ]
    return np.array(sorted(items, key=lambda item: -(item[2] + item[3])), np.int32).reshape(-1, 4)


def prefill_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    tables: Tensor,
    work: Tensor,
    out: Tensor | None = None,
    config: Config | None = None,
) -> Tensor:
    """q [T, H, D], caches [pages, Hkv, page_size, D], tables int32 [B, max_pages], work int32 [W, 4] -> out [T, H, D].

    The new tokens' own keys and values are in the pages already. Rows of q that no work item holds are not computed; an item of 0 rows
    is padding.
    """
    kv_heads, page_size = check_cache(q, k_cache, v_cache, tables)
    tokens, heads, dim = q.shape
    out = q.new_empty(q.shape) if out is None else out
    check("out", out, (tokens, heads, dim), (q.dtype,), inner=3)
    if len(work) == 0:
        return out
    check("work", work, (None, 4), (torch.int32,), inner=2)
    chosen = pick(CONFIGS, config)
    block_n = min(chosen["BLOCK_N"], page_size, TILE_BYTES // (dim * q.element_size()))
    block_m = (
        min(chosen["BLOCK_M"], 16384 // dim) if q.element_size() == 2 else 16
    )  # fp32 products need many registers
    require(
        chosen["ROWS"] % block_m == 0,
        f"ROWS is {chosen['ROWS']}; expected a multiple of BLOCK_M, {block_m}",
    )
    stages = min(
        chosen["num_stages"], 3 if dim < 256 else 2
    )  # three stages of the widest heads are 1 KiB too many for sm_89
    _prefill[(heads, len(work), chosen["ROWS"] // block_m)](
        q,
        k_cache,
        v_cache,
        tables,
        work,
        out,
        q.stride(0),
        tables.stride(0),
        H=heads,
        HKV=kv_heads,
        D=dim,
        PAGE=page_size,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        num_warps=chosen["num_warps"],
        num_stages=stages,
    )
    return out


@triton.jit
def _tiles(
    acc,
    total,
    peak,
    next_page,
    q,
    k_cache,
    v_cache,
    table,
    head,
    position,
    first,
    stop,
    end,
    HKV: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
):
    """The softmax of rows q [M, D], the first of them at `position`, goes on over keys first..stop - 1; `end` is the number of stored keys."""
    M: tl.constexpr = q.shape[0]
    D: tl.constexpr = q.shape[1]
    scale: tl.constexpr = (
        1.4426950408889634 / D**0.5
    )  # log2(e) / sqrt(D): exp2 is the machine's own exponential
    keys = tl.arange(0, BLOCK_N)
    tile = keys[:, None] * D + tl.arange(0, D)[None, :]
    for start in range(first, stop, BLOCK_N):
        page = next_page.to(
            tl.int64
        )  # one tile ahead: a lookup in the tile's own iteration would halve the pipeline
        next_page = tl.load(table + (start + BLOCK_N) // PAGE, mask=start + BLOCK_N < end, other=0)
        base = ((page * HKV + head) * PAGE + start % PAGE) * D
        k = tl.load(k_cache + base + tile)
        if MASKED:  # 0 * NaN is NaN: values past the end must not be read
            v = tl.load(v_cache + base + tile, mask=start + keys[:, None] < end, other=0.0)
        else:
            v = tl.load(v_cache + base + tile)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        if MASKED:
            scores = tl.where(
                start + keys[None, :] <= position + tl.arange(0, M)[:, None], scores, -1e30
            )
        higher = tl.maximum(peak, tl.max(scores, 1) * scale)
        p = tl.exp2(
            tl.fma(scores, scale, -higher[:, None])
        )  # spelled out: both loops must round alike
        shrink = tl.exp2(peak - higher)
        total = total * shrink + tl.sum(p, 1)
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
        peak = higher
    return acc, total, peak, next_page


@triton.jit
def _prefill(
    q,
    k_cache,
    v_cache,
    tables,
    work,
    out,
    q_stride,
    table_stride,
    H: tl.constexpr,
    HKV: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    head, item, done = tl.program_id(0), work + tl.program_id(1) * 4, tl.program_id(2) * BLOCK_M
    rows = tl.load(item + 2) - done
    if rows <= 0:
        return
    table = tables + tl.load(item).to(tl.int64) * table_stride
    position = tl.load(item + 3) + done
    row = tl.arange(0, BLOCK_M)
    token = tl.load(item + 1).to(tl.int64) + done + row
    columns = head * D + tl.arange(0, D)[None, :]
    queries = tl.load(q + token[:, None] * q_stride + columns, mask=row[:, None] < rows, other=0.0)
    end = position + tl.minimum(rows, BLOCK_M)
    whole = (position + 1) // BLOCK_N * BLOCK_N  # keys in tiles that even the first row sees
    acc, total = tl.zeros([BLOCK_M, D], tl.float32), tl.zeros([BLOCK_M], tl.float32)
    peak, next_page = tl.full([BLOCK_M], -1e30, tl.float32), tl.load(table)
    acc, total, peak, next_page = _tiles(
        acc,
        total,
        peak,
        next_page,
        queries,
        k_cache,
        v_cache,
        table,
        head // (H // HKV),
        position,
        0,
        whole,
        end,
        HKV,
        PAGE,
        BLOCK_N,
        False,
    )
    acc, total, peak, next_page = _tiles(
        acc,
        total,
        peak,
        next_page,
        queries,
        k_cache,
        v_cache,
        table,
        head // (H // HKV),
        position,
        whole,
        end,
        end,
        HKV,
        PAGE,
        BLOCK_N,
        True,
    )
    tl.store(
        out + token[:, None] * (H * D) + columns, acc / total[:, None], mask=row[:, None] < rows
    )


def reference(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    tables: Tensor,
    starts: Sequence[int],
    counts: Sequence[int],
) -> Tensor:
    out, first, heads = torch.zeros_like(q), 0, q.shape[1]
    for table, start, count in zip(tables, starts, counts, strict=True):
        pages, mine = table[: -(-(start + count) // k_cache.shape[2])], slice(first, first + count)
        k, v = (
            cache[pages]
            .transpose(0, 1)
            .flatten(1, 2)[:, : start + count]
            .repeat_interleave(heads // cache.shape[1], 0)
            for cache in (k_cache, v_cache)
        )  # [H, keys, D]
        hidden = torch.ones(count, start + count, dtype=torch.bool, device=q.device).triu(start + 1)
        scores = (torch.einsum("thd,hnd->htn", q[mine], k) / q.shape[2] ** 0.5).masked_fill(
            hidden, -torch.inf
        )
        out[mine], first = torch.einsum("htn,hnd->thd", torch.softmax(scores, -1), v), first + count
    return out
