"""Attention of the engine's steps over KV pages, once by Triton kernels and once in plain PyTorch.

Both are attention objects of model/attention.py: they normalise and rotate queries and keys, store
keys and values in the pages, and attend.

    PagedAttention     on a GPU: Triton kernels
    GatheredAttention  on a CPU without model/native: the same pages in plain PyTorch
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.paged_decode import SplitScratch, decode_attention
from kernels.paged_prefill import prefill_attention
from kernels.qk_norm_rope import qk_norm_rope_store
from nanorchestra.engine.step_inputs import StepInputs
from nanorchestra.model.attention import attend_at_the_end
from nanorchestra.model.ops import qk_norm_rope
from nanorchestra.model.qwen3 import SelfAttention
from nanorchestra.model.rope import Rotation


@dataclass(frozen=True)
class PagedAttention:
    """Attention of a step over KV pages, by Triton kernels.

    k_cache, v_cache [layers, pages, Hkv, page_size, D]. The two scratches may be the same memory.
    """

    k_cache: Tensor
    v_cache: Tensor
    inputs: StepInputs
    decode_scratch: SplitScratch
    prefill_scratch: SplitScratch

    def __call__(self, layer: SelfAttention, qkv: Tensor, rotation: Rotation) -> Tensor:
        """Returns attention's output [T, H, D]; stores the tokens' keys and values first."""
        k_cache, v_cache = self.k_cache[layer.index], self.v_cache[layer.index]
        q = qk_norm_rope_store(
            qkv,
            layer.q_norm,
            layer.k_norm,
            rotation.cos,
            rotation.sin,
            k_cache,
            v_cache,
            self.inputs.slots,
            layer.eps,
        )
        return self.attend(q, k_cache, v_cache)

    def attend(self, q: Tensor, k_cache: Tensor, v_cache: Tensor) -> Tensor:
        """Returns attention of q [T, H, D] over one layer's pages [pages, Hkv, page_size, D]."""
        out = torch.empty_like(q)
        inputs, rows = self.inputs, len(self.inputs.decode_lens)
        decode_attention(
            q[:rows],
            k_cache,
            v_cache,
            inputs.decode_tables,
            inputs.decode_lens,
            inputs.decode_items,
            inputs.num_decode_items,
            self.decode_scratch,
            out[:rows],
        )
        if inputs.has_chunks:
            prefill_attention(
                q,
                k_cache,
                v_cache,
                inputs.prefill_tables,
                inputs.prefill_lens,
                inputs.prefill_items,
                inputs.num_prefill_items,
                self.prefill_scratch,
                out,
                inputs.whole_items,
            )
        return out


@dataclass(frozen=True)
class PagedChunk:
    """Tokens start .. start + count of a sequence, and its pages."""

    start: int
    count: int
    block_table: Sequence[int]


class GatheredAttention:
    """Attention of a step over KV pages, in plain PyTorch: gathers the keys of a chunk, attends.

    k_cache, v_cache [layers, pages, Hkv, page_size, D], as PagedAttention's; chunks: those of the
    step, in the order of its tokens.
    """

    def __init__(self, k_cache: Tensor, v_cache: Tensor, chunks: Sequence[PagedChunk]):
        self.k_cache, self.v_cache = k_cache, v_cache
        self.chunks = chunks
        page_size = k_cache.shape[3]
        pages, offsets = [], []
        for chunk in chunks:
            for position in range(chunk.start, chunk.start + chunk.count):
                pages.append(chunk.block_table[position // page_size])
                offsets.append(position % page_size)
        self._pages = torch.tensor(pages, dtype=torch.int64, device=k_cache.device)  # [T]
        self._offsets = torch.tensor(offsets, dtype=torch.int64, device=k_cache.device)  # [T]

    def __call__(self, layer: SelfAttention, qkv: Tensor, rotation: Rotation) -> Tensor:
        """Returns attention's output [T, H, D]; stores the tokens' keys and values first."""
        q, k, v = qk_norm_rope(qkv, layer.q_norm, layer.k_norm, rotation, layer.kv_heads, layer.eps)
        k_cache, v_cache = self.k_cache[layer.index], self.v_cache[layer.index]
        # Indices around a slice put the tokens first: [T, Hkv, D], as k and v are.
        k_cache[self._pages, :, self._offsets] = k
        v_cache[self._pages, :, self._offsets] = v
        return self.attend(q, k_cache, v_cache)

    def attend(self, q: Tensor, k_cache: Tensor, v_cache: Tensor) -> Tensor:
        """Returns attention of q [T, H, D] over one layer's pages [pages, Hkv, page_size, D]."""
        outputs = []
        queries = q.split([chunk.count for chunk in self.chunks])
        for query, chunk in zip(queries, self.chunks, strict=True):
            end = chunk.start + chunk.count
            pages = list(chunk.block_table)
            k, v = (x[pages].transpose(1, 2).flatten(0, 1)[:end] for x in (k_cache, v_cache))
            outputs.append(attend_at_the_end(query, k, v))  # [count, H, D]
        return torch.cat(outputs)
