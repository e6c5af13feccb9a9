"""Computes a planned step on a CPU: the model, the KV in its pages, the draws.

native.c computes a packed model, torch any other. The order of KV inside a page is theirs.
"""

from functools import partial
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nanorchestra.engine.request import Request
from nanorchestra.engine.sampler import Draw, draw_tokens, score_tokens
from nanorchestra.engine.scheduler import Plan
from nanorchestra.errors import require
from nanorchestra.model.native import BLOCK, Forward, PackedLinear, zeros
from nanorchestra.model.ops import Attend
from nanorchestra.model.packed_attention import Segment, packed_attention
from nanorchestra.model.qwen3 import Qwen3

SCORED = 1024  # scored positions whose logits are in memory at a time
Chunk = tuple[Request, int, int]  # ids[start : start + count] of a request, as in Plan.prefills


class Runner:
    """Owns the KV pages: k_cache and v_cache [layers, num_pages, Hkv, page_size, D].

    They are on the model's device, in kv_dtype. `launch` starts a step and `draws` reads what it
    drew; on a GPU (GpuRunner) the host may launch the next step in between.
    """

    overlaps = False  # a CPU computes when it is told to: there is nothing to overlap
    mixed: tuple[int, float] | None = None  # bounds of chunks (Scheduler)
    sizes_known = (0, 0)  # of captured steps (GpuRunner)

    def __init__(
        self, model: Qwen3, num_pages: int, page_size: int, vocab_size: int, kv_dtype: torch.dtype
    ):
        config, weight = model.config, model.embed_tokens.weight
        usable = self.kv_dtypes(weight)
        names = " or ".join(map(str, usable))
        require(kv_dtype in usable, f"engine: kv_dtype is {kv_dtype}; expected {names} here")
        self.model, self.page_size, self.device = model, page_size, weight.device
        self.vocab_size, kv_heads = vocab_size, config.num_key_value_heads
        shape = config.num_hidden_layers, num_pages, kv_heads, page_size, config.head_dim
        make = partial(torch.zeros, device=self.device) if weight.is_cuda else zeros
        self._new_cache = partial(make, shape, dtype=kv_dtype)
        self.wake()

    @staticmethod
    def kv_dtypes(weight: Tensor) -> tuple[torch.dtype, ...]:
        """Returns the dtypes that the pages of a model with this weight may have."""
        return (weight.dtype,)

    def wake(self) -> None:
        """Takes memory for the pages. It is zeroed: padding reads it, and NaN would spread."""
        self.sleep()
        self.k_cache, self.v_cache = self._new_cache(), self._new_cache()
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
        chunks = [(request, len(request.ids) - 1, 1) for request in plan.decodes] + plan.prefills
        counts = [count for *_, count in chunks]
        ends = zip(chunks, accumulate(counts), strict=True)
        place = {request: end - 1 for (request, *_), end in ends}
        place |= {request: place[leader] for request, leader in plan.forks}
        wanted = [place[request] for request in plan.sampling]
        tokens, positions, slots = token_inputs(chunks, self.page_size)
        if self._native is not None:
            tables = [request.table.pages for request, *_ in chunks]
            return self._native(tokens, positions, counts, tables, wanted)
        attend = self._attend(chunks, self._ints(slots))
        return self._logits(self.model(self._ints(tokens), self._ints(positions), attend)[wanted])

    def draws(self, launched: Any, requests: list[Request]) -> list[Draw | Exception]:
        """Draws a token for each of the requests; one that cannot be drawn has its error."""
        return self._sample(launched, requests) if requests else []

    @torch.inference_mode()
    def score(self, ids: list[int]) -> list[float]:
        """Returns the log-probabilities of the ids but the first. Uses no pages."""
        tokens, attend = self._ints(ids), packed_attention([Segment(0, len(ids))])
        hidden, values = self.model(tokens, self._ints(range(len(ids))), attend), []
        for n in range(0, len(ids) - 1, SCORED):
            targets = tokens[n + 1 : n + 1 + SCORED]
            logits = self._logits(hidden[n:][: len(targets)])
            values += score_tokens(logits, self.vocab_size, targets)
        return values

    def _logits(self, hidden) -> Tensor:
        return self.model.logits(hidden)

    def _sample(self, logits, requests) -> list[Draw | Exception]:
        """Draws a token for each row. If that fails, each is drawn alone: noise is of a row."""
        try:
            return draw_tokens(
                logits,
                self.vocab_size,
                [request.params for request in requests],
                [len(request.ids) for request in requests],
                [request.allowed for request in requests],
            )
        except torch.AcceleratorError:  # the device failed, not a request
            raise
        except Exception as error:
            if len(requests) == 1:
                return [error]
        return [
            draw
            for row, request in enumerate(requests)
            for draw in self._sample(logits[row : row + 1], [request])
        ]

    def _copy_pages(self, copies):
        """All pages are read before any is written, since pages may have changed hands."""
        if copies:
            to, source = self._ints(list(copies)), self._ints(list(copies.values()))
            for cache in (self.k_cache, self.v_cache):
                bits = cache.view(torch.uint8)  # not every operation takes fp8
                bits.index_copy_(1, to, bits.index_select(1, source))

    def _attend(self, chunks, slots) -> Attend:
        """Returns attend(layer, q, k, v) for the model: stores the KV, then each chunk attends."""
        pages, offsets = slots // self.page_size, slots % self.page_size

        def attend(layer, q, k, v):
            caches, out = (self.k_cache[layer], self.v_cache[layer]), []
            for cache, new in zip(caches, (k, v), strict=True):
                cache[pages, :, offsets] = new  # [T, Hkv, D]
            parts = q.split([count for *_, count in chunks])
            for query, (request, start, count) in zip(parts, chunks, strict=True):
                end, table = start + count, request.table.pages
                kv = (x[table].transpose(0, 1).flatten(1, 2)[None, :, :end] for x in caches)
                mask = torch.ones(count, end, dtype=torch.bool).tril(start)
                attended = F.scaled_dot_product_attention(
                    query.transpose(0, 1)[None], *kv, mask, enable_gqa=True
                )
                out.append(attended[0].transpose(0, 1))
            return torch.cat(out)

        return attend

    def _ints(self, values) -> Tensor:
        return torch.as_tensor(values, dtype=torch.int64, device=self.device)


def token_inputs(chunks: list[Chunk], size: int) -> tuple[list[int], list[int], list[int]]:
    """Returns tokens, positions and slots (page * size + offset) of the chunks' ids.

    Ids that the device alone has are missing from the tokens.
    """
    tokens, positions, slots = [], [], []
    for request, start, count in chunks:
        span, pages = range(start, start + count), request.table.pages
        tokens += request.ids[start : start + count]
        positions += span
        slots += [pages[n // size] * size + n % size for n in span]
    return tokens, positions, slots
