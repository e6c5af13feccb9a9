"""Decode attention over the paged KV cache: one new query a sequence, against all of its keys.

    out[b, h] = sum_j softmax_j(q[b, h] . k[j] / sqrt(D)) v[j]   for j < context_lens[b]

k and v are those of kv head h // G, G = H / Hkv.

Bytes and FLOPs. With H query heads and Hkv kv heads of D, a key of one sequence takes
2 Hkv D itemsize bytes (K and V) and 4 H D FLOPs (q k and p v). Qwen3-8B in bf16: 4,096 bytes and
16,384 FLOPs a key and layer, 4 FLOP a byte, or 24 with the padding and the second product of p
below. In the time of one byte an A100 of 80 GB does 153 FLOPs, an H200 206 and an H100 295 (data
sheets). Memory is the limit: 64 sequences of 4,096 keys are 1.07 GB a layer, 0.22 ms at the
4.8 TB/s of an H200.

Splits. One piece of work for each row and kv head would leave most of the GPU idle at small
batches, so the keys of a row are cut into splits (Flash-Decoding; Dao et al. 2023): a piece of work
is one split of one kv head. Splits end at fixed positions (`split_bounds`), so neither the batch
nor the number of multiprocessors changes the order of a row's sums. They grow with the position: 8
x Hkv pieces at 1,024 keys, and few partial results at 40,960.

Merge. For each split s of a query the kernel stores the mean value a_s and l_s = log2 of its sum of
exponentials. The whole is sum_s 2^(l_s) a_s / sum_s 2^(l_s). This is an identity, no approximation:
2^(l_s) a_s is the split's sum of exp(score) * value and 2^(l_s) its sum of exp(score), and a sum
over all keys is the sum over splits of these. Both are fp32 and never rounded to 16 bits. p is
multiplied in two parts of 16 bits, which together keep about 16 of its 24 bits in bf16 and 22 in
fp16 (softmax.py).

Shared prefixes. Say 8 rows have a common prefix and G = 4. A tensor-core tile has 16 rows, which 4
rows x 4 query heads of a kv head fill (rows_per_item = 4). So each split of the prefix has two
items, of rows 0-3 and 4-7, in place of the eight of lone rows, which use 4 of the 16 rows each. The
two follow one another in the list and run at the same time: the keys come once from HBM and twice
from L2, where eight lone rows read them eight times (Hydragen; Juravsky et al. 2024).

In general an item is the same split of up to rows_per_item neighbouring rows, whose block tables
begin alike, and G is padded to a power of two. The tile has 16 rows either way: one compiled code
and one instruction (HMMA), so a row has the same bits alone and in a group.

Grid. A fixed number of programs shares the list, whose length is read on the device: a captured
CUDA graph serves all lengths and all groups, and no program is launched for nothing.

Splits, their scratch and their merge are also those of paged_prefill.py.

Scratch. partial and lse take rows * S * H * (D + 1) * 4 bytes with S splits: for Qwen3-8B 372 MB at
512 rows of 40,960 keys (S = 44), 68 MB at 128 rows of 16,384 (S = 32). A split writes 4 H D bytes
and the merge reads them: together 6% of the split's K and V at 128 keys, 1.6% at 512, 0.4% at
2,048.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.common import check, dependent_launch, multiprocessors, pick, wait_for_previous
from kernels.softmax import attend_pages, cache_constants, gather_pages, softmax_start

BLOCK_M = 16  # query rows of an item: the fewest of a tensor-core instruction
MERGE_BLOCK = 16  # splits that the merge adds at a time
NUM_WARPS = 4  # of 32 threads each
REGISTERS = 65536  # of a multiprocessor, from sm_80 on


def naive_decode_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, block_tables: Tensor, context_lens: Tensor
) -> Tensor:
    """Returns what decode_attention computes, one row and one head at a time.

    The arguments are those of decode_attention. The arithmetic is in the dtype of q and the caches:
    in float64 this is the reference of the tests.
    """
    rows, heads, head_dim = q.shape
    group = heads // k_cache.shape[1]
    out = torch.zeros_like(q)
    for row in range(rows):
        context_len = int(context_lens[row])
        if context_len == 0:
            continue  # no key
        keys = gather_pages(k_cache, block_tables[row], context_len)  # [Hkv, context_len, D]
        values = gather_pages(v_cache, block_tables[row], context_len)
        for head in range(heads):
            kv_head = head // group
            scores = keys[kv_head] @ q[row, head] / head_dim**0.5  # [context_len]
            probabilities = torch.softmax(scores, 0)
            out[row, head] = probabilities @ values[kv_head]
    return out


# The work list, made on the host.


class SharedPrefix(NamedTuple):
    """Neighbouring rows whose block tables begin alike, for at least so many stored keys."""

    first_row: int
    rows: int
    keys: int


class SplitScratch(NamedTuple):
    """The splits, and room for their results, on the device of q.

    S splits and R rows; R may be more than the rows of q.
    """

    bounds: Tensor  # int32 [S + 1]: split s holds keys bounds[s] .. bounds[s + 1] - 1
    partial: Tensor  # fp32 [R, S, H, D]: the mean value of a split
    lse: Tensor  # fp32 [R, S, H]: log2 of the sum of exponentials of a split


def split_bounds(max_context: int, least: int = 128) -> list[int]:
    """Returns the positions at which splits begin, and the end of the last one, >= max_context.

    Splits have 128 keys up to position 2,048, 512 up to 8,192 and 2,048 beyond, or `least` if that
    is more. A change of these changes the bits of every result.
    """
    bounds = [0]
    while bounds[-1] < max_context:
        start = bounds[-1]
        if start < 2048:
            size = 128
        elif start < 8192:
            size = 512
        else:
            size = 2048
        bounds.append(start + max(size, least))
    return bounds


def rows_per_item(group: int) -> int:
    """Returns how many rows an item holds at most, for `group` query heads of a kv head."""
    return BLOCK_M // triton.next_power_of_2(group)


def decode_items(
    context_lens: Sequence[int],
    shared_prefixes: Sequence[SharedPrefix],
    bounds: Sequence[int],
    max_rows: int,
) -> np.ndarray:
    """Returns the items int32 [n, 3] of a step: first row, number of rows, split.

    max_rows is rows_per_item(G). Every split of every row is in one item. Items with most keys come
    first; the items of one split of a shared prefix follow one another. The order does not change
    results. A row is in one shared prefix at most. ValueError if a row has more keys than the
    bounds, or fewer than its prefix.

    For example, with splits at 0, 128, 256, 384, two rows of 300 and 200 keys that share 150, and
    two rows an item: (0, 2, 0), (0, 1, 1), (1, 1, 1), (0, 1, 2).

    It is two nested loops, in numpy because the host makes thousands of items a step:

        for each prefix, split that it fills, and portion of its rows: (row, rows, split)
        for each row, and split that it shares with none: (row, 1, split)
    """
    lengths = np.asarray(context_lens, np.int64)
    if lengths.max(initial=0) > bounds[-1]:
        raise ValueError(f"a row has {lengths.max()} keys; expected at most {bounds[-1]}")
    starts = np.asarray(bounds[:-1], np.int64)
    ends = np.asarray(bounds[1:], np.int64)

    prefixes = np.asarray(shared_prefixes, np.int64).reshape(-1, 3)
    first_rows, row_counts, shared_keys = prefixes.T
    whole_splits = np.searchsorted(ends, shared_keys, side="right")  # that each prefix fills
    shared_items = _shared_items(first_rows, row_counts, whole_splits, max_rows)

    member_prefix, member_index = enumerate_counts(row_counts)
    members = first_rows[member_prefix] + member_index  # all rows with a prefix
    if (lengths[members] < shared_keys[member_prefix]).any():
        raise ValueError("a row has fewer keys than its shared prefix")
    lone_from = np.zeros_like(lengths)  # the first split of each row that it shares with none
    lone_from[members] = whole_splits[member_prefix]
    num_splits = np.searchsorted(starts, lengths)  # of each row
    lone_items = _lone_items(lone_from, num_splits)

    items = np.concatenate((shared_items, lone_items))
    item_rows, _, item_splits = items.T
    item_keys = np.minimum(ends[item_splits], lengths[item_rows]) - starts[item_splits]
    longest_first = np.argsort(-item_keys, kind="stable")
    return items[longest_first].astype(np.int32)


def _shared_items(
    first_rows: np.ndarray, row_counts: np.ndarray, whole_splits: np.ndarray, max_rows: int
) -> np.ndarray:
    """Returns the items of prefixes: each split that one fills, with its rows in portions."""
    portions = -(-row_counts // max_rows)  # of each prefix
    prefix, index = enumerate_counts(whole_splits * portions)
    split, portion = np.divmod(index, portions[prefix])
    row = first_rows[prefix] + portion * max_rows
    rows_left = first_rows[prefix] + row_counts[prefix] - row
    return np.stack((row, np.minimum(max_rows, rows_left), split), 1)


def _lone_items(lone_from: np.ndarray, num_splits: np.ndarray) -> np.ndarray:
    """Returns items of one row: of row i the splits lone_from[i] .. num_splits[i] - 1."""
    row, index = enumerate_counts(num_splits - lone_from)
    return np.stack((row, np.ones_like(row), lone_from[row] + index), 1)


def enumerate_counts(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns owner and index of counts[i] things of each owner i.

    [2, 0, 3] gives owners [0, 0, 2, 2, 2] and indices [0, 1, 0, 1, 2].
    """
    owner = np.repeat(np.arange(len(counts)), counts)
    first = np.cumsum(counts) - counts
    return owner, np.arange(len(owner)) - first[owner]


