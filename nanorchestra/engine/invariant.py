"""The engine's invariant mode: what is computed for a token has the same bits whatever else is computed with it.

A matrix library chooses the order of its sums by the shape of the call. So here every call has one shape, whatever the batch: the model
sees TILE tokens at a time, the last tile padded, each tile going through all layers before the next begins; and a query's keys are taken
in splits of SPLIT, counted from position 0, whose partial softmaxes are merged in order. A prompt computed whole, in chunks, token by
token or from the cache is then summed in one order. What is left is that a row's place within a call must not matter: the tests check
it for the libraries at hand, and for `_SameEverywhere`.
"""

from __future__ import annotations

from typing import Callable, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from nanorchestra.model.ops import by_kernel, cache_rows, store_kv

TILE = 64  # tokens of each call of the model
SPLIT = 64  # keys of a piece of attention: one split against
QUERIES = 8  # so many of the tile's queries
PIECES = 8  # pieces of each call

Run = tuple[
    list[int], int, int
]  # consecutive tokens of one sequence: its pages, the first one's position, how many


def forward(
    model,
    tokens: Tensor,
    positions: Tensor,
    runs: Sequence[Run],
    rows: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
) -> Tensor:
    """The model over the pages: tokens and positions int64 [T], which are `runs` one after the other -> hidden states [T, hidden].

    k_cache and v_cache are [layers, pages, Hkv, page_size, D]; rows int64 [T, Hkv] says where the tokens' keys go (`ops.cache_rows`).
    """
    tiles: list[list[Run]] = []
    room = 0
    for pages, start, count in runs:
        while count:
            if not room:
                tiles.append([])
                room = TILE
            taken = min(count, room)
            tiles[-1].append((pages, start, taken))
            room, start, count = room - taken, start + taken, count - taken
    attends = (
        _TileAttention(tile, part, k_cache, v_cache) for tile, part in zip(tiles, rows.split(TILE))
    )
    with _SameEverywhere():
        return by_tiles(
            lambda tile: model(*tile.unbind(1), next(attends)), torch.stack((tokens, positions), 1)
        )


