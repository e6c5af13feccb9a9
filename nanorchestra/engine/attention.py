"""Attention of decoding requests over their KV pages in plain PyTorch, for the CPU.

The keys of a query are split in two: the leading pages that it shares with other rows of the step
(samples of one prompt), which are read once for GROUP rows, and the rest, its own. Either part is
computed in blocks: padded batches of pieces of similar length. The two partial softmaxes are merged
by their log-sum-exp (Dao et al. 2022, section 3.1). Index tensors are built once and serve every
layer.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from os.path import commonprefix

import numpy as np
import torch
from torch import Tensor

from nanorchestra.engine.request import Request

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
class _Block:
    """Pieces of similar length that are computed together; a piece is rows that see the same keys.

    members [pieces * Q] are rows of the batch, `queries` their places in this step's q. The keys
    and their mask are `part` of the batch's. The partial results go to the slots from `slot` on.
    """

    pieces: int
    members: np.ndarray
    part: slice
    slot: int
    queries: Tensor | None = None


class DecodeBatch:
    """Requests that decode together, one query each, on one copy of their keys and values.

    The copy lies block by block, with room for at least page_size more positions a row, and each
    step adds one to every row, so a step gathers no pages. Rows may drop out; a new row, or a full
    one, needs a new copy. `rows` maps each request to its row, in the order of the queries. k_cache
    and v_cache are [layers, pages, Hkv, page_size, D].
    """

    def __init__(self, k_cache: Tensor, v_cache: Tensor, heads: int):
        self.caches = k_cache, v_cache
        _, _, self.kv_heads, self.page_size, self.dim = k_cache.shape
        self.heads, self.fold = heads, heads // self.kv_heads
        self.rows: dict[Request, int] = {}
        self._memory: dict[str, Tensor] = {}

    def start(self, requests: list[Request]) -> None:
        """Begins a new batch, and copies its pages."""
        self.rows = {request: row for row, request in enumerate(requests)}
        size, tables = self.page_size, [request.table.pages for request in requests]
        ends = [len(request.ids) for request in requests]
        whole = [pages[: (end - 1) // size] for pages, end in zip(tables, ends, strict=True)]
        own, shared = [], []  # (rows, pages, number of keys in them) of each piece
        for rows, common in group_by_prefix(whole):
            for i in range(0, len(rows), GROUP) if common else ():
                shared.append((rows[i : i + GROUP], whole[rows[0]][:common], common * size))
            for row in rows:
                pages = tables[row][common : -(-ends[row] // size)]
                own.append(([row], pages, ends[row] - common * size))
        # Of each row: the slots of its results (-1: none), its newest place in the copy, its room.
        self._own, self._shared = np.full((2, len(requests)), -1)
        self._newest, self._room = np.zeros((2, len(requests)), np.int64)
        self._blocks: list[_Block] = []
        self._slots, pages, hidden = 0, [], []
        self._add(own, self._own, pages, hidden)
        self._add(shared, self._shared, pages, hidden)
        self._copies = [self._copy(which, np.concatenate(pages)) for which in (0, 1)]
        hidden = torch.from_numpy(np.concatenate(hidden))
        self._masks = torch.zeros(hidden.shape).masked_fill_(hidden, -torch.inf)
        self._aim()

    def _add(self, pieces, slot_of, pages, hidden):
        """Makes blocks of pieces of similar length; appends their pages and hidden keys."""
        own = slot_of is self._own
        heads = self.heads if own else self.heads * GROUP  # score rows of a piece
        pieces = sorted(pieces, key=lambda piece: -len(piece[1]))
        while pieces:
            longest = len(pieces[0][1]) + own  # own keys become more
            keys = longest * self.page_size
            fit = max(1, BLOCK_FLOATS // (keys * max(heads, self.kv_heads * self.dim)))
            rows, tables, lengths = zip(*pieces[:fit], strict=True)
            pieces = pieces[fit:]
            members = padded_rows(rows).reshape(-1)
            taken = np.flatnonzero(members >= 0)
            slot_of[members[taken]] = self._slots + taken
            begin, lengths = sum(map(len, hidden)), np.array(lengths)
            if own:
                self._newest[members] = begin + np.arange(len(rows)) * keys + lengths - 1
                self._room[members] = keys - lengths
            pages.append(padded_rows(tables, longest).clip(0).reshape(-1))
            hidden.append((np.arange(keys) >= lengths[:, None]).reshape(-1))
            part = slice(begin, begin + len(hidden[-1]))
            self._blocks.append(_Block(len(rows), members.clip(0), part, self._slots))
            self._slots += len(members)

    def _copy(self, which, pages) -> Tensor:
        """Copies pages [n] of all keys (0) or values (1) -> [layers, Hkv, n * page_size, D]."""
        cache = self.caches[which].flatten(1, 2)
        rows = torch.from_numpy(pages * self.kv_heads + np.arange(self.kv_heads)[:, None]).view(-1)
        out = self._buffer(str(which), cache.dtype, len(cache), len(rows), *cache.shape[2:])
        torch.index_select(cache, 1, rows, out=out)
        return out.view(len(cache), self.kv_heads, -1, self.dim)

    def follow(self, wanted: set[Request]) -> bool:
        """Goes on to the next step with those of its requests that are in `wanted`.

        Takes them out of `wanted`. Returns False if a row is full or too many have dropped out.
        """
        self.rows = {request: row for request, row in self.rows.items() if request in wanted}
        rows = list(self.rows.values())
        if not rows or 8 * len(rows) < 7 * len(self._room) or self._room[rows].min() < 1:
            return False
        wanted.difference_update(self.rows)
        self._room[rows] -= 1
        self._newest[rows] += 1
        self._masks[self._newest[rows]] = 0.0
        self._aim()
        return True

    def _aim(self):
        """Sets where the step's queries, keys and partial results lie. The last slot is empty."""
        rows = list(self.rows.values())
        self._where = torch.from_numpy(self._newest[rows])
        places = np.zeros(len(self._room), np.int64)  # a row that has dropped out reads any query
        places[rows] = np.arange(len(rows))
        for block in self._blocks:
            block.queries = torch.from_numpy(places[block.members])
        slots = (self._own[rows], self._shared[rows] % (self._slots + 1))
        self._merged = [torch.from_numpy(x) for x in slots]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attends from q [rows, H, D] -> [rows, H, D], after adding k and v to the copy.

        k and v are [rows, Hkv, D]. Partial results lie as [Hkv, slots, H / Hkv(, D)].
        """
        for copy, new in zip(self._copies, (k, v), strict=True):
            copy[layer].index_copy_(1, self._where, new.transpose(0, 1))
        shape = self.kv_heads, self._slots + 1, self.fold
        out = self._buffer("out", torch.float32, *shape, self.dim)
        lse = self._buffer("lse", torch.float32, *shape)
        out[:, -1], lse[:, -1] = 0.0, -torch.inf
        scaled = q.float() * self.dim**-0.5
        for block in self._blocks:
            query = scaled.index_select(0, block.queries)
            query = query.view(-1, self.kv_heads, self.fold, self.dim).transpose(0, 1)
            query = query.reshape(self.kv_heads, block.pieces, -1, self.dim)  # [Hkv, B, Q*fold, D]
            mine = slice(block.slot, block.slot + len(block.queries))
            results = out[:, mine].view(query.shape), lse[:, mine].view(query.shape[:3])
            keys, values = (
                copy[layer, :, block.part].unflatten(1, (block.pieces, -1)).float()
                for copy in self._copies
            )
            mask = self._masks[block.part].view(block.pieces, 1, -1)
            self._attend_block(query, keys, values, mask, *results)
        own, shared = self._merged
        merged = out.index_select(1, own)
        if self._shared.max() >= 0:
            share = torch.sigmoid_(lse.index_select(1, shared) - lse.index_select(1, own))
            merged.lerp_(out.index_select(1, shared), share[..., None])
        return merged.transpose(0, 1).reshape(-1, self.heads, self.dim).to(q.dtype)

    def _attend_block(self, query, keys, values, mask, out, lse):
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

    def _buffer(self, name, dtype, *shape) -> Tensor:
        """Memory that is kept from step to step: new tensors cost a page fault every 4 KiB."""
        if name not in self._memory:
            self._memory[name] = torch.empty(0, dtype=dtype)
        return self._memory[name].resize_(shape)


def padded_rows(lists: Sequence[list[int]], width: int = 0) -> np.ndarray:
    """Returns the lists as int64 rows, padded with -1 to the longest, or to `width` if longer."""
    width = max(width, *map(len, lists))
    return np.array([[*values, *[-1] * (width - len(values))] for values in lists], np.int64)
