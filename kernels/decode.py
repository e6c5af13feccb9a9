"""Decode attention over the paged KV cache: one new query a sequence, against all of its keys (Flash-Decoding; Dao et al., 2023).

    out[b, h] = sum_j softmax_j(q[b, h] . k[j] / sqrt(D)) v[j],   j < lengths[b],   kv head h // G,   G = H / Hkv

Reads 2 * Hkv * D * itemsize bytes a key, for 4 * H * D FLOPs: 4 FLOP a byte in bf16 at G = 4, so memory is the limit.
A program owns SPLIT keys of one sequence and one kv head, for the G query heads that share it, and writes their mean value and log-sum-exp
in fp32 (3% of the bytes read); a second kernel merges them in order. SPLIT is fixed, whatever the batch: a row's bits do not depend on its
company. With `groups`, neighbouring rows read the pages that they share once (decode_shared.py), in the same splits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.common import Config, check, pick, require
from kernels.decode_shared import attend, shared_splits

SPLIT = 256  # keys a program: a change changes the bits of every result
CONFIGS = {
    arch: {"SPLIT": SPLIT, "BLOCK_N": 64, "num_warps": 4, "num_stages": 3} for arch in (80, 89, 90)
}
TILE_BYTES = 16384  # of K in flight a stage; BLOCK_N shrinks where D or the dtype is wide


def decode_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    tables: Tensor,
    lengths: Tensor,
    *,
    max_length: int,
    groups: Tensor | None = None,
    out: Tensor | None = None,
    config: Config | None = None,
) -> Tensor:
    """q [B, H, D], caches [pages, Hkv, page_size, D], tables int32 [B, max_pages], lengths int32 [B] -> out [B, H, D].

    Row b sees the first lengths[b] <= max_length keys of the pages in tables[b]; with none its output is 0. max_length sets the grid, so
    that a captured graph serves all lengths up to it. groups int32 [N, 3]: see decode_shared.py.
    """
    kv_heads, page_size = check_cache(q, k_cache, v_cache, tables)
    rows, heads, dim = q.shape
    check("lengths", lengths, (rows,), (torch.int32,))
    require(tables.shape[0] == rows, f"tables has {tables.shape[0]} rows for {rows} queries")
    require(max_length > 0, f"max_length is {max_length}; expected at least 1")
    out = q.new_empty(q.shape) if out is None else out
    check("out", out, (rows, heads, dim), (q.dtype,), inner=3)
    if rows == 0:
        return out
    chosen = pick(CONFIGS, config)
    split, splits = chosen["SPLIT"], triton.cdiv(max_length, chosen["SPLIT"])
    block = min(chosen["BLOCK_N"], page_size, TILE_BYTES // (dim * q.element_size()))
    require(split % block == 0, f"SPLIT is {split}; expected a multiple of BLOCK_N, {block}")
    partial = torch.empty((rows, splits, heads, dim), dtype=torch.float32, device=q.device)
    lse = torch.empty((rows, splits, heads), dtype=torch.float32, device=q.device)
    launch = {"num_warps": chosen["num_warps"], "num_stages": chosen["num_stages"]}
    shape = {
        "G": heads // kv_heads,
        "HKV": kv_heads,
        "D": dim,
        "PAGE": page_size,
        "SPLIT": split,
        "BLOCK_N": block,
    }
    if groups is not None:
        shared_splits(q, k_cache, v_cache, tables, groups, partial, lse, shape)
    count = 0 if groups is None else groups.shape[0]
    _own_splits[(rows, kv_heads, splits)](
        q,
        k_cache,
        v_cache,
        tables,
        lengths,
        groups,
        partial,
        lse,
        q.stride(0),
        tables.stride(0),
        count,
        GROUPS=triton.next_power_of_2(count) if count else 0,
        ROWS=triton.next_power_of_2(heads // kv_heads),
        **shape,
        **launch,
    )
    _merge[(rows, heads)](
        partial, lse, lengths, out, splits, H=heads, D=dim, SPLIT=split, BLOCK=16, num_warps=4
    )
    return out


def check_cache(q: Tensor, k_cache: Tensor, v_cache: Tensor, tables: Tensor) -> tuple[int, int]:
    """(Hkv, page size) of a cache that fits the queries; ValueError for one that does not."""
    require(q.dim() == 3, f"q has shape {tuple(q.shape)}; expected [rows, heads, head_dim]")
    check("q", q, q.shape, inner=2)
    heads, dim = q.shape[1:]
    check("k_cache", k_cache, (None, None, None, dim), (q.dtype,), inner=4)
    check("v_cache", v_cache, tuple(k_cache.shape), (q.dtype,), inner=4)
    check("tables", tables, (None, None), (torch.int32,))
    _, kv_heads, page_size, _ = k_cache.shape
    require(
        heads % kv_heads == 0, f"{heads} query heads; expected a multiple of the cache's {kv_heads}"
    )
    require(
        dim in (16, 32, 64, 128, 256), f"head_dim is {dim}; expected a power of two from 16 to 256"
    )
    require(
        page_size in (16, 32, 64, 128, 256),
        f"page_size is {page_size}; expected a power of two from 16 to 256",
    )
    return kv_heads, page_size


@triton.jit
def _own_splits(
    q,
    k_cache,
    v_cache,
    tables,
    lengths,
    groups,
    partial,
    lse,
    q_stride,
    table_stride,
    count,
    GROUPS: tl.constexpr,
    ROWS: tl.constexpr,
    G: tl.constexpr,
    HKV: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    row, head, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    first, length = split * SPLIT, tl.load(lengths + row)
    if first >= length:
        return
    if GROUPS > 0:  # the row's group, if any, has done its shared splits
        group = tl.arange(0, GROUPS)
        start = tl.load(groups + group * 3, mask=group < count, other=0)
        members = tl.load(groups + group * 3 + 1, mask=group < count, other=0)
        shared = tl.load(groups + group * 3 + 2, mask=group < count, other=0)
        if first < tl.sum(tl.where((row >= start) & (row < start + members), shared, 0), 0):
            return
    member = tl.arange(0, ROWS)  # query heads of this kv head
    columns = tl.arange(0, D)[None, :]
    queries = tl.load(
        q + row * q_stride + (head * G + member[:, None]) * D + columns,
        mask=member[:, None] < G,
        other=0.0,
    )
    mean, log_sum = attend(
        queries,
        k_cache,
        v_cache,
        tables + row * table_stride,
        head,
        first,
        tl.minimum(first + SPLIT, length),
        HKV,
        PAGE,
        BLOCK_N,
    )
    at = (row * tl.num_programs(2) + split) * (HKV * G) + head * G + member
    tl.store(partial + at[:, None] * D + columns, mean, mask=member[:, None] < G)
    tl.store(lse + at, log_sum, mask=member < G)


@triton.jit
def _merge(
    partial,
    lse,
    lengths,
    out,
    splits,
    H: tl.constexpr,
    D: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out[row, head] = the mean of its splits' values, weighted by their sums of exponentials, BLOCK splits at a time."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    count = tl.cdiv(tl.load(lengths + row), SPLIT)
    columns = tl.arange(0, D)
    peak, total, acc = -1e30, 0.0, tl.zeros([D], tl.float32)
    for start in range(0, count, BLOCK):
        split = start + tl.arange(0, BLOCK)
        at = (row * splits + split) * H + head
        log_sums = tl.load(lse + at, mask=split < count, other=-1e30)
        values = tl.load(
            partial + at[:, None] * D + columns[None, :], mask=split[:, None] < count, other=0.0
        )
        higher = tl.maximum(peak, tl.max(log_sums, 0))
        weights = tl.exp2(log_sums - higher)
        shrink = tl.exp2(peak - higher)
        total = total * shrink + tl.sum(weights, 0)
        acc = acc * shrink + tl.sum(weights[:, None] * values, 0)
        peak = higher
    tl.store(out + (row * H + head) * D + columns, acc / tl.where(total > 0, total, 1.0))


def reference(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, tables: Tensor, lengths: Tensor
) -> Tensor:
    out = torch.zeros_like(q)
    for row, length in enumerate(lengths.tolist()):
        pages = tables[row, : -(-length // k_cache.shape[2])]
        k, v = (
            cache[pages]
            .transpose(0, 1)
            .flatten(1, 2)[:, :length]
            .repeat_interleave(q.shape[1] // cache.shape[1], 0)
            for cache in (k_cache, v_cache)
        )  # [H, length, D]
        out[row] = torch.einsum(
            "hn,hnd->hd",
            torch.softmax(torch.einsum("hd,hnd->hn", q[row], k) / q.shape[2] ** 0.5, -1),
            v,
        )
    return out
