"""Flash attention for training, forward: out = softmax(q k^T / sqrt(D)) v over the spans of a pack (Dao et al. 2022; Dao 2023).

Grouped-query, exact, without a [T, T] matrix: the softmax is rescaled tile by tile. FLOPs: 4 * H * D a visible pair of query and key. Bytes:
q and out once, and k and v once a block of queries, which the L2 cache holds for a pack of Qwen3-8B of up to about 10k tokens.
One program owns a block of queries of one head and visits all its spans (kernels/flash_plan.py): tiles that all its queries see without a mask,
then those on a span's edges with one. Longest blocks start first. A sequence or tree gives bitwise the same anywhere in any pack.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.common import DTYPES, Config, check, pick, require

CONFIGS: dict[int, Config] = {  # BLOCK_M is what the work list must be made for
    80: {"BLOCK_M": 128, "BLOCK_N": 64, "num_warps": 8, "num_stages": 2},
    89: {"BLOCK_M": 128, "BLOCK_N": 32, "num_warps": 8, "num_stages": 3},
    90: {"BLOCK_M": 128, "BLOCK_N": 64, "num_warps": 8, "num_stages": 3},
}
FLOAT32: Config = {
    "BLOCK_M": 32,
    "BLOCK_N": 32,
    "num_warps": 8,
    "num_stages": 2,
}  # on every card: exact products take no tensor core
HEAD_DIMS = (16, 32, 64, 128)
LOG2E = 1.4426950408889634  # exp(x) = exp2(x * LOG2E), and exp2 is what the hardware has


@dataclass(frozen=True)
class Work:
    """Blocks of queries (or keys), longest first, and the spans that each visits: kernels/flash_plan.py makes them."""

    items: Tensor  # int32 [items, 4]: (first token, last token + 1, first visit, last visit + 1)
    visits: Tensor  # int32 [visits, 4]: spans (start, end, key_start, key_end)
    block: int  # an item has at most so many tokens
    tokens: int  # no span goes beyond


def flash_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    work: Work,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    config: Config | None = None,
) -> tuple[Tensor, Tensor]:
    """q [T, H, D], k and v [T, Hkv, D] -> out [T, H, D], and lse fp32 [T, H], the natural logarithm of the sum of
    exp(score). `work` has blocks of queries; rows that no span covers are not written. `lse`, where given, is a transposed [H, T].
    """
    tokens, heads, dim = q.shape
    kv_heads = k.shape[1]
    check_inputs(q, k, v, work)
    out = torch.empty((tokens, heads, dim), dtype=q.dtype, device=q.device) if out is None else out
    lse = (
        torch.empty((heads, tokens), dtype=torch.float32, device=q.device).T if lse is None else lse
    )
    check("out", out, (tokens, heads, dim), (q.dtype,), inner=3)
    check_lse(lse, tokens, heads)
    if len(work.items):
        _forward[(len(work.items) * heads,)](
            q,
            k,
            v,
            out,
            lse,
            work.items,
            work.visits,
            tokens,
            H=heads,
            G=heads // kv_heads,
            D=dim,
            UNIT=dim**-0.5 * LOG2E,
            **settings(CONFIGS, q.dtype, config) | {"BLOCK_M": work.block},
        )
    return out, lse


def settings(
    configs: dict[int, Config], dtype: torch.dtype, override: Config | None = None
) -> Config:
    """The configuration for the card at hand and a dtype."""
    return pick(
        {arch: FLOAT32 for arch in configs} if dtype == torch.float32 else configs, override
    )


def check_inputs(q: Tensor, k: Tensor, v: Tensor, work: Work) -> None:
    """ValueError unless the kernels take these shapes, dtypes and strides."""
    check("q", q, (None, None, None), DTYPES, inner=3)
    tokens, heads, dim = q.shape
    require(dim in HEAD_DIMS, f"head_dim {dim} is not supported; expected one of {HEAD_DIMS}")
    check("k", k, (tokens, None, dim), (q.dtype,), inner=3)
    check("v", v, tuple(k.shape), (q.dtype,), inner=3)
    require(
        k.shape[1] > 0 and heads % k.shape[1] == 0,
        f"{heads} query heads do not divide among {k.shape[1]} kv heads",
    )
    require(
        work.items.device == q.device,
        f"the work list is on {work.items.device}; q is on {q.device}",
    )
    require(work.tokens <= tokens, f"the work list covers {work.tokens} tokens; q has {tokens}")


def check_lse(lse: Tensor, tokens: int, heads: int) -> None:
    check("lse", lse, (tokens, heads), (torch.float32,), inner=0)
    require(
        lse.T.is_contiguous(),
        "lse must be the transpose of a contiguous [H, T], which is what the kernels read in one piece",
    )


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
    UNIT: tl.constexpr,
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
    query = tl.load(q + base + tile, mask=here[:, None], other=0.0)  # [BLOCK_M, D]
    kv_tile = columns[:, None] * (H // G * D) + head // G * D + tl.arange(0, D)
    top = tl.full([BLOCK_M], -1e30, tl.float32)  # the largest score so far, in units of log2(e)
    mass = tl.zeros([BLOCK_M], tl.float32)  # sum of exp2(score - top)
    total = tl.zeros([BLOCK_M, D], tl.float32)  # sum of exp2(score - top) * value
    for visit in range(tl.load(item + 2), tl.load(item + 3)):
        limit, begin, edge, stop = _visit(visits + visit * 4, rows, first, last, BLOCK_N)
        for offset in range(0, stop - begin, BLOCK_N):
            key = begin + offset
            at = key.to(tl.int64) * (H // G * D)
            exists = (key + columns < stop)[:, None]
            keys = tl.load(k + at + kv_tile, mask=exists, other=0.0)  # [BLOCK_N, D]
            scores = tl.dot(query, keys.T, input_precision="ieee")  # [BLOCK_M, BLOCK_N]
            if key >= edge:
                # finite, for rows that see nothing yet; what these gather shrinks to 0 when the first score comes
                scores = tl.where((key + columns)[None, :] < limit[:, None], scores, -1e9)
            higher = tl.maximum(top, tl.max(scores, 1) * UNIT)
            p = tl.exp2(scores * UNIT - higher[:, None])
            shrink = tl.exp2(top - higher)
            mass = mass * shrink + tl.sum(p, 1)
            values = tl.load(v + at + kv_tile, mask=exists, other=0.0)
            total = tl.dot(
                p.to(values.dtype), values, total * shrink[:, None], input_precision="ieee"
            )
            top = higher
    tl.store(
        out + base + tile, (total / mass[:, None]).to(out.dtype.element_ty), mask=here[:, None]
    )
    tl.store(
        lse + head.to(tl.int64) * tokens + rows,
        (top + tl.log2(mass)) * 0.6931471805599453,
        mask=here,
    )


@triton.jit
def _visit(span, rows, first, last, BLOCK_N: tl.constexpr):
    """How the block of queries first .. last walks a span: each row sees keys below its limit; tiles begin .. edge need no mask, edge .. stop do."""
    start, end, key_start, key_end = (
        tl.load(span),
        tl.load(span + 1),
        tl.load(span + 2),
        tl.load(span + 3),
    )
    causal = start == key_start
    limit = tl.where((rows >= start) & (rows < end), tl.where(causal, rows + 1, key_end), 0)
    stop = tl.where(causal, tl.minimum(key_end, last), key_end)
    common = (
        tl.where(causal, first + 1, key_end) - key_start
    )  # keys that all rows see, if all are in the span
    edge = key_start + tl.where((start <= first) & (last <= end), common // BLOCK_N * BLOCK_N, 0)
    return limit, key_start, edge, stop


def visible(spans: list, tokens: int, device: torch.device) -> Tensor:
    """The mask that spans amount to: bool [T, T], which key (column) a query (row) sees."""
    seen = torch.zeros(tokens, tokens, dtype=torch.bool, device=device)
    for start, end, key_start, key_end in spans:
        seen[start:end, key_start:key_end] |= seen.new_ones(end - start, key_end - key_start).tril(
            0 if start == key_start else key_end
        )
    return seen


def reference(q: Tensor, k: Tensor, v: Tensor, spans: list) -> tuple[Tensor, Tensor]:
    """out [T, H, D] and lse [T, H], in the dtype of its arguments."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = torch.einsum("thd,shd->ths", q, k) * q.shape[-1] ** -0.5
    scores = scores.masked_fill(~visible(spans, len(q), q.device)[:, None], float("-inf"))
    return torch.einsum("ths,shd->thd", scores.softmax(-1), v), scores.logsumexp(-1)
