"""Attention over the KV pages in plain PyTorch, for the CPU.

The keys of a query are split in two: the leading pages that it shares with other rows of the step
(samples of one prompt), which are read once for GROUP rows, and the rest, its own. Either part is
computed in blocks: padded batches of pieces of similar length. The two partial softmaxes are merged
by their log-sum-exp (Dao et al. 2022, section 3.1). Index tensors are built once and serve every
layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
import torch
from torch import Tensor

from nanorchestra.engine.request import Request

TILE = 64  # a longer chunk is cut into rows of so many queries
GROUP = 8  # rows that read shared pages together; a larger group is split, so that padding is small
BLOCK_FLOATS = 1 << 20  # a block's scores, or its keys: small enough to stay in the CPU's cache
FLASH_ROWS = 4  # up to so many rows, torch's fused attention divides the heads among the threads


def group_by_prefix(tables: Sequence[list[int]]) -> list[tuple[list[int], int]]:
    """Says which rows read which leading pages together: (rows, number of pages), each row once.

    Sorted tables with a long common prefix are neighbours. A row stays with the neighbour that it
    shares clearly more with, so that a system prompt common to all does not split the groups.
    """
    order = sorted(range(len(tables)), key=tables.__getitem__)
    common = [_common(tables[a], tables[b]) for a, b in pairwise(order)] + [0]
    groups, start = [], 0
    for i, here in enumerate(common):
        neighbours = max(common[i - 1] if i else 0, common[i + 1] if i + 1 < len(common) else 0)
        if here == 0 or 4 * here < 3 * neighbours:
            groups.append((order[start : i + 1], min(common[start:i], default=0)))
            start = i + 1
    return groups


def _common(a: list[int], b: list[int]) -> int:
    """Length of the common prefix."""
    length = min(len(a), len(b))
    return next((n for n in range(length) if a[n] != b[n]), length)


class Scratch:
    """Memory that is kept from step to step: new large tensors cost a page fault every 4 KiB."""

    def __init__(self):
        self._buffers: dict[str, Tensor] = {}

    def __call__(self, name: str, dtype: torch.dtype, *shape: int) -> Tensor:
        """Returns an uninitialised tensor. It is valid until the name is used again."""
        size = int(np.prod(shape))
        if name not in self._buffers or self._buffers[name].numel() < size:
            self._buffers[name] = torch.empty(size + size // 4, dtype=dtype)
        return self._buffers[name][:size].view(shape)


@dataclass
class _Piece:
    """Queries (rows of q; -1 is padding) that see the same pages, each up to its `last` key.

    A single entry in `last` holds for all queries.
    """

    width: int  # queries of a row, padded
    queries: list[int]
    pages: list[int]
    last: list[int]


@dataclass
class _Block:
    """Pieces of one size, after padding, that are computed together: `rows` of Q queries.

    members [rows * Q] are rows of the first step's q, `queries` of this step's. pages int64
    [rows * n]. mask [rows, 1 or Q * H / Hkv, keys] is added to the scores. The partial results go
    to the slots from `slot` on.
    """

    rows: int
    members: np.ndarray
    queries: Tensor
    pages: Tensor
    mask: Tensor | None
    slot: int


class PagedAttention:
    """What rows of consecutive queries attend to, once their own keys are in the pages.

    k_cache and v_cache are [layers, pages, Hkv, page_size, D].
    """

    def __init__(self, k_cache: Tensor, v_cache: Tensor, heads: int):
        self.caches, self.scratch = (k_cache, v_cache), Scratch()
        self.layers, _, self.kv_heads, self.page_size, self.dim = k_cache.shape
        self.heads, self.fold = heads, heads // self.kv_heads

    def plan(
        self, tables: list[list[int]], starts: list[int], counts: list[int], spare: int = 0
    ) -> None:
        """Sets the rows: row i has counts[i] queries at positions starts[i].. of tables[i].

        The rows follow one another in q. Own pages are padded by `spare` more.
        """
        size, ends = self.page_size, list(accumulate(counts))
        self.blocks: list[_Block] = []
        self.slots = 0
        self.own_slot, self.shared_slot = np.full((2, ends[-1]), -1)  # by query; -1: none
        whole = [table[: start // size] for table, start in zip(tables, starts, strict=True)]
        tiles = [
            _pad([*range(end - count, end)], _width(count), -1)
            for end, count in zip(ends, counts, strict=True)
        ]
        skipped, shared, own = [0] * len(tables), [], []
        for rows, pages in group_by_prefix(whole):
            for i in range(0, len(rows), GROUP) if pages and len(rows) > 1 else ():
                members = [tiles[row] for row in rows[i : i + GROUP]]
                width = max(map(len, members))
                queries = [query for tile in members for query in _pad(tile, width, -1)]
                shared.append(_Piece(width, queries, whole[rows[0]][:pages], [pages * size - 1]))
            for row in rows:
                skipped[row] = pages if len(rows) > 1 else 0
        for i, tile in enumerate(tiles):
            start, end = starts[i] - skipped[i] * size, (starts[i] + counts[i] - 1) // size + 1
            last = [start + min(n, counts[i] - 1) for n in range(len(tile))]
            own.append(_Piece(len(tile), tile, tables[i][skipped[i] : end], last))
        self._add(own, self.own_slot, 1, spare)
        self.own_blocks = self.blocks[:]
        self._add(shared, self.shared_slot, GROUP)
        self._aim(np.arange(ends[-1]))

    def _add(self, pieces: list[_Piece], slot_of: np.ndarray, rows: int, spare: int = 0) -> None:
        """Makes blocks of pieces of equal width and similar length; each has up to `rows` rows."""
        pieces = sorted(pieces, key=lambda piece: (piece.width, -len(piece.pages)))
        while pieces:
            width, longest = pieces[0].width, len(pieces[0].pages) + spare
            keys = np.arange(longest * self.page_size)
            floats = len(keys) * max(width * rows * self.heads, self.kv_heads * self.dim)
            fit = max(1, BLOCK_FLOATS // floats)
            part = [piece for piece in pieces[:fit] if piece.width == width]
            pieces = pieces[len(part) :]
            members = _matrix([piece.queries for piece in part], -1)
            pages = _matrix([_pad(piece.pages, longest, 0) for piece in part], 0)
            last = _matrix([piece.last for piece in part], 0)
            hidden, mask = keys > last[:, :, None], None
            if hidden.any():
                mask = torch.from_numpy(np.where(hidden, np.float32(-np.inf), np.float32(0)))
                if last.shape[1] > 1:
                    mask = mask.repeat_interleave(self.fold, 1)
            slot_of[members[members >= 0]] = self.slots + np.flatnonzero(members >= 0)
            members = members.clip(0).reshape(-1)
            queries, pages = torch.from_numpy(members), torch.from_numpy(pages.reshape(-1))
            self.blocks.append(_Block(len(part), members, queries, pages, mask, self.slots))
            self.slots += len(members)

    def _aim(self, rows: np.ndarray) -> None:
        """Sets which partial results belong to the queries. The last slot is empty."""
        own, shared = self.own_slot[rows], self.shared_slot[rows]
        self._own = torch.from_numpy(own)
        self._shared = torch.from_numpy(np.where(shared < 0, self.slots, shared))
        self._any_shared = bool((shared >= 0).any())

    def attend(self, layer: int, q: Tensor) -> Tensor:
        """Attends from q [T, H, D] -> [T, H, D].

        Partial results lie as [Hkv, slots, H / Hkv(, D)].
        """
        shape = (self.kv_heads, self.slots + 1, self.fold)
        out = self.scratch("out", torch.float32, *shape, self.dim)
        lse = self.scratch("lse", torch.float32, *shape)
        out[:, -1], lse[:, -1] = 0.0, -torch.inf
        scaled = q.float() * self.dim**-0.5
        for index, block in enumerate(self.blocks):
            query = scaled.index_select(0, block.queries)
            query = query.view(-1, self.kv_heads, self.fold, self.dim).transpose(0, 1)
            query = query.reshape(self.kv_heads, block.rows, -1, self.dim)  # [Hkv, B, Q * fold, D]
            mine = slice(block.slot, block.slot + len(block.queries))
            results = out[:, mine].view(query.shape), lse[:, mine].view(query.shape[:3])
            self._attend_block(query, *self._keys(layer, index), block.mask, *results)
        merged = out.index_select(1, self._own)
        if self._any_shared:
            difference = lse.index_select(1, self._shared) - lse.index_select(1, self._own)
            share = torch.sigmoid_(difference)[..., None]
            merged.lerp_(out.index_select(1, self._shared), share)
        return merged.transpose(0, 1).reshape(-1, self.heads, self.dim).to(q.dtype)

    def _attend_block(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        mask: Tensor | None,
        out: Tensor,
        lse: Tensor,
    ) -> None:
        """Writes the attention `out`, and the log of each softmax's denominator `lse`."""
        if query.shape[1] <= FLASH_ROWS:
            mask = None if mask is None else mask[:, None]
            rows_first = (x.transpose(0, 1) for x in (query, keys, values))
            attended, total = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                *rows_first, 0.0, False, attn_mask=mask, scale=1.0
            )
            out.copy_(attended.transpose(0, 1))
            lse.copy_(total.transpose(0, 1))
            return
        shape = (*query.shape[:3], keys.shape[2])
        scores, weights = (self.scratch(name, torch.float32, *shape) for name in ("s", "w"))
        for head, transposed in enumerate(keys.transpose(2, 3)):
            if mask is None:
                torch.bmm(query[head], transposed, out=scores[head])
            else:
                torch.baddbmm(mask, query[head], transposed, out=scores[head])
        torch.softmax(scores, 3, out=weights)
        # The largest weight is 1 / denominator: cheaper than a sum of exponentials.
        torch.sub(scores.amax(3), weights.amax(3).log_(), out=lse)
        for head in range(self.kv_heads):
            torch.bmm(weights[head], values[head], out=out[head])

    def _keys(self, layer: int, index: int) -> tuple[Tensor, ...]:
        """Keys and values of a block, fp32 [Hkv, rows, n * page_size, D]."""
        block = self.blocks[index]
        gathered = (self._gather(name, layer, block.pages) for name in (0, 1))
        return tuple(x.view(self.kv_heads, block.rows, -1, self.dim).float() for x in gathered)

    def _gather(self, which: int, layer: int, pages: Tensor, out: Tensor | None = None) -> Tensor:
        """Copies pages [n] of the keys (0) or values (1) -> [Hkv, n, page_size, D]."""
        cache = self.caches[which][layer]
        if out is None:
            shape = (self.kv_heads, len(pages), *cache.shape[2:])
            out = self.scratch(f"pages {which}", cache.dtype, *shape)
        rows = pages * self.kv_heads + torch.arange(self.kv_heads)[:, None]
        torch.index_select(cache.flatten(0, 1), 0, rows.view(-1), out=out.flatten(0, 1))
        return out


