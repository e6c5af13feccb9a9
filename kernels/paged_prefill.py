"""Prefill attention over the paged KV cache: chunks of new tokens against their whole context.

    out[t, h] = sum_j softmax_j(q[t, h] . k[j] / sqrt(D)) v[j]   for j <= the position of t

k and v are those of kv head h // G, G = H / Hkv.

Bytes and FLOPs. A pair of a query and a visible key takes 4 H D FLOPs: 16,384 at Qwen3-8B's 32
heads of 128, so 8,192 tokens without context are 0.55 TFLOP a layer. q, out, K and V of these are
168 MB, 3,300 FLOP a byte: compute is the limit, 0.56 ms at 989 TFLOP/s (data sheet of H100 and
H200). K and V are read once by each program, mostly from L2: the programs of the heads of one kv
head are neighbours.

A program takes BLOCK_M queries of one head of an item: all 128, 64 at D = 256, 16 in fp32. It
visits the tiles of keys that all of its queries see without a mask, then the tiles at the diagonal
with one. Tiles begin at multiples of BLOCK_N from position 0, so a token has the same bits wherever
its chunk began and whatever else is in the batch. p is rounded to the dtype of V, as in
FlashAttention-2 (Dao 2023).

Steps with prefill are never captured, so the grid is the work list. Its length and the number of
tokens are grid sizes only: one compiled code serves them all.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.common import check
from kernels.softmax import attend_pages, cache_constants, gather_pages, softmax_start

ITEM_TOKENS = 128  # of an item at most


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


def prefill_items(starts: Sequence[int], counts: Sequence[int]) -> Tensor:
    """Returns the items int32 [W, 4] for counts[i] new tokens of sequence i at starts[i] and on.

    An item is a sequence, the first row of its tokens in q, their number (at most ITEM_TOKENS) and
    the position of the first. The tokens of the sequences follow one another in q. Items that see
    most keys come first, so that the last programs to finish are short.
    """
    items = []
    first_token = 0
    for sequence, (start, count) in enumerate(zip(starts, counts, strict=True)):
        for done in range(0, count, ITEM_TOKENS):
            tokens = min(ITEM_TOKENS, count - done)
            items.append((sequence, first_token + done, tokens, start + done))
        first_token += count
    items.sort(key=_last_position, reverse=True)
    return torch.tensor(items, dtype=torch.int32).reshape(-1, 4)


def _last_position(item: tuple[int, int, int, int]) -> int:
    """Returns the position of an item's last token, which sees one key more than that."""
    _, _, tokens, position = item
    return position + tokens - 1


# The launcher.


def prefill_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    items: Tensor,
    out: Tensor,
) -> Tensor:
    """Fills and returns out [T, H, D].

    q [T, H, D] with any row stride; caches [pages, Hkv, page_size, D] of its dtype;
    block_tables int32 [sequences, width] with any row stride; items int32 [W, 4] (prefill_items).
    The keys and values of the new tokens are in the pages already. Tokens in no item are not
    written. ValueError if the arguments do not fit each other.
    """
    constants = cache_constants(q, k_cache, v_cache, block_tables)
    _, heads, head_dim = q.shape
    group = heads // constants["HKV"]
    check(q.shape, q.dtype, out=out)
    check((None, 4), torch.int32, items=items)
    block_m = min(ITEM_TOKENS, 16384 // head_dim)
    if q.dtype == torch.float32:
        block_m = 16  # fp32 is multiplied without tensor cores, which takes many registers
    _attend_chunks[(heads, len(items), ITEM_TOKENS // block_m)](
        q,
        k_cache,
        v_cache,
        block_tables,
        items,
        out,
        q.stride(0),
        block_tables.stride(0),
        G=group,
        **constants,
        BLOCK_M=block_m,
        num_warps=8,
        # At D = 256, three stages are 1 KiB too much for sm_89 (BLOCK_M 64, BLOCK_N 32).
        num_stages=3 if head_dim < 256 else 2,
    )
    return out


# The kernel.


@triton.jit(
    do_not_specialize=["table_stride"],
    # Rows of a table that begin anywhere are the same code: entries are loaded one by one.
    do_not_specialize_on_alignment=["block_tables_ptr", "items_ptr"],
)
def _attend_chunks(
    q_ptr,  # [T, H, D], rows q_stride apart
    k_cache_ptr,  # [pages, HKV, PAGE, D]
    v_cache_ptr,
    block_tables_ptr,  # [sequences, width], rows table_stride apart
    items_ptr,  # [W, 4]
    out_ptr,  # [T, H, D]
    q_stride,
    table_stride,
    G: tl.constexpr,
    HKV: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Fills out for BLOCK_M tokens of one head and item."""
    H: tl.constexpr = HKV * G
    head = tl.program_id(0)
    kv_head = head // G
    item_ptr = items_ptr + tl.program_id(1) * 4
    done = tl.program_id(2) * BLOCK_M  # tokens of the item that programs before this one take
    tokens = tl.load(item_ptr + 2) - done
    if tokens <= 0:
        return
    tokens = tl.minimum(tokens, BLOCK_M)
    sequence = tl.load(item_ptr).to(tl.int64)
    first_token = tl.load(item_ptr + 1).to(tl.int64) + done
    position = tl.load(item_ptr + 3) + done
    block_table_ptr = block_tables_ptr + sequence * table_stride

    m = tl.arange(0, BLOCK_M)[:, None]
    column = head * D + tl.arange(0, D)[None, :]
    q = tl.load(q_ptr + (first_token + m) * q_stride + column, m < tokens, 0.0)

    context_len = position + tokens
    # Tiles before this key are visible to the first token, and so to all of them.
    unmasked_end = (position + 1) // BLOCK_N * BLOCK_N
    row_max, row_sum, acc = softmax_start(BLOCK_M, D)
    row_max, row_sum, acc = attend_pages(
        q,
        row_max,
        row_sum,
        acc,
        k_cache_ptr,
        v_cache_ptr,
        block_table_ptr,
        kv_head,
        start=0,
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
        end=context_len,
        read_to=context_len,
        seen_to=position + m + 1,
        HKV=HKV,
        PAGE=PAGE,
        BLOCK_N=BLOCK_N,
        TWO_PARTS=False,
    )
    tl.store(out_ptr + (first_token + m) * (H * D) + column, acc / row_sum[:, None], m < tokens)
