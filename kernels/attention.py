"""What the attention kernels share: the step of a running softmax, and the walk over cache pages.

The softmax of a row is kept as `peak`, the largest score so far in units of log2, `total`, the sum
of exp2(score - peak), and `acc`, the sum of exp2(score - peak) * value. Each tile of keys rescales
them (Milakov & Gimelshein 2018; Dao et al. 2022). In the end acc / total is the mean value, and
peak + log2(total) the log2 of the sum of exponentials.

A KV cache is [pages, Hkv, page_size, D], of the dtype of q or FP8, which is widened as it is read;
a row of `tables` names the pages of one sequence in order.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kernels.common import FP8, SIZES, check, require

BLOCK_N = 64  # keys of a tile, unless D or the dtype is wide or the pages are small
TILE_BYTES = 16384  # of a tile of K
LOG2E = tl.constexpr(1.4426950408889634)  # exp(x) = exp2(x * LOG2E); the hardware has exp2


def check_cache(q: Tensor, k_cache: Tensor, v_cache: Tensor, tables: Tensor) -> dict[str, int]:
    """Returns the constants HKV, D, PAGE and BLOCK_N of the kernels.

    ValueError if queries, caches and tables do not fit each other or the kernels.
    """
    check((None, None, None), strided=True, q=q)
    heads, dim = q.shape[1:]
    kind = FP8 if k_cache.dtype == FP8 else q.dtype
    check((None, None, None, dim), kind, k_cache=k_cache)
    check(k_cache.shape, kind, v_cache=v_cache)
    check((None, None), torch.int32, strided=True, tables=tables)
    _, kv_heads, page_size, _ = k_cache.shape
    require(heads % kv_heads == 0, f"{heads} query heads; expected a multiple of {kv_heads}")
    for name, size in (("head_dim", dim), ("page_size", page_size)):
        require(size in SIZES, f"{name} is {size}; expected one of {SIZES}")
    block = min(BLOCK_N, page_size, TILE_BYTES // (dim * q.element_size()))
    return {"HKV": kv_heads, "D": dim, "PAGE": page_size, "BLOCK_N": block}


@triton.jit
def softmax_start(M: tl.constexpr, D: tl.constexpr):
    """Returns peak and total [M] and acc [M, D] before the first tile."""
    zeros = tl.zeros([M, D], tl.float32)
    return tl.full([M], -1e30, tl.float32), tl.zeros([M], tl.float32), zeros


@triton.jit
def softmax_step(scores, peak, total, SCALE: tl.constexpr):
    """Adds a tile of scores [M, N] to peak and total [M].

    Returns p = exp2(SCALE * score - peak), the factor [M, 1] by which acc shrinks, peak and total.
    """
    higher = tl.maximum(peak, tl.max(scores, 1) * SCALE)
    p = tl.exp2(tl.fma(scores, SCALE, -higher[:, None]))
    shrink = tl.exp2(peak - higher)
    return p, shrink[:, None], higher, total * shrink + tl.sum(p, 1)


@triton.jit
def attend_pages(
    state,
    q,
    pages,
    limit,
    first,
    stop,
    end,
    HKV: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    EXACT: tl.constexpr,
):
    """Adds keys first .. stop - 1 of a kv head, tile by tile, to the softmax of rows q [M, D].

    state: (peak, total, acc), which is returned; pages: (k_cache, v_cache, table, kv head); end:
    number of stored keys. A row sees keys up to its limit, [M, 1] or one for all; None: it sees all
    of them.

    p is rounded to the dtype of q, as tensor cores want it. EXACT: a second product adds what the
    rounding lost, which costs no bytes from memory.
    """
    D: tl.constexpr = q.shape[1]
    peak, total, acc = state
    k_cache, v_cache, table, head = pages
    keys, page = tl.arange(0, BLOCK_N), tl.load(table + first // PAGE, first < end, 0)
    tile = keys[:, None] * D + tl.arange(0, D)[None, :]
    for start in range(first, stop, BLOCK_N):
        # The next page is looked up one tile ahead: a lookup in place stalls the pipeline.
        base = ((page.to(tl.int64) * HKV + head) * PAGE + start % PAGE) * D
        page = tl.load(table + (start + BLOCK_N) // PAGE, start + BLOCK_N < end, 0)
        k = tl.load(k_cache + base + tile).to(q.dtype)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        if limit is None:
            v = tl.load(v_cache + base + tile).to(q.dtype)
        else:  # 0 * NaN is NaN: values past the end must not be read
            v = tl.load(v_cache + base + tile, start + keys[:, None] < end, 0.0).to(q.dtype)
            scores = tl.where(start + keys[None, :] <= limit, scores, -1e30)
        p, shrink, peak, total = softmax_step(scores, peak, total, LOG2E / D**0.5)
        rounded = p.to(v.dtype)
        acc = tl.dot(rounded, v, acc * shrink, input_precision="ieee")
        if EXACT:
            lost = (p - rounded.to(tl.float32)).to(v.dtype)
            acc = tl.dot(lost, v, acc, input_precision="ieee")
    return peak, total, acc


def reference(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    tables: Tensor,
    starts: Sequence[int],
    counts: Sequence[int],
) -> Tensor:
    """Returns attention of counts[i] queries at positions starts[i].. of sequence i.

    The shapes are those of prefill_attention; the arithmetic is in the dtype of q.
    """
    out, first = torch.zeros_like(q), 0
    for table, start, count in zip(tables, starts, counts, strict=True):
        length, rows = start + count, slice(first, first := first + count)
        pages = table[: -(-length // k_cache.shape[2])]
        k, v = (x[pages].transpose(0, 1).flatten(1, 2)[:, :length] for x in (k_cache, v_cache))
        seen = torch.ones(count, length, dtype=torch.bool, device=q.device).tril(start)
        each = scaled_dot_product_attention(q[rows].transpose(0, 1), k, v, seen, enable_gqa=True)
        out[rows] = each.transpose(0, 1)
    return out