def split_scratch(
    uses: Sequence[tuple[int, Sequence[int]]],
    heads: int,
    head_dim: int,
    device: torch.device | str,
) -> list[SplitScratch]:
    """Returns the scratch of each use: up to so many rows, and these splits of their keys.

    All lie in the same memory, so one use must be merged before the next begins.
    """
    most = max(rows * (len(bounds) - 1) for rows, bounds in uses)
    partial = torch.empty(most, heads, head_dim, dtype=torch.float32, device=device)
    lse = torch.empty(most, heads, dtype=torch.float32, device=device)
    scratches = []
    for rows, bounds in uses:
        splits = len(bounds) - 1
        used = slice(rows * splits)
        scratches.append(
            SplitScratch(
                torch.tensor(bounds, dtype=torch.int32, device=device),
                partial[used].view(rows, splits, heads, head_dim),
                lse[used].view(rows, splits, heads),
            )
        )
    return scratches


# The launcher.


def decode_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    items: Tensor,
    num_items: Tensor,
    scratch: SplitScratch,
    out: Tensor,
) -> Tensor:
    """Fills and returns out [B, H, D].

    q [B, H, D] with any row stride; caches [pages, Hkv, page_size, D] of its dtype;
    block_tables int32 [B, width] with any row stride. Row b sees the first context_lens[b] keys
    (int32 [B]); with none its output is not written. items int32 [capacity, 3] begin with those of
    these rows (decode_items); num_items int32 [1] says how many they are, and further ones are
    never read. Nothing is allocated, and the grids depend on B and the model alone, so the launches
    can be captured once for each B. ValueError if the arguments do not fit each other.
    """
    constants = cache_constants(q, k_cache, v_cache, block_tables)
    rows, heads, _ = q.shape
    check((rows, None), torch.int32, strided=True, block_tables=block_tables)
    check((None, 3), torch.int32, items=items)
    check((1,), torch.int32, num_items=num_items)
    check_scratch(q, context_lens, scratch)
    check(q.shape, q.dtype, out=out)
    group = heads // constants["HKV"]
    if group > BLOCK_M:
        raise ValueError(f"{group} query heads a kv head; expected at most {BLOCK_M}")
    config = pick("paged_decode", q.dtype)
    programs = config["PROGRAMS"] * multiprocessors(q.device)
    registers = REGISTERS // config["PROGRAMS"] // (32 * NUM_WARPS)  # of a thread
    _attend_splits[(programs,)](
        q,
        k_cache,
        v_cache,
        block_tables,
        context_lens,
        items,
        num_items,
        scratch.bounds,
        scratch.partial,
        scratch.lse,
        q.stride(0),
        block_tables.stride(0),
        scratch.lse.shape[1],
        G=group,
        PADDED_G=triton.next_power_of_2(group),
        **constants,
        BLOCK_M=BLOCK_M,
        TWO_PARTS=q.dtype != torch.float32,  # p in fp32 has all of its bits in one
        num_warps=NUM_WARPS,
        num_stages=config["num_stages"],
        maxnreg=min(255, registers // 8 * 8),  # so that all PROGRAMS of a multiprocessor fit
        **dependent_launch(),
    )
    merge_splits(scratch, context_lens, out, MERGE_BLOCK)
    return out


def check_scratch(q: Tensor, context_lens: Tensor, scratch: SplitScratch) -> None:
    """Raises ValueError unless the scratch has room for the rows of q [B, H, D]."""
    rows, heads, head_dim = q.shape
    scratch_rows, splits = scratch.lse.shape[:2]
    check((rows,), torch.int32, context_lens=context_lens)
    check((splits + 1,), torch.int32, bounds=scratch.bounds)
    check((scratch_rows, splits, heads, head_dim), torch.float32, partial=scratch.partial)
    check((scratch_rows, splits, heads), torch.float32, lse=scratch.lse)
    if scratch_rows < rows:
        raise ValueError(f"the scratch has {scratch_rows} rows; expected at least {rows}")


def merge_splits(
    scratch: SplitScratch, context_lens: Tensor, out: Tensor, splits_at_a_time: int
) -> None:
    """Fills the rows of out [B, H, D] that see keys, from the results of their splits."""
    rows, heads, head_dim = out.shape
    splits = scratch.lse.shape[1]
    _merge_splits[(rows, heads)](
        scratch.partial,
        scratch.lse,
        context_lens,
        scratch.bounds,
        out,
        splits,
        H=heads,
        D=head_dim,
        PADDED_S=triton.next_power_of_2(splits),
        BLOCK_S=splits_at_a_time,
        **dependent_launch(),
    )


# The kernels.


@triton.jit(
    do_not_specialize=["table_stride", "splits"],  # one code for any width and context
    # What is loaded one by one may lie anywhere.
    do_not_specialize_on_alignment=[
        "block_tables_ptr",
        "context_lens_ptr",
        "items_ptr",
        "num_items_ptr",
        "bounds_ptr",
    ],
)
def _attend_splits(
    q_ptr,  # [B, H, D], rows q_stride apart
    k_cache_ptr,  # [pages, HKV, PAGE, D]
    v_cache_ptr,
    block_tables_ptr,  # [B, width], rows table_stride apart
    context_lens_ptr,  # [B]
    items_ptr,  # [capacity, 3]
    num_items_ptr,  # [1]
    bounds_ptr,  # [splits + 1]
    partial_ptr,  # [R, splits, H, D]
    lse_ptr,  # [R, splits, H]
    q_stride,
    table_stride,
    splits,
    G: tl.constexpr,
    PADDED_G: tl.constexpr,
    HKV: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TWO_PARTS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Fills partial and lse: each program takes every num_programs-th pair of item and kv head."""
    wait_for_previous(DEPENDENT)
    m = tl.arange(0, BLOCK_M)  # a query row is a row of the item and a query head of the kv head
    row_in_item = m // PADDED_G
    head_in_group = m % PADDED_G
    d = tl.arange(0, D)[None, :]
    num_pairs = tl.load(num_items_ptr) * HKV
    for pair in range(tl.program_id(0), num_pairs, tl.num_programs(0)):
        item_ptr = items_ptr + pair // HKV * 3
        kv_head = pair % HKV
        first_row = tl.load(item_ptr).to(tl.int64)
        rows = tl.load(item_ptr + 1)
        split = tl.load(item_ptr + 2)
        start = tl.load(bounds_ptr + split)
        # Several rows are an item where they share all pages of the split: the length and the block
        # table of the first row are then right for all.
        context_len = tl.load(context_lens_ptr + first_row)
        end = tl.minimum(tl.load(bounds_ptr + split + 1), context_len)

        row = first_row + row_in_item
        head = kv_head * G + head_in_group
        real = (row_in_item < rows) & (head_in_group < G)
        q = tl.load(q_ptr + row[:, None] * q_stride + head[:, None] * D + d, real[:, None], 0.0)

        row_max, row_sum, acc = softmax_start(BLOCK_M, D)
        row_max, row_sum, acc = attend_pages(
            q,
            row_max,
            row_sum,
            acc,
            k_cache_ptr,
            v_cache_ptr,
            block_table_ptr=block_tables_ptr + first_row * table_stride,
            kv_head=kv_head,
            start=start,
            end=end,
            read_to=end,
            seen_to=end,
            HKV=HKV,
            PAGE=PAGE,
            BLOCK_N=BLOCK_N,
            TWO_PARTS=TWO_PARTS,
        )
        result = (row * splits + split) * (HKV * G) + head
        tl.store(partial_ptr + result[:, None] * D + d, acc / row_sum[:, None], real[:, None])
        tl.store(lse_ptr + result, row_max + tl.log2(row_sum), real)


@triton.jit(
    do_not_specialize=["splits"],
    do_not_specialize_on_alignment=["context_lens_ptr", "bounds_ptr"],
)
def _merge_splits(
    partial_ptr,  # [R, splits, H, D]
    lse_ptr,  # [R, splits, H]
    context_lens_ptr,  # [B]
    bounds_ptr,  # [splits + 1]
    out_ptr,  # [B, H, D]
    splits,
    H: tl.constexpr,
    D: tl.constexpr,
    PADDED_S: tl.constexpr,
    BLOCK_S: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Fills out: a program adds the splits of one row and head in order, BLOCK_S at a time.

    With BLOCK_S = 1 this is what paged_prefill.py does in registers, to the bit: the fma say where
    a product is not rounded.
    """
    wait_for_previous(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    d = tl.arange(0, D)
    context_len = tl.load(context_lens_ptr + row)
    # The splits of a row are those that begin before its context_len.
    s = tl.arange(0, PADDED_S)
    starts = tl.load(bounds_ptr + s, s < splits, 2**31 - 1)
    num_splits = tl.sum((starts < context_len).to(tl.int32), 0)
    if num_splits == 0:
        return
    row_max = -1e30
    row_sum = 0.0
    acc = tl.zeros([D], tl.float32)
    for first_split in range(0, num_splits, BLOCK_S):
        split = first_split + tl.arange(0, BLOCK_S)
        used = split < num_splits
        result = (row * splits + split) * H + head
        lse = tl.load(lse_ptr + result, used, -1e30)
        mean = tl.load(partial_ptr + result[:, None] * D + d[None, :], used[:, None], 0.0)

        new_max = tl.maximum(row_max, tl.max(lse, 0))
        rescale = tl.exp2(row_max - new_max)
        weights = tl.exp2(lse - new_max)
        row_sum = tl.fma(row_sum, rescale, tl.sum(weights, 0))
        acc = tl.fma(acc, rescale, tl.sum(weights[:, None] * mean, 0))
        row_max = new_max
    tl.store(out_ptr + (row * H + head) * D + d, acc / row_sum)
