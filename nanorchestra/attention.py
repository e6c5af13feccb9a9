"""Attention over the KV pages for one step of the engine, in plain PyTorch: the CPU's path, and any device's where no kernel is used.

The keys of a query are split in two: the leading pages it shares with other rows of the step (samples of one prompt), which are read
once for all of them, and the rest, its own. Either part is computed in blocks, padded batches of rows of similar length, and the two
partial softmaxes are merged by their log-sum-exp. All index tensors are built once a step and serve every layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from .ops import store_kv

TILE = 64                      # a longer chunk is cut into rows of so many queries
GROUP = 8                      # rows that read one copy of shared pages; a larger group is split, so that padding stays small
BLOCK_FLOATS = 1 << 19         # size of a block's scores or gathered keys: small enough to stay in cache


@dataclass(frozen=True)
class Rows:
    """R runs of consecutive queries. Row i has counts[i] queries (1..TILE) at positions starts[i].. of the sequence whose pages are
    tables[i], and they are rows firsts[i].. of the step's q. The arrays are int64 [R]."""

    tables: list[list[int]]
    starts: np.ndarray
    counts: np.ndarray
    firsts: np.ndarray


Groups = list[tuple[list[int], int]]      # (row indices, number of leading pages they share)


@dataclass(frozen=True)
class _Block:
    """B rows of Q queries, each row against n pages. Its partial results go to the slots from `slot` on, B * Q of them.

    queries int64 [B * Q] indexes q; pages int64 [B * n]; mask is added to the scores: fp32 [B, 1 or Q * H / Hkv, n * page_size] or None.
    """

    slot: int
    rows: int
    queries: Tensor
    pages: Tensor
    mask: Tensor | None


