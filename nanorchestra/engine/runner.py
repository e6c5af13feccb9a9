"""Computes a planned step on a CPU: the model, the KV in its pages, the draws.

native.c computes a packed model, torch any other. The order of KV inside a page is theirs.
"""

from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nanorchestra.engine.request import Request
from nanorchestra.engine.sampler import Draw, Sampler
from nanorchestra.engine.scheduler import Plan
from nanorchestra.model.native import BLOCK, Forward, PackedLinear
from nanorchestra.model.ops import Attend, cache_rows, store_kv
from nanorchestra.model.packed_attention import Segment, packed_attention
from nanorchestra.model.qwen3 import Qwen3

SCORED = 1024  # scored positions whose logits are in memory at a time
Chunk = tuple[Request, int, int]  # ids[start : start + count] of a request, as in Plan.prefills


class Runner:
    """Owns the KV pages: k_cache and v_cache [layers, num_pages, Hkv, page_size, D].

    They have the model's dtype and device. `launch` starts a step and `draws` reads what it drew;
    on a GPU (GpuRunner) the host may launch the next step in between.
    """

    overlaps = False  # a CPU computes when it is told to: there is nothing to overlap
    mixed: tuple[int, float] | None = None  # bounds of chunks (Scheduler)

    def __init__(self, model: Qwen3, num_pages: int, page_size: int, vocab_size: int):
        config, weight = model.config, model.embed_tokens.weight
        self.model, self.page_size, self.device = model, page_size, weight.device
        self.kv_heads, self.sampler = config.num_key_value_heads, Sampler(vocab_size)
        self._shape = config.num_hidden_layers, num_pages, self.kv_heads, page_size, config.head_dim
        self.wake()

    def wake(self) -> None:
        """Takes memory for the pages. It is zeroed: padding reads it, and NaN would spread."""
        self.sleep()
        self.k_cache, self.v_cache = (
            self.model.embed_tokens.weight.new_zeros(self._shape) for _ in range(2)
        )
        packed = isinstance(self.model.layers[0].down_proj, PackedLinear)
        if packed and self.page_size % BLOCK == 0:
            self._native = Forward(self.model, self.k_cache, self.v_cache)

    def sleep(self) -> None:
        """Gives the memory of the pages back, and of everything kept from step to step."""
        self.k_cache = self.v_cache = self._native = None

    def launch(self, plan: Plan, after: Any = None) -> Any:
        """Starts a step; returns what `draws` needs: here logits [len(plan.sampling), vocab].

        after: the launched step whose draws are this one's newest ids (steps.py).
        """
        self._copy_pages(plan.copies)
        return self._logits(self._last_hidden(plan))

    def draws(self, launched: Any, requests: list[Request]) -> list[Draw]:
        """Draws a token for each of the requests."""
        return self._sample(launched, requests) if requests else []

    @torch.inference_mode()
    def score(self, list_of_ids: list[list[int]]) -> list[list[float]]:
        """Returns the log-probabilities of each sequence's ids but the first. Uses no pages."""
        counts = list(map(len, list_of_ids))
        spans = [
            (end - count, count) for end, count in zip(accumulate(counts), counts, strict=True)
        ]
        tokens = self._ints([i for ids in list_of_ids for i in ids])
        positions = self._ints([n for count in counts for n in range(count)])
        attend = packed_attention([Segment(*span) for span in spans])
        hidden, values = self.model(tokens, positions, attend), []
        for n in range(0, len(tokens) - 1, SCORED):
            targets = tokens[n + 1 : n + 1 + SCORED]
            values += self.sampler.score(self._logits(hidden[n:][: len(targets)]), targets)
        return [values[start : start + count - 1] for start, count in spans]

    def _logits(self, hidden) -> Tensor:
        return self.model.logits(hidden)

    def _sample(self, logits, requests) -> list[Draw]:
        return self.sampler(
            logits,
            [request.params for request in requests],
            [len(request.ids) for request in requests],
            [request.allowed for request in requests],
        )

    def _last_hidden(self, plan) -> Tensor:
        """Computes the step. Returns the hidden states [R, hidden] of plan.sampling."""
        chunks = [(request, len(request.ids) - 1, 1) for request in plan.decodes] + plan.prefills
        hidden, counts = self._hidden(chunks), [count for *_, count in chunks]
        ends = zip(chunks, accumulate(counts), strict=True)
        place = {request: end - 1 for (request, *_), end in ends}
        place |= {request: place[leader] for request, leader in plan.forks}
        return hidden.index_select(0, self._ints([place[request] for request in plan.sampling]))

    def _copy_pages(self, copies):
        """All pages are read before any is written, since pages may have changed hands."""
        if copies:
            to, source = self._ints(list(copies)), self._ints(list(copies.values()))
            for cache in (self.k_cache, self.v_cache):
                cache.index_copy_(1, to, cache.index_select(1, source))

    def _hidden(self, chunks) -> Tensor:
        """Computes the chunks -> [T, hidden]: in C if the model is packed, else in torch."""
        tokens, positions, slots = map(self._ints, token_inputs(chunks, self.page_size))
        if self._native is None:
            return self.model(tokens, positions, self._attend(chunks, slots))
        tables = [request.table.pages for request, *_ in chunks]
        return self._native(tokens, positions, [count for *_, count in chunks], tables)

    def _attend(self, chunks, slots) -> Attend:
        """Returns attend(layer, q, k, v) for the model: stores the KV, then each chunk attends."""
        rows = cache_rows(slots, self.kv_heads, self.page_size)
        histories = [self._history(*chunk) for chunk in chunks]

        def attend(layer, q, k, v):
            caches = self.k_cache[layer], self.v_cache[layer]
            store_kv(k, v, *caches, rows)
            parts = q.split([count for *_, count in chunks])
            out = []
            for query, (seen, mask) in zip(parts, histories, strict=True):
                kv = (cache.view(-1, cache.shape[-1])[seen][None] for cache in caches)
                attended = F.scaled_dot_product_attention(
                    query.transpose(0, 1)[None], *kv, mask, enable_gqa=True
                )
                out.append(attended[0].transpose(0, 1))
            return torch.cat(out)

        return attend

    def _history(self, request, start, count) -> tuple[Tensor, Tensor]:
        """Rows of the cache [Hkv, keys] that a chunk sees, and its mask."""
        end, size = start + count, self.page_size
        slots = self._ints(request.table.pages)[:, None] * size + torch.arange(size)
        rows = cache_rows(slots.view(-1)[:end], self.kv_heads, size)
        return rows.T, torch.ones(count, end, dtype=torch.bool).tril(start)

    def _ints(self, values) -> Tensor:
        return torch.as_tensor(values, dtype=torch.int64, device=self.device)


def token_inputs(chunks: list[Chunk], size: int) -> tuple[list[int], list[int], list[int]]:
    """Returns tokens, positions and slots (page * size + offset) of the chunks' ids."""
    tokens, positions, slots = [], [], []
    for request, start, count in chunks:
        span, pages = range(start, start + count), request.table.pages
        tokens += request.ids[start : start + count]
        positions += span
        slots += [pages[n // size] * size + n % size for n in span]
    return tokens, positions, slots