class DecodeBatch(PagedAttention):
    """Requests that decode together, one query each, on one copy of their keys and values.

    The copy lies block by block, with room for at least page_size more positions a row, and each
    step adds one to every row, so a step gathers no pages. Rows may drop out; a new row, or a full
    one, needs a new copy. `rows` maps each request to its row, in the order of the queries.
    """

    rows: dict[Request, int] = {}

    def start(self, requests: list[Request]) -> None:
        """Begins a new batch, and copies its pages."""
        self.rows = {request: row for row, request in enumerate(requests)}
        newest = [len(request.ids) - 1 for request in requests]
        self.plan([request.table.pages for request in requests], newest, [1] * len(newest), 1)
        counts = [len(block.pages) for block in self.blocks]
        ends = list(accumulate(counts))
        self._parts = [slice(end - n, end) for end, n in zip(ends, counts, strict=True)]
        shape = (self.layers, self.kv_heads, ends[-1], self.page_size, self.dim)
        self._copies = [
            self.scratch(f"copy {which}", cache.dtype, *shape)
            for which, cache in enumerate(self.caches)
        ]
        pages = torch.cat([block.pages for block in self.blocks])
        for which, copy in enumerate(self._copies):
            for layer in range(self.layers):
                self._gather(which, layer, pages, copy[layer])
        # The masks of own blocks lie in one tensor, where a position has its index in the copy.
        self._masks = torch.cat([block.mask.view(-1) for block in self.own_blocks])
        self._newest, self._room = np.zeros((2, len(newest)), np.int64)
        for block, part in zip(self.own_blocks, self._parts, strict=False):
            keys, begin = block.mask.shape[2], part.start * self.page_size
            visible = (block.mask[:, 0] == 0).sum(1).numpy()
            self._newest[block.members] = begin + np.arange(block.rows) * keys + visible - 1
            self._room[block.members] = keys - visible
            block.mask = self._masks[begin : begin + block.mask.numel()].view(block.mask.shape)
        self._where = torch.from_numpy(self._newest)

    def follow(self, wanted: set[Request]) -> bool:
        """Goes on to the next step with those of its requests that are in `wanted`.

        Takes them out of `wanted`. Returns False if a row is full or too many have dropped out.
        """
        self.rows = {request: row for request, row in self.rows.items() if request in wanted}
        rows = np.fromiter(self.rows.values(), np.int64, len(self.rows))
        if not self.rows or 8 * len(rows) < 7 * len(self._room) or self._room[rows].min() < 1:
            return False
        wanted.difference_update(self.rows)
        self._room[rows] -= 1
        self._newest[rows] += 1
        self._where = torch.from_numpy(self._newest[rows])
        self._masks[self._where] = 0.0
        places = np.zeros(len(self._room), np.int64)  # a row that has dropped out reads any query
        places[rows] = np.arange(len(rows))
        for block in self.blocks:
            block.queries = torch.from_numpy(places[block.members])
        self._aim(rows)
        return True

    def store(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Adds the step's keys and values [rows, Hkv, D] to the copy."""
        for copy, new in zip(self._copies, (k, v), strict=True):
            copy[layer].flatten(1, 2).index_copy_(1, self._where, new.transpose(0, 1))

    def _keys(self, layer: int, index: int) -> tuple[Tensor, ...]:
        rows, part = self.blocks[index].rows, self._parts[index]
        parts = (copy[layer, :, part].flatten(1, 2) for copy in self._copies)
        return tuple(x.unflatten(1, (rows, -1)).float() for x in parts)


def _width(count: int) -> int:
    """Pads a row's queries to one of few widths."""
    unit = max(16, (1 << count.bit_length() - 1) >> 2)
    return -(-count // unit) * unit if count > 1 else 1


def _pad(values: list[int], length: int, fill: int) -> list[int]:
    return values + [fill] * (length - len(values))


def _matrix(lists: list[list[int]], fill: int) -> np.ndarray:
    """The lists as int64 rows, padded to the longest."""
    longest = max(map(len, lists))
    return np.array([_pad(values, longest, fill) for values in lists], np.int64)
