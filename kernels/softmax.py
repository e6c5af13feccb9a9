"""The running softmax of the attention kernels, and their walk over the pages of a sequence.

Attention of one query over keys j is sum_j p_j v_j with p_j = exp(l_j) / sum_i exp(l_i) and the
logits l_j = q . k_j / sqrt(D). A score is the product q . k_j alone, and SCALE = log2(e) / sqrt(D)
turns it into a logit in units of log2. A kernel sees the keys a tile at a time and keeps three
values for each query:

    row_max  the largest SCALE * score so far
    row_sum  the sum of exp2(SCALE * score - row_max)
    acc      the sum of exp2(SCALE * score - row_max) * value

A tile with a larger score rescales row_sum and acc by exp2(old row_max - new row_max) (Milakov &
Gimelshein 2018; Dao et al. 2022). After the last tile, acc / row_sum is the output and
row_max + log2(row_sum) is the log2 of the sum of exponentials.

The KV cache is [pages, Hkv, page_size, D]. The block table of a sequence names its pages in order:
key j lies in page block_table[j // page_size], row j % page_size. This file launches no kernel.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.common import SIZES, Config, check

BLOCK_N = 64  # keys of a tile, fewer if a row of K is wide or the pages are small
TILE_BYTES = 16384  # of a tile of K at most
LOG2E = tl.constexpr(1.4426950408889634)  # exp(x) = exp2(x * LOG2E); the hardware has exp2
# The score of a pair that a mask hides. It is finite, since minus infinity less itself is NaN, and
# no larger in magnitude because of the rounding that flash.py describes.
MASKED = tl.constexpr(-1e9)


def cache_constants(q: Tensor, k_cache: Tensor, v_cache: Tensor, block_tables: Tensor) -> Config:
    """Returns the constants HKV, D, PAGE and BLOCK_N of the kernels.

    q [rows, H, D] with any row stride; block_tables int32 [B, width] with any row stride.
    ValueError if queries, caches and block tables do not fit each other or the kernels.
    """
    check((None, None, None), strided=True, q=q)
    _, heads, head_dim = q.shape
    check((None, None, None, head_dim), q.dtype, k_cache=k_cache)
    check(k_cache.shape, q.dtype, v_cache=v_cache)
    check((None, None), torch.int32, strided=True, block_tables=block_tables)
    _, kv_heads, page_size, _ = k_cache.shape
    if heads % kv_heads:
        raise ValueError(f"{heads} query heads; expected a multiple of {kv_heads}")
    for name, size in (("head_dim", head_dim), ("page_size", page_size)):
        if size not in SIZES:
            raise ValueError(f"{name} is {size}; expected one of {SIZES}")
    block_n = min(BLOCK_N, page_size, TILE_BYTES // (head_dim * q.element_size()))
    return {"HKV": kv_heads, "D": head_dim, "PAGE": page_size, "BLOCK_N": block_n}


def gather_pages(cache: Tensor, block_table: Tensor, length: int) -> Tensor:
    """Returns the first `length` keys (or values) of a sequence as [Hkv, length, D].

    The naive versions of the paged kernels use it: a copy of what the kernels read in place.
    """
    page_size = cache.shape[2]
    pages = block_table[: -(-length // page_size)].long()
    # [pages, Hkv, page_size, D] -> [Hkv, pages, page_size, D] -> [Hkv, pages * page_size, D]
    return cache[pages].transpose(0, 1).flatten(1, 2)[:, :length]


@triton.jit
def softmax_start(M: tl.constexpr, D: tl.constexpr):
    """Returns row_max [M], row_sum [M] and acc [M, D] before the first tile."""
    # less than any score; finite, as minus infinity less itself would be NaN
    row_max = tl.full([M], -1e30, tl.float32)
    row_sum = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, D], tl.float32)
    return row_max, row_sum, acc


@triton.jit
def softmax_step(scores, row_max, row_sum, SCALE: tl.constexpr):
    """Adds a tile of scores [M, N] to row_max and row_sum [M].

    Returns p = exp2(SCALE * score - row_max) [M, N], the factor [M, 1] that rescales acc, and the
    new row_max and row_sum.
    """
    new_max = tl.maximum(row_max, tl.max(scores, 1) * SCALE)
    p = tl.exp2(tl.fma(scores, SCALE, -new_max[:, None]))
    rescale = tl.exp2(row_max - new_max)
    row_sum = row_sum * rescale + tl.sum(p, 1)
    return p, rescale[:, None], new_max, row_sum


@triton.jit
def attend_pages(
    q,  # [M, D]
    row_max,  # [M]
    row_sum,  # [M]
    acc,  # [M, D]
    k_cache_ptr,  # [pages, HKV, PAGE, D]
    v_cache_ptr,
    block_table_ptr,  # of the sequence
    kv_head,
    start,  # the first key to visit, a multiple of BLOCK_N
    end,  # one past the last key to visit
    read_to,  # keys from here on are not read: behind the sequence, or behind a split
    seen_to,  # a row sees keys < seen_to: [M, 1], or one for all rows; None: all see all
    HKV: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TWO_PARTS: tl.constexpr,
):
    """Returns row_max, row_sum and acc after keys start .. end - 1 of one kv head, tile by tile.

    A caller may continue with a second range. Every row must see the first key of its first range:
    row_max is then real, and a tile that a row does not see adds exactly 0. Tiles begin at
    multiples of BLOCK_N from position 0, so the arithmetic of a row does not depend on the other
    rows of q or where its chunk began.

    Tensor cores take p in the dtype of q. With TWO_PARTS a second product, which reads no memory,
    adds what this rounding lost, rounded in turn: of the 24 bits of p, two numbers in bf16 keep
    about 16 and two in fp16 about 22.
    """
    D: tl.constexpr = q.shape[1]
    columns = tl.arange(0, BLOCK_N)
    tile_offsets = columns[:, None] * D + tl.arange(0, D)[None, :]  # [BLOCK_N, D] within a page
    page = tl.load(block_table_ptr + start // PAGE, start < read_to, 0)
    for key in range(start, end, BLOCK_N):
        # 64 bits: a cache has more than 2^31 elements.
        page_offset = ((page.to(tl.int64) * HKV + kv_head) * PAGE + key % PAGE) * D
        # The page of the next tile is looked up now: a lookup in place stalls the pipeline.
        next_key = key + BLOCK_N
        page = tl.load(block_table_ptr + next_key // PAGE, next_key < read_to, 0)

        k = tl.load(k_cache_ptr + page_offset + tile_offsets)
        scores = tl.dot(q, k.T, input_precision="ieee")  # [M, BLOCK_N]
        if seen_to is None:
            v = tl.load(v_cache_ptr + page_offset + tile_offsets)
        else:
            scores = tl.where(key + columns[None, :] < seen_to, scores, MASKED)
            # Values past the end are not read: they may be NaN, and 0 * NaN is NaN.
            in_cache = key + columns[:, None] < read_to
            v = tl.load(v_cache_ptr + page_offset + tile_offsets, in_cache, 0.0)

        p, rescale, row_max, row_sum = softmax_step(scores, row_max, row_sum, LOG2E / D**0.5)
        p_high = p.to(q.dtype)
        acc = tl.dot(p_high, v, acc * rescale, input_precision="ieee")
        if TWO_PARTS:
            p_low = (p - p_high.to(tl.float32)).to(q.dtype)
            acc = tl.dot(p_low, v, acc, input_precision="ieee")
    return row_max, row_sum, acc
