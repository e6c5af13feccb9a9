"""Computes a scheduled batch on a GPU, with Triton kernels and captured CUDA graphs.

A step copies its inputs to fixed tensors and replays a graph of the forward pass and the output
matrix. Steps that only decode have a graph for each of a few numbers of rows (`decode_sizes`: 36
for 512 running requests), steps with prefill for each of a few numbers of tokens (`token_sizes`: 28
for 4,096 tokens). The numbers of decodes, chunks and items of work are data on the device. The
tokens are then drawn by sampler.py, launch by launch. After the start no step is captured or
compiled. Only `read`, and `wait` for a dropped step, wait for the GPU.

The tokens that a step draws stay on the device too. The next step takes them from there, so that
the host may launch it before it has read them.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from kernels.common import SIZES
from kernels.paged_decode import rows_per_item, split_bounds, split_scratch
from kernels.paged_prefill import LEAST_SPLIT, tokens_per_item
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
    first_tokens,
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
        self.max_running = max_running
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
        self._inputs = empty_inputs(max_batch_tokens, max_running, paging, self.device)
        sizes = [(rows, False) for rows in decode_sizes(max_running)]
        sizes += [(tokens, True) for tokens in token_sizes(max_batch_tokens)]
        # What a step of each size reads, by (tokens, whether there are chunks).
        self._steps = {size: first_tokens(self._inputs, *size) for size in sizes}
        self.logits = torch.zeros(max_running, config.vocab_size, device=self.device)  # fp32
        self.graphs: dict[tuple[int, bool], torch.cuda.CUDAGraph] = {}  # by the size of the step
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
            self._draw_all_kinds()  # torch.cuda.graph() has given back the memory that torch kept

    def _zero_pages(self, count) -> Tensor:
        dtype = self.model.embed_tokens.weight.dtype
        shape = kv_shape(self.model.config, count, self.page_size)
        return torch.zeros(shape, dtype=dtype, device=self.device)

    # Before the first request.

    def warm_up(self) -> None:
        """Runs steps of all sizes and draws of all kinds, of which nothing is kept.

        This compiles the kernels and copies the rotary frequencies to the device, which a capture
        may not. torch then keeps the memory that such steps take. Captures are in inference mode
        as these are (`_forward`): with gradients, model/ops.py takes other operations.
        """
        for inputs in self._steps.values():
            self._forward(inputs)
        self._draw_all_kinds()

    def _draw_all_kinds(self) -> None:
        every = {"temperature": 0.5, "top_logprobs": 1}
        kinds = SamplingParams(), SamplingParams(top_k=20, **every), SamplingParams(top_p=0.9)
        params = [kinds[row % len(kinds)] for row in range(self.max_running)]
        masks = [np.ones(self.num_drawable, bool)] + [None] * (self.max_running - 1)
        draw_tokens(self.logits, self.num_drawable, params, range(self.max_running), masks)

    def capture(self) -> None:
        """Captures a graph of each size, the largest first: the others then use its memory.

        They share one pool, so they must replay on one stream, one after the other.
        """
        stream, pool = torch.cuda.Stream() if self.on_gpu else None, None
        for size in sorted(self._steps, reverse=True):
            self.graphs[size] = self._captured(self._steps[size], stream, pool)
            pool = self.graphs[size].pool()

    def _captured(self, inputs, stream, pool) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        # thread_local: what another thread calls, a trainer's, does not break the capture
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            self._forward(inputs)
        return graph

    # A step.

    def launch(self, batch: Batch, previous: Launched | None = None) -> Launched:
        """Starts a step, and does not wait for it.

        Its logits are a part of `self.logits`. If the tokens of the step before are unread, the
        newest ids come from its draws, on the device.
        """
        if self.on_gpu:
            self._stream = torch.cuda.current_stream()
        size = self._size(batch)
        inputs = self._steps[size]
        row_of = {} if previous is None else {r: row for row, r in enumerate(previous.requests)}
        tokens, rows = len(inputs.tokens), len(inputs.decode_lens)
        decodes, arrays = make_inputs(
            batch.decodes, batch.prefills, tokens, rows, row_of, self._paging
        )
        copy_inputs(arrays, inputs)
        # Rows, and those of the step before, whose newest id is on the device alone.
        unread = [(row, row_of[r]) for row, r in enumerate(decodes) if r in row_of]
        if unread:
            rows_now, rows_before = to_device(np.array(unread).T.copy(), self.device)
            newest = previous.draws.tokens.index_select(0, rows_before)
            inputs.tokens.index_copy_(0, rows_now, newest.int())
        if size in self.graphs:
            self.graphs[size].replay()
        else:
            self._forward(inputs)
        requests: list[Request] = decodes + batch.ended_prefills
        return Launched(batch, requests, self.logits[: len(requests)])

    def _size(self, batch) -> tuple[int, bool]:
        """Returns the smallest size of a step that holds the batch."""
        has_chunks = bool(batch.prefills)
        tokens = len(batch.decodes) + batch.prefill_tokens
        return min(size for size in self._steps if size[0] >= tokens and size[1] == has_chunks)

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
        if inputs.has_chunks:
            hidden = hidden.index_select(0, inputs.last_tokens)
        self.model.wide_logits(hidden, out=self.logits[: len(hidden)])


def pages_that_fit(
    config: ModelConfig, page_size: int, dtype: torch.dtype, device: torch.device
) -> int:
    """Returns how many KV pages fit: MEMORY_SHARE of the free memory, over the bytes of a page.

    Call it after `warm_up`: torch then holds the memory of weights, inputs, logits, scratch and of
    what a step allocates, so none of it is free. The graphs take the memory of the largest step,
    which torch then gives back. The rest of the share is for what a graph has of its own, and for
    the fragments of torch's memory.
    """
    available = MEMORY_SHARE * free_memory(device)
    return max(1, int(available / page_bytes(config, page_size, dtype)))


def decode_sizes(max_running: int) -> list[int]:
    """Returns the numbers of rows that have a graph: 1, 2, 4, 8, multiples of 16, max_running."""
    sizes = [1, 2, 4, 8, *range(16, max_running + 1, 16)]
    return sorted({*(size for size in sizes if size < max_running), max_running})


def token_sizes(max_batch_tokens: int) -> list[int]:
    """Returns the numbers of tokens that have a graph with prefill, up to max_batch_tokens.

    They are multiples of 16 up to 64, and from each power of two to the next four steps: from 64 on
    padding is a quarter of the tokens at most. A step of up to 64 tokens of an 8B model reads
    weights for most of its time, and padding costs nothing.
    """
    sizes = [16]
    while sizes[-1] < max_batch_tokens:
        power_of_two = 1 << (sizes[-1].bit_length() - 1)
        sizes.append(sizes[-1] + max(16, power_of_two // 4))
    return [size for size in sizes if size < max_batch_tokens] + [max_batch_tokens]


def free_memory(device: torch.device) -> int:
    """Returns the bytes of the device that no process holds."""
    return torch.cuda.mem_get_info(device)[0]
