"""Computes one planned step: the plan's tokens through the model, their keys and values into the pages, logits for who needs them."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from nanorchestra.engine.attention import (
    TILE,
    DecodeAttention,
    PagedAttention,
    Rows,
    Scratch,
    group_by_prefix,
)
from nanorchestra.engine.request import Request
from nanorchestra.engine.scheduler import Plan
from nanorchestra.model.ops import cache_rows, store_kv

BATCHES = 4  # at most so many decode batches: newcomers form one of their own rather than have all copied anew


class Runner:
    """Owns the KV pages: k_cache and v_cache [layers, num_pages, Hkv, page_size, D], in the model's dtype and on its device.

    The tokens of a step stand in this order: decodes, batch by batch, then chunks that extend a sequence, then those that begin one.
    fused: it can draw, too (gpu.py).
    """

    fused = False

    def __init__(self, model, num_pages: int, page_size: int):
        self.model, self.page_size = model, page_size
        config, weight = model.config, model.embed_tokens.weight
        self.heads, self.device = config.num_attention_heads, weight.device
        self._scratch = Scratch(self.device)
        shape = (
            config.num_hidden_layers,
            num_pages,
            config.num_key_value_heads,
            page_size,
            config.head_dim,
        )
        self.k_cache, self.v_cache = (
            torch.zeros(shape, dtype=weight.dtype, device=self.device) for _ in range(2)
        )
        self._batches = [_Batch(Scratch(self.device)) for _ in range(BATCHES)]

    def logits(self, plan: Plan) -> Tensor:
        """Runs the step; logits [len(plan.sampling), vocab] in that order."""
        self._copy_pages(plan.copies)
        hidden, place = self._hidden(plan)
        place |= {request: place[leader] for request, leader in plan.forks}
        wanted = torch.tensor(
            [place[request] for request in plan.sampling], dtype=torch.int64, device=self.device
        )
        return self.model.logits(hidden.index_select(0, wanted))

    def _hidden(self, plan: Plan) -> tuple[Tensor, dict[Request, int]]:
        """The step's hidden states [T, hidden], and where among them each request's last one is."""
        extending, fresh = (
            [chunk for chunk in plan.prefills if bool(chunk[1]) is begun] for begun in (True, False)
        )
        batches = self._decode_batches(plan.decodes)
        decodes = [request for batch in batches for request in batch.rows]
        tokens, positions, rows, place = self._inputs(decodes, extending + fresh)
        return self.model(
            tokens,
            positions,
            self._attend(batches, extending, [count for _, _, count in fresh], rows),
        ), place

    def _copy_pages(self, copies: dict[int, int]) -> None:
        """copies: page -> the page it is a copy of. All are read before any is written, since pages may have changed hands."""
        if copies:
            to, source = (
                torch.tensor(list(pages), device=self.device)
                for pages in (copies.keys(), copies.values())
            )
            for cache in (self.k_cache, self.v_cache):
                cache.index_copy_(1, to, cache.index_select(1, source))

    def sleep(self) -> None:
        """Gives the memory of the pages and of everything kept from step to step back; the tensors stay, without storage."""
        for cache in (self.k_cache, self.v_cache):
            cache.untyped_storage().resize_(0)
        self._scratch, self._batches = (
            Scratch(self.device),
            [_Batch(Scratch(self.device)) for _ in range(BATCHES)],
        )

    def wake(self) -> None:
        """Takes memory for the pages again, zeroed: a NaN left there would spoil whoever reads past his end of a page."""
        for cache in (self.k_cache, self.v_cache):
            cache.untyped_storage().resize_(cache.numel() * cache.element_size())
            cache.zero_()

    def erase(self, tails: list[tuple[Request, int, int]]) -> None:
        """Zeroes the positions (request, start, count) that a failed step may have written: a NaN left in a page would spoil whoever reads past
        his end of it."""
        _, _, rows, _ = self._inputs([], tails)
        for cache in (self.k_cache, self.v_cache):
            cache.view(len(cache), -1, cache.shape[-1]).index_fill_(1, rows.flatten(), 0)
        for batch in self._batches:
            batch.rows = {}

    def _inputs(
        self, decodes: list[Request], chunks: list[tuple[Request, int, int]]
    ) -> tuple[Tensor, Tensor, Tensor, dict[Request, int]]:
        """Tokens and positions int64 [T], where their keys go int64 [T, Hkv] (`cache_rows`), and each request's last index."""
        size = self.page_size
        newest = [len(request.ids) - 1 for request in decodes]
        tokens = [request.ids[-1] for request in decodes]
        positions = [np.array(newest, np.int64)]
        slots = [
            np.array(
                [
                    request.table.pages[n // size] * size + n % size
                    for request, n in zip(decodes, newest)
                ],
                np.int64,
            )
        ]
        place = {request: i for i, request in enumerate(decodes)}
        for request, start, count in chunks:
            span = np.arange(start, start + count)
            pages = np.array(
                request.table.pages[start // size : (start + count - 1) // size + 1], np.int64
            )
            positions.append(span)
            slots.append(pages[span // size - start // size] * size + span % size)
            tokens += request.ids[start : start + count]
            place[request] = len(tokens) - 1
        rows = cache_rows(self._tensor(np.concatenate(slots)), self.k_cache.shape[2], size)
        return (
            torch.tensor(tokens, device=self.device),
            self._tensor(np.concatenate(positions)),
            rows,
            place,
        )

    def _attend(
        self,
        batches: list[_Batch],
        extending: list[tuple[Request, int, int]],
        fresh: list[int],
        rows: Tensor,
    ):
        """attend(layer, q, k, v) for the model: stores the step's keys and values, then each kind of token attends in its way."""
        extension = self._extension(extending) if extending else None
        sizes = [len(batch.rows) for batch in batches]
        decoding = sum(sizes)
        extended = decoding + sum(count for _, _, count in extending)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            store_kv(k, v, self.k_cache[layer], self.v_cache[layer], rows)
            parts = []
            for batch, one_q, one_k, one_v in (
                zip(batches, *(x[:decoding].split(sizes) for x in (q, k, v))) if batches else ()
            ):
                batch.attention.store(layer, one_k, one_v)
                parts.append(batch.attention(layer, one_q))
            if extension is not None:
                parts.append(extension(layer, q[decoding:extended]))
            for chunk in zip(*(x[extended:].split(fresh) for x in (q, k, v))) if fresh else ():
                heads_first = (x.transpose(0, 1)[None] for x in chunk)
                parts.append(
                    F.scaled_dot_product_attention(*heads_first, is_causal=True, enable_gqa=True)[
                        0
                    ].transpose(0, 1)
                )
            return parts[0] if len(parts) == 1 else torch.cat(parts)

        return attend

    def _extension(self, chunks: list[tuple[Request, int, int]]) -> PagedAttention:
        tables, starts, counts, firsts, first = [], [], [], [], 0
        for request, start, count in chunks:
            tiles = range(start, start + count, TILE)
            tables += [request.table.pages] * len(tiles)
            starts += tiles
            counts += [min(TILE, start + count - at) for at in tiles]
            firsts += range(first, first + count, TILE)
            first += count
        rows = Rows(tables, *(np.array(x, np.int64) for x in (starts, counts, firsts)))
        groups = group_by_prefix(
            [table[: start // self.page_size] for table, start in zip(tables, starts)]
        )
        return PagedAttention(self.k_cache, self.v_cache, rows, groups, self.heads, self._scratch)

    def _decode_batches(self, decodes: list[Request]) -> list[_Batch]:
        """The decode batches of this step: those of the last one that can go on, and one of everybody else, or of all if they are many.

        Whoever has stopped decoding is forgotten at once, because he may come back with other pages.
        """
        wanted = set(decodes)
        kept = [batch for batch in self._batches if batch.follow(wanted)]
        loose = [request for request in decodes if request in wanted]
        if loose:
            if len(kept) == BATCHES or 2 * len(loose) > len(decodes):
                kept, loose = [], decodes
            unused = next(batch for batch in self._batches if batch not in kept)
            unused.start(loose, self.k_cache, self.v_cache, self.heads)
            kept.append(unused)
        for batch in self._batches:
            if batch not in kept:
                batch.rows = {}
        return kept

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self.device)


class _Batch:
    """Requests that decode together: `rows` maps each to its row of `attention`, in the order of their queries. Empty: not in use."""

    def __init__(self, scratch: Scratch):
        self.scratch, self.rows = scratch, {}
        self.attention: DecodeAttention | None = None

    def follow(self, wanted: set[Request]) -> bool:
        """On to the next step with those of its requests that are in `wanted`, and takes them out of it; False if it cannot go on."""
        self.rows = {request: row for request, row in self.rows.items() if request in wanted}
        if not self.rows or not self.attention.follow(
            np.fromiter(self.rows.values(), np.int64, len(self.rows))
        ):
            return False
        wanted.difference_update(self.rows)
        return True

    def start(self, requests: list[Request], k_cache: Tensor, v_cache: Tensor, heads: int) -> None:
        """A new batch of these requests, in this order."""
        self.rows = {request: row for row, request in enumerate(requests)}
        tables = [request.table.pages for request in requests]
        starts = np.array([len(request.ids) - 1 for request in requests])
        rows = Rows(tables, starts, np.ones(len(requests), np.int64), np.arange(len(requests)))
        size = k_cache.shape[3]
        groups = group_by_prefix(
            [table[: start // size] for table, start in zip(tables, starts.tolist())]
        )
        self.attention = DecodeAttention(k_cache, v_cache, rows, groups, heads, self.scratch)
