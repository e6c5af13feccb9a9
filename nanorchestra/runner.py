"""Computes one planned step: the plan's tokens through the model, their keys and values into the pages, logits for who needs them."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from .attention import TILE, Groups, PagedAttention, Rows, Scratch, group_by_prefix
from .scheduler import Plan, Request


class Runner:
    """Owns the KV pages: k_cache and v_cache [layers, num_pages, page_size, Hkv, D], in the model's dtype and on its device."""

    def __init__(self, model, num_pages: int, page_size: int):
        self.model, self.page_size = model, page_size
        config, weight = model.config, model.embed_tokens.weight
        self.device, self._scratch = weight.device, Scratch(weight.device)
        shape = (config.num_hidden_layers, num_pages, page_size, config.num_key_value_heads, config.head_dim)
        self.k_cache = torch.zeros(shape, dtype=weight.dtype, device=self.device)
        self.v_cache = torch.zeros(shape, dtype=weight.dtype, device=self.device)
        self._groups: list[tuple[list[Request], int]] = []
        self._grouped: set[Request] = set()

    def logits(self, plan: Plan) -> Tensor:
        """Runs the step; logits [len(plan.sampling), vocab] in that order."""
        extending = [chunk for chunk in plan.prefills if chunk[1]]
        fresh = [chunk for chunk in plan.prefills if not chunk[1]]
        lengths = [len(request.ids) for request in plan.decodes]
        tokens = [request.ids[-1] for request in plan.decodes]
        tables = [request.table.pages for request in plan.decodes]
        starts, counts, firsts = [n - 1 for n in lengths], [1] * len(lengths), list(range(len(lengths)))
        groups = self._group_decodes(plan.decodes)
        page_size = self.page_size
        positions = [np.array(starts, np.int64)]
        slots = [np.array([pages[n // page_size] * page_size + n % page_size for pages, n in zip(tables, starts)], np.int64)]
        last: dict[Request, int] = {}
        for request, start, count in extending + fresh:
            span = np.arange(start, start + count)
            first_page = start // page_size
            pages = np.array(request.table.pages[first_page: (start + count - 1) // page_size + 1], np.int64)
            positions.append(span)
            slots.append(pages[span // page_size - first_page] * page_size + span % page_size)
            if start:
                tiles = range(start, start + count, TILE)
                tables += [request.table.pages] * len(tiles)
                starts += tiles
                counts += [min(TILE, start + count - at) for at in tiles]
                firsts += [len(tokens) + at - start for at in tiles]
            tokens += request.ids[start: start + count]
            last[request] = len(tokens) - 1
        rows = Rows(tables, *(np.array(x, np.int64) for x in (starts, counts, firsts)))
        attend = PagedAttention(self.k_cache, self.v_cache, np.concatenate(slots), rows, groups, [count for _, _, count in fresh],
                                self.model.config.num_attention_heads, self._scratch)
        hidden = self.model(torch.tensor(tokens, device=self.device), self._tensor(np.concatenate(positions)), attend)
        if plan.prefills:
            wanted = list(range(len(plan.decodes))) + [last[request] for request in plan.sampling[len(plan.decodes):]]
            hidden = hidden[torch.tensor(wanted, dtype=torch.int64, device=self.device)]
        return self.model.logits(hidden)

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self.device)

    def _group_decodes(self, decodes: list[Request]) -> Groups:
        """Which decoding rows share leading pages, by index into `decodes`.

        Kept from step to step: a request's leading pages stay as they are while it decodes, so the groups only lose members until
        somebody new arrives. Whoever stops decoding is forgotten at once, for he may come back with other pages.
        """
        if not self._grouped.issuperset(decodes):
            groups = group_by_prefix([request.table.pages for request in decodes])
            self._groups = [([decodes[i] for i in members], shared) for members, shared in groups]
            self._grouped = set(decodes)
        index = {request: i for i, request in enumerate(decodes)}
        if len(index) < len(self._grouped):
            self._groups = [([request for request in members if request in index], shared) for members, shared in self._groups]
            self._groups = [group for group in self._groups if group[0]]
            self._grouped = set(decodes)
        return [([index[request] for request in members], shared) for members, shared in self._groups]
