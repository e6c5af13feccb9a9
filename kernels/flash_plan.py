"""Plans attention over a pack for training on the host, and makes it a differentiable function.

A pack is one dimension [T] of tokens. Sequences, or trees of sequences that share their beginnings,
stand in it one after the other. Attention over it is a set of spans (start, end, key_start,
key_end): queries start .. end see keys key_start .. key_end, causally if they are the same tokens
(start == key_start), else all of them. Each segment has one causal span, on itself, and one span
with the same queries for each of its prefixes.

A work list cuts the queries (or the keys) into blocks and names for each block the spans that touch
it. A program owns a block and visits all its spans: what a query sees of its prefixes and of its
own sequence meets in registers, and so do the gradients of a prefix that many samples read.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from kernels.common import check, pick, require
from kernels.flash import HEAD_DIMS, Work, flash_forward
from kernels.flash_backward import backward_keys, backward_queries

Span = tuple[int, int, int, int]


@dataclass(frozen=True)
class Plan:
    """The work of a pack: blocks of queries for forward and dq, of keys for dk and dv."""

    forward: Work
    queries: Work
    keys: Work
    tokens: int


def plan(spans: Sequence[Span], device: torch.device | str, dtype: torch.dtype) -> Plan:
    """Returns the plan of attention over spans whose causal ones cover the pack without gaps."""
    spans = sorted(spans, key=lambda span: (span[2], span[0]))  # prefixes before the segment itself
    tokens = max((span[1] for span in spans), default=0)
    prefixed = {start for start, _, key_start, _ in spans if start != key_start}
    # No block crosses into a segment without a prefix: so a tree has the same bits in any pack.
    roots = sorted({span[0] for span in spans} - prefixed) + [tokens]

    def work(kernel, side):
        block = pick(kernel, dtype)[side]
        blocks = [
            (first, min(first + block, end))
            for start, end in pairwise(roots)
            for first in range(start, end, block)
        ]
        return _work(spans, blocks, by_keys=side == "BLOCK_N", device=device)

    return Plan(
        work("flash_forward", "BLOCK_M"),
        work("backward_queries", "BLOCK_M"),
        work("backward_keys", "BLOCK_N"),
        tokens,
    )


def flash_attention(q: Tensor, k: Tensor, v: Tensor, plan: Plan) -> Tensor:
    """Returns differentiable attention: q [T, H, D], k and v [T, Hkv, D] -> [T, H, D].

    ValueError unless the plan covers T tokens.
    """
    return _FlashAttention.apply(q.contiguous(), k.contiguous(), v.contiguous(), plan)


class _FlashAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, plan):
        check((plan.tokens, None, None), q=q)
        tokens, heads, dim = q.shape
        require(dim in HEAD_DIMS, f"head_dim is {dim}; expected one of {HEAD_DIMS}")
        check((tokens, None, dim), q.dtype, k=k)
        check(k.shape, q.dtype, v=v)
        group, rest = divmod(heads, k.shape[1])
        require(not rest, f"{heads} query heads; expected a multiple of {k.shape[1]}")
        ctx.plan, ctx.shape = plan, {"H": heads, "G": group, "D": dim}
        out = q.new_empty(q.shape)
        lse = q.new_empty(heads, tokens, dtype=torch.float32)
        tensors = q, k, v, out, lse
        _launch(flash_forward, plan.forward, heads, ctx.shape, tensors)
        ctx.save_for_backward(*tensors)
        return out

    @staticmethod
    def backward(ctx, grad):
        # Read once: activation checkpointing frees what it has recomputed as it is read.
        q, k, v, out, lse = ctx.saved_tensors
        plan, grad, delta = ctx.plan, grad.contiguous(), lse.new_empty(lse.shape)
        dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
        tensors = grad, q, k, v, out, lse, delta, dq
        _launch(backward_queries, plan.queries, len(lse), ctx.shape, tensors)
        tensors = grad, q, k, v, lse, delta, dk, dv
        _launch(backward_keys, plan.keys, k.shape[1], ctx.shape, tensors)
        return dq, dk, dv, None


def _launch(kernel, work, heads, shape, tensors):
    """Launches a program for each item of the work and each head."""
    config = pick(kernel.__name__, tensors[0].dtype)
    kernel[(len(work.items) * heads,)](
        *tensors, work.items, work.visits, len(tensors[0]), **shape, **config, num_warps=8
    )


def _work(spans, blocks, by_keys, device) -> Work:
    """Lists for each block the spans that touch it; blocks with most visible pairs come first."""
    firsts = [first for first, _ in blocks]
    touching = [[] for _ in blocks]
    pairs = [0] * len(blocks)
    for span in spans:
        start, end, key_start, key_end = span
        causal = start == key_start
        low, high = (key_start, key_end) if by_keys else (start, end)
        for index in range(bisect_right(firsts, low) - 1, bisect_left(firsts, high)):
            first, last = blocks[index]
            touching[index].append(span)
            if by_keys:
                pairs[index] += end - (max(start, first) if causal else start)
            else:
                pairs[index] += (min(key_end, last) if causal else key_end) - key_start
    items, visits = [], []
    for index in sorted(range(len(blocks)), key=lambda i: -pairs[i]):
        items.append((*blocks[index], len(visits), len(visits) + len(touching[index])))
        visits += touching[index]
    tables = (torch.tensor(rows, dtype=torch.int32).reshape(-1, 4) for rows in (items, visits))
    return Work(*(table.to(device) for table in tables))
