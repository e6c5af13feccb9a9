"""Prefill attention over the paged KV cache: chunks of new tokens against their whole context.

    out[t, h] = sum_j softmax_j(q[t, h] . k[j] / sqrt(D)) v[j]   for j <= the position of t

k and v are those of kv head h // G, G = H / Hkv.

Bytes and FLOPs. A pair of a query and a visible key takes 4 H D FLOPs: 16,384 at Qwen3-8B's 32
heads of 128, so 8,192 tokens without context are 0.55 TFLOP a layer. q, out, K and V of these are
168 MB, 3,300 FLOP a byte: compute is the limit, 0.56 ms at 989 TFLOP/s (data sheet of H100 and
H200). K and V are read once by each program, mostly from L2: the programs of the heads of one kv
head are neighbours.

An item is a block of neighbouring tokens of one sequence. A program takes the G query heads of one
kv head for all of them: a tile has BLOCK_M = 128 query rows, 32 tokens at G = 4. So few tokens of a
chunk fill a tile too.

Splits. The keys are cut into splits at fixed positions, as in decode (paged_decode.py) but wider:
at multiples of 1,024 up to 8,192, and of 2,048 beyond. In each split a program visits the tiles of
keys that all of its queries see without a mask, then the tiles at the diagonal with one. Then the
splits are merged in order, in one of two ways that give the same bits:

    whole items    one program visits all splits, and merges them in registers
    split items    a program each; a second kernel merges their results from memory

Whole items move no partial results, and their number fills a GPU when a step has many tokens. Split
items fill it when few tokens have a long context: 100 tokens on 16,384 keys are 4 blocks, 12 splits
and 8 kv heads, 384 pieces of work in place of 32. Partial results of a split, written and read,
take 8 H D bytes a token: with 4 TB/s a third of the time of its 1,024 keys.

Tiles begin at multiples of BLOCK_N from position 0 and splits at fixed positions, so a token has
the same bits wherever its chunk began and whatever else is in the batch. p is rounded to the dtype
of V, as in FlashAttention-2 (Dao 2023).

As in decode a fixed number of programs shares the list, whose length is read on the device.
"""

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.common import check, multiprocessors
from kernels.paged_decode import SplitScratch, check_scratch, enumerate_counts, merge_splits
from kernels.softmax import attend_pages, cache_constants, gather_pages, softmax_start

BLOCK_M = 128  # query rows of an item at most
LEAST_SPLIT = 1024  # keys of a split at least (paged_decode.split_bounds)
PROGRAMS = 2  # of a multiprocessor; the second may follow the first


def naive_prefill_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    starts: Sequence[int],
    counts: Sequence[int],
) -> Tensor:
    """Returns what prefill_attention computes, one sequence and one head at a time.

    starts and counts are those of prefill_items, the other arguments those of prefill_attention.
    The arithmetic is in the dtype of q and the caches: in float64 this is the reference of the
    tests.
    """
    _, heads, head_dim = q.shape
    group = heads // k_cache.shape[1]
    out = torch.zeros_like(q)
    first_token = 0
    for sequence, (start, count) in enumerate(zip(starts, counts, strict=True)):
        tokens = slice(first_token, first_token + count)
        first_token += count
        context_len = start + count
        keys = gather_pages(k_cache, block_tables[sequence], context_len)  # [Hkv, context_len, D]
        values = gather_pages(v_cache, block_tables[sequence], context_len)
        positions = torch.arange(start, context_len, device=q.device)
        key_positions = torch.arange(context_len, device=q.device)
        masked = key_positions[None, :] > positions[:, None]  # [count, context_len]
        for head in range(heads):
            kv_head = head // group
            scores = q[tokens, head] @ keys[kv_head].T / head_dim**0.5  # [count, context_len]
            scores = scores.masked_fill(masked, float("-inf"))
            out[tokens, head] = torch.softmax(scores, 1) @ values[kv_head]
    return out


# The work list, made on the host.


def tokens_per_item(group: int, head_dim: int, dtype: torch.dtype) -> int:
    """Returns how many tokens an item holds at most, for `group` query heads of a kv head."""
    return _block_m(head_dim, dtype) // group


