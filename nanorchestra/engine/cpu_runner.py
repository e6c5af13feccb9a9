"""Computes a scheduled batch on a CPU: the model, the KV in its pages, the draws.

The C of model/native computes a packed model, torch any other. The order of KV inside a page is
theirs.
"""

from typing import Any

import torch
from torch import Tensor

from nanorchestra.engine.sampler import Result, draw_tokens
from nanorchestra.engine.scheduler import Batch, Chunk
from nanorchestra.engine.sequence import Request
from nanorchestra.model.attention import GatheredAttention, PagedChunk
from nanorchestra.model.native import BLOCK, Forward, PackedLinear, zeros
from nanorchestra.model.qwen3 import Qwen3


class CpuRunner:
    """Owns the KV pages: kv_cache [2, layers, num_pages, Hkv, page_size, D], keys then values.

    `launch` computes the logits and `read` draws from them. `draw` is a GPU's.
    """

    overlaps = False  # a CPU computes when it is told to: there is nothing to look ahead for
    mixed_prefill = None  # the chunks of a step that decodes are bounded by its tokens alone

    def __init__(self, model: Qwen3, num_pages: int, page_size: int, vocab_size: int):
        config = model.config
        self.model = model
        self.page_size = page_size
        self.vocab_size = vocab_size
        shape = (
            2,
            config.num_hidden_layers,
            num_pages,
            config.num_key_value_heads,
            page_size,
            config.head_dim,
        )
        self.kv_cache = zeros(shape, model.embed_tokens.weight.dtype)
        self._native = None
        packed = isinstance(model.layers[0].down_proj, PackedLinear)
        if packed and page_size % BLOCK == 0:
            self._native = Forward(model, *self.kv_cache)

    @property
    def num_pages(self) -> int:
        """Pages of the pool."""
        return self.kv_cache.shape[2]

    def launch(self, batch: Batch, after: Any = None) -> Tensor:
        """Computes the batch; returns the logits [len(batch.sampled), vocab]."""
        chunks = all_chunks(batch)
        tokens, positions = [], []
        sampled_rows = []  # places of the last tokens of those that are sampled
        for chunk in chunks:
            tokens += chunk.request.ids[chunk.start : chunk.end]
            positions += range(chunk.start, chunk.end)
            if chunk.is_last:
                sampled_rows.append(len(tokens) - 1)
        block_tables = [chunk.request.sequence.block_table for chunk in chunks]
        counts = [chunk.count for chunk in chunks]
        if self._native is not None:
            return self._native(tokens, positions, counts, block_tables, sampled_rows)
        paged = [
            PagedChunk(chunk.start, chunk.count, pages)
            for chunk, pages in zip(chunks, block_tables, strict=True)
        ]
        attention = GatheredAttention(*self.kv_cache, paged)
        hidden = self.model(torch.tensor(tokens), torch.tensor(positions), attention)
        return self.model.logits(hidden[sampled_rows])

    def draw(self, launched: Tensor, requests: list[Request]) -> None:
        """Nothing: the draws of a CPU are made when they are read."""

    def read(self, launched: Tensor, requests: list[Request]) -> list[Result]:
        """Draws a token for each of the requests, those that the batch samples.

        One whose guide raises has that error in its place.
        """
        if not requests:
            return []
        errors, masks = {}, []
        for request in requests:
            mask = None
            try:
                mask = request.allowed_ids(self.vocab_size)
            except Exception as error:
                errors[request] = error
            masks.append(mask)
        draws = draw_tokens(
            launched,
            self.vocab_size,
            [request.params for request in requests],
            [len(request.ids) for request in requests],
            masks,
        )
        draws = draws.listed([request.params for request in requests])
        return [errors.get(r, draw) for r, draw in zip(requests, draws, strict=True)]

    def wait(self) -> None:
        """Nothing: a step has been computed when `launch` returns."""


def all_chunks(batch: Batch) -> list[Chunk]:
    """Returns the decodes as chunks of one token, then the prefills."""
    chunks = []
    for request in batch.decodes:
        length = len(request.ids)
        chunks.append(Chunk(request, length - 1, length, is_last=True))
    return chunks + batch.prefills
