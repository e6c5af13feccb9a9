"""Flash attention for training, forward: out = softmax(q k^T / sqrt(D)) v over the spans of a pack.

Grouped-query and exact, without a [T, T] matrix (Dao et al. 2022; Dao 2023). 4 * H * D FLOPs for
each visible pair of a query and a key. q and out move once, k and v once for each block of queries;
the L2 cache holds them for a pack of Qwen3-8B of up to about 10,000 tokens. Compute is the limit.

One program owns a block of queries of one head and visits all of its spans (flash_plan.py): first
the tiles that all of its queries see, without a mask, then those on a span's edges. Longest blocks
start first. A sequence, or a tree of sequences, gives the same bits at any place in any pack.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kernels.attention import LOG2E, softmax_start, softmax_step

HEAD_DIMS = (16, 32, 64, 128)


@dataclass(frozen=True)
class Work:
    """Blocks of queries or of keys, longest first, and the spans each visits (flash_plan.py)."""

    items: Tensor  # int32 [items, 4]: (first token, last token + 1, first visit, last visit + 1)
    visits: Tensor  # int32 [visits, 4]: spans (start, end, key_start, key_end)


@triton.jit
def flash_forward(
    q,
    k,
    v,
    out,
    lse,
    items,
    visits,
    tokens,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Fills out [T, H, D], and lse fp32 [H, T], the natural logarithm of the sum of exp(score)."""
    head = tl.program_id(0) % H
    first, last, visit, end = fields(items + tl.program_id(0) // H * 4)
    rows, columns = first + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    query = load_rows(q, first, last, head, H, BLOCK_M, D)
    peak, total, acc = softmax_start(BLOCK_M, D)
    for index in range(visit, end):
        limit, begin, edge, stop = walk(visits + index * 4, rows, first, last, BLOCK_N)
        for offset in range(0, stop - begin, BLOCK_N):
            key = begin + offset
            keys = load_rows(k, key, stop, head // G, H // G, BLOCK_N, D)
            scores = tl.dot(query, keys.T, input_precision="ieee")  # [BLOCK_M, BLOCK_N]
            if key >= edge:
                # finite: what a row that sees nothing yet adds up shrinks to 0 at its first key
                scores = tl.where((key + columns)[None, :] < limit[:, None], scores, -1e9)
            p, shrink, peak, total = softmax_step(scores, peak, total, D**-0.5 * LOG2E)
            values = load_rows(v, key, stop, head // G, H // G, BLOCK_N, D)
            acc = tl.dot(p.to(values.dtype), values, acc * shrink, input_precision="ieee")
    here = rows < last
    tl.store(pointers(out, first, head, H, BLOCK_M, D), acc / total[:, None], here[:, None])
    log_sum = (peak + tl.log2(total)) * (1 / LOG2E)
    tl.store(lse + head.to(tl.int64) * tokens + rows, log_sum, here)


@triton.jit
def pointers(x, row, head, HEADS: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr):
    """Returns those of ROWS rows of one head, from `row` on, in x [T, HEADS, D]: [ROWS, D]."""
    tile = tl.arange(0, ROWS)[:, None] * (HEADS * D) + head * D + tl.arange(0, D)
    return x + row.to(tl.int64) * (HEADS * D) + tile


@triton.jit
def load_rows(x, row, stop, head, HEADS: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr):
    """Returns these rows, with zeros from row `stop` on."""
    exists = row + tl.arange(0, ROWS) < stop
    return tl.load(pointers(x, row, head, HEADS, ROWS, D), exists[:, None], 0.0)


@triton.jit
def fields(row):
    """Returns the four numbers of an item or a visit (see Work)."""
    return tl.load(row), tl.load(row + 1), tl.load(row + 2), tl.load(row + 3)


@triton.jit
def walk(visit, rows, first, last, BLOCK_N: tl.constexpr):
    """Returns (limit, begin, edge, stop) for the block of queries first .. last over a span.

    A row sees the keys from begin to below its limit. Tiles begin .. edge need no mask, edge ..
    stop do.
    """
    start, end, key_start, key_end = fields(visit)
    causal = start == key_start
    limit = tl.where((rows >= start) & (rows < end), tl.where(causal, rows + 1, key_end), 0)
    stop = tl.where(causal, tl.minimum(key_end, last), key_end)
    common = tl.where(causal, first + 1, key_end) - key_start  # keys that all rows of the span see
    inside = (start <= first) & (last <= end)
    edge = key_start + tl.where(inside, common // BLOCK_N * BLOCK_N, 0)
    return limit, key_start, edge, stop


def reference(q: Tensor, k: Tensor, v: Tensor, spans: list[tuple[int, int, int, int]]) -> Tensor:
    """Returns out [T, H, D], in the dtype of the arguments."""
    seen = torch.zeros(len(q), len(q), dtype=torch.bool, device=q.device)  # [query, key]
    for start, end, key_start, key_end in spans:
        block = seen[start:end, key_start:key_end].fill_(True)
        if start == key_start:
            block.tril_()
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    return scaled_dot_product_attention(q, k, v, seen, enable_gqa=True).transpose(0, 1)
