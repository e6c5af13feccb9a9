"""Computes a scheduled batch on a CPU: the C of model/native a packed model, torch any other.

Inside a page native.c keeps KV in an order of its own (`strip_of`).
"""

import torch

from nanorchestra.engine.paged_attention import GatheredAttention, PagedChunk
from nanorchestra.engine.runner import Launched, Runner, kv_shape, page_bytes
from nanorchestra.engine.scheduler import Batch
from nanorchestra.model.native import STRIP, Forward, PackedLinear, zeros
from nanorchestra.model.qwen3 import Qwen3

DEFAULT_POOL = 1 << 30  # bytes
PAGE_SIZE = 16


class CpuRunner(Runner):
    """A step has been computed when `launch` returns, so there is nothing to look ahead for.

    num_pages: DEFAULT_POOL's worth if None. page_size: PAGE_SIZE if None. A model must be packed
    before the runner is made, or torch computes it.
    """

    def __init__(
        self,
        model: Qwen3,
        num_drawable: int,
        num_pages: int | None = None,
        page_size: int | None = None,
    ):
        super().__init__(num_drawable, page_size or PAGE_SIZE)
        config, dtype = model.config, model.embed_tokens.weight.dtype
        if num_pages is None:
            num_pages = max(1, DEFAULT_POOL // page_bytes(config, self.page_size, dtype))
        self.model = model
        self.kv_cache = zeros(kv_shape(config, num_pages, self.page_size), dtype)
        self._native = None
        packed = isinstance(model.layers[0].down_proj, PackedLinear)
        if packed and self.page_size % STRIP == 0:
            k_cache, v_cache = self.kv_cache
            self._native = Forward(model, k_cache, v_cache)

    def launch(self, batch: Batch, previous: Launched | None = None) -> Launched:
        """Computes a step."""
        decodes, chunks = batch.decodes, batch.prefills
        tokens = [request.ids[-1] for request in decodes]
        starts = [len(request.ids) - 1 for request in decodes]
        positions = starts.copy()
        last_tokens = list(range(len(decodes)))  # the place of the last token of each sampled one
        for chunk in chunks:
            tokens += chunk.request.ids[chunk.start : chunk.end]
            positions += range(chunk.start, chunk.end)
            if chunk.is_last:
                last_tokens.append(len(tokens) - 1)
        starts += [chunk.start for chunk in chunks]
        counts = [1] * len(decodes) + [chunk.count for chunk in chunks]
        requests = decodes + [chunk.request for chunk in chunks]
        block_tables = [request.sequence.block_table for request in requests]
        if self._native is not None:
            logits = self._native(tokens, positions, counts, block_tables, last_tokens)
        else:
            paged = [PagedChunk(*chunk) for chunk in zip(starts, counts, block_tables, strict=True)]
            k_cache, v_cache = self.kv_cache
            attention = GatheredAttention(k_cache, v_cache, paged)
            hidden = self.model(torch.tensor(tokens), torch.tensor(positions), attention)
            logits = self.model.logits(hidden[last_tokens])
        return Launched(batch, batch.sampled, logits)
