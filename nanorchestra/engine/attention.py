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
from os.path import commonprefix

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
    neighbours = pairwise(tables[i] for i in order)
    common = [len(commonprefix(pair)) for pair in neighbours] + [0]
    groups, start = [], 0
    for i, here in enumerate(common):
        if here == 0 or 4 * here < 3 * max(common[max(i - 1, 0) : i + 2]):
            groups.append((order[start : i + 1], min(common[start:i], default=0)))
            start = i + 1
    return groups


@dataclass
class _Piece:
    """Queries (rows of q; -1 is padding) that see the same pages, each (or all) up to `last`."""

    width: int  # queries of one tile, padded
    queries: list[int]
    pages: list[int]
    last: list[int]


@dataclass
class _Block:
    """Pieces of one size, after padding, that are computed together: `rows` of Q queries.

    members [rows * Q] are rows of the first step's q, `queries` of this step's. pages int64
    [rows * n]; their positions are `part` of all blocks' keys. mask [rows, 1 or Q * H / Hkv, keys]
    is added to the scores. The partial results go to the slots from `slot` on.
    """

    rows: int
    members: np.ndarray
    queries: Tensor
    pages: Tensor
    mask: Tensor
    slot: int
    part: slice


class PagedAttention:
    """What chunks attend to, once their own keys are in the pages.

    k_cache and v_cache are [layers, pages, Hkv, page_size, D].
    """

    def __init__(self, k_cache: Tensor, v_cache: Tensor, heads: int):
        self.caches = k_cache, v_cache
        _, _, self.kv_heads, self.page_size, self.dim = k_cache.shape
        self.heads, self.fold = heads, heads // self.kv_heads
        self._memory: dict[str, Tensor] = {}

    def plan(self, chunks: Sequence[tuple[list[int], int, int]], spare: int = 0) -> None:
        """Sets the chunks (pages, start, count): `count` queries at positions from `start` on.

        They follow one another in q. Own pages are padded by `spare` more.
        """
        size, self.slots, self.keys = self.page_size, 0, 0
        self.blocks: list[_Block] = []
        tiles = [
            (pages, tile, min(TILE, start + count - tile))
            for pages, start, count in chunks
            for tile in range(start, start + count, TILE)
        ]
        ends = list(accumulate(count for *_, count in tiles))
        self.own_slot, self.shared_slot = np.full((2, ends[-1]), -1)  # by query; -1: none
        queries = [
            _pad(range(end - count, end), _width(count))
            for end, (_, _, count) in zip(ends, tiles, strict=True)
        ]
        skipped, shared, own = [0] * len(tiles), [], []
        whole = [pages[: start // size] for pages, start, _ in tiles]
        for rows, common in group_by_prefix(whole):
            for i in range(0, len(rows), GROUP) if common and len(rows) > 1 else ():
                members = [queries[row] for row in rows[i : i + GROUP]]
                width = max(map(len, members))
                padded = [query for member in members for query in _pad(member, width)]
                shared.append(_Piece(width, padded, whole[rows[0]][:common], [common * size - 1]))
            for row in rows:
                skipped[row] = common if len(rows) > 1 else 0
        for (pages, start, count), skip, row in zip(tiles, skipped, queries, strict=True):
            last = [start - skip * size + min(n, count - 1) for n in range(len(row))]
            own.append(_Piece(len(row), row, pages[skip : (start + count - 1) // size + 1], last))
        self._add(own, self.own_slot, 1, spare)
        self.own_blocks = self.blocks[:]
        self._add(shared, self.shared_slot, GROUP)
        self._aim(np.arange(ends[-1]))

    def _add(self, pieces: list[_Piece], slot_of: np.ndarray, tiles: int, spare: int = 0) -> None:
        """Makes blocks of pieces of equal width and similar length; each has up to `tiles`."""
        pieces = sorted(pieces, key=lambda piece: (piece.width, -len(piece.pages)))
        while pieces:
            width, longest = pieces[0].width, len(pieces[0].pages) + spare
            keys = np.arange(longest * self.page_size)
            floats = len(keys) * max(width * tiles * self.heads, self.kv_heads * self.dim)
            fit = max(1, BLOCK_FLOATS // floats)
            part = [piece for piece in pieces[:fit] if piece.width == width]
            pieces = pieces[len(part) :]
            members = padded_rows([piece.queries for piece in part])
            pages = padded_rows([_pad(piece.pages, longest) for piece in part]).clip(0)
            last = padded_rows([piece.last for piece in part])
            hidden = torch.from_numpy(keys > last[:, :, None])
            if last.shape[1] > 1:
                hidden = hidden.repeat_interleave(self.fold, 1)
            mask = torch.zeros(hidden.shape).masked_fill_(hidden, -torch.inf)
            slot_of[members[members >= 0]] = self.slots + np.flatnonzero(members >= 0)
            members = members.clip(0).reshape(-1)
            queries, pages = torch.from_numpy(members), torch.from_numpy(pages.reshape(-1))
            end = self.keys + len(pages) * self.page_size
            lies = self.slots, slice(self.keys, end)
            self.blocks.append(_Block(len(part), members, queries, pages, mask, *lies))
            self.slots, self.keys = self.slots + len(members), end

    def _aim(self, rows: np.ndarray) -> None:
        """Sets which partial results belong to the queries. The last slot, -1, is empty."""
        self._own = torch.from_numpy(self.own_slot[rows])
        self._shared = torch.from_numpy(self.shared_slot[rows] % (self.slots + 1))

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attends from q [T, H, D] -> [T, H, D]; k and v are in the pages already.

        Partial results lie as [Hkv, slots, H / Hkv(, D)].
        """
        shape = self.kv_heads, self.slots + 1, self.fold
        out = self._buffer("out", torch.float32, *shape, self.dim)
        lse = self._buffer("lse", torch.float32, *shape)
        out[:, -1], lse[:, -1] = 0.0, -torch.inf
        scaled = q.float() * self.dim**-0.5
        for block in self.blocks:
            query = scaled.index_select(0, block.queries)
            query = query.view(-1, self.kv_heads, self.fold, self.dim).transpose(0, 1)
            query = query.reshape(self.kv_heads, block.rows, -1, self.dim)  # [Hkv, B, Q * fold, D]
            mine = slice(block.slot, block.slot + len(block.queries))
            results = out[:, mine].view(query.shape), lse[:, mine].view(query.shape[:3])
            self._attend_block(query, *self._keys(layer, block), block.mask, *results)
        merged = out.index_select(1, self._own)
        if len(self.blocks) > len(self.own_blocks):
            difference = lse.index_select(1, self._shared) - lse.index_select(1, self._own)
            share = torch.sigmoid_(difference)[..., None]
            merged.lerp_(out.index_select(1, self._shared), share)
        return merged.transpose(0, 1).reshape(-1, self.heads, self.dim).to(q.dtype)

    def _attend_block(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        mask: Tensor,
        out: Tensor,
        lse: Tensor,
    ) -> None:
        """Writes the attention `out`, and the log of each softmax's denominator `lse`."""
        if query.shape[1] <= FLASH_ROWS:
            rows_first = (x.transpose(0, 1) for x in (query, keys, values))
            attended, total = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                *rows_first, attn_mask=mask[:, None], scale=1.0
            )
            out.copy_(attended.transpose(0, 1))
            lse.copy_(total.transpose(0, 1))
            return
        shape = *query.shape[:3], keys.shape[2]
        scores, weights = (self._buffer(name, torch.float32, *shape) for name in "sw")
        for head, transposed in enumerate(keys.transpose(2, 3)):
            torch.baddbmm(mask, query[head], transposed, out=scores[head])
        torch.softmax(scores, 3, out=weights)
        # The largest weight is 1 / denominator: cheaper than a sum of exponentials.
        torch.sub(scores.amax(3), weights.amax(3).log_(), out=lse)
        for head in range(self.kv_heads):
            torch.bmm(weights[head], values[head], out=out[head])

    def _keys(self, layer: int, block: _Block) -> tuple[Tensor, ...]:
        """Keys and values of a block, fp32 [Hkv, rows, n * page_size, D]."""
        return tuple(
            self._gather(which, block.pages, slice(layer, layer + 1))
            .view(self.kv_heads, block.rows, -1, self.dim)
            .float()
            for which in (0, 1)
        )

    def _gather(self, which: int, pages: Tensor, layers: slice) -> Tensor:
        """Copies pages [n] of the keys (0) or values (1) -> [layers, Hkv, n, page_size, D]."""
        cache = self.caches[which][layers].flatten(1, 2)
        rows = (pages * self.kv_heads + torch.arange(self.kv_heads)[:, None]).view(-1)
        out = self._buffer(str(which), cache.dtype, len(cache), len(rows), *cache.shape[2:])
        return torch.index_select(cache, 1, rows, out=out).unflatten(1, (self.kv_heads, -1))

    def _buffer(self, name: str, dtype: torch.dtype, *shape: int) -> Tensor:
        """Memory that is kept from step to step: new tensors cost a page fault every 4 KiB."""
        if name not in self._memory:
            self._memory[name] = torch.empty(0, dtype=dtype)
        return self._memory[name].resize_(shape)


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
        self.plan([(r.table.pages, len(r.ids) - 1, 1) for r in requests], spare=1)
        pages = torch.cat([block.pages for block in self.blocks])
        self._copies = [self._gather(which, pages, slice(None)).flatten(2, 3) for which in (0, 1)]
        # The masks of own blocks lie in one tensor, where a position has its index in the copy.
        self._masks = torch.cat([block.mask.view(-1) for block in self.own_blocks])
        self._newest, self._room = np.zeros((2, len(requests)), np.int64)
        for block in self.own_blocks:
            keys, visible = block.mask.shape[2], (block.mask[:, 0] == 0).sum(1).numpy()
            self._newest[block.members] = (
                block.part.start + np.arange(block.rows) * keys + visible - 1
            )
            self._room[block.members] = keys - visible
            block.mask = self._masks[block.part].view(block.mask.shape)
        self._where = torch.from_numpy(self._newest)

    def follow(self, wanted: set[Request]) -> bool:
        """Goes on to the next step with those of its requests that are in `wanted`.

        Takes them out of `wanted`. Returns False if a row is full or too many have dropped out.
        """
        self.rows = {request: row for request, row in self.rows.items() if request in wanted}
        rows = np.fromiter(self.rows.values(), np.int64)
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

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attends from q, after adding the step's k and v [rows, Hkv, D] to the copy."""
        for copy, new in zip(self._copies, (k, v), strict=True):
            copy[layer].index_copy_(1, self._where, new.transpose(0, 1))
        return super().attend(layer, q, k, v)

    def _keys(self, layer: int, block: _Block) -> tuple[Tensor, ...]:
        parts = (copy[layer, :, block.part] for copy in self._copies)
        return tuple(part.unflatten(1, (block.rows, -1)).float() for part in parts)


def _width(count: int) -> int:
    """Pads a tile's queries to one of few widths."""
    unit = max(16, (1 << count.bit_length() - 1) >> 2)
    return -(-count // unit) * unit if count > 1 else 1


def _pad(values: Sequence[int], length: int) -> list[int]:
    return [*values, *[-1] * (length - len(values))]


def padded_rows(lists: list[list[int]]) -> np.ndarray:
    """Returns the lists as int64 rows, padded to the longest with -1."""
    longest = max(map(len, lists))
    return np.array([_pad(values, longest) for values in lists], np.int64)
