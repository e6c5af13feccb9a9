"""Prefill attention over the paged KV cache: chunks of new tokens against their whole context.

    out[t, h] = sum_j softmax_j(q[t, h] . k[j] / sqrt(D)) v[j],  j <= position of t,  kv head h // G

4 * H * D FLOPs for each pair of a query and a visible key; q and out move once, K and V once a work
item and head, mostly through L2: compute is the limit (FlashAttention-2; Dao 2023). A program owns
BLOCK_M query rows of one head of a work item. It visits the tiles of keys that all of its rows see
without a mask, then those at the diagonal with one. P is rounded to the dtype of V. The host lays
out the work, longest first. Tiles start at multiples of BLOCK_N from position 0, so a row has the
same bits wherever its chunk began.
"""

from collections.abc import Sequence
from itertools import accumulate

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.attention import attend_pages, check_cache, softmax_start
from kernels.common import check

ROWS = 128  # query rows of a work item


def prefill_work(starts: Sequence[int], counts: Sequence[int]) -> Tensor:
    """Returns the work list of prefill_attention for counts[i] new tokens at positions starts[i]..

    The queries of the sequences follow one another in q. int32 [W, 4]: sequence, first row of q,
    number of rows (at most ROWS), position of the first row. Items that see most keys come first.
    """
    firsts = [0, *accumulate(counts)]
    items = [
        (i, firsts[i] + done, min(ROWS, count - done), start + done)
        for i, (start, count) in enumerate(zip(starts, counts, strict=True))
        for done in range(0, count, ROWS)
    ]
    items.sort(key=lambda item: -(item[2] + item[3]))
    return torch.tensor(items, dtype=torch.int32).reshape(-1, 4)


def prefill_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    tables: Tensor,
    work: Tensor,
    out: Tensor,
) -> Tensor:
    """Fills and returns out [T, H, D].

    q [T, H, D] with any row stride; caches as in attention.py; tables int32 [B, max_pages]; work
    int32 [W, 4]. The keys and values of the new tokens are
    already in the pages. Rows of q that no work item holds are not written; an item of 0 rows is
    padding.
    """
    shape = check_cache(q, k_cache, v_cache, tables)
    _, heads, dim = q.shape
    check(q.shape, q.dtype, out=out)
    check((None, 4), torch.int32, work=work)
    # Products in fp32 need many registers.
    block = min(ROWS, 16384 // dim) if q.element_size() == 2 else 16
    _prefill[(heads, len(work), ROWS // block)](
        q,
        k_cache,
        v_cache,
        tables,
        work,
        out,
        q.stride(0),
        tables.stride(0),
        H=heads,
        **shape,
        BLOCK_M=block,
        num_warps=8,
        num_stages=3 if dim < 256 else 2,  # sm_89 has 1 KiB too little for three stages
    )
    return out


@triton.jit(do_not_specialize=["table_stride"])
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
    row = tl.arange(0, BLOCK_M)[:, None]
    token = tl.load(item + 1).to(tl.int64) + done + row
    columns = head * D + tl.arange(0, D)[None, :]
    queries = tl.load(q + token * q_stride + columns, row < rows, 0.0)
    end = position + tl.minimum(rows, BLOCK_M)
    whole = (position + 1) // BLOCK_N * BLOCK_N  # keys in tiles that even the first row sees
    pages = k_cache, v_cache, table, head // (H // HKV)
    state = softmax_start(BLOCK_M, D)
    state = attend_pages(state, queries, pages, None, 0, whole, end, HKV, PAGE, BLOCK_N, False)
    _, total, acc = attend_pages(
        state, queries, pages, position + row, whole, end, end, HKV, PAGE, BLOCK_N, False
    )
    tl.store(out + token * (H * D) + columns, acc / total[:, None], row < rows)