class Scratch:
    """Memory that is kept from step to step: fresh large tensors would cost a page fault every 4 KiB."""

    def __init__(self, device: torch.device):
        self._device, self._buffers = device, {}

    def __call__(self, name: str, dtype: torch.dtype, *shape: int) -> Tensor:
        size = int(np.prod(shape))
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < size or buffer.dtype != dtype:
            buffer = self._buffers[name] = torch.empty(size + size // 4, dtype=dtype, device=self._device)
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
            groups.append((order[start: i + 1], min(common[start:i], default=0)))
            start = i + 1
    return groups


def _common(a: list[int], b: list[int]) -> int:
    n = 0
    for x, y in zip(a, b):
        if x != y:
            break
        n += 1
    return n


def _fill(lists: list[list[int]], lengths: np.ndarray) -> np.ndarray:
    """Lists of the given lengths as one int64 matrix, the ends padded with 0."""
    matrix = np.zeros((len(lists), int(lengths.max())), np.int64)
    matrix[np.arange(matrix.shape[1]) < lengths[:, None]] = np.fromiter(chain.from_iterable(lists), np.int64, int(lengths.sum()))
    return matrix


class PagedAttention:
    """attend(layer, q, k, v) for one step: q [T, H, D], k and v [T, Hkv, D] -> [T, H, D].

    k_cache and v_cache are [layers, pages, page_size, Hkv, D]; slots int64 [T] is where this step's keys and values are stored. The first
    tokens of q belong to `rows`, those after them to `fresh`: chunks (lengths) that begin a sequence and need nothing from the cache.
    `groups` says which rows share how many leading pages; shared pages lie wholly before each member's first query.
    """

    def __init__(self, k_cache: Tensor, v_cache: Tensor, slots: np.ndarray, rows: Rows, groups: Groups, fresh: list[int], heads: int,
                 scratch: Scratch):
        self.k_cache, self.v_cache, self.fresh, self.heads, self.scratch = k_cache, v_cache, fresh, heads, scratch
        _, _, self.page_size, self.kv_heads, self.head_dim = k_cache.shape
        self.device = k_cache.device
        self.slots = self._tensor(slots)
        self.blocks: list[_Block] = []
        self.slot_count = 0
        self.row_tokens = int(rows.counts.sum())
        if self.row_tokens:
            self._plan(rows, groups)

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self.device)

    # building blocks

    def _plan(self, rows: Rows, groups: Groups) -> None:
        own_slot, shared_slot = np.zeros(self.row_tokens, np.int64), np.full(self.row_tokens, -1)
        widths = 1 << np.ceil(np.log2(rows.counts)).astype(np.int64)
        skipped = np.zeros(len(rows.tables), np.int64)
        members, shared = [], []
        for indices, pages in groups:
            if len(indices) > 1 and pages:
                skipped[indices] = pages
                for i in range(0, len(indices), GROUP):
                    members.append(indices[i: i + GROUP])
                    shared.append(pages)
        used = -(-(rows.starts + rows.counts) // self.page_size) - skipped
        for part in self._cut(widths, used):
            self._add_own(rows, part, int(widths[part[0]]), skipped[part], used[part], own_slot)
        if members:
            shared = np.array(shared)
            width = widths[[indices[0] for indices in members]]
            for part in self._cut(width * GROUP, shared):
                self._add_shared(rows, [members[i] for i in part], int(width[part[0]]), shared[part], shared_slot)
        self.any_shared = bool(members)
        shared_slot[shared_slot < 0] = self.slot_count                                             # the slot after the last: nothing
        self.own_slot, self.shared_slot = self._tensor(own_slot), self._tensor(shared_slot)

    def _cut(self, queries: np.ndarray, pages: np.ndarray) -> list[np.ndarray]:
        """Indices of the rows of each block: equal numbers of queries, similar numbers of pages, and no more than fit."""
        order = np.lexsort((-pages, queries))                                                      # the longest first: it sets the padding
        parts, start = [], 0
        for end in (*(np.flatnonzero(np.diff(queries[order])) + 1).tolist(), len(order)):
            while start < end:
                first = order[start]
                floats = pages[first] * self.page_size * max(queries[first] * self.heads, self.kv_heads * self.head_dim)
                stop = min(end, start + max(1, BLOCK_FLOATS // int(floats)))
                parts.append(order[start:stop])
                start = stop
        return parts

    def _add_own(self, rows: Rows, part: np.ndarray, width: int, skipped: np.ndarray, used: np.ndarray, slot_of: np.ndarray) -> None:
        """The rows in `part` against their own pages, causally: used[i] pages each, after the skipped[i] shared ones."""
        starts, counts, firsts = (x[part, None] for x in (rows.starts, rows.counts, rows.firsts))
        bounds = zip(part.tolist(), skipped.tolist(), (skipped + used).tolist())
        pages = _fill([rows.tables[i][a:b] for i, a, b in bounds], used)
        column = np.arange(width)
        offsets = np.minimum(column, counts - 1)                                                   # [B, Q]; a padding query repeats the last
        last_visible = starts - skipped[:, None] * self.page_size + offsets
        hidden = np.arange(pages.shape[1] * self.page_size) > last_visible[:, :, None]             # [B, Q, keys]
        mask = np.where(hidden, np.float32(-np.inf), np.float32(0))
        if width > 1:
            mask = mask.repeat(self.heads // self.kv_heads, axis=1)
        self._append(firsts + offsets, column < counts, pages, mask, slot_of)

    def _add_shared(self, rows: Rows, groups: list[list[int]], width: int, shared: np.ndarray, slot_of: np.ndarray) -> None:
        """Groups of rows against their shared[g] pages: every query sees every key."""
        sizes = np.array([len(indices) for indices in groups])
        members = _fill(groups, sizes)                                                             # [G, most]
        pages = _fill([rows.tables[indices[0]][:n] for indices, n in zip(groups, shared.tolist())], shared)
        firsts, counts = rows.firsts[members][:, :, None], rows.counts[members][:, :, None]
        column = np.arange(width)
        real = (np.arange(members.shape[1]) < sizes[:, None])[:, :, None] & (column < counts)      # [G, most, Q]
        mask = None
        if shared.min() < shared.max():
            hidden = np.arange(pages.shape[1] * self.page_size) >= shared[:, None, None] * self.page_size
            mask = np.where(hidden, np.float32(-np.inf), np.float32(0))
        self._append(firsts + np.minimum(column, counts - 1), real, pages, mask, slot_of)

    def _append(self, queries: np.ndarray, real: np.ndarray, pages: np.ndarray, mask: np.ndarray | None, slot_of: np.ndarray) -> None:
        slot_of[queries[real]] = self.slot_count + np.flatnonzero(real)
        self.blocks.append(_Block(self.slot_count, len(pages), self._tensor(queries.reshape(-1)), self._tensor(pages.reshape(-1)),
                                  None if mask is None else self._tensor(mask)))
        self.slot_count += queries.size

    # computing

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k_cache, v_cache = self.k_cache[layer], self.v_cache[layer]
        store_kv(k, v, k_cache, v_cache, self.slots)
        parts = [self._paged(q, k_cache, v_cache)] if self.row_tokens else []
        if self.fresh:
            for one_q, one_k, one_v in zip(*(x[self.row_tokens:].split(self.fresh) for x in (q, k, v))):
                heads_first = (x.transpose(0, 1)[None] for x in (one_q, one_k, one_v))
                parts.append(F.scaled_dot_product_attention(*heads_first, is_causal=True, enable_gqa=True)[0].transpose(0, 1))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _paged(self, q: Tensor, k_cache: Tensor, v_cache: Tensor) -> Tensor:
        """q [T, H, D] -> [row_tokens, H, D]. Partial results lie as [Hkv, slots, H / Hkv(, D)], the last slot empty."""
        fold, dim, slots = self.heads // self.kv_heads, self.head_dim, self.slot_count + 1
        out = self.scratch("out", torch.float32, self.kv_heads, slots, fold, dim)
        lse = self.scratch("lse", torch.float32, self.kv_heads, slots, fold)
        out[:, -1], lse[:, -1] = 0.0, -torch.inf
        for block in self.blocks:
            self._partial(block, q, k_cache, v_cache, out, lse)
        merged = out.index_select(1, self.own_slot)
        if self.any_shared:
            shared = out.index_select(1, self.shared_slot)
            own_lse, shared_lse = lse.index_select(1, self.own_slot), lse.index_select(1, self.shared_slot)
            merged.lerp_(shared, torch.sigmoid(shared_lse - own_lse)[..., None])
        return merged.transpose(0, 1).reshape(self.row_tokens, self.heads, dim).to(q.dtype)

    def _partial(self, block: _Block, q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor, lse: Tensor) -> None:
        """One block: for each of its queries and heads the attention over the block's keys, and the log of its softmax's denominator."""
        fold, dim, rows = self.heads // self.kv_heads, self.head_dim, block.rows
        count = block.queries.shape[0]
        mine = slice(block.slot, block.slot + count)
        query = (q * dim**-0.5).index_select(0, block.queries).view(count, self.kv_heads, fold, dim).transpose(0, 1).float()
        query = query.reshape(self.kv_heads, rows, -1, dim)                                        # [Hkv, B, Q * fold, D]
        keys, values = (self._gather(name, cache, block) for name, cache in (("k", k_cache), ("v", v_cache)))
        shape = (self.kv_heads, rows, query.shape[2], keys.shape[1])
        scores, weights = (self.scratch(name, torch.float32, *shape) for name in ("scores", "weights"))
        for head in range(self.kv_heads):
            transposed = keys[:, :, head].transpose(1, 2)
            if block.mask is None:
                torch.bmm(query[head], transposed, out=scores[head])
            else:
                torch.baddbmm(block.mask, query[head], transposed, out=scores[head])
        torch.softmax(scores, 3, out=weights)
        # the largest weight is 1 / denominator: the fused softmax is faster than exponentials and sums apart
        torch.sub(scores.amax(3), weights.amax(3).log_(), out=lse[:, mine].view(shape[:3]))
        for head in range(self.kv_heads):
            torch.bmm(weights[head], values[:, :, head], out=out[head, mine].view(rows, -1, dim))

    def _gather(self, name: str, cache: Tensor, block: _Block) -> Tensor:
        """The block's pages side by side: [B, keys, Hkv, D], fp32."""
        flat = cache.flatten(1)
        gathered = self.scratch(name, cache.dtype, block.pages.shape[0], flat.shape[1])
        torch.index_select(flat, 0, block.pages, out=gathered)
        return gathered.view(block.rows, -1, self.kv_heads, self.head_dim).float()
