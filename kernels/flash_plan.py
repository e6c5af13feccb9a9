"""Attention over a pack for training: which tiles the flash kernels visit, planned on the host once a pack, and the differentiable function.

A pack is one dimension [T] of tokens in which sequences, or trees of sequences that share their beginnings, stand one after the other.
Attention over it is a set of spans; each pair of a query and a key lies in at most one. A work list cuts the queries (or the keys) into
blocks, and names for each block the spans that touch it. A program then owns a block and visits all its spans: what a query sees of its
prefixes and of its own sequence meets in registers, and so do the gradients of a prefix that many samples read. Nothing is merged later.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.common import require
from kernels.flash import CONFIGS, Work, flash_forward, settings
from kernels.flash_backward import KEY_CONFIGS, QUERY_CONFIGS, flash_backward


class Span(NamedTuple):
    """Queries start .. end see keys key_start .. key_end: causally if they are the same tokens (start == key_start), else all of them."""

    start: int
    end: int
    key_start: int
    key_end: int

    @property
    def causal(self) -> bool:
        return self.start == self.key_start


@dataclass(frozen=True)
class Plan:
    """The work of a pack: by blocks of queries for the forward pass and for dq, by blocks of keys for dk and dv."""

    forward: Work
    queries: Work
    keys: Work


def plan(
    spans: Iterable[Sequence[int]],
    device: torch.device | str,
    dtype: torch.dtype,
    block: int | None = None,
) -> Plan:
    """Work for attention of this dtype over spans (start, end, key_start, key_end) that cover the pack. ValueError if they make no sense."""
    spans = _checked(spans)
    covered = sum(s.end - s.start for s in spans if s.causal)
    require(
        covered == max((max(s.end, s.key_end) for s in spans), default=0),
        "not every token of the pack is in one causal span",
    )
    block_of = lambda configs, name: block or settings(configs, dtype)[name]
    return Plan(
        work_of_queries(spans, block_of(CONFIGS, "BLOCK_M"), device),
        work_of_queries(spans, block_of(QUERY_CONFIGS, "BLOCK_M"), device),
        work_of_keys(spans, block_of(KEY_CONFIGS, "BLOCK_N"), device),
    )


def varlen_spans(cu_seqlens: Sequence[int]) -> list[Span]:
    """Sequences without common beginnings; sequence i is tokens cu_seqlens[i] .. cu_seqlens[i + 1]. Empty ones have no span."""
    require(len(cu_seqlens) > 0 and cu_seqlens[0] == 0, "cu_seqlens must begin with 0")
    require(
        all(start <= end for start, end in pairwise(cu_seqlens)), "cu_seqlens must not decrease"
    )
    return [Span(start, end, start, end) for start, end in pairwise(cu_seqlens) if start < end]


def flash_attention(q: Tensor, k: Tensor, v: Tensor, plan: Plan) -> Tensor:
    """q [T, H, D], k and v [T, Hkv, D] -> [T, H, D], differentiable. ValueError unless the plan covers T tokens."""
    require(
        plan.queries.tokens == len(q),
        f"the plan covers {plan.queries.tokens} tokens; q has {len(q)}",
    )
    return _FlashAttention.apply(q.contiguous(), k.contiguous(), v.contiguous(), plan)


class _FlashAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, plan: Plan) -> Tensor:
        out, lse = flash_forward(q, k, v, plan.forward)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.plan = plan
        return out

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        return *flash_backward(grad, *ctx.saved_tensors, ctx.plan.queries, ctx.plan.keys), None


def work_of_queries(
    spans: Iterable[Sequence[int]], block: int, device: torch.device | str = "cpu"
) -> Work:
    """Items are blocks of queries. The spans need not cover anything."""
    return _work(
        _checked(spans),
        block,
        device,
        lambda s: (s.start, s.end),
        lambda first, last, s: (min(s.key_end, last) if s.causal else s.key_end) - s.key_start,
    )


def work_of_keys(
    spans: Iterable[Sequence[int]], block: int, device: torch.device | str = "cpu"
) -> Work:
    """Items are blocks of keys."""
    return _work(
        _checked(spans),
        block,
        device,
        lambda s: (s.key_start, s.key_end),
        lambda first, last, s: s.end - (max(s.start, first) if s.causal else s.start),
    )


def _checked(spans: Iterable[Sequence[int]]) -> list[Span]:
    """In the order of their keys, which is the order in which a query sees its prefixes and then itself."""
    spans = sorted((Span(*span) for span in spans), key=lambda s: (s.key_start, s.start))
    for span in spans:
        require(
            0 <= span.start < span.end < 2**31 and 0 <= span.key_start < span.key_end < 2**31,
            f"{span} is empty or out of range",
        )
        require(
            not span.causal or span.end == span.key_end,
            f"{span} is causal, so its queries and keys must end together",
        )
    return spans


def _work(
    spans: list[Span],
    block: int,
    device: torch.device | str,
    piece: Callable[[Span], tuple[int, int]],
    pairs: Callable[[int, int, Span], int],
) -> Work:
    """Cuts the union of the spans' pieces into blocks, and lists for each block the spans whose piece touches it; longest blocks first."""
    require(
        block >= 16 and block & (block - 1) == 0,
        f"block is {block}; expected a power of two, at least 16",
    )
    roots = _roots(spans)
    blocks = [
        (first, min(first + block, end))
        for start, end in _runs(map(piece, spans), roots)
        for first in range(start, end, block)
    ]
    firsts = [first for first, _ in blocks]
    touching: list[list[Span]] = [[] for _ in blocks]
    for span in spans:
        start, end = piece(span)
        index = bisect_right(firsts, start) - 1
        while index < len(blocks) and firsts[index] < end:
            touching[index].append(span)
            index += 1
    lengths = [
        sum(pairs(*edges, span) for span in touched) for edges, touched in zip(blocks, touching)
    ]
    items, visits = [], []
    for index in sorted(range(len(blocks)), key=lambda i: -lengths[i]):
        items.append((*blocks[index], len(visits), len(visits) + len(touching[index])))
        visits += touching[index]
    as_table = [
        torch.tensor(rows, dtype=torch.int32).reshape(-1, 4).to(device) for rows in (items, visits)
    ]
    return Work(*as_table, block, max((max(s.end, s.key_end) for s in spans), default=0))


def _roots(spans: list[Span]) -> set[int]:
    """Where sequences without a prefix begin. No block goes across, so that what a tree gives does not depend on its neighbours."""
    prefixed = _runs((s.start, s.end) for s in spans if not s.causal)
    begins = [start for start, _ in prefixed]

    def reads(token: int) -> bool:
        index = bisect_right(begins, token) - 1
        return index >= 0 and token < prefixed[index][1]

    return {s.start for s in spans if s.causal and not reads(s.start)}


def _runs(pieces: Iterable[tuple[int, int]], roots: Collection[int] = ()) -> list[tuple[int, int]]:
    """The union of the pieces (start, end), in order; pieces that only meet at a root stay apart."""
    runs: list[tuple[int, int]] = []
    for start, end in sorted(pieces):
        if runs and (start < runs[-1][1] or start == runs[-1][1] and start not in roots):
            runs[-1] = (runs[-1][0], max(runs[-1][1], end))
        else:
            runs.append((start, end))
    return runs
