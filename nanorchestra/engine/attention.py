"""Attention over the KV pages in plain PyTorch: the CPU's path, and any device's where no kernel is used.

The keys of a query are split in two: the leading pages it shares with other rows of the step (samples of one prompt), which are read
once for all of them, and the rest, its own. Either part is computed in blocks, padded batches of rows of similar length, and the two
partial softmaxes are merged by their log-sum-exp. Index tensors are built once a step at most, and serve every layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Sequence

import numpy as np
import torch
from torch import Tensor

TILE = 64  # a longer chunk is cut into rows of so many queries
GROUP = 8  # rows that read one copy of shared pages; a larger group is split, so that padding stays small
BLOCK_FLOATS = 1 << 20  # a block's scores, or its keys: small enough to stay in cache
FLASH_ROWS = 4  # a block of at most so many rows goes through torch's fused attention, which divides one row's heads among the threads
COPY_BYTES = 1 << 28  # the largest copy of keys and values that DecodeAttention makes


@dataclass(frozen=True)
class Rows:
    """R runs of consecutive queries. Row i has counts[i] queries (1..TILE) at positions starts[i].. of the sequence whose pages are
    tables[i], and they are rows firsts[i].. of q. The arrays are int64 [R]."""

    tables: list[list[int]]
    starts: np.ndarray
    counts: np.ndarray
    firsts: np.ndarray


Groups = list[tuple[list[int], int]]  # (row indices, number of leading pages they share)


class Scratch:
    """Memory that is kept from step to step: fresh large tensors would cost a page fault every 4 KiB."""

    def __init__(self, device: torch.device):
        self._device, self._buffers = device, {}

    def __call__(self, name: str, dtype: torch.dtype, *shape: int) -> Tensor:
        size = int(np.prod(shape))
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < size or buffer.dtype != dtype:
            buffer = self._buffers[name] = torch.empty(
                size + size // 4, dtype=dtype, device=self._device
            )
        return buffer[:size].view(shape)


def group_by_prefix(tables: Sequence[list[int]]) -> Groups:
    """Which rows should read which leading pages together, every row once.

    Sorted tables with a long common prefix are neighbours. A row stays with the neighbour it shares clearly more with, so that a
    system prompt common to all does not tear the samples of one prompt apart.
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
    n = 0
    for x, y in zip(a, b):
        if x != y:
            break
        n += 1
    return n


def _fill(lists: list[list[int]], lengths: np.ndarray, spare: int = 0) -> np.ndarray:
    """Lists of the given lengths as one int64 matrix, the ends padded with 0, and `spare` columns more."""
    matrix = np.zeros((len(lists), int(lengths.max()) + spare), np.int64)
    matrix[np.arange(matrix.shape[1]) < lengths[:, None]] = np.fromiter(
        chain.from_iterable(lists), np.int64, int(lengths.sum())
    )
    return matrix


def _hide(hidden: np.ndarray) -> np.ndarray:
    return np.where(hidden, np.float32(-np.inf), np.float32(0))


@dataclass
class _Block:
    """B rows of Q queries, each row against n pages. Its partial results go to the slots from `slot` on, B * Q of them.

    queries [B * Q] are rows of q; pages [B * n]; mask is added to the scores: [B, 1 or Q * H / Hkv, n * page_size], or None.
    """

    slot: int
    rows: int
    queries: Tensor
    pages: Tensor
    mask: Tensor | None


