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

from kernels.attention import LOG2E, softmax_step
from kernels.common import FP32, check, pick, require

CONFIGS = {  # BLOCK_M is also the block of the work list
    80: {"BLOCK_M": 128, "BLOCK_N": 64, "num_warps": 8, "num_stages": 2},
    89: {"BLOCK_M": 128, "BLOCK_N": 32, "num_warps": 8, "num_stages": 3},
    90: {"BLOCK_M": 128, "BLOCK_N": 64, "num_warps": 8, "num_stages": 3},
    FP32: {"BLOCK_M": 32, "BLOCK_N": 32, "num_warps": 8, "num_stages": 2},
}
HEAD_DIMS = (16, 32, 64, 128)


@dataclass(frozen=True)
class Work:
    """Blocks of queries or of keys, longest first, and the spans each visits (flash_plan.py)."""

    items: Tensor  # int32 [items, 4]: (first token, last token + 1, first visit, last visit + 1)
    visits: Tensor  # int32 [visits, 4]: spans (start, end, key_start, key_end)


def flash_forward(q: Tensor, k: Tensor, v: Tensor, work: Work) -> tuple[Tensor, Tensor]:
    """Returns out [T, H, D], and lse fp32 [H, T], the natural logarithm of the sum of exp(score).

    q [T, H, D], k and v [T, Hkv, D]; work: blocks of queries that cover the pack.
    """
    shape = check_inputs(q, k, v)
    tokens, heads, dim = q.shape
    out = q.new_empty(tokens, heads, dim)
    lse = q.new_empty(heads, tokens, dtype=torch.float32)
    _forward[(len(work.items) * heads,)](
        q, k, v, out, lse, work.items, work.visits, tokens, **shape, **pick(CONFIGS, q.dtype)
    )
    return out, lse


def check_inputs(q: Tensor, k: Tensor, v: Tensor) -> dict[str, int]:
    """Returns the constants H, G and D of the kernels. ValueError for what they do not take."""
    check((None, None, None), q=q)
    tokens, heads, dim = q.shape
    require(dim in HEAD_DIMS, f"head_dim is {dim}; expected one of {HEAD_DIMS}")
    check((tokens, None, dim), q.dtype, k=k)
    check(k.shape, q.dtype, v=v)
    kv_heads = k.shape[1]
    require(heads % kv_heads == 0, f"{heads} query heads; expected a multiple of {kv_heads}")
    return {"H": heads, "G": heads // kv_heads, "D": dim}


@triton.jit
def _forward(
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
    item = items + tl.program_id(0) // H * 4
    head = tl.program_id(0) % H
    first, last = tl.load(item), tl.load(item + 1)
    rows, columns = first + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    here = rows < last
    base = (first.to(tl.int64) * H + head) * D
    tile = tl.arange(0, BLOCK_M)[:, None] * (H * D) + tl.arange(0, D)
    query = tl.load(q + base + tile, here[:, None], 0.0)  # [BLOCK_M, D]
    kv_tile = columns[:, None] * (H // G * D) + head // G * D + tl.arange(0, D)
    peak = tl.full([BLOCK_M], -1e30, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, D], tl.float32)
    for visit in range(tl.load(item + 2), tl.load(item + 3)):
        limit, begin, edge, stop = walk(visits + visit * 4, rows, first, last, BLOCK_N)
        for offset in range(0, stop - begin, BLOCK_N):
            key = begin + offset
            at = key.to(tl.int64) * (H // G * D)
            exists = (key + columns < stop)[:, None]
            keys = tl.load(k + at + kv_tile, exists, 0.0)  # [BLOCK_N, D]
            scores = tl.dot(query, keys.T, input_precision="ieee")  # [BLOCK_M, BLOCK_N]
            if key >= edge:
                # finite: what a row that sees nothing yet adds up shrinks to 0 at its first key
                scores = tl.where((key + columns)[None, :] < limit[:, None], scores, -1e9)
            p, shrink, peak, total = softmax_step(scores, peak, total, D**-0.5 * LOG2E)
            values = tl.load(v + at + kv_tile, exists, 0.0)
            p = p.to(values.dtype)
            acc = tl.dot(p, values, acc * shrink, input_precision="ieee")
    tl.store(out + base + tile, acc / total[:, None], here[:, None])
    log_sum = (peak + tl.log2(total)) * (1 / LOG2E)
    tl.store(lse + head.to(tl.int64) * tokens + rows, log_sum, here)


@triton.jit
def span_of(visit):
    """Returns (start, end, key_start, key_end): causal if start == key_start, else all see all."""
    return tl.load(visit), tl.load(visit + 1), tl.load(visit + 2), tl.load(visit + 3)


@triton.jit
def walk(visit, rows, first, last, BLOCK_N: tl.constexpr):
    """Returns (limit, begin, edge, stop) for the block of queries first .. last over a span.

    A row sees the keys from begin to below its limit. Tiles begin .. edge need no mask, edge ..
    stop do.
    """
    start, end, key_start, key_end = span_of(visit)
    causal = start == key_start
    limit = tl.where((rows >= start) & (rows < end), tl.where(causal, rows + 1, key_end), 0)
    stop = tl.where(causal, tl.minimum(key_end, last), key_end)
    common = tl.where(causal, first + 1, key_end) - key_start  # keys that all rows of the span see
    inside = (start <= first) & (last <= end)
    edge = key_start + tl.where(inside, common // BLOCK_N * BLOCK_N, 0)
    return limit, key_start, edge, stop


def visible(spans: list[tuple[int, int, int, int]], tokens: int) -> Tensor:
    """Returns the mask that spans describe, bool [T, T]: which key (column) a query (row) sees."""
    seen = torch.zeros(tokens, tokens, dtype=torch.bool)
    for start, end, key_start, key_end in spans:
        block = torch.ones(end - start, key_end - key_start, dtype=torch.bool)
        seen[start:end, key_start:key_end] |= block.tril() if start == key_start else block
    return seen


def reference(
    q: Tensor, k: Tensor, v: Tensor, spans: list[tuple[int, int, int, int]]
) -> tuple[Tensor, Tensor]:
    """Returns out [T, H, D] and lse [H, T], in the dtype of the arguments."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = torch.einsum("thd,shd->hts", q, k) * q.shape[-1] ** -0.5
    scores = scores.masked_fill(~visible(spans, len(q)).to(q.device), float("-inf"))
    return torch.einsum("hts,shd->thd", scores.softmax(-1), v), scores.logsumexp(-1)
