"""Flash attention for training, forward and backward: out = softmax(q k^T / sqrt(D)) v over a pack.

A pack is one dimension [T] of tokens. Sequences, or trees of sequences that share their beginnings,
stand in it one after the other. Grouped-query and exact, without a [T, T] matrix (Dao et al. 2022;
Dao 2023). A visible pair of a query and a key costs 4 D FLOPs a query head forward and 14 D
backward. q and out move once, k and v once for each block of queries and query head. L2 serves the
latter while the k and v of a pack fit in it: at the 4 KiB a token of Qwen3-8B up to about 10,000
tokens (A100 40 MB, H100 50 MB). Compute is the limit.

What a query sees is a list of spans. Two answers (tokens 4-6 and 7-8) to one prompt (tokens 0-3)
have five:

    1  Span(0, 4, 0, 4)  causal: the prompt sees itself
    2  Span(4, 7, 0, 4)  the first answer sees the prompt
    3  Span(4, 7, 4, 7)  causal: the first answer sees itself
    4  Span(7, 9, 0, 4)  the second answer sees the prompt
    5  Span(7, 9, 7, 9)  causal: the second answer sees itself

In the picture, a query (row) sees the keys with a number, which is that of the span:

      key  0 1 2 3 4 5 6 7 8
    query
        0  1
        1  1 1
        2  1 1 1
        3  1 1 1 1
        4  2 2 2 2 3
        5  2 2 2 2 3 3
        6  2 2 2 2 3 3 3
        7  4 4 4 4       5
        8  4 4 4 4       5 5

Work is cut into blocks of queries (or of keys), and a list names for each block the spans that
touch it. With blocks of four queries, the one of tokens 4-7 visits spans 2 to 5. One program owns a
block of one head and visits all of its spans. What a query sees of the prompt and of its own answer
meets in registers, and so do the gradients of a prompt that many answers read. No sum is split
between programs, so there are no atomics and every run gives the same bits.

In order: the naive version, the work list, the launcher, the forward kernel, the two backward
kernels. The file knows nothing of samples, norms or rotations.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.common import check, pick
from kernels.softmax import LOG2E, MASKED, softmax_start, softmax_step

HEAD_DIMS = (16, 32, 64, 128)
WARPS = 8


class Span(NamedTuple):
    """Queries start .. end - 1 see the keys key_start .. key_end - 1.

    A span is causal if both are the same tokens (start == key_start): a query then sees the keys up
    to itself. Otherwise all of its queries see all of its keys.
    """

    start: int
    end: int
    key_start: int
    key_end: int

    @property
    def causal(self) -> bool:
        """True if the queries are the keys."""
        return self.start == self.key_start


def naive_attention(q: Tensor, k: Tensor, v: Tensor, spans: Sequence[Span]) -> Tensor:
    """Returns out [T, H, D] by loops over tokens and heads: the definition, used by tests only.

    q is [T, H, D], k and v are [T, Hkv, D]. Query head h reads kv head h // (H / Hkv).
    Arithmetic is in the dtype of the arguments; autograd differentiates it.
    """
    tokens, heads, dim = q.shape
    group = heads // k.shape[1]
    rows = []
    for token in range(tokens):
        visible = []
        for span in spans:
            if span.start <= token < span.end:
                visible += range(span.key_start, token + 1 if span.causal else span.key_end)
        for head in range(heads):
            keys = k[visible, head // group]  # [visible, D]
            values = v[visible, head // group]
            scores = keys @ q[token, head] / dim**0.5  # [visible]
            rows.append(torch.softmax(scores, 0) @ values)  # [D]
    return torch.stack(rows).view(tokens, heads, dim)


@dataclass(frozen=True)
class WorkList:
    """Blocks of tokens in the order in which programs start, and the spans that each visits."""

    blocks: Tensor  # int32 [blocks, 4]: block_start, block_end, visit_start, visit_end
    visits: Tensor  # int32 [visits, 4]: a Span


@dataclass(frozen=True)
class FlashWork:
    """The work lists of a pack, one for each kernel."""

    forward: WorkList  # blocks of queries
    backward_queries: WorkList  # blocks of queries
    backward_keys: WorkList  # blocks of keys
    tokens: int  # T
    dtype: torch.dtype  # of q, k and v, on which the sizes of the blocks depend


def flash_work(spans: Sequence[Span], device: torch.device | str, dtype: torch.dtype) -> FlashWork:
    """Returns the work of attention over spans whose causal ones cover the pack without gaps.

    dtype is that of q, k and v: the size of a block depends on it and on the GPU (tiles.toml).
    ValueError if there is no span.
    """
    tokens = pack_tokens(spans)
    # A block visits prefixes before its own sequence, in the order of their positions.
    spans = sorted(spans, key=lambda span: (span.key_start, span.start))
    forward = _blocks(spans, tokens, pick("flash_forward", dtype)["BLOCK_M"])
    queries = _blocks(spans, tokens, pick("flash_backward_queries", dtype)["BLOCK_M"])
    keys = _blocks(spans, tokens, pick("flash_backward_keys", dtype)["BLOCK_N"])
    return FlashWork(
        forward=_list_visits(spans, forward, by_keys=False, device=device),
        backward_queries=_list_visits(spans, queries, by_keys=False, device=device),
        backward_keys=_list_visits(spans, keys, by_keys=True, device=device),
        tokens=tokens,
        dtype=dtype,
    )


def pack_tokens(spans: Sequence[Span]) -> int:
    """Returns T, the number of tokens of a pack. ValueError if there is no span."""
    if not spans:
        raise ValueError("the pack has no spans; expected at least one")
    return max(span.end for span in spans)


def _blocks(spans: Sequence[Span], tokens: int, size: int) -> list[tuple[int, int]]:
    """Returns the blocks (block_start, block_end), at most `size` long, that cover the pack.

    A block never holds tokens of two trees: so a tree has the same bits at any place in any pack.
    A tree begins with a segment that has no prefix.
    """
    prefixed = {span.start for span in spans if not span.causal}
    roots = sorted({span.start for span in spans} - prefixed)
    blocks = []
    for tree_start, tree_end in zip(roots, [*roots[1:], tokens], strict=True):
        for block_start in range(tree_start, tree_end, size):
            blocks.append((block_start, min(block_start + size, tree_end)))
    return blocks


def _list_visits(
    spans: Sequence[Span],
    blocks: Sequence[tuple[int, int]],
    by_keys: bool,
    device: torch.device | str,
) -> WorkList:
    """Returns the spans that touch each block; the blocks with most visible pairs come first.

    by_keys: the blocks are blocks of keys, not of queries.
    """
    block_starts = [block_start for block_start, _ in blocks]
    touching: list[list[Span]] = [[] for _ in blocks]
    pairs = [0] * len(blocks)  # an estimate, for one token of the block
    for span in spans:
        if by_keys:
            start, end = span.key_start, span.key_end
        else:
            start, end = span.start, span.end
        first_index = bisect_right(block_starts, start) - 1  # of the block that holds token `start`
        end_index = bisect_left(block_starts, end)  # of the first block behind token `end` - 1
        for index in range(first_index, end_index):
            block_start, block_end = blocks[index]
            touching[index].append(span)
            if by_keys:
                seen_from = max(span.start, block_start) if span.causal else span.start
                pairs[index] += span.end - seen_from
            else:
                seen_to = min(span.key_end, block_end) if span.causal else span.key_end
                pairs[index] += seen_to - span.key_start
    rows, visits = [], []
    for index in sorted(range(len(blocks)), key=lambda index: -pairs[index]):
        block_start, block_end = blocks[index]
        visit_start = len(visits)
        visits += touching[index]
        rows.append((block_start, block_end, visit_start, len(visits)))
    return WorkList(blocks=_table(rows, device), visits=_table(visits, device))


def _table(rows: Sequence[tuple[int, ...]], device: torch.device | str) -> Tensor:
    return torch.tensor(rows, dtype=torch.int32).reshape(-1, 4).to(device)


def flash_attention(q: Tensor, k: Tensor, v: Tensor, work: FlashWork) -> Tensor:
    """Returns differentiable attention: q [T, H, D], k and v [T, Hkv, D] -> out [T, H, D].

    ValueError unless the work is that of T tokens and of the dtype of q, k and v, D is one of
    HEAD_DIMS and H a multiple of Hkv.
    """
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    check((work.tokens, None, None), work.dtype, q=q)
    tokens, heads, dim = q.shape
    if dim not in HEAD_DIMS:
        raise ValueError(f"head_dim is {dim}; expected one of {HEAD_DIMS}")
    check((tokens, None, dim), work.dtype, k=k)
    check(k.shape, work.dtype, v=v)
    kv_heads = k.shape[1]
    if heads % kv_heads:
        raise ValueError(f"{heads} query heads; expected a multiple of {kv_heads}")
    if not torch.is_grad_enabled():
        out, _ = _forward(q, k, v, work)
        return out
    return _FlashAttention.apply(q, k, v, work)


def _forward(q, k, v, work: FlashWork) -> tuple[Tensor, Tensor]:
    """Returns out [T, H, D], and lse2 fp32 [H, T], which the backward kernels read."""
    tokens, heads, _ = q.shape
    out = q.new_empty(q.shape)
    lse2 = q.new_empty(heads, tokens, dtype=torch.float32)
    _launch(flash_forward, work.forward, heads, (q, k, v, out, lse2), q, k)
    return out, lse2


class _FlashAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, work):
        out, lse2 = _forward(q, k, v, work)
        ctx.work = work
        ctx.save_for_backward(q, k, v, out, lse2)
        return out

    @staticmethod
    def backward(ctx, dout):
        # Read once: activation checkpointing frees what it has recomputed as it is read.
        q, k, v, out, lse2 = ctx.saved_tensors
        dout = dout.contiguous()
        delta = lse2.new_empty(lse2.shape)
        dq, dk, dv = q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)
        heads, kv_heads = q.shape[1], k.shape[1]
        tensors = (dout, q, k, v, out, lse2, delta, dq)
        _launch(flash_backward_queries, ctx.work.backward_queries, heads, tensors, q, k)
        tensors = (dout, q, k, v, lse2, delta, dk, dv)
        _launch(flash_backward_keys, ctx.work.backward_keys, kv_heads, tensors, q, k)
        return dq, dk, dv, None


def _launch(kernel, work: WorkList, heads: int, tensors: tuple[Tensor, ...], q: Tensor, k: Tensor):
    """Launches one program for each block of the work and each of `heads` heads."""
    tokens, query_heads, dim = q.shape
    kv_heads = k.shape[1]
    config = dict(pick(kernel.__name__, q.dtype))
    if dim <= 64 and kernel is not flash_forward:
        # The compiler then keeps the program's own block in registers, and wider tiles spill.
        visited = "BLOCK_N" if kernel is flash_backward_queries else "BLOCK_M"
        config[visited] = min(config[visited], 32)
    kernel[(len(work.blocks) * heads,)](
        *tensors,
        work.blocks,
        work.visits,
        tokens,
        HKV=kv_heads,
        G=query_heads // kv_heads,
        D=dim,
        **config,
        num_warps=WARPS,
    )


@triton.jit(do_not_specialize=["tokens"])
def flash_forward(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lse2_ptr,
    blocks_ptr,
    visits_ptr,
    tokens,
    HKV: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Fills out [T, H, D], and lse2 fp32 [H, T], the log2 of the sum of exp(score / sqrt(D)).

    A program visits first the tiles of a span that all of its queries see, without a mask, then
    those on the span's edge.
    """
    SCALE: tl.constexpr = D**-0.5 * LOG2E
    H: tl.constexpr = HKV * G
    head = tl.program_id(0) % H
    kv_head = head // G
    block_start, block_end, visit_start, visit_end = _load_four(blocks_ptr, tl.program_id(0) // H)
    rows = block_start + tl.arange(0, BLOCK_M)
    columns = tl.arange(0, BLOCK_N)
    q = _load_rows(q_ptr, block_start, block_end, head, H, BLOCK_M, D)
    row_max, row_sum, acc = softmax_start(BLOCK_M, D)
    for visit in range(visit_start, visit_end):
        seen_to, start, unmasked_end, end = _keys_of(
            visits_ptr, visit, rows, block_start, block_end, BLOCK_N
        )
        for offset in range(0, end - start, BLOCK_N):
            key = start + offset
            k = _load_rows(k_ptr, key, end, kv_head, HKV, BLOCK_N, D)
            scores = tl.dot(q, k.T, input_precision="ieee")  # [BLOCK_M, BLOCK_N]
            if key >= unmasked_end:
                # What a row adds up before its first visible key is scaled to 0 at that key. Up to
                # there row_max is SCALE * MASKED, rounded; the product in fma is not rounded, so p
                # is exp2 of the rounding error, not 1. The error is at most 16 for -1e9; for -1e30
                # it is about 1e21, and p infinite.
                scores = tl.where((key + columns)[None, :] < seen_to[:, None], scores, MASKED)
            p, rescale, row_max, row_sum = softmax_step(scores, row_max, row_sum, SCALE)
            v = _load_rows(v_ptr, key, end, kv_head, HKV, BLOCK_N, D)
            acc = tl.dot(p.to(v.dtype), v, acc * rescale, input_precision="ieee")
    exists = rows < block_end
    out = acc / row_sum[:, None]
    tl.store(_pointers(out_ptr, block_start, head, H, BLOCK_M, D), out, exists[:, None])
    tl.store(lse2_ptr + head.to(tl.int64) * tokens + rows, row_max + tl.log2(row_sum), exists)


# Backward (Dao et al. 2022, algorithm 4). With score = q k^T, SCALE = log2(e) / sqrt(D),
# p = exp2(score * SCALE - lse2), dp = dout v^T and delta = sum(dout * out):
#
#     dv = p^T dout      ds = p (dp - delta)      dq = ds k / sqrt(D)      dk = ds^T q / sqrt(D)
#
# p and ds are fp32 until they meet their other factor. One kernel owns queries, one owns keys, and
# both compute p and dp: 7 products a tile instead of 5, and no sum that two programs share.


@triton.jit(do_not_specialize=["tokens"])
def flash_backward_queries(
    dout_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lse2_ptr,
    delta_ptr,
    dq_ptr,
    blocks_ptr,
    visits_ptr,
    tokens,
    HKV: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Fills dq [T, H, D], and delta fp32 [H, T], which the second kernel reads."""
    SCALE: tl.constexpr = D**-0.5 * LOG2E
    H: tl.constexpr = HKV * G
    head = tl.program_id(0) % H
    kv_head = head // G
    block_start, block_end, visit_start, visit_end = _load_four(blocks_ptr, tl.program_id(0) // H)
    rows = block_start + tl.arange(0, BLOCK_M)
    columns = tl.arange(0, BLOCK_N)
    exists = rows < block_end
    q = _load_rows(q_ptr, block_start, block_end, head, H, BLOCK_M, D)
    dout = _load_rows(dout_ptr, block_start, block_end, head, H, BLOCK_M, D)
    out = _load_rows(out_ptr, block_start, block_end, head, H, BLOCK_M, D)
    delta = tl.sum(dout.to(tl.float32) * out.to(tl.float32), 1)  # [BLOCK_M]
    row_offsets = head.to(tl.int64) * tokens + rows
    tl.store(delta_ptr + row_offsets, delta, exists)
    lse2 = tl.load(lse2_ptr + row_offsets, exists, 0.0)
    dq = tl.zeros([BLOCK_M, D], tl.float32)
    for visit in range(visit_start, visit_end):
        seen_to, start, unmasked_end, end = _keys_of(
            visits_ptr, visit, rows, block_start, block_end, BLOCK_N
        )
        for offset in range(0, end - start, BLOCK_N):
            key = start + offset
            k = _load_rows(k_ptr, key, end, kv_head, HKV, BLOCK_N, D)
            v = _load_rows(v_ptr, key, end, kv_head, HKV, BLOCK_N, D)
            scores = tl.dot(q, k.T, input_precision="ieee")  # [BLOCK_M, BLOCK_N]
            p = tl.exp2(scores * SCALE - lse2[:, None])
            if key >= unmasked_end:
                p = tl.where((key + columns)[None, :] < seen_to[:, None], p, 0.0)
            dp = tl.dot(dout, v.T, input_precision="ieee")
            ds = p * (dp - delta[:, None])
            dq = tl.dot(ds.to(k.dtype), k, dq, input_precision="ieee")
    tl.store(_pointers(dq_ptr, block_start, head, H, BLOCK_M, D), dq * D**-0.5, exists[:, None])


@triton.jit(do_not_specialize=["tokens"])
def flash_backward_keys(
    dout_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    lse2_ptr,
    delta_ptr,
    dk_ptr,
    dv_ptr,
    blocks_ptr,
    visits_ptr,
    tokens,
    HKV: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Fills dk and dv [T, Hkv, D] from all query heads and all spans that read a block of keys."""
    SCALE: tl.constexpr = D**-0.5 * LOG2E
    H: tl.constexpr = HKV * G
    kv_head = tl.program_id(0) % HKV
    block_start, block_end, visit_start, visit_end = _load_four(blocks_ptr, tl.program_id(0) // HKV)
    keys = block_start + tl.arange(0, BLOCK_N)
    columns = tl.arange(0, BLOCK_M)
    k = _load_rows(k_ptr, block_start, block_end, kv_head, HKV, BLOCK_N, D)
    v = _load_rows(v_ptr, block_start, block_end, kv_head, HKV, BLOCK_N, D)
    dk = tl.zeros([BLOCK_N, D], tl.float32)
    dv = tl.zeros([BLOCK_N, D], tl.float32)
    for visit in range(visit_start, visit_end):
        seen_from, start, unmasked_start, end = _queries_of(
            visits_ptr, visit, keys, block_start, block_end, BLOCK_M
        )
        # for head in the group:
        #     for row in range(start, end, BLOCK_M):
        # as one loop, so that the pipeline of loads fills once
        row = start
        head = kv_head * G
        for _ in range(0, G * tl.cdiv(end - start, BLOCK_M)):
            q = _load_rows(q_ptr, row, end, head, H, BLOCK_M, D)
            dout = _load_rows(dout_ptr, row, end, head, H, BLOCK_M, D)
            row_offset = head.to(tl.int64) * tokens + row  # a scalar: it takes fewer registers
            exists = columns < end - row
            lse2 = tl.load(lse2_ptr + row_offset + columns, exists, 0.0)
            delta = tl.load(delta_ptr + row_offset + columns, exists, 0.0)
            scores = tl.dot(k, q.T, input_precision="ieee")  # [BLOCK_N, BLOCK_M]
            # beyond the span p is 1: there dout is 0
            p = tl.exp2(scores * SCALE - lse2[None, :])
            if row < unmasked_start:
                p = tl.where((row + columns)[None, :] >= seen_from[:, None], p, 0.0)
            dv = tl.dot(p.to(dout.dtype), dout, dv, input_precision="ieee")
            dp = tl.dot(v, dout.T, input_precision="ieee")
            ds = p * (dp - delta[None, :])
            dk = tl.dot(ds.to(q.dtype), q, dk, input_precision="ieee")
            row += BLOCK_M
            head = tl.where(row < end, head, head + 1)
            row = tl.where(row < end, row, start)
    exists = (keys < block_end)[:, None]
    tl.store(_pointers(dk_ptr, block_start, kv_head, HKV, BLOCK_N, D), dk * D**-0.5, exists)
    tl.store(_pointers(dv_ptr, block_start, kv_head, HKV, BLOCK_N, D), dv, exists)


@triton.jit
def _keys_of(visits_ptr, visit, rows, block_start, block_end, BLOCK_N: tl.constexpr):
    """Returns (seen_to, start, unmasked_end, end): what a block of queries sees of a span's keys.

    A row sees the keys from start to below its seen_to. Tiles of keys from start to below
    unmasked_end need no mask, those from there to below end do. Queries 4-7 of a causal span that
    begins at token 0, with tiles of two keys:

        key        0 1 | 2 3 | 4 5 | 6 7
        query 4    x x   x x   x              seen_to 5
        query 7    x x   x x   x x   x x      seen_to 8
                             |           |
                  unmasked_end 4         end 8
    """
    start, end, key_start, key_end = _load_four(visits_ptr, visit)
    causal = start == key_start
    in_span = (rows >= start) & (rows < end)
    seen_to = tl.where(causal, rows + 1, key_end)
    seen_to = tl.where(in_span, seen_to, 0)
    seen_by_block = tl.where(causal, tl.minimum(key_end, block_end), key_end)
    seen_by_all = (
        tl.where(causal, block_start + 1, key_end) - key_start
    )  # keys, of rows in the span
    all_in_span = (start <= block_start) & (block_end <= end)
    unmasked_keys = tl.where(all_in_span, seen_by_all // BLOCK_N * BLOCK_N, 0)
    return seen_to, key_start, key_start + unmasked_keys, seen_by_block


@triton.jit
def _queries_of(visits_ptr, visit, keys, block_start, block_end, BLOCK_M: tl.constexpr):
    """Returns (seen_from, start, unmasked_start, end): the queries that see a block of keys.

    A key is seen by the rows from its seen_from to below end. Tiles of queries from start to below
    unmasked_start need a mask, those from there to below end do not. Keys 2-5 of a causal span of
    tokens 0-9, with tiles of two queries:

        query      0 1 | 2 3 | 4 5 | 6 7 | 8 9
        key 2            x x   x x   x x   x x    seen_from 2
        key 5                    x   x x   x x    seen_from 5
                       |        |              |
                 start 2    unmasked_start 5   end 10     the tiles 2-3 and 4-5 have a mask
    """
    start, end, key_start, key_end = _load_four(visits_ptr, visit)
    causal = start == key_start
    in_span = (keys >= key_start) & (keys < key_end)
    seen_from = tl.where(causal, keys, start)
    seen_from = tl.where(in_span, seen_from, end)
    unseen = tl.maximum(block_start - start, 0)  # queries of a causal span before the block
    skipped = tl.where(causal, unseen // BLOCK_M * BLOCK_M, 0)
    all_in_span = (key_start <= block_start) & (block_end <= key_end)
    unmasked_start = tl.where(causal, block_end - 1, start)
    unmasked_start = tl.where(all_in_span, unmasked_start, end)
    return seen_from, start + skipped, unmasked_start, end


@triton.jit
def _load_four(table_ptr, row):
    """Returns the four numbers of a row of a work list."""
    row_ptr = table_ptr + row * 4
    return tl.load(row_ptr), tl.load(row_ptr + 1), tl.load(row_ptr + 2), tl.load(row_ptr + 3)


@triton.jit
def _pointers(x_ptr, row, head, HEADS: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr):
    """Returns the pointers [ROWS, D] of one head's rows, from `row` on, in x [T, HEADS, D]."""
    tile = tl.arange(0, ROWS)[:, None] * (HEADS * D) + head * D + tl.arange(0, D)
    return x_ptr + row.to(tl.int64) * (HEADS * D) + tile


@triton.jit
def _load_rows(x_ptr, row, end, head, HEADS: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr):
    """Returns the rows [ROWS, D] of one head, from `row` on, with zeros from row `end` on."""
    exists = row + tl.arange(0, ROWS) < end
    return tl.load(_pointers(x_ptr, row, head, HEADS, ROWS, D), exists[:, None], 0.0)