class PagedAttention:
    """What the queries of `rows` attend to, layer by layer: q [T, H, D] -> [T, H, D], once their own keys are in the pages.

    k_cache and v_cache are [layers, pages, Hkv, page_size, D]. `groups` says which rows share how many leading pages, which must lie
    wholly before each member's first query. A row's own pages are padded by `spare` more.
    """

    def __init__(
        self,
        k_cache: Tensor,
        v_cache: Tensor,
        rows: Rows,
        groups: Groups,
        heads: int,
        scratch: Scratch,
        spare: int = 0,
    ):
        self.k_cache, self.v_cache, self.heads, self.scratch, self.spare = (
            k_cache,
            v_cache,
            heads,
            scratch,
            spare,
        )
        _, _, self.kv_heads, self.page_size, self.head_dim = k_cache.shape
        self.blocks: list[_Block] = []
        self.slot_count = 0
        self.own_slot, self.shared_slot = (
            np.full(int(rows.counts.sum()), -1) for _ in range(2)
        )  # by query; -1: none
        self.skipped = np.zeros(len(rows.tables), np.int64)  # by row: its shared pages
        self._plan(rows, groups)
        self._aim(np.arange(len(self.own_slot)))

    def _plan(self, rows: Rows, groups: Groups) -> None:
        units = np.maximum(
            16, 1 << np.log2(rows.counts).astype(np.int64) >> 2
        )  # few different widths, and little padding
        widths = np.where(rows.counts > 1, -(-rows.counts // units) * units, 1)
        members, shared = [], []
        for indices, pages in groups:
            if len(indices) > 1 and pages:
                self.skipped[indices] = pages
                for i in range(0, len(indices), GROUP):
                    members.append(indices[i : i + GROUP])
                    shared.append(pages)
        used = -(-(rows.starts + rows.counts) // self.page_size) - self.skipped
        for part in self._cut(widths, used + self.spare):
            self._add_own(rows, part, int(widths[part[0]]), used[part])
        self.own_blocks = len(self.blocks)
        if members:
            shared = np.array(shared)
            width = np.array([widths[indices].max() for indices in members])
            for part in self._cut(width * GROUP, shared):
                self._add_shared(
                    rows, [members[i] for i in part], int(width[part[0]]), shared[part]
                )

    def _cut(self, queries: np.ndarray, pages: np.ndarray) -> list[np.ndarray]:
        """Indices of the rows of each block: equal numbers of queries, similar numbers of pages, and no more than fit."""
        order = np.lexsort((-pages, queries))  # the longest first: it sets the padding
        parts, start = [], 0
        for end in (*(np.flatnonzero(np.diff(queries[order])) + 1).tolist(), len(order)):
            while start < end:
                first = order[start]
                floats = (
                    pages[first]
                    * self.page_size
                    * max(queries[first] * self.heads, self.kv_heads * self.head_dim)
                )
                stop = min(end, start + max(1, BLOCK_FLOATS // int(floats)))
                parts.append(order[start:stop])
                start = stop
        return parts

    def _add_own(self, rows: Rows, part: np.ndarray, width: int, used: np.ndarray) -> None:
        """The rows in `part` against their own pages, causally: used[i] pages each, after the shared ones."""
        starts, counts, firsts = (x[part, None] for x in (rows.starts, rows.counts, rows.firsts))
        skipped = self.skipped[part]
        bounds = zip(part.tolist(), skipped.tolist(), (skipped + used).tolist())
        pages = _fill([rows.tables[i][a:b] for i, a, b in bounds], used, self.spare)
        column = np.arange(width)
        offsets = np.minimum(column, counts - 1)  # [B, Q]; a padding query repeats the last
        last_visible = starts - skipped[:, None] * self.page_size + offsets
        mask = _hide(
            np.arange(pages.shape[1] * self.page_size) > last_visible[:, :, None]
        )  # [B, Q, keys]
        if width > 1:
            mask = mask.repeat(self.heads // self.kv_heads, axis=1)
        self._append(firsts + offsets, column < counts, pages, mask, self.own_slot)

    def _add_shared(
        self, rows: Rows, groups: list[list[int]], width: int, shared: np.ndarray
    ) -> None:
        """Groups of rows against their shared[g] pages: every query sees every key."""
        sizes = np.array([len(indices) for indices in groups])
        members = _fill(groups, sizes)  # [G, most]
        pages = _fill(
            [rows.tables[indices[0]][:n] for indices, n in zip(groups, shared.tolist())], shared
        )
        firsts, counts = rows.firsts[members][:, :, None], rows.counts[members][:, :, None]
        column = np.arange(width)
        real = (np.arange(members.shape[1]) < sizes[:, None])[:, :, None] & (
            column < counts
        )  # [G, most, Q]
        mask = None
        if shared.min() < shared.max():
            mask = _hide(
                np.arange(pages.shape[1] * self.page_size) >= shared[:, None, None] * self.page_size
            )
        self._append(firsts + np.minimum(column, counts - 1), real, pages, mask, self.shared_slot)

    def _append(
        self,
        queries: np.ndarray,
        real: np.ndarray,
        pages: np.ndarray,
        mask: np.ndarray | None,
        slot_of: np.ndarray,
    ) -> None:
        slot_of[queries[real]] = self.slot_count + np.flatnonzero(real)
        self.blocks.append(
            _Block(
                self.slot_count,
                len(pages),
                self._tensor(queries.reshape(-1)),
                self._tensor(pages.reshape(-1)),
                None if mask is None else self._tensor(mask),
            )
        )
        self.slot_count += queries.size

    def _aim(self, queries: np.ndarray) -> None:
        """The results are wanted for these queries, in this order."""
        own, shared = self.own_slot[queries], self.shared_slot[queries]
        self._any_shared = bool((shared >= 0).any())
        self._own, self._shared = (
            self._tensor(own),
            self._tensor(np.where(shared < 0, self.slot_count, shared)),
        )  # beyond the last: nothing

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self.k_cache.device)

    def __call__(self, layer: int, q: Tensor) -> Tensor:
        """Partial results lie as [Hkv, slots, H / Hkv(, D)]; the last slot is empty."""
        fold, dim, slots = self.heads // self.kv_heads, self.head_dim, self.slot_count + 1
        out = self.scratch("out", torch.float32, self.kv_heads, slots, fold, dim)
        lse = self.scratch("lse", torch.float32, self.kv_heads, slots, fold)
        out[:, -1], lse[:, -1] = 0.0, -torch.inf
        scaled = q.float() * dim**-0.5
        for index, block in enumerate(self.blocks):
            self._attend_block(block, scaled, *self._keys(layer, index), out, lse)
        merged = out.index_select(1, self._own)
        if self._any_shared:
            difference = lse.index_select(1, self._shared) - lse.index_select(1, self._own)
            merged.lerp_(out.index_select(1, self._shared), torch.sigmoid_(difference)[..., None])
        return merged.transpose(0, 1).reshape(-1, self.heads, dim).to(q.dtype)

    def _attend_block(
        self, block: _Block, q: Tensor, keys: Tensor, values: Tensor, out: Tensor, lse: Tensor
    ) -> None:
        """For each of the block's queries and heads: the attention over its keys, and the log of the softmax's denominator."""
        count, fold, dim = block.queries.shape[0], self.heads // self.kv_heads, self.head_dim
        mine = slice(block.slot, block.slot + count)
        query = (
            q.index_select(0, block.queries).view(count, self.kv_heads, fold, dim).transpose(0, 1)
        )
        query = query.reshape(self.kv_heads, block.rows, -1, dim)  # [Hkv, B, Q * fold, D]
        if block.rows <= FLASH_ROWS and query.device.type == "cpu":
            mask = (
                None if block.mask is None else block.mask[:, None]
            )  # the heads that share keys are one head's queries
            attended, total = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                *(x.transpose(0, 1) for x in (query, keys, values)),
                0.0,
                False,
                attn_mask=mask,
                scale=1.0,
            )
            out[:, mine].view(query.shape).copy_(attended.transpose(0, 1))
            lse[:, mine].view(query.shape[:3]).copy_(total.transpose(0, 1))
            return
        shape = (*query.shape[:3], keys.shape[2])
        scores, weights = (
            self.scratch(name, torch.float32, *shape) for name in ("scores", "weights")
        )
        for head in range(self.kv_heads):
            transposed = keys[head].transpose(1, 2)
            if block.mask is None:
                torch.bmm(query[head], transposed, out=scores[head])
            else:
                torch.baddbmm(block.mask, query[head], transposed, out=scores[head])
        torch.softmax(scores, 3, out=weights)
        # the largest weight is 1 / denominator: the fused softmax is faster than exponentials and sums apart
        torch.sub(scores.amax(3), weights.amax(3).log_(), out=lse[:, mine].view(shape[:3]))
        for head in range(self.kv_heads):
            torch.bmm(weights[head], values[head], out=out[head, mine].view(block.rows, -1, dim))

    def _keys(self, layer: int, index: int) -> tuple[Tensor, ...]:
        """Block `index`'s pages side by side, keys and values, fp32 [Hkv, B, n * page_size, D]."""
        block = self.blocks[index]
        shape = (self.kv_heads, block.pages.shape[0], self.page_size, self.head_dim)
        buffers = (self.scratch(name, self.k_cache.dtype, *shape) for name in ("k", "v"))
        return tuple(
            self._gather(cache[layer], block.pages, buffer)
            .view(self.kv_heads, block.rows, -1, self.head_dim)
            .float()
            for cache, buffer in zip((self.k_cache, self.v_cache), buffers)
        )

    def _gather(self, cache: Tensor, pages: Tensor, out: Tensor) -> Tensor:
        """cache [pages, Hkv, page_size, D], pages [n] -> out [Hkv, n, page_size, D]."""
        heads = torch.arange(self.kv_heads, device=pages.device)[:, None]
        torch.index_select(
            cache.flatten(0, 1), 0, (pages * self.kv_heads + heads).view(-1), out=out.flatten(0, 1)
        )
        return out


class DecodeAttention(PagedAttention):
    """PagedAttention for rows of one query each, which goes on from step to step on one copy of their keys and values.

    The copy lies block by block, with room for at least page_size more positions a row, and each step adds one position to each row: a
    step costs no gathering of pages. Rows may drop out; a new row, or a full one, needs a new batch (`follow` says so).
    """

    def __init__(
        self,
        k_cache: Tensor,
        v_cache: Tensor,
        rows: Rows,
        groups: Groups,
        heads: int,
        scratch: Scratch,
    ):
        super().__init__(k_cache, v_cache, rows, groups, heads, scratch, spare=1)
        self._members = [block.queries.numpy(force=True) for block in self.blocks]
        ends = np.cumsum([block.pages.shape[0] for block in self.blocks]).tolist()
        self._parts = [
            slice(start, end) for start, end in pairwise([0] + ends)
        ]  # each block's pages in the copy
        shape = (k_cache.shape[0], self.kv_heads, ends[-1], self.page_size, self.head_dim)
        self.copied = 2 * int(np.prod(shape)) * k_cache.element_size() <= COPY_BYTES
        if self.copied:
            self._copy(rows, shape)

    def _copy(self, rows: Rows, shape: tuple[int, ...]) -> None:
        self._k, self._v = (
            self.scratch(name, self.k_cache.dtype, *shape) for name in ("copied k", "copied v")
        )
        pages = torch.cat([block.pages for block in self.blocks])
        for layer in range(shape[0]):
            self._gather(self.k_cache[layer], pages, self._k[layer])
            self._gather(self.v_cache[layer], pages, self._v[layer])
        own = self.blocks[: self.own_blocks]
        self._mask = torch.cat(
            [block.mask.view(-1) for block in own]
        )  # own blocks come first: as in the copy
        self._newest, self._room = np.zeros(
            (2, len(rows.tables)), np.int64
        )  # by row: where its newest key lies
        for block, part, members in zip(own, self._parts, self._members):
            size = block.pages.shape[0] // block.rows * self.page_size
            length = rows.starts[members] + 1 - self.skipped[members] * self.page_size
            begin = part.start * self.page_size + np.arange(block.rows) * size
            block.mask = self._mask[begin[0] : begin[0] + block.rows * size].view(
                block.rows, 1, size
            )
            self._newest[members], self._room[members] = begin + length - 1, size - length
        self._where = self._tensor(self._newest)

    def follow(self, rows: np.ndarray) -> bool:
        """On to the next step: these rows (indices) have one position more, in this order in q. False if a new batch is needed."""
        if not self.copied or 8 * len(rows) < 7 * len(self._room) or self._room[rows].min() < 1:
            return False
        self._room[rows] -= 1
        self._newest[rows] += 1
        self._where = self._tensor(self._newest[rows])
        self._mask[self._where] = 0.0
        index = np.zeros(len(self._room), np.int64)  # who has dropped out reads any query
        index[rows] = np.arange(len(rows))
        for block, members in zip(self.blocks, self._members):
            block.queries = self._tensor(index[members])
        self._aim(rows)
        return True

    def store(self, layer: int, k: Tensor, v: Tensor) -> None:
        """The step's keys and values [rows, Hkv, D], for the copy."""
        if self.copied:
            self._k[layer].flatten(1, 2).index_copy_(1, self._where, k.transpose(0, 1))
            self._v[layer].flatten(1, 2).index_copy_(1, self._where, v.transpose(0, 1))

    def _keys(self, layer: int, index: int) -> tuple[Tensor, ...]:
        if not self.copied:
            return super()._keys(layer, index)
        rows, part = self.blocks[index].rows, self._parts[index]
        return tuple(
            copy[layer, :, part].flatten(1, 2).unflatten(1, (rows, -1)).float()
            for copy in (self._k, self._v)
        )
