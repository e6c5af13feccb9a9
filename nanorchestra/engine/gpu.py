"""Computes a planned step on a GPU: the kernels of `kernels/`, and decode steps as captured CUDA graphs with the sampling inside.

A layer is six launches and four matrix products: the residual is added and the sum normalised in one, queries and keys are normalised,
rotated and stored in one, and attention has one kernel for decodes, which reads what samples of one prompt share once, and one for chunks.

A graph serves one padded number of decodes and one bound on their lengths. Everything that changes from step to step lies in one matrix
that is copied to the device at once; the rows that pad it have no keys and no slot, so that they touch no page.
"""

from __future__ import annotations

import bisect
import math
from dataclasses import dataclass
from typing import Sequence

import numpy as np
import torch
from torch import Tensor

from kernels.decode import SPLIT, decode_attention
from kernels.decode_shared import ROWS
from kernels.external import choose_prefill, external_prefill
from kernels.norm import add_rms_norm, rms_norm
from kernels.prefill import prefill_attention, prefill_work
from kernels.rope import norm_rope_store
from kernels.sample import sample_linear, sample_logits
from kernels.swiglu import swiglu
from nanorchestra.engine.attention import group_by_prefix
from nanorchestra.engine.request import Request, SamplingParams
from nanorchestra.engine.runner import Runner
from nanorchestra.engine.sampler import Draw, Sampler
from nanorchestra.engine.scheduler import Plan
from nanorchestra.errors import NotFiniteError
from nanorchestra.model.quantise import is_quantised
from nanorchestra.model.qwen3 import Qwen3

SIZES = (
    1,
    2,
    4,
    *range(8, 64, 8),
    *range(64, 513, 32),
)  # decode batches that have a graph; a larger one runs launch by launch
LENGTHS = (
    2048,
    8192,
    32768,
    131072,
    1 << 20,
)  # bounds on the keys of a decode, each with its own graphs
FUSED = 64  # rows up to which sampling is fused with the output matrix
_NOBODY = [], [], np.zeros((0, 3), np.int32)  # decodes of no step: requests, their order, groups
TOKEN, POSITION, SLOT, SEED, TEMPERATURE, TABLE = range(
    6
)  # columns of a batch's matrix; its pages stand from TABLE on


@dataclass
class _Decodes:
    """Decodes on the device: rows int64 [B, TABLE + pages], groups int32 [B, 3] as decode_attention wants them, a bound on the lengths."""

    rows: Tensor
    groups: Tensor
    max_length: int


@dataclass
class _Chunks:
    """Chunks on the device: tokens, positions, slots int64 [T], tables int32 [chunks, pages], work as prefill_attention wants it; and what
    flash-attn wants instead, on the host: the first position of each and how many they are."""

    tokens: Tensor
    positions: Tensor
    slots: Tensor
    tables: Tensor
    work: Tensor
    starts: list[int]
    counts: list[int]