def _block_m(head_dim: int, dtype: torch.dtype) -> int:
    if dtype == torch.float32:
        return 16  # fp32 is multiplied without tensor cores, which takes many registers
    return min(BLOCK_M, 16384 // head_dim)


def prefill_items(
    starts: Sequence[int],
    counts: Sequence[int],
    bounds: Sequence[int],
    max_tokens: int,
    whole: bool,
    first_row: int = 0,
) -> np.ndarray:
    """Returns the items int32 [n, 4] for counts[i] new tokens of sequence i at starts[i] and on.

    An item is a sequence, the first row of its tokens in q, their number (at most max_tokens, that
    of tokens_per_item), and with `whole` the number of splits that they see, otherwise one of these
    splits. The tokens of the sequences follow one another in q from first_row on. Items that see
    most keys come first. ValueError if a sequence has more keys than the bounds.

    For example, with splits at 0, 1024, 2048, 40 tokens at 1,000 and 32 tokens an item: whole
    (0, 32, 8, 2), (0, 0, 32, 2); split (0, 0, 32, 0), (0, 32, 8, 0), (0, 32, 8, 1), (0, 0, 32, 1).
    """
    starts, counts = np.asarray(starts, np.int64), np.asarray(counts, np.int64)
    context = (starts + counts).max(initial=0)
    if context > bounds[-1]:
        raise ValueError(f"a sequence has {context} keys; expected at most {bounds[-1]}")
    sequence, index = enumerate_counts(-(-counts // max_tokens))
    done = index * max_tokens  # tokens of the sequence in items before this one
    row = first_row + (np.cumsum(counts) - counts)[sequence] + done
    tokens = np.minimum(max_tokens, counts[sequence] - done)
    end = starts[sequence] + done + tokens  # keys that the last token sees
    splits = np.searchsorted(bounds[:-1], end)  # those that begin before
    if whole:
        items = np.stack((sequence, row, tokens, splits), 1)
        keys = end
    else:
        block, split = enumerate_counts(splits)
        items = np.stack((sequence[block], row[block], tokens[block], split), 1)
        keys = np.minimum(np.asarray(bounds)[split + 1], end[block]) - np.asarray(bounds)[split]
    return items[np.argsort(-keys, kind="stable")].astype(np.int32)


# The launcher.


def prefill_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    items: Tensor,
    num_items: Tensor,
    scratch: SplitScratch,
    out: Tensor,
    whole: bool,
) -> Tensor:
    """Fills and returns out [T, H, D].

    q [T, H, D] with any row stride; caches [pages, Hkv, page_size, D] of its dtype;
    block_tables int32 [sequences, width] with any row stride. Token t sees the first
    context_lens[t] keys of its sequence (int32 [T]). items int32 [capacity, 4] begin with those of
    these tokens (prefill_items, with the same `whole`); num_items int32 [1] says how many they are.
    The keys and values of the new tokens are in the pages already. The output of tokens in no item
    is not written; their context_lens are 0. ValueError if the arguments do not fit each other.
    """
    constants = cache_constants(q, k_cache, v_cache, block_tables)
    _, heads, head_dim = q.shape
    group = heads // constants["HKV"]
    block_m = _block_m(head_dim, q.dtype)
    check((None, 4), torch.int32, items=items)
    check((1,), torch.int32, num_items=num_items)
    check(q.shape, q.dtype, out=out)
    check_scratch(q[:0] if whole else q, context_lens[:0] if whole else context_lens, scratch)
    if group > block_m:
        raise ValueError(f"{group} query heads a kv head; expected at most {block_m}")
    _attend_chunks[(PROGRAMS * multiprocessors(q.device),)](
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
        out,
        q.stride(0),
        block_tables.stride(0),
        scratch.lse.shape[1],
        G=group,
        **constants,
        BLOCK_M=block_m,
        WHOLE=whole,
        num_warps=8,
        # At D = 256, three stages are 1 KiB too much for sm_89 (BLOCK_M 64, BLOCK_N 32).
        num_stages=3 if head_dim < 256 else 2,
    )
    if not whole:
        merge_splits(scratch, context_lens, out, splits_at_a_time=1)
    return out


# The kernel.


@triton.jit(
    do_not_specialize=["table_stride", "splits"],
    # What is loaded one by one may lie anywhere.
    do_not_specialize_on_alignment=[
        "block_tables_ptr",
        "context_lens_ptr",
        "items_ptr",
        "num_items_ptr",
        "bounds_ptr",
    ],
)
def _attend_chunks(
    q_ptr,  # [T, H, D], rows q_stride apart
    k_cache_ptr,  # [pages, HKV, PAGE, D]
    v_cache_ptr,
    block_tables_ptr,  # [sequences, width], rows table_stride apart
    context_lens_ptr,  # [T]
    items_ptr,  # [capacity, 4]
    num_items_ptr,  # [1]
    bounds_ptr,  # [splits + 1]
    partial_ptr,  # [R, splits, H, D]
    lse_ptr,  # [R, splits, H]
    out_ptr,  # [T, H, D]
    q_stride,
    table_stride,
    splits,
    G: tl.constexpr,
    HKV: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """Fills out if items are whole, or else partial and lse.

    A program takes every num_programs-th pair of item and kv head. A query row is a token of the
    item and a query head of the kv head.
    """
    H: tl.constexpr = HKV * G
    m = tl.arange(0, BLOCK_M)
    token = m // G
    head_in_group = m % G
    d = tl.arange(0, D)[None, :]
    num_pairs = tl.load(num_items_ptr) * HKV
    for pair in range(tl.program_id(0), num_pairs, tl.num_programs(0)):
        item_ptr = items_ptr + pair // HKV * 4
        kv_head = pair % HKV
        sequence = tl.load(item_ptr).to(tl.int64)
        first_row = tl.load(item_ptr + 1).to(tl.int64)
        tokens = tl.load(item_ptr + 2)
        split_or_count = tl.load(item_ptr + 3)
        block_table_ptr = block_tables_ptr + sequence * table_stride

        real = token < tokens
        q_rows = q_ptr + kv_head * G * D + (first_row + token) * q_stride + head_in_group * D
        q = tl.load(q_rows[:, None] + d, real[:, None], 0.0)
        seen_by_first = tl.load(context_lens_ptr + first_row)
        seen = seen_by_first + token  # keys that a query sees
        context_len = seen_by_first + tokens - 1

        if WHOLE:
            # As _merge_splits does it, in registers.
            merged_max, merged_sum, merged = softmax_start(BLOCK_M, D)
            for split in range(0, split_or_count):
                mean, lse = _attend_split(
                    q,
                    seen,
                    seen_by_first,
                    context_len,
                    k_cache_ptr,
                    v_cache_ptr,
                    block_table_ptr,
                    kv_head,
                    bounds_ptr + split,
                    HKV,
                    PAGE,
                    BLOCK_N,
                )
                new_max = tl.maximum(merged_max, lse)
                rescale = tl.exp2(merged_max - new_max)
                weight = tl.exp2(lse - new_max)
                merged_sum = tl.fma(merged_sum, rescale, weight)
                merged = tl.fma(merged, rescale[:, None], weight[:, None] * mean)
                merged_max = new_max
            out = merged / merged_sum[:, None]
            first_out_ptr = out_ptr + (first_row * H + kv_head * G) * D
            result = token * H + head_in_group
            tl.store(first_out_ptr + result[:, None] * D + d, out, real[:, None])
        else:
            split = split_or_count
            mean, lse = _attend_split(
                q,
                seen,
                seen_by_first,
                context_len,
                k_cache_ptr,
                v_cache_ptr,
                block_table_ptr,
                kv_head,
                bounds_ptr + split,
                HKV,
                PAGE,
                BLOCK_N,
            )
            first_result = (first_row * splits + split) * H + kv_head * G
            result = token * (splits * H) + head_in_group
            first_partial_ptr = partial_ptr + first_result * D
            tl.store(first_partial_ptr + result[:, None] * D + d, mean, real[:, None])
            tl.store(lse_ptr + first_result + result, lse, real)


@triton.jit
def _attend_split(
    q,  # [BLOCK_M, D]
    seen,  # keys that a query sees [BLOCK_M]
    seen_by_first,
    context_len,  # keys that the last query sees
    k_cache_ptr,
    v_cache_ptr,
    block_table_ptr,
    kv_head,
    bound_ptr,  # of the split
    HKV: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Returns the mean value [BLOCK_M, D] of a split, and log2 of its sum of exponentials."""
    start = tl.load(bound_ptr)
    end = tl.minimum(tl.load(bound_ptr + 1), context_len)
    # Tiles before this key are visible to the first token, and so to all of them.
    unmasked_end = tl.minimum(seen_by_first, end) // BLOCK_N * BLOCK_N
    unmasked_end = tl.maximum(unmasked_end, start)
    row_max, row_sum, acc = softmax_start(q.shape[0], q.shape[1])
    row_max, row_sum, acc = attend_pages(
        q,
        row_max,
        row_sum,
        acc,
        k_cache_ptr,
        v_cache_ptr,
        block_table_ptr,
        kv_head,
        start=start,
        end=unmasked_end,
        read_to=context_len,
        seen_to=None,
        HKV=HKV,
        PAGE=PAGE,
        BLOCK_N=BLOCK_N,
        TWO_PARTS=False,
    )
    row_max, row_sum, acc = attend_pages(
        q,
        row_max,
        row_sum,
        acc,
        k_cache_ptr,
        v_cache_ptr,
        block_table_ptr,
        kv_head,
        start=unmasked_end,
        end=end,
        read_to=context_len,
        seen_to=seen[:, None],
        HKV=HKV,
        PAGE=PAGE,
        BLOCK_N=BLOCK_N,
        TWO_PARTS=False,
    )
    # A query that sees no key of the split has row_max from MASKED, and so weight 0 in a merge.
    return acc / row_sum[:, None], row_max + tl.log2(row_sum)