def forward_whole(model, sequences: Sequence[Sequence[int]]) -> Tensor:
    """Hidden states [T, hidden] of whole sequences, one after the other: the bits that `forward` gives them from step to step."""
    config, weight = model.config, model.embed_tokens.weight
    counts = [-(-len(ids) // SPLIT) for ids in sequences]  # of pages, which are as large as a split
    tables = [
        list(range(end - count, end)) for count, end in zip(counts, np.cumsum(counts).tolist())
    ]
    shape = (
        config.num_hidden_layers,
        sum(counts),
        config.num_key_value_heads,
        SPLIT,
        config.head_dim,
    )
    caches = (torch.zeros(shape, dtype=weight.dtype, device=weight.device) for _ in range(2))
    tokens = torch.tensor([i for ids in sequences for i in ids], device=weight.device)
    positions, slots = (
        torch.cat(
            [
                torch.arange(first, first + len(ids), device=weight.device)
                for ids, first in zip(sequences, firsts)
            ]
        )
        for firsts in ([0] * len(tables), [table[0] * SPLIT for table in tables])
    )
    runs = [(table, 0, len(ids)) for table, ids in zip(tables, sequences)]
    return forward(
        model,
        tokens,
        positions,
        runs,
        cache_rows(slots, config.num_key_value_heads, SPLIT),
        *caches,
    )


def by_tiles(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """A function of rows, called with TILE of them at a time: x [T, ...] -> [T, ...]. The last row is repeated to fill the last tile."""
    index = torch.arange(-(-len(x) // TILE) * TILE, device=x.device).clamp_(max=len(x) - 1)
    return torch.cat([function(tile) for tile in x[index].split(TILE)])[: len(x)]


class _SameEverywhere(TorchFunctionMode):
    """Replaces, within a forward, the functions whose result depends on the place of a row.

    On a GPU products are made by a kernel that sums in one order. On a CPU the last few elements of each thread's share of a silu, which
    may end within a row, come from other instructions than the rest, with other last bits. Its exponential does not have this trouble, and
    sums and quotients are exactly rounded.
    """

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is F.linear and by_kernel(args[0]):
            from kernels.gemm import invariant_linear

            return invariant_linear(*args, **(kwargs or {}))
        if function is F.silu:
            return args[0] / (1 + torch.exp(-args[0]))
        return function(*args, **(kwargs or {}))


class _TileAttention:
    """attend(layer, q, k, v) for one tile: stores its keys and values, then each query sees all positions up to its own.

    A piece is up to QUERIES queries that see the same split in the same pages, as the samples of a prompt do. P pieces have
    P * Hkv * QUERIES rows of results, and a last row is that of seeing nothing; `partial` says which of them each query merges.
    """

    def __init__(self, runs: list[Run], rows: Tensor, k_cache: Tensor, v_cache: Tensor):
        self.k_cache, self.v_cache, self.rows = k_cache, v_cache, rows
        _, _, self.kv_heads, size, _ = k_cache.shape
        positions: list[int] = []
        queries_of: dict[tuple[int, ...], list[int]] = {}  # by the split and the pages it lies in
        for pages, start, count in runs:
            for split in range((start + count - 1) // SPLIT + 1):
                key = (split, *pages[split * SPLIT // size : -(-(split + 1) * SPLIT // size)])
                unseen_by = max(0, split * SPLIT - start)
                queries_of.setdefault(key, []).extend(
                    range(len(positions) + unseen_by, len(positions) + count)
                )
            positions += range(start, start + count)
        pieces = [
            (key, queries[i : i + QUERIES])
            for key, queries in queries_of.items()
            for i in range(0, len(queries), QUERIES)
        ]
        pieces += pieces[:1] * (-len(pieces) % PIECES)
        partial = self._partial(pieces)
        partial[:, len(positions) :] = partial[
            :, len(positions) - 1 : len(positions)
        ]  # the tile's padding
        queries = np.array(
            [(queries + queries[:1] * QUERIES)[:QUERIES] for _, queries in pieces]
        )  # [P, QUERIES]
        begin = np.array([[key[0] * SPLIT] for key, _ in pieces])
        seen = begin + np.arange(SPLIT)  # [P, SPLIT]
        hidden = seen[:, None] > np.array(positions)[queries][:, :, None]  # [P, QUERIES, SPLIT]
        width = max(map(len, queries_of)) - 1
        tables = np.array([(key[1:] + key[-1:] * width)[:width] for key, _ in pieces])  # [P, width]
        slots = (
            np.take_along_axis(tables, np.minimum(seen // size - begin // size, width - 1), 1)
            * size
            + seen % size
        )
        self.partial, self.queries, hidden, slots = (
            torch.from_numpy(x).to(rows.device) for x in (partial, queries, hidden, slots)
        )
        self.hidden = hidden[:, None, :, None]  # for each head
        self.key_rows = (
            cache_rows(slots.flatten(), self.kv_heads, size)
            .view(-1, SPLIT, self.kv_heads)
            .transpose(1, 2)
            .flatten()
        )

    def _partial(self, pieces: list[tuple[tuple[int, ...], list[int]]]) -> np.ndarray:
        """int64 [splits, TILE, Hkv]: the row of the results for each split, query and key head."""
        shape = (max(key[0] for key, _ in pieces) + 1, TILE, self.kv_heads)
        partial = np.full(shape, len(pieces) * self.kv_heads * QUERIES)
        for i, (key, queries) in enumerate(pieces):
            partial[key[0], queries] = (
                i * self.kv_heads + np.arange(self.kv_heads)
            ) * QUERIES + np.arange(len(queries))[:, None]
        return partial

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        count, (_, heads, dim), fold = len(self.rows), q.shape, q.shape[1] // self.kv_heads
        store_kv(k[:count], v[:count], self.k_cache[layer], self.v_cache[layer], self.rows)
        keys, values = (
            cache[layer].view(-1, dim).index_select(0, self.key_rows).float().view(-1, SPLIT, dim)
            for cache in (self.k_cache, self.v_cache)
        )  # [P * Hkv, SPLIT, D]
        q = (q.float() * dim**-0.5).flatten(1).index_select(0, self.queries.flatten())
        q = (
            q.view(-1, QUERIES, self.kv_heads, fold * dim)
            .transpose(1, 2)
            .reshape(-1, QUERIES * fold, dim)
        )
        out = q.new_zeros(len(q) * QUERIES + 1, fold * dim)
        lse = q.new_full((len(q) * QUERIES + 1, fold), -torch.inf)
        parts = (
            x.split(PIECES * self.kv_heads)
            for x in (q, keys, values, out[:-1].view(q.shape), lse[:-1].view(q.shape[:2]))
        )
        for one_q, one_k, one_v, one_out, one_lse, hidden in zip(*parts, self.hidden.split(PIECES)):
            scores = torch.bmm(one_q, one_k.transpose(1, 2))
            scores.view(PIECES, self.kv_heads, QUERIES, fold, SPLIT).masked_fill_(
                hidden, -torch.inf
            )
            weights = scores.softmax(2)
            torch.sub(
                scores.amax(2), weights.amax(2).log_(), out=one_lse
            )  # the largest weight is 1 / denominator
            torch.bmm(weights, one_v, out=one_out)
        partial = self.partial.flatten()
        out, lse = (
            x.index_select(0, partial).view(-1, TILE, heads, x.shape[1] // fold) for x in (out, lse)
        )
        return self._merge(out, lse).to(k.dtype)

    def _merge(self, out: Tensor, lse: Tensor) -> Tensor:
        """out [splits, TILE, H, D] and lse [splits, TILE, H, 1] -> [TILE, H, D]. A split that is not seen adds zero, which changes no sum."""
        largest = lse.amax(0)
        merged, total = torch.zeros_like(out[0]), torch.zeros_like(largest)
        for one, one_lse in zip(out, lse):
            share = (one_lse - largest).exp_()
            merged += one * share
            total += share
        return merged / total