class Drawn:
    """What a step draws for `requests`, on its way: tokens int64 and logprobs fp32 [R], and hidden states [R, hidden], on the device."""

    def __init__(self, requests: list[Request], hidden: Tensor, tokens: Tensor, logprobs: Tensor):
        self.requests, self.hidden, self.tokens = requests, hidden, tokens
        self._host, self._arrived = (tokens, logprobs), None
        if tokens.is_cuda:  # copied now: behind the next step the copy would wait for that one too
            self._host = tuple(
                torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x, non_blocking=True)
                for x in (tokens, logprobs)
            )
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    def read(self) -> tuple[list[int], list[float]]:
        """Tokens and log-probabilities, once they are there."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._host[0].tolist(), self._host[1].tolist()


class GpuRunner(Runner):
    """A Runner by kernels, which can also draw: `launch` starts a step, `draws` waits for it, and between them the next one can be launched.
    A request has the same noise alone and in any batch: rows that sample from the whole vocabulary are drawn by the kernel, the others by
    the Sampler. graphs: capture decode steps; needs a GPU.

    A model whose output matrix is in parts or quantised is sampled by the Sampler alone: `fused` is False then. `prefill` says which kernel
    computes the attention of chunks, and why. ValueError if `attention` names one that cannot.
    """

    def __init__(
        self,
        model,
        num_pages: int,
        page_size: int,
        vocab_size: int,
        graphs: bool,
        attention: str = "triton",
    ):
        super().__init__(model, num_pages, page_size)
        self.prefill = choose_prefill(
            attention,
            self.heads,
            model.config.num_key_value_heads,
            model.config.head_dim,
            self.k_cache.dtype,
            self.device,
            page_size,
        )
        self.vocab_size, self.graphs = vocab_size, graphs
        self.fused = type(model) is Qwen3 and (
            model.lm_head is None or not is_quantised(model.lm_head)
        )
        self._captured: dict[tuple[int, int], _Graph] = {}
        self._batch: tuple[list[Request], list[Request], np.ndarray] = _NOBODY

    def launch(self, plan: Plan, after: Drawn | None = None) -> Drawn:
        """Starts the step and the draws of plan.sampling, and does not wait for them. A request whose newest id is PENDING takes it from
        `after`, on the device."""
        requests = plan.sampling
        self._copy_pages(plan.copies)
        if self.graphs and not plan.prefills and not plan.forks and len(plan.decodes) <= SIZES[-1]:
            hidden, tokens, logprobs, place = self._replay(plan.decodes, after)
            index = torch.tensor([place[request] for request in requests], device=self.device)
            return Drawn(
                requests, *(x.index_select(0, index) for x in (hidden, tokens, logprobs))
            )  # copies: the next replay overwrites
        hidden, place = self._hidden(plan, after)
        place |= {request: place[leader] for request, leader in plan.forks}
        hidden = hidden.index_select(
            0, torch.tensor([place[request] for request in requests], device=self.device)
        )
        seeds, temperatures = np.array([_noise(request.params) for request in requests], np.int64).T
        positions = np.array([len(request.ids) for request in requests], np.int64)
        return Drawn(
            requests,
            hidden,
            *self._sample(
                hidden,
                *(self._tensor(np.ascontiguousarray(x)) for x in (seeds, positions, temperatures)),
            ),
        )

    def draws(
        self,
        drawn: Drawn,
        requests: list[Request],
        sampler: Sampler,
        allowed: Sequence[np.ndarray | None],
    ) -> list[Draw]:
        """Waits for the draws, and gives those of `requests`, with who is not plain drawn by the sampler. Errors as for Sampler."""
        row = {request: i for i, request in enumerate(drawn.requests)}
        tokens, logprobs = drawn.read()
        draws = [Draw(tokens[row[request]], logprobs[row[request]], []) for request in requests]
        special = [
            i
            for i, (request, ids) in enumerate(zip(requests, allowed))
            if ids is not None or not request.params.plain
        ]
        if special:
            chosen = [requests[i] for i in special]
            logits = self.model.logits(
                drawn.hidden[torch.tensor([row[request] for request in chosen], device=self.device)]
            )
            redrawn = sampler(
                logits,
                [r.params for r in chosen],
                [len(r.ids) for r in chosen],
                [allowed[i] for i in special],
            )
            for i, draw in zip(special, redrawn):
                draws[i] = draw
        if not all(math.isfinite(draw.logprob) for draw in draws):
            raise NotFiniteError
        return draws

    def sleep(self) -> None:
        self._captured = {}  # their memory is the pool's too
        super().sleep()

    # a step launch by launch

    def _hidden(self, plan: Plan, after: Drawn | None = None) -> tuple[Tensor, dict[Request, int]]:
        place: dict[Request, int] = {}
        decodes = chunks = None
        if not plan.decodes:
            self._batch = _NOBODY  # whoever comes back may have other pages
        else:
            order, decodes = self._decodes(plan.decodes, len(plan.decodes), after)
            place = {request: i for i, request in enumerate(order)}
        if plan.prefills:
            chunks = self._chunks(plan.prefills)
            ends = np.cumsum([count for _, _, count in plan.prefills]) - 1 + len(plan.decodes)
            place |= {request: int(end) for (request, _, _), end in zip(plan.prefills, ends)}
        return self._forward(decodes, chunks), place

    def _forward(self, decodes: _Decodes | None, chunks: _Chunks | None) -> Tensor:
        """The tokens of both through the model, their keys and values into the pages -> hidden states [T, hidden]."""
        model, count = self.model, 0
        inputs = []
        if decodes is not None:
            count = len(decodes.rows)
            inputs.append([decodes.rows[:, column] for column in (TOKEN, POSITION, SLOT)])
            tables, lengths = decodes.rows[:, TABLE:].int(), (decodes.rows[:, POSITION] + 1).int()
        if chunks is not None:
            inputs.append([chunks.tokens, chunks.positions, chunks.slots])
        tokens, positions, slots = (torch.cat(parts) for parts in zip(*inputs))
        angles = positions[:, None].float() * model.rope_frequencies(self.device)
        cos, sin = (
            angles.cos(),
            angles.sin(),
        )  # fp32 [T, D / 2]
        residual = model.embed_tokens(tokens)
        x = rms_norm(residual, model.layers[0].input_layernorm, model.config.rms_norm_eps)
        after = [block.input_layernorm for block in model.layers[1:]] + [model.norm]
        for layer, (block, norm) in enumerate(zip(model.layers, after)):
            caches, attention = (self.k_cache[layer], self.v_cache[layer]), block.self_attn
            q = norm_rope_store(
                attention.qkv_proj(x),
                attention.q_norm,
                attention.k_norm,
                cos,
                sin,
                *caches,
                slots,
                attention.eps,
            )
            out = torch.empty_like(q)
            if decodes is not None:
                decode_attention(
                    q[:count],
                    *caches,
                    tables,
                    lengths,
                    max_length=decodes.max_length,
                    groups=decodes.groups,
                    out=out[:count],
                )
            if chunks is not None and self.prefill[0] == "flash-attn":
                out[count:] = external_prefill(
                    q[count:], *caches, chunks.tables, chunks.starts, chunks.counts
                )
            elif chunks is not None:
                prefill_attention(q[count:], *caches, chunks.tables, chunks.work, out=out[count:])
            x, residual = add_rms_norm(
                attention.o_proj(out.flatten(1)),
                residual,
                block.post_attention_layernorm,
                block.eps,
            )
            x, residual = add_rms_norm(
                block.down_proj(swiglu(block.gate_up_proj(x))), residual, norm, block.eps
            )
        return x

    def _sample(
        self, hidden: Tensor, seeds: Tensor, positions: Tensor, temperatures: Tensor
    ) -> tuple[Tensor, Tensor]:
        """(tokens int64 [R], logprobs fp32 [R]); temperatures int64 [R] are the bits of fp32."""
        temperature = temperatures.int().view(torch.float32)
        if len(hidden) <= FUSED:
            return sample_linear(
                hidden,
                self.model.output_weight,
                seeds,
                positions,
                temperature,
                vocab=self.vocab_size,
            )
        return sample_logits(
            self.model.logits(hidden), seeds, positions, temperature, vocab=self.vocab_size
        )

    # inputs

    def _decodes(
        self, requests: list[Request], size: int, after: Drawn | None = None
    ) -> tuple[list[Request], _Decodes]:
        """The requests in the order of their rows, samples of one prompt together, and the rows, padded to `size` of them."""
        page_size = self.page_size
        if self._batch[0] != requests:
            self._batch = (list(requests), *self._group(requests))
        _, order, groups = self._batch
        rows = np.zeros(
            (size, TABLE + max(len(request.table.pages) for request in order)), np.int64
        )
        rows[len(order) :, [POSITION, SLOT]] = -1
        for row, request in zip(rows, order):
            pages, newest = request.table.pages, len(request.ids) - 1
            row[:TABLE] = (
                request.ids[-1],
                newest,
                pages[newest // page_size] * page_size + newest % page_size,
                *_noise(request.params),
            )
            row[TABLE : TABLE + len(pages)] = pages
        padded = np.zeros((size, 3), np.int32)
        padded[: len(groups)] = groups
        longest = int(rows[:, POSITION].max()) + 1
        on_device = self._tensor(rows)
        if after is not None:
            source = {request: i for i, request in enumerate(after.requests)}
            on_device[: len(order), TOKEN] = after.tokens.index_select(
                0, torch.tensor([source[request] for request in order], device=self.device)
            )
        return order, _Decodes(
            on_device, self._tensor(padded), LENGTHS[bisect.bisect_left(LENGTHS, longest)]
        )

    def _group(self, requests: list[Request]) -> tuple[list[Request], np.ndarray]:
        """Their order, and (first row, rows, shared keys) of those that read common pages together."""
        whole = [
            request.table.pages[: (len(request.ids) - 1) // self.page_size] for request in requests
        ]
        order: list[Request] = []
        groups = []
        for indices, pages in group_by_prefix(whole):
            shared = pages * self.page_size // SPLIT * SPLIT
            for start in range(0, len(indices), ROWS) if shared and len(indices) > 1 else ():
                groups.append((len(order) + start, min(ROWS, len(indices) - start), shared))
            order += [requests[i] for i in indices]
        return order, np.array(groups, np.int32).reshape(-1, 3)

    def _chunks(self, prefills: list[tuple[Request, int, int]]) -> _Chunks:
        size = self.page_size
        tables = np.zeros(
            (len(prefills), max(len(request.table.pages) for request, _, _ in prefills)), np.int32
        )
        tokens: list[int] = []
        positions, slots = [], []
        for table, (request, start, count) in zip(tables, prefills):
            pages = np.array(request.table.pages, np.int64)
            span = np.arange(start, start + count)
            tokens += request.ids[start : start + count]
            positions.append(span)
            slots.append(pages[span // size] * size + span % size)
            table[: len(pages)] = pages
        starts, counts = ([chunk[i] for chunk in prefills] for i in (1, 2))
        return _Chunks(
            torch.tensor(tokens, device=self.device),
            self._tensor(np.concatenate(positions)),
            self._tensor(np.concatenate(slots)),
            self._tensor(tables),
            self._tensor(prefill_work(starts, counts)),
            starts,
            counts,
        )

    # captured decode steps

    def _replay(
        self, requests: list[Request], after: Drawn | None
    ) -> tuple[Tensor, Tensor, Tensor, dict[Request, int]]:
        """Hidden states, tokens and log-probabilities of a padded batch, and each request's row. They stand until the next replay."""
        size = SIZES[bisect.bisect_left(SIZES, len(requests))]
        order, decodes = self._decodes(requests, size, after)
        key = (size, decodes.max_length)
        if key not in self._captured:
            self._captured[key] = _Graph(self, size, decodes.max_length)
        return *self._captured[key].replay(decodes), {request: i for i, request in enumerate(order)}

    def _decode_step(self, decodes: _Decodes) -> tuple[Tensor, Tensor, Tensor]:
        hidden, rows = self._forward(decodes, None), decodes.rows
        return hidden, *self._sample(
            hidden, rows[:, SEED].contiguous(), rows[:, POSITION] + 1, rows[:, TEMPERATURE]
        )


