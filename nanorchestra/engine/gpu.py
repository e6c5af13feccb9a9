"""Computes a planned step on a GPU, with Triton kernels and captured CUDA graphs.

A layer is six launches and four matrix products. A decode step is one graph with the draw inside:
logits never leave the device, and the next step can be launched before the host reads the tokens.

A graph serves one padded number of decodes and one bound on their lengths. Its inputs lie in one
matrix that is copied to the device at once. Padding rows have no keys and no slot.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kernels.decode import SPLIT, decode_attention
from kernels.decode_shared import ROWS
from kernels.external import choose_attention, external_prefill, sizes_of
from kernels.norm import rms_norm
from kernels.prefill import prefill_attention, prefill_work
from kernels.rope import norm_rope_store
from kernels.sample import MAX_BATCH, sample_linear, sample_logits
from kernels.swiglu import swiglu
from nanorchestra.engine.attention import group_by_prefix, padded_rows
from nanorchestra.engine.request import Request, SamplingParams
from nanorchestra.engine.runner import Runner
from nanorchestra.engine.sampler import Draw
from nanorchestra.engine.scheduler import Plan
from nanorchestra.model.quantise import is_quantised
from nanorchestra.model.qwen3 import Qwen3

# Numbers of decodes that have a graph. A larger batch is launched kernel by kernel.
SIZES = (1, 2, 4, *range(8, 64, 8), *range(64, 513, 32))
LENGTHS = (2048, 8192, 32768, 131072, 1 << 20)  # bounds on the keys of a row: each has its graphs
TOKEN, POSITION, SLOT, SEED, TEMPERATURE, TABLE = range(
    6
)  # columns of a row; TABLE.. are its pages


@dataclass
class _Decodes:
    """Decodes on the device: rows int64 [B, TABLE + pages] and groups int32 [B, 3] (decode.py)."""

    rows: Tensor
    groups: Tensor
    max_length: int


@dataclass
class _Chunks:
    """Chunks on the device: tokens, positions, slots; int32 tables and work (prefill.py)."""

    inputs: tuple[Tensor, ...]
    tables: Tensor
    work: Tensor
    sizes: dict  # for flash-attn


class _Launched:
    """A launched step's hidden states [R, hidden], and its draws on their way to the host."""

    def __init__(self, requests: list[Request], hidden: Tensor, tokens: Tensor, logprobs: Tensor):
        self.row = {request: i for i, request in enumerate(requests)}
        self.hidden, self.tokens, self._arrived = hidden, tokens, None
        # Copied now: behind the next step the copy would wait for that one too.
        self._host = [x.to("cpu", non_blocking=True) for x in (tokens, logprobs)]
        if tokens.is_cuda:
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    def read(self) -> list[Draw]:
        """Waits for the draws."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return list(map(Draw, *(x.tolist() for x in self._host)))


class GpuRunner(Runner):
    """A Runner on Triton kernels.

    The kernel draws the rows that sample from the whole vocabulary; the Sampler draws the others,
    and all rows if the output matrix is quantised. `prefill`: the kernel of chunks, and why.
    """

    def __init__(
        self, model: Qwen3, num_pages: int, page_size: int, vocab_size: int, attention: str
    ):
        super().__init__(model, num_pages, page_size, vocab_size)
        self.vocab_size = vocab_size
        self.prefill = choose_attention(attention, self.k_cache.dtype, page_size)
        self.overlaps = model.lm_head is None or not is_quantised(model.lm_head)

    def sleep(self) -> None:
        """As Runner.sleep; captured graphs go too, since they read the pages where they lay."""
        super().sleep()
        self._captured: dict[tuple[int, int], _Graph] = {}
        self._grouped: tuple[list[Request], list[Request], np.ndarray] | None = None

    def launch(self, plan: Plan, after: _Launched | None = None) -> _Launched | Tensor:
        """Starts the step and the draws of plan.sampling, and does not wait for them.

        after: a step whose draws are the newest ids of this one's requests, taken on the device.
        """
        if not self.overlaps:
            return super().launch(plan)
        self._copy_pages(plan.copies)
        if not plan.prefills and not plan.forks:
            return self._decode(plan.decodes, after)
        hidden, requests = self._last_hidden(plan), plan.sampling
        noise = self._ints([(*_noise(r.params), len(r.ids)) for r in requests]).view(-1, 3)
        return _Launched(requests, hidden, *self._draw(hidden, *noise.T.contiguous()))

    def draws(self, launched: _Launched | Tensor, requests: list[Request]) -> list[Draw]:
        """Waits for the draws of the requests."""
        if not self.overlaps:
            return super().draws(launched, requests)
        read = launched.read()
        draws = {request: read[launched.row[request]] for request in requests}
        if special := [request for request in requests if not request.plain]:
            rows = self._ints([launched.row[request] for request in special])
            drawn = self._sample(self.model.logits(launched.hidden[rows]), special)
            draws |= zip(special, drawn, strict=True)
        return list(draws.values())

    def _decode(self, requests: list[Request], after: _Launched | None) -> _Launched:
        """Launches a decode step, as a graph if one is large enough."""
        if self.device.type == "cuda" and len(requests) <= SIZES[-1]:
            size = SIZES[bisect.bisect_left(SIZES, len(requests))]
            order, decodes = self._decodes(requests, size, after)
            key = size, decodes.max_length
            if key not in self._captured:
                self._captured[key] = _Graph(self, *key)
            outputs = self._captured[key].replay(decodes)
        else:
            order, decodes = self._decodes(requests, len(requests), after)
            outputs = self._decode_step(decodes)
        copies = (x[: len(order)].clone() for x in outputs)  # the next replay overwrites them
        return _Launched(order, *copies)

    def _decode_step(self, decodes: _Decodes) -> tuple[Tensor, Tensor, Tensor]:
        """Computes hidden states, tokens and log-probabilities: what a graph captures."""
        hidden, rows = self._forward(decodes, None), decodes.rows
        noise = rows[:, SEED].contiguous(), rows[:, TEMPERATURE], rows[:, POSITION] + 1
        return hidden, *self._draw(hidden, *noise)

    def _hidden(self, plan: Plan) -> tuple[Tensor, list[Request]]:
        order, decodes, chunks = [], None, None
        if plan.decodes:
            order, decodes = self._decodes(plan.decodes, len(plan.decodes))
        else:
            self._grouped = None  # a request that comes back may have other pages
        if plan.prefills:
            tables = padded_rows([request.table.pages for request, _, _ in plan.prefills])
            tables = torch.from_numpy(tables.clip(0)).int().to(self.device)
            _, starts, counts = zip(*plan.prefills, strict=True)
            work = prefill_work(starts, counts).to(self.device)
            sizes = sizes_of(counts, np.add(starts, counts).tolist(), self.device)
            chunks = _Chunks(self._inputs(plan.prefills), tables, work, sizes)
        return self._forward(decodes, chunks), order

    def _forward(self, decodes: _Decodes | None, chunks: _Chunks | None) -> Tensor:
        """Runs the tokens through the model -> hidden states [T, hidden], decodes first."""
        model, inputs = self.model, []
        if decodes is not None:
            inputs.append([decodes.rows[:, column] for column in (TOKEN, POSITION, SLOT)])
        if chunks is not None:
            inputs.append(chunks.inputs)
        tokens, positions, slots = map(torch.cat, zip(*inputs, strict=True))
        angles = positions[:, None].float() * model.rope_frequencies(self.device)
        cos, sin = angles.cos(), angles.sin()  # fp32 [T, D / 2]
        attend = self._attention(decodes, chunks)
        residual = model.embed_tokens(tokens)
        x = rms_norm(residual, model.layers[0].input_layernorm, model.config.rms_norm_eps)
        after = [block.input_layernorm for block in model.layers[1:]] + [model.norm]
        for layer, (block, norm) in enumerate(zip(model.layers, after, strict=True)):
            own, caches = block.self_attn, (self.k_cache[layer], self.v_cache[layer])
            norms = own.q_norm, own.k_norm
            q = norm_rope_store(own.qkv_proj(x), norms, cos, sin, *caches, slots, own.eps)
            x = own.o_proj(attend(q, *caches).flatten(1))
            x = rms_norm(x, block.post_attention_layernorm, block.eps, residual)  # adds to it first
            x = block.down_proj(swiglu(block.gate_up_proj(x)))
            x = rms_norm(x, norm, block.eps, residual)
        return x

    def _attention(self, decodes: _Decodes | None, chunks: _Chunks | None):
        """Returns attend(q [T, H, D], k_cache, v_cache) -> [T, H, D]."""
        count, own = 0, ()
        if decodes is not None:
            count = len(decodes.rows)
            own = decodes.rows[:, TABLE:].int(), (decodes.rows[:, POSITION] + 1).int()
            options = {"max_length": decodes.max_length, "groups": decodes.groups}

        def attend(q: Tensor, *caches: Tensor) -> Tensor:
            out = torch.empty_like(q)
            if own:
                decode_attention(q[:count], *caches, *own, **options, out=out[:count])
            if chunks is not None and self.prefill[0] == "flash-attn":
                out[count:] = external_prefill(q[count:], *caches, chunks.tables, chunks.sizes)
            elif chunks is not None:
                prefill_attention(q[count:], *caches, chunks.tables, chunks.work, out[count:])
            return out

        return attend

    def _draw(
        self, hidden: Tensor, seeds: Tensor, temperatures: Tensor, positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Draws (tokens int64 [R], logprobs fp32 [R]); temperatures int64 hold the bits of fp32."""
        noise = seeds, positions, temperatures.int().view(torch.float32)
        if not len(hidden):
            return positions, hidden.new_empty(0)
        if len(hidden) <= MAX_BATCH:  # the draw is fused with the output matrix
            return sample_linear(hidden, self.model.output_weight, *noise, vocab=self.vocab_size)
        return sample_logits(self.model.logits(hidden), *noise, vocab=self.vocab_size)

    def _decodes(
        self, requests: list[Request], size: int, after: _Launched | None = None
    ) -> tuple[list[Request], _Decodes]:
        """Returns the requests in the order of their rows, and the rows, padded to `size`."""
        if self._grouped is None or self._grouped[0] != requests:
            self._grouped = (list(requests), *self._group(requests))
        _, order, groups = self._grouped
        width = TABLE + max(len(request.table.pages) for request in order)
        rows, page_size = np.zeros((size, width), np.int64), self.page_size
        rows[len(order) :, [POSITION, SLOT]] = -1
        for row, request in zip(rows, order, strict=False):
            pages, newest = request.table.pages, len(request.ids) - 1 + (after is not None)
            slot = pages[newest // page_size] * page_size + newest % page_size
            row[:TABLE] = request.ids[-1], newest, slot, *_noise(request.params)
            row[TABLE : TABLE + len(pages)] = pages
        padded = np.zeros((size, 3), np.int32)
        padded[: len(groups)] = groups
        bound = LENGTHS[bisect.bisect_left(LENGTHS, rows[:, POSITION].max() + 1)]
        rows, padded = (torch.from_numpy(x).to(self.device) for x in (rows, padded))
        if after is not None:
            source = self._ints([after.row[request] for request in order])
            rows[: len(order), TOKEN] = after.tokens[source]
        return order, _Decodes(rows, padded, bound)

    def _group(self, requests: list[Request]) -> tuple[list[Request], np.ndarray]:
        """Orders them by the pages they share: (first row, rows, shared keys) of each group."""
        size = self.page_size
        whole = [r.table.pages[: (len(r.ids) - 1) // size] for r in requests]
        order: list[Request] = []
        groups = []
        for indices, pages in group_by_prefix(whole):
            shared = pages * size // SPLIT * SPLIT
            for start in range(0, len(indices), ROWS) if shared and len(indices) > 1 else ():
                groups.append((len(order) + start, min(ROWS, len(indices) - start), shared))
            order += [requests[i] for i in indices]
        return order, np.array(groups, np.int32).reshape(-1, 3)


class _Graph:
    """A captured decode step. The graphs of a runner share one memory pool: one runs at a time."""

    def __init__(self, runner: GpuRunner, size: int, max_length: int):
        longest = min(max_length, runner.model.config.max_position_embeddings)
        width = TABLE - (-longest // runner.page_size)
        rows = torch.zeros(size, width, dtype=torch.int64, device=runner.device)
        rows[:, [POSITION, SLOT]] = -1
        self.inputs = _Decodes(rows, rows.new_zeros(size, 3, dtype=torch.int32), max_length)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # compiles kernels; libraries take their work space
            for _ in range(2):
                runner._decode_step(self.inputs)
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        pool = next((other.graph.pool() for other in runner._captured.values()), None)
        # thread_local: a trainer may be at work in another thread
        with torch.cuda.graph(self.graph, pool=pool, capture_error_mode="thread_local"):
            self.outputs = runner._decode_step(self.inputs)

    def replay(self, decodes: _Decodes) -> tuple[Tensor, Tensor, Tensor]:
        self.inputs.rows[:, : decodes.rows.shape[1]].copy_(decodes.rows)
        self.inputs.groups.copy_(decodes.groups)
        self.graph.replay()
        return self.outputs


def _noise(params: SamplingParams) -> tuple[int, int]:
    """The seed as int64, and the temperature's fp32 bits."""
    bits = int(np.float32(params.temperature).view(np.int32))
    return (params.seed + 2**63) % 2**64 - 2**63, bits
