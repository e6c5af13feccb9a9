"""Computes a scheduled batch on a GPU, with Triton kernels and captured CUDA graphs.

A step that only decodes copies its inputs to fixed tensors and replays a graph of the forward pass
and the output matrix. Each of a few batch sizes has a graph (`graph_sizes`: 36 sizes for 512
running requests), captured when the runner is made. A step with prefill launches the same
computation kernel by kernel. The tokens are then drawn by sampler.py, launch by launch. After the
start no step is captured or compiled. Only `read`, and `wait` for a dropped step, wait for the GPU.

The tokens that a step draws stay on the device too. The next step takes them from there, so that
the host may launch it before it has read them.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from kernels.common import SIZES
from kernels.paged_decode import rows_per_item, split_bounds, split_scratch
from kernels.paged_prefill import LEAST_SPLIT, prefill_items, tokens_per_item
from kernels.quantised import ROWS
from nanorchestra.engine.paged_attention import PagedAttention
from nanorchestra.engine.runner import Launched, Runner, kv_shape, page_bytes
from nanorchestra.engine.sampler import draw_tokens
from nanorchestra.engine.scheduler import Batch
from nanorchestra.engine.sequence import Request, SamplingParams
from nanorchestra.engine.step_inputs import (
    SPLIT_TOKENS,
    Paging,
    StepInputs,
    copy_inputs,
    empty_inputs,
    first_decodes,
    inputs_to_device,
    make_inputs,
)
from nanorchestra.engine.transfers import to_device
from nanorchestra.errors import require
from nanorchestra.model.qwen3 import ModelConfig, Qwen3

MEMORY_SHARE = 0.9  # of the free memory that the KV pages take, if their number is not given
PAGE_SIZE = 64


class GpuRunner(Runner):
    """A step on a GPU. All steps are computed on the current stream, in the order of the calls.

    What a graph reads and writes keeps its address: KV pages, inputs, logits, scratch, and the
    model's weights, which must be changed in place.

    num_pages: `pages_that_fit` if None. page_size: PAGE_SIZE if None. max_running: requests that a
    step samples at most.

    The tests run this class on CPU tensors, in Triton's interpreter. `on_gpu` is then False: there
    are no graphs, streams and events, and nothing is warmed up.
    """

    overlaps = True
    # At 8B so many take the GPU less time than the host takes to launch the step (docs/kernels.md).
    mixed_prefill = 384

    def __init__(
        self,
        model: Qwen3,
        num_drawable: int,
        num_pages: int | None,
        page_size: int | None,
        max_batch_tokens: int,
        max_running: int,
        max_context: int,
    ):
        super().__init__(num_drawable, page_size or PAGE_SIZE)
        config, weight = model.config, model.embed_tokens.weight
        for name, value in (("head_dim", config.head_dim), ("page size", self.page_size)):
            right = f"the GPU's kernels take {', '.join(map(str, SIZES))}"
            require(value in SIZES, f"engine: {name} is {value}; {right}")

        self.model, self.device, self.on_gpu = model, weight.device, weight.is_cuda
        self.max_batch_tokens, self.max_running = max_batch_tokens, max_running
        heads, head_dim = config.num_attention_heads, config.head_dim
        group = heads // config.num_key_value_heads
        self._paging = paging = Paging(
            self.page_size,
            table_width=-(-max_context // self.page_size),
            decode_bounds=split_bounds(max_context),
            rows_per_item=rows_per_item(group),
            prefill_bounds=split_bounds(max_context, LEAST_SPLIT),
            tokens_per_item=tokens_per_item(group, head_dim, weight.dtype),
        )
        split_tokens = min(SPLIT_TOKENS, max_batch_tokens)
        uses = (max_running, paging.decode_bounds), (split_tokens, paging.prefill_bounds)
        self._scratches = split_scratch(uses, heads, head_dim, self.device)
        most_items = max_running * (len(paging.decode_bounds) - 1)
        self._inputs = empty_inputs(
            max_running, max_running, most_items, 0, self._paging.table_width, self.device
        )
        self.logits = torch.zeros(max_running, config.vocab_size, device=self.device)  # fp32
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}  # by number of rows
        self._stream: torch.cuda.Stream | None = None  # of the last launch

        self.kv_cache = self._zero_pages(1)
        if self.on_gpu:
            torch.cuda.empty_cache()
            self.warm_up()
        if num_pages is None:
            num_pages = pages_that_fit(config, self.page_size, weight.dtype, self.device)
        self.kv_cache = self._zero_pages(num_pages)
        if self.on_gpu:
            self.capture()
            self.warm_up()  # torch.cuda.graph() has given back the memory that torch kept

    def _zero_pages(self, count) -> Tensor:
        dtype = self.model.embed_tokens.weight.dtype
        shape = kv_shape(self.model.config, count, self.page_size)
        return torch.zeros(shape, dtype=dtype, device=self.device)

    # Before the first request.

    def warm_up(self) -> None:
        """Runs steps and draws of all kinds, on page 0, of which nothing is kept.

        This compiles the kernels and copies the rotary frequencies to the device, which a capture
        may not. torch then keeps the memory that such steps take. Captures are in inference mode
        as these are (`_forward`): with gradients, model/ops.py takes other operations.
        """
        for rows in graph_sizes(self.max_running):
            self._forward(first_decodes(self._inputs, rows))
        longest = self._paging.table_width * self.page_size
        # quantised.py has other tiles on both sides of 8 and 16 rows; above ROWS torch multiplies.
        for tokens in (self.max_batch_tokens, ROWS + 1, ROWS, 17, 16, 9, 8, 1):
            counts, left = [], min(tokens, self.max_batch_tokens)
            while left and len(counts) < self.max_running:
                counts.append(min(left, longest))
                left -= counts[-1]
            self._forward(self._prefill_without_effect(counts))
        every = {"temperature": 0.5, "top_logprobs": 1}
        kinds = SamplingParams(), SamplingParams(top_k=20, **every), SamplingParams(top_p=0.9)
        params = [kinds[row % len(kinds)] for row in range(self.max_running)]
        masks = [np.ones(self.num_drawable, bool)] + [None] * (self.max_running - 1)
        draw_tokens(self.logits, self.num_drawable, params, range(self.max_running), masks)

    def _prefill_without_effect(self, counts) -> StepInputs:
        chunks, width = len(counts), self._paging.table_width
        inputs = empty_inputs(sum(counts), 0, 0, chunks, width, self.device)
        bounds, most = self._paging.prefill_bounds, self._paging.tokens_per_item
        items = prefill_items([0] * chunks, counts, bounds, most, inputs.whole_items)
        return replace(
            inputs,
            prefill_items=to_device(items, self.device),
            num_prefill_items=to_device(np.array([len(items)], np.int32), self.device),
            prefill_lens=inputs.prefill_lens + 1,
        )

    def capture(self) -> None:
        """Captures a graph of each size, the largest first: the others then use its memory.

        They share one pool, so they must replay on one stream, one after the other.
        """
        stream, pool = torch.cuda.Stream() if self.on_gpu else None, None
        for rows in reversed(graph_sizes(self.max_running)):
            self.graphs[rows] = self._captured(rows, stream, pool)
            pool = self.graphs[rows].pool()

    def _captured(self, rows, stream, pool) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        # thread_local: what another thread calls, a trainer's, does not break the capture
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            self._forward(first_decodes(self._inputs, rows))
        return graph

    # A step.

    def launch(self, batch: Batch, previous: Launched | None = None) -> Launched:
        """Starts a step, and does not wait for it.

        Its logits are a part of `self.logits`. If the tokens of the step before are unread, the
        newest ids come from its draws, on the device.
        """
        if self.on_gpu:
            self._stream = torch.cuda.current_stream()
        graph_size = self._graph_size(batch)
        rows = graph_size or len(batch.decodes)
        unread = 0 if previous is None else 1  # ids of each decode
        decodes, arrays = make_inputs(batch.decodes, batch.prefills, rows, unread, self._paging)
        if graph_size:
            inputs = first_decodes(self._inputs, graph_size)
            copy_inputs(arrays, inputs)
        else:
            inputs = inputs_to_device(arrays, self.device)
        if previous is not None:
            row_of = {request: row for row, request in enumerate(previous.requests)}
            rows_before = np.array([row_of[request] for request in decodes])
            rows_before = to_device(rows_before, self.device)
            newest = previous.draws.tokens.index_select(0, rows_before)
            inputs.tokens[: len(decodes)].copy_(newest)
        if graph_size:
            self.graphs[graph_size].replay()
        else:
            self._forward(inputs)
        requests: list[Request] = decodes + batch.ended_prefills
        return Launched(batch, requests, self.logits[: len(requests)])

    def _graph_size(self, batch) -> int | None:
        """Returns the size of the smallest graph for the batch, None if it is run eagerly."""
        if batch.prefills:
            return None
        return min((size for size in self.graphs if size >= len(batch.decodes)), default=None)

    def wait(self) -> None:
        """Waits for everything that was launched."""
        if self._stream is not None:
            self._stream.synchronize()

    # The computation, which graphs capture.

    @torch.inference_mode()
    def _forward(self, inputs: StepInputs) -> None:
        """Computes a step into `kv_cache` and `logits`.

        Nothing here may depend on a value on the device: graphs capture it.
        """
        k_cache, v_cache = self.kv_cache
        attention = PagedAttention(k_cache, v_cache, inputs, *self._scratches)
        hidden = self.model(inputs.tokens, inputs.positions, attention)
        if inputs.num_chunks:
            hidden = hidden.index_select(0, inputs.last_tokens)
        if len(hidden):
            self.model.wide_logits(hidden, out=self.logits[: len(hidden)])


def pages_that_fit(
    config: ModelConfig, page_size: int, dtype: torch.dtype, device: torch.device
) -> int:
    """Returns how many KV pages fit: MEMORY_SHARE of the free memory, over the bytes of a page.

    Call it after `warm_up`: torch then holds the memory of weights, inputs, logits, scratch and of
    what a step allocates, so none of it is free. The rest of the share is for the graphs, which
    hold the intermediate results of one decode step, and for the fragments of torch's memory.
    """
    available = MEMORY_SHARE * free_memory(device)
    return max(1, int(available / page_bytes(config, page_size, dtype)))


def graph_sizes(max_running: int) -> list[int]:
    """Returns the batch sizes that have a graph: 1, 2, 4, 8, multiples of 16, and max_running."""
    sizes = [1, 2, 4, 8, *range(16, max_running + 1, 16)]
    return sorted({*(size for size in sizes if size < max_running), max_running})


def free_memory(device: torch.device) -> int:
    """Returns the bytes of the device that no process holds."""
    return torch.cuda.mem_get_info(device)[0]