class _Graph:
    """A decode step of one size, captured: `replay` copies its inputs to where the graph reads them, and runs it. The graphs of a runner share
    one memory pool, since only one runs at a time; it lives as long as they do."""

    def __init__(self, runner: GpuRunner, size: int, max_length: int):
        pages = -(-min(max_length, runner.model.config.max_position_embeddings) // runner.page_size)
        rows = torch.zeros(size, TABLE + pages, dtype=torch.int64, device=runner.device)
        rows[:, [POSITION, SLOT]] = -1
        self.inputs = _Decodes(
            rows, torch.zeros(size, 3, dtype=torch.int32, device=runner.device), max_length
        )
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(
            stream
        ):  # compiles the kernels and lets the libraries take their work space
            for _ in range(2):
                runner._decode_step(self.inputs)
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        pool = next((captured.graph.pool() for captured in runner._captured.values()), None)
        with torch.cuda.graph(
            self.graph, pool=pool, capture_error_mode="thread_local"
        ):  # a trainer may be at work in another thread
            self.outputs = runner._decode_step(self.inputs)

    def replay(self, decodes: _Decodes) -> tuple[Tensor, Tensor, Tensor]:
        self.inputs.rows[:, : decodes.rows.shape[1]].copy_(decodes.rows)
        self.inputs.groups.copy_(decodes.groups)
        self.graph.replay()
        return self.outputs


def _noise(params: SamplingParams) -> tuple[int, int]:
    """The seed as int64, and the temperature's fp32 bits."""
    seed = (params.seed + 2**63) % 2**64 - 2**63
    return seed, int(np.float32(params.temperature).view(np.int32))
