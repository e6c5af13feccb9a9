"""Decode attention over the paged KV cache: one new query a sequence, against all of its keys.

    out[b, h] = sum_j softmax_j(q[b, h] . k[j] / sqrt(D)) v[j],  j < lengths[b],  kv head h // G

G = H / Hkv. Reads 2 * Hkv * D * itemsize bytes a key for 4 * H * D FLOPs: 4 FLOP a byte in bf16 at
G = 4, so memory is the limit. The keys of a row are cut into splits (Flash-Decoding; Dao et al.
2023). A program owns SPLIT keys of one row and one kv head, for its G query heads. It writes their
mean value and log2-sum-exp in fp32, 3% of the bytes read; `_merge` adds the splits in order. SPLIT
is fixed, so the bits of a row do not depend on the batch. Splits that neighbouring rows share are
read once for all of them (decode_shared.py).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.attention import attend_split, check_cache
from kernels.common import check, require
from kernels.decode_shared import group_tile, shared_splits

SPLIT = 256  # keys of a program: a change changes the bits of every result


def decode_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    tables: Tensor,
    lengths: Tensor,
    groups: Tensor,
    max_length: int,
    out: Tensor,
) -> Tensor:
    """Fills and returns out [B, H, D].

    q [B, H, D] with any row stride; caches as in attention.py. Row b sees the first lengths[b] <=
    max_length keys (int32 [B]) of the pages tables[b] (int32 [B, max_pages]); with none its output
    is 0. max_length sets the grid, so that a captured graph serves all lengths up to it. groups
    int32 [N, 3]: see decode_shared.py.
    """
    shape = check_cache(q, k_cache, v_cache, tables)
    rows, heads, dim = q.shape
    check((rows,), torch.int32, lengths=lengths)
    require(len(tables) == rows, f"tables has {len(tables)} rows; expected {rows}")
    check((None, 3), torch.int32, groups=groups)
    check(q.shape, q.dtype, out=out)
    shape |= {"G": heads // shape["HKV"], "SPLIT": SPLIT}
    splits, count = triton.cdiv(max_length, SPLIT), len(groups)
    partial = q.new_empty(rows, splits, heads, dim, dtype=torch.float32)
    lse = q.new_empty(rows, splits, heads, dtype=torch.float32)
    inputs = q, k_cache, v_cache, tables, groups, partial, lse, q.stride(0), tables.stride(0)
    tile = group_tile(shape["G"], q.element_size())
    launch = shape | {"num_warps": 4, "num_stages": 3}
    shared_splits[(count * tile["PARTS"], shape["HKV"], splits)](*inputs, **tile, **launch)
    tile = {
        "GROUPS": triton.next_power_of_2(count) if count else 0,
        "ROWS": triton.next_power_of_2(shape["G"]),
    }
    _own_splits[(rows, shape["HKV"], splits)](*inputs, lengths, count, **tile, **launch)
    _merge[(rows, heads)](partial, lse, lengths, out, splits, H=heads, D=dim, SPLIT=SPLIT, BLOCK=16)
    return out


@triton.jit
def _own_splits(
    q,
    k_cache,
    v_cache,
    tables,
    groups,
    partial,
    lse,
    q_stride,
    table_stride,
    lengths,
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
    if GROUPS > 0:  # a shared split of the row's group is already done
        group = tl.arange(0, GROUPS)
        start = tl.load(groups + group * 3, group < count, 0)
        members = tl.load(groups + group * 3 + 1, group < count, 0)
        shared = tl.load(groups + group * 3 + 2, group < count, 0)
        if first < tl.sum(tl.where((row >= start) & (row < start + members), shared, 0), 0):
            return
    member = tl.arange(0, ROWS)  # query heads of this kv head
    real = member[:, None] < G
    columns = tl.arange(0, D)[None, :]
    place = q + row * q_stride + (head * G + member[:, None]) * D + columns
    queries = tl.load(place, real, 0.0)
    pages = k_cache, v_cache, tables + row * table_stride, head
    end = tl.minimum(first + SPLIT, length)
    mean, log_sum = attend_split(queries, pages, first, end, HKV, PAGE, BLOCK_N)
    at = (row * tl.num_programs(2) + split) * (HKV * G) + head * G + member
    tl.store(partial + at[:, None] * D + columns, mean, real)
    tl.store(lse + at, log_sum, member < G)


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
    """Adds the mean values of a row's splits, weighted by their sums, BLOCK splits at a time."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    count = tl.cdiv(tl.load(lengths + row), SPLIT)
    columns = tl.arange(0, D)
    peak, total, acc = -1e30, 0.0, tl.zeros([D], tl.float32)
    for start in range(0, count, BLOCK):
        split = start + tl.arange(0, BLOCK)
        at = (row * splits + split) * H + head
        log_sums = tl.load(lse + at, split < count, -1e30)
        place = partial + at[:, None] * D + columns[None, :]
        values = tl.load(place, split[:, None] < count, 0.0)
        higher = tl.maximum(peak, tl.max(log_sums, 0))
        weights, shrink = tl.exp2(log_sums - higher), tl.exp2(peak - higher)
        total = total * shrink + tl.sum(weights, 0)
        acc = acc * shrink + tl.sum(weights[:, None] * values, 0)
        peak = higher
    tl.store(out + (row * H + head) * D + columns, acc / tl.where(total > 0, total, 1.0))
