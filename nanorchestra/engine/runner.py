"""Computes a planned step on a CPU: the model, the KV in its pages, the draws."""

from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nanorchestra.engine.attention import DecodeBatch
from nanorchestra.engine.request import Request
from nanorchestra.engine.sampler import Draw, Sampler
from nanorchestra.engine.scheduler import Plan
from nanorchestra.model.ops import Attend, cache_rows, store_kv
from nanorchestra.model.packed_attention import Segment, packed_attention
from nanorchestra.model.qwen3 import Qwen3

BATCHES = 4  # decode batches at most: new requests form one of their own, and no other is copied
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
        heads = self.model.config.num_attention_heads
        self._batches = [DecodeBatch(self.k_cache, self.v_cache, heads) for _ in range(BATCHES)]

    def sleep(self) -> None:
        """Gives the memory of the pages back, and of everything kept from step to step."""
        self.k_cache = self.v_cache = self._batches = None

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
        hidden, decodes = self._hidden(plan)
        place = {request: i for i, request in enumerate(decodes)}
        end = len(decodes) - 1
        for request, _, count in plan.prefills:
            end += count
            place[request] = end
        place |= {request: place[leader] for request, leader in plan.forks}
        return hidden.index_select(0, self._ints([place[request] for request in plan.sampling]))

    def _copy_pages(self, copies):
        """All pages are read before any is written, since pages may have changed hands."""
        if copies:
            to, source = self._ints(list(copies)), self._ints(list(copies.values()))
            for cache in (self.k_cache, self.v_cache):
                cache.index_copy_(1, to, cache.index_select(1, source))

    def _hidden(self, plan) -> tuple[Tensor, list[Request]]:
        """Returns hidden states [T, hidden], decodes first, and the decodes in their order."""
        batches = self._decode_batches(plan.decodes)
        decodes = [request for batch in batches for request in batch.rows]
        chunks = [(request, len(request.ids) - 1, 1) for request in decodes] + plan.prefills
        tokens, positions, slots = map(self._ints, token_inputs(chunks, self.page_size))
        attend = self._attend(batches, plan.prefills, slots)
        return self.model(tokens, positions, attend), decodes

    def _attend(self, batches, chunks, slots) -> Attend:
        """Returns attend(layer, q, k, v) for the model: stores the KV, then each part attends."""
        rows = cache_rows(slots, self.kv_heads, self.page_size)
        sizes = [len(batch.rows) for batch in batches] + [count for *_, count in chunks]
        histories = [self._history(*chunk) for chunk in chunks]

        def attend(layer, q, k, v):
            caches = self.k_cache[layer], self.v_cache[layer]
            store_kv(k, v, *caches, rows)
            parts = list(zip(*(x.split(sizes) for x in (q, k, v)), strict=True))
            out = [b.attend(layer, *part) for b, part in zip(batches, parts, strict=False)]
            for part, history in zip(parts[len(batches) :], histories, strict=True):
                query, *kv = (x.transpose(0, 1)[None] for x in part)
                mask = None
                if history is not None:
                    seen, mask = history
                    kv = (cache.view(-1, cache.shape[-1])[seen][None] for cache in caches)
                attended = F.scaled_dot_product_attention(
                    query, *kv, mask, is_causal=mask is None, enable_gqa=True
                )
                out.append(attended[0].transpose(0, 1))
            return out[0] if len(out) == 1 else torch.cat(out)

        return attend

    def _history(self, request, start, count) -> tuple[Tensor, Tensor] | None:
        """Rows of the cache [Hkv, keys] that a chunk sees, and its mask; None at the beginning."""
        if not start:
            return None
        end, size = start + count, self.page_size
        slots = self._ints(request.table.pages)[:, None] * size + torch.arange(size)
        rows = cache_rows(slots.view(-1)[:end], self.kv_heads, size)
        return rows.T, torch.ones(count, end, dtype=torch.bool).tril(start)

    def _decode_batches(self, decodes) -> list[DecodeBatch]:
        """Returns the decode batches of this step, old ones that can go on and at most one new.

        The new one has the other requests, or all requests if the others are many. A request that
        has stopped decoding is forgotten: it may come back with other pages.
        """
        wanted = set(decodes)
        kept = [batch for batch in self._batches if batch.follow(wanted)]
        loose = [request for request in decodes if request in wanted]
        if len(kept) == BATCHES and loose or 2 * len(loose) > len(decodes):
            kept, loose = [], decodes
        unused = [batch for batch in self._batches if batch not in kept]
        for batch in unused:
            batch.rows = {}
        if loose:
            unused[0].start(loose)
            kept.append(unused[0])
        return kept

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
