"""Decode attention over pages that several rows share (samples of one prompt), which are read once for all of them.

A group is up to ROWS neighbouring rows of the batch whose block tables begin alike. A program owns SPLIT shared keys of one group and one
kv head, for BLOCK_M of the group's query heads: 64 FLOP a byte in bf16, where a row alone does 4 (at G = 4; with more heads, or in fp32, the
group's programs are neighbours and find the keys in L2). It writes each row's partial result where the row's own program would have
(decode.py), so that the merge is the same. (Hydragen; Juravsky et al., 2024.) The inner loop of both forms, `attend`, is here.

groups is int32 [N, 3]: the first row, the number of rows (at most ROWS; 0: padding), and the shared length in keys, a multiple of SPLIT and
no longer than any row of the group. It lives on the device, so that a captured graph serves any grouping into N groups.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.common import Config, check, pick

ROWS = 16
CONFIGS = {arch: {"BLOCK_M": 64, "num_warps": 4, "num_stages": 3} for arch in (80, 89, 90)}


def shared_splits(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    tables: Tensor,
    groups: Tensor,
    partial: Tensor,
    lse: Tensor,
    shape: dict[str, int],
    config: Config | None = None,
) -> None:
    """Fills partial [B, splits, H, D] and lse [B, splits, H] at the shared splits of the rows of groups [N, 3]."""
    check("groups", groups, (None, 3), (torch.int32,), inner=2)
    chosen = pick(CONFIGS, config)
    members = triton.next_power_of_2(
        shape["G"]
    )  # a power of two: a query's slot in the group is row * members + head
    slots = ROWS * members
    block = min(
        slots, chosen["BLOCK_M"] if q.element_size() == 2 else 8
    )  # fp32 products need many registers
    if len(groups):
        _shared_splits[(len(groups) * (slots // block), shape["HKV"], partial.shape[1])](
            q,
            k_cache,
            v_cache,
            tables,
            groups,
            partial,
            lse,
            q.stride(0),
            tables.stride(0),
            PARTS=slots // block,
            MEMBERS=members,
            BLOCK_M=block,
            **shape,
            num_warps=chosen["num_warps"],
            num_stages=chosen["num_stages"],
        )


@triton.jit
def attend(
    q,
    k_cache,
    v_cache,
    table,
    head,
    first,
    end,
    HKV: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Rows q [M, D] against keys first..end - 1 (at least one) of a kv head: their mean value [M, D], log2 of the sum of exponentials [M]."""
    M: tl.constexpr = q.shape[0]
    D: tl.constexpr = q.shape[1]
    scale: tl.constexpr = (
        1.4426950408889634 / D**0.5
    )  # log2(e) / sqrt(D): exp2 is the machine's own exponential
    keys = tl.arange(0, BLOCK_N)
    tile = keys[:, None] * D + tl.arange(0, D)[None, :]
    peak = tl.full([M], -1e30, tl.float32)
    total = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, D], tl.float32)
    next_page = tl.load(table + first // PAGE)
    for start in range(first, end, BLOCK_N):
        page = next_page.to(
            tl.int64
        )  # one tile ahead: a lookup in the tile's own iteration would halve the pipeline
        next_page = tl.load(table + (start + BLOCK_N) // PAGE, mask=start + BLOCK_N < end, other=0)
        base = ((page * HKV + head) * PAGE + start % PAGE) * D
        seen = start + keys < end
        k = tl.load(k_cache + base + tile, mask=seen[:, None], other=0.0)
        v = tl.load(
            v_cache + base + tile, mask=seen[:, None], other=0.0
        )  # 0 * NaN is NaN: what lies past the end must not be read
        scores = tl.where(seen[None, :], tl.dot(q, tl.trans(k), input_precision="ieee"), -1e30)
        higher = tl.maximum(peak, tl.max(scores, 1) * scale)
        p = tl.exp2(tl.fma(scores, scale, -higher[:, None]))
        shrink = tl.exp2(peak - higher)
        total = total * shrink + tl.sum(p, 1)
        high = p.to(
            v.dtype
        )  # p in two halves of 8 bits: no rounding of p, and no more bytes from memory
        acc = tl.dot(high, v, acc * shrink[:, None], input_precision="ieee")
        acc = tl.dot((p - high.to(tl.float32)).to(v.dtype), v, acc, input_precision="ieee")
        peak = higher
    return acc / total[:, None], peak + tl.log2(total)


@triton.jit
def _shared_splits(
    q,
    k_cache,
    v_cache,
    tables,
    groups,
    partial,
    lse,
    q_stride,
    table_stride,
    PARTS: tl.constexpr,
    MEMBERS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    G: tl.constexpr,
    HKV: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    group, head, split = groups + tl.program_id(0) // PARTS * 3, tl.program_id(1), tl.program_id(2)
    slot = tl.program_id(0) % PARTS * BLOCK_M + tl.arange(0, BLOCK_M)
    start, rows, first = tl.load(group).to(tl.int64), tl.load(group + 1), split * SPLIT
    if (tl.program_id(0) % PARTS * BLOCK_M >= rows * MEMBERS) | (first >= tl.load(group + 2)):
        return
    row, member = start + slot // MEMBERS, slot % MEMBERS
    real = (slot // MEMBERS < rows) & (member < G)
    columns = tl.arange(0, D)[None, :]
    queries = tl.load(
        q + row[:, None] * q_stride + (head * G + member[:, None]) * D + columns,
        mask=real[:, None],
        other=0.0,
    )
    mean, log_sum = attend(
        queries,
        k_cache,
        v_cache,
        tables + start * table_stride,
        head,
        first,
        first + SPLIT,
        HKV,
        PAGE,
        BLOCK_N,
    )
    at = (row * tl.num_programs(2) + split) * (HKV * G) + head * G + member
    tl.store(partial + at[:, None] * D + columns, mean, mask=real[:, None])
    tl.store(lse + at, log_sum, mask=real)
