"""Decode attention over the paged KV cache: one new query a sequence, against all of its keys.

    out[b, h] = sum_j softmax_j(q[b, h] . k[j] / sqrt(D)) v[j],  j < lengths[b],  kv head h // G

G = H / Hkv. Reads 2 * Hkv * D * itemsize bytes a key for 4 * H * D FLOPs: 4 FLOP a byte in bf16 at
G = 4, so memory is the limit. The keys of a row are cut into splits (Flash-Decoding; Dao et al.
2023). A program owns SPLIT keys and one kv head, for the G query heads of one row, or of up to
`group_rows` neighbouring rows that share these keys, which are then read once (Hydragen; Juravsky
et al. 2024). It writes the mean value of each query head and its log2-sum-exp in fp32, 3% of the
bytes read; `_merge` adds the splits of a row in order. SPLIT is fixed, so the bits of a row do not
depend on the batch. The host lists the work: no program is empty, however the lengths differ.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.attention import attend_pages, check_cache, softmax_start
from kernels.common import check, require
from kernels.decode_plan import SPLIT, DecodeWork, group_rows


def decode_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    tables: Tensor,
    lengths: Tensor,
    work: DecodeWork,
    out: Tensor,
) -> Tensor:
    """Fills and returns out [B, H, D].

    q [B, H, D] with any row stride; caches as in attention.py. Row b sees the first lengths[b] keys
    (int32 [B]) of the pages tables[b] (int32 [B, max_pages]); with none its output is 0. Shapes
    alone set the grids, so a captured graph serves all work of the same shapes.
    """
    shape = check_cache(q, k_cache, v_cache, tables)
    rows, heads, dim = q.shape
    check((rows,), torch.int32, lengths=lengths, starts=work.starts)
    require(len(tables) == rows, f"tables has {len(tables)} rows; expected {rows}")
    check((None, 3), torch.int32, own=work.own, shared=work.shared)
    check(q.shape, q.dtype, out=out)
    fold = heads // shape["HKV"]
    shape |= {"G": fold, "MEMBERS": triton.next_power_of_2(fold), "SPLIT": SPLIT}
    partial = q.new_empty(max(1, work.results), heads, dim, dtype=torch.float32)
    lse = q.new_empty(max(1, work.results), heads, dtype=torch.float32)
    inputs = q, k_cache, v_cache, tables, lengths, work.starts
    most = group_rows(fold, q.element_size())
    for items, block in ((work.shared, most), (work.own, 1)):
        if len(items):
            _splits[(len(items), shape["HKV"])](
                *inputs,
                items,
                partial,
                lse,
                q.stride(0),
                tables.stride(0),
                **shape,
                BLOCK_M=block * shape["MEMBERS"],
                num_warps=4,
                num_stages=3,
            )
    results = partial, lse, lengths, work.starts, out
    _merge[(rows, heads)](*results, H=heads, D=dim, SPLIT=SPLIT, BLOCK=16)
    return out


@triton.jit(do_not_specialize=["table_stride"])  # one code for any width of the tables
def _splits(
    q,
    k_cache,
    v_cache,
    tables,
    lengths,
    starts,
    work,
    partial,
    lse,
    q_stride,
    table_stride,
    MEMBERS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    G: tl.constexpr,
    HKV: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Fills partial [results, H, D] and lse [results, H] for an item and a kv head."""
    work, head = work + tl.program_id(0) * 3, tl.program_id(1)
    start, rows, split = tl.load(work).to(tl.int64), tl.load(work + 1), tl.load(work + 2)
    if rows == 0:
        return
    slot = tl.arange(0, BLOCK_M)
    row, member = start + slot // MEMBERS, slot % MEMBERS
    real = (slot // MEMBERS < rows) & (member < G)
    columns = tl.arange(0, D)[None, :]
    place = q + row[:, None] * q_stride + (head * G + member[:, None]) * D + columns
    queries = tl.load(place, real[:, None], 0.0)
    pages = k_cache, v_cache, tables + start * table_stride, head
    first = split * SPLIT
    end = tl.minimum(first + SPLIT, tl.load(lengths + start))
    state = softmax_start(BLOCK_M, D)
    peak, total, acc = attend_pages(
        state, queries, pages, end - 1, first, end, end, HKV, PAGE, BLOCK_N, True
    )
    at = tl.load(starts + row, real, 0).to(tl.int64) + split
    at = at * (HKV * G) + head * G + member
    tl.store(partial + at[:, None] * D + columns, acc / total[:, None], real[:, None])
    tl.store(lse + at, peak + tl.log2(total), real)


@triton.jit
def _merge(
    partial,
    lse,
    lengths,
    starts,
    out,
    H: tl.constexpr,
    D: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Adds the mean values of a row's splits, weighted by their sums, BLOCK splits at a time."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    count, start = tl.cdiv(tl.load(lengths + row), SPLIT), tl.load(starts + row).to(tl.int64)
    columns = tl.arange(0, D)
    peak, total, acc = -1e30, 0.0, tl.zeros([D], tl.float32)
    for first in range(0, count, BLOCK):
        split = first + tl.arange(0, BLOCK)
        at = (start + split) * H + head
        log_sums = tl.load(lse + at, split < count, -1e30)
        place = partial + at[:, None] * D + columns[None, :]
        values = tl.load(place, split[:, None] < count, 0.0)
        higher = tl.maximum(peak, tl.max(log_sums, 0))
        weights, shrink = tl.exp2(log_sums - higher), tl.exp2(peak - higher)
        total = total * shrink + tl.sum(weights, 0)
        acc = acc * shrink + tl.sum(weights[:, None] * values, 0)
        peak = higher
    tl.store(out + (row * H + head) * D + columns, acc / tl.where(total > 0, total, 1.0))
