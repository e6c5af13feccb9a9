"""Computes one planned step: the plan's tokens through the model, their keys and values into the pages, logits for who needs them."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from .attention import TILE, DecodeAttention, PagedAttention, Rows, Scratch, group_by_prefix
from .ops import cache_rows, store_kv
from .scheduler import Plan, Request


class Runner:
    """Owns the KV pages: k_cache and v_cache [layers, num_pages, Hkv, page_size, D], in the model's dtype and on its device.

    The tokens of a step stand in this order: decodes, then chunks that extend a sequence, then fresh chunks, which begin one.
    """

    def __init__(self, model, num_pages: int, page_size: int):
        self.model, self.page_size = model, page_size
        config, weight = model.config, model.embed_tokens.weight
        self.heads, self.device = config.num_attention_heads, weight.device
        self._decode_scratch, self._scratch = Scratch(weight.device), Scratch(weight.device)
        shape = (config.num_hidden_layers, num_pages, config.num_key_value_heads, page_size, config.head_dim)
        self.k_cache, self.v_cache = (torch.zeros(shape, dtype=weight.dtype, device=self.device) for _ in range(2))
        self._decoding: dict[Request, int] = {}                      # who decoded in the last step -> row of self._batch
        self._batch: DecodeAttention | None = None

    def logits(self, plan: Plan) -> Tensor:
        """Runs the step; logits [len(plan.sampling), vocab] in that order."""
        extending, fresh = ([chunk for chunk in plan.prefills if bool(chunk[1]) is begun] for begun in (True, False))
        tokens, positions, rows, ends = self._inputs(plan.decodes, extending + fresh)
        attend = self._attend(self._decode_batch(plan.decodes), len(plan.decodes), extending, [count for _, _, count in fresh], rows)
        hidden = self.model(tokens, positions, attend)
        if plan.prefills:
            wanted = list(range(len(plan.decodes))) + [ends[request] for request in plan.sampling[len(plan.decodes):]]
            hidden = hidden[torch.tensor(wanted, dtype=torch.int64, device=self.device)]
        return self.model.logits(hidden)

    def erase(self, plan: Plan) -> None:
        """Zeroes what a failed step may have written: a NaN left in a page would spoil whoever reads past his end of it."""
        _, _, rows, _ = self._inputs(plan.decodes, plan.prefills)
        for cache in (self.k_cache, self.v_cache):
            cache.view(len(cache), -1, cache.shape[-1]).index_fill_(1, rows.flatten(), 0)
        self._decoding, self._batch = {}, None

    def _inputs(self, decodes: list[Request], chunks: list[tuple[Request, int, int]]) -> tuple[Tensor, Tensor, Tensor, dict[Request, int]]:
        """Tokens and positions int64 [T], where their keys go int64 [T, Hkv] (`cache_rows`), and each chunk's last index."""
        size = self.page_size
        newest = [len(request.ids) - 1 for request in decodes]
        tokens = [request.ids[-1] for request in decodes]
        positions = [np.array(newest, np.int64)]
        slots = [np.array([request.table.pages[n // size] * size + n % size for request, n in zip(decodes, newest)], np.int64)]
        ends = {}
        for request, start, count in chunks:
            span = np.arange(start, start + count)
            pages = np.array(request.table.pages[start // size: (start + count - 1) // size + 1], np.int64)
            positions.append(span)
            slots.append(pages[span // size - start // size] * size + span % size)
            tokens += request.ids[start: start + count]
            ends[request] = len(tokens) - 1
        rows = cache_rows(self._tensor(np.concatenate(slots)), self.k_cache.shape[2], size)
        return torch.tensor(tokens, device=self.device), self._tensor(np.concatenate(positions)), rows, ends

    def _attend(self, batch: DecodeAttention | None, decoding: int, extending: list[tuple[Request, int, int]], fresh: list[int], rows: Tensor):
        """attend(layer, q, k, v) for the model: stores the step's keys and values, then each kind of token attends in its way."""
        extension = self._extension(extending) if extending else None
        extended = decoding + sum(count for _, _, count in extending)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            store_kv(k, v, self.k_cache[layer], self.v_cache[layer], rows)
            parts = []
            if batch is not None:
                batch.store(layer, k[:decoding], v[:decoding])
                parts.append(batch(layer, q[:decoding]))
            if extension is not None:
                parts.append(extension(layer, q[decoding:extended]))
            for chunk in zip(*(x[extended:].split(fresh) for x in (q, k, v))) if fresh else ():
                heads_first = (x.transpose(0, 1)[None] for x in chunk)
                parts.append(F.scaled_dot_product_attention(*heads_first, is_causal=True, enable_gqa=True)[0].transpose(0, 1))
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
        groups = group_by_prefix([table[: start // self.page_size] for table, start in zip(tables, starts)])
        return PagedAttention(self.k_cache, self.v_cache, rows, groups, self.heads, self._scratch)

    def _decode_batch(self, decodes: list[Request]) -> DecodeAttention | None:
        """The last step's batch if it can go on: nobody is new, few have left. Whoever stops decoding is forgotten at once, because he may
        come back with other pages."""
        before = self._decoding
        if decodes and self._batch is not None and all(request in before for request in decodes):
            self._decoding = {request: before[request] for request in decodes}
            if self._batch.follow(np.fromiter(self._decoding.values(), np.int64, len(decodes))):
                return self._batch
        self._decoding = {request: row for row, request in enumerate(decodes)}
        self._batch = None
        if decodes:
            tables = [request.table.pages for request in decodes]
            starts = np.array([len(request.ids) - 1 for request in decodes])
            rows = Rows(tables, starts, np.ones(len(decodes), np.int64), np.arange(len(decodes)))
            groups = group_by_prefix([table[: start // self.page_size] for table, start in zip(tables, starts.tolist())])
            self._batch = DecodeAttention(self.k_cache, self.v_cache, rows, groups, self.heads, self._decode_scratch)
        return self._batch

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self.device)
