"""Computes a scheduled batch on a GPU, with Triton kernels and captured CUDA graphs.

A step that only decodes copies its inputs to fixed tensors and replays a graph of the forward pass
and the output matrix. Each of a few batch sizes has a graph (`graph_sizes`: 36 sizes for 512
running requests), captured when the runner is made. A step with prefill launches the same
computation kernel by kernel. The tokens are then drawn by sampler.py, launch by launch. After the
start no step is captured or compiled. Only `read` and `wait` wait for the GPU.

The tokens that a step draws stay on the device too. The next step takes them from there, so that
the host may launch it before it has read them.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from kernels.common import SIZES
from kernels.paged_decode import DecodeWork, decode_scratch, rows_per_item
from kernels.paged_prefill import prefill_items
from nanorchestra.engine.sampler import Draws, Result, draw_tokens, to_device
from nanorchestra.engine.scheduler import Batch
from nanorchestra.engine.score import output_logits
from nanorchestra.engine.sequence import Request, SamplingParams
from nanorchestra.engine.step_inputs import StepInputs, StepMaker, empty_step
from nanorchestra.errors import require
from nanorchestra.model.attention import DecodeInputs, PagedAttention, PrefillInputs
from nanorchestra.model.qwen3 import Qwen3

MEMORY_SHARE = 0.9  # of the free memory that the KV pages take, if their number is not given


@dataclass
class Launched:
    """A step that the GPU computes, or is about to."""

    requests: list[Request]  # in the order of the rows of logits
    logits: Tensor  # fp32 [R, vocab]
    draws: Draws | None = None  # on the device
    read: Draws | None = None  # on the host, once `drawn` has come
    drawn: torch.cuda.Event | None = None
    errors: dict[Request, Exception] = field(default_factory=dict)  # of those without a draw


class ModelRunner:
    """Owns the KV pages: kv_cache [2, layers, num_pages, Hkv, page_size, D], keys then values.

    num_pages: as many as fit in MEMORY_SHARE of the free memory if None. A step k is `launch(k)`,
    `draw(k)`, `read(k)`, on the current stream; `draw(k)` comes before `launch(k + 1)`, which
    overwrites the logits.

    use_graphs: whether steps that only decode replay graphs. The graphs hold the addresses of the
    weights: they must be changed in place.
    """

    overlaps = True
    # Tokens of prefill beside decodes. 150 to 250 rows take the time of one, which is that of
    # reading the weights.
    mixed_prefill = 384

    def __init__(
        self,
        model: Qwen3,
        num_pages: int | None,
        page_size: int,
        vocab_size: int,
        max_batch_tokens: int,
        max_running: int,
        max_context: int,
    ):
        config, weight = model.config, model.embed_tokens.weight
        for name, value in (("head_dim", config.head_dim), ("page size", page_size)):
            right = f"the GPU's kernels take {', '.join(map(str, SIZES))}"
            require(value in SIZES, f"engine: {name} is {value}; {right}")

        self.model, self.device = model, weight.device
        self.vocab_size = vocab_size
        self.max_tokens, self.max_rows = max_batch_tokens, min(max_running, max_batch_tokens)
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads

        # What a graph reads and writes keeps its address from here on. So do the model's weights
        # and its rotary frequencies.
        self._frequencies = model.rope_frequencies(self.device)
        self._bounds, self._partial, self._lse = decode_scratch(
            self.max_rows, max_context, heads, config.head_dim, self.device
        )
        bounds, width = self._bounds.tolist(), -(-max_context // page_size)
        self._maker = StepMaker(page_size, width, bounds, rows_per_item(heads // kv_heads))
        most_items = self.max_rows * (len(bounds) - 1)
        self._inputs = empty_step(self.max_rows, most_items, width, self.device)
        self.logits = torch.zeros(self.max_rows, config.vocab_size, device=self.device)  # fp32

        self.graphs: dict[int, Graph] = {}  # by batch size
        self.use_graphs = weight.is_cuda
        self.capture_stream = None
        self._stream = None  # of the last launch
        self.kv_cache = self._zero_pages(1)
        if weight.is_cuda:
            torch.cuda.empty_cache()
            self.warm_up()  # compiles, and takes the memory of eager steps
        if num_pages is None:
            pages = MEMORY_SHARE * free_memory(self.device) / self.kv_cache.nbytes
            num_pages = max(1, int(pages))
        self.kv_cache = self._zero_pages(num_pages)
        if weight.is_cuda:
            self.capture_stream = torch.cuda.Stream()
            self.capture()  # each capture gives the memory that torch keeps back
            self.warm_up()

    def _zero_pages(self, count) -> Tensor:
        config, page_size = self.model.config, self._maker.page_size
        kv_heads, dim = config.num_key_value_heads, config.head_dim
        shape = (2, config.num_hidden_layers, count, kv_heads, page_size, dim)
        dtype = self.model.embed_tokens.weight.dtype
        return torch.zeros(shape, dtype=dtype, device=self.device)

    @property
    def num_pages(self) -> int:
        """Pages of the pool."""
        return self.kv_cache.shape[2]

    # Before the first request.

    def warm_up(self) -> None:
        """Runs steps and draws of all kinds, on page 0, of which nothing is kept."""
        for rows in graph_sizes(self.max_rows):
            self._forward(self._inputs.decodes(rows))
        longest = self._maker.table_width * self._maker.page_size
        # quantised.py has other tiles on both sides of 8, 16 and 64 rows.
        for tokens in (self.max_tokens, 65, 64, 17, 16, 9, 8, 1):
            counts, left = [], min(tokens, self.max_tokens)
            while left and len(counts) < self.max_rows:
                counts.append(min(left, longest))
                left -= counts[-1]
            self._forward(self._prefill_without_effect(counts))
        every = {"temperature": 0.5, "top_logprobs": 1}
        kinds = SamplingParams(), SamplingParams(top_k=20, **every), SamplingParams(top_p=0.9)
        params = [kinds[row % len(kinds)] for row in range(self.max_rows)]
        masks = [np.ones(self.vocab_size, bool)] + [None] * (self.max_rows - 1)
        draw_tokens(self.logits, self.vocab_size, params, range(self.max_rows), masks)

    def _prefill_without_effect(self, counts) -> StepInputs:
        chunks, tokens = len(counts), sum(counts)
        nothing = empty_step(tokens, 0, self._maker.table_width, self.device)
        items = prefill_items([0] * chunks, counts).to(self.device)
        return replace(
            nothing,
            context_lens=nothing.context_lens[:0],
            decode_tables=nothing.decode_tables[:0],
            prefill_tables=nothing.decode_tables[:chunks],
            prefill_items=items,
            last_tokens=nothing.tokens[:chunks],
        )

    def capture(self) -> None:
        """Captures the graphs, the largest first: the others then use its memory in the pool."""
        for rows in reversed(graph_sizes(self.max_rows)):
            self.graphs[rows] = Graph(self, rows)

    # A step.

    def launch(self, batch: Batch, after: Launched | None = None) -> Launched:
        """Starts a step, and does not wait for it (engine.py)."""
        if self.device.type == "cuda":
            self._stream = torch.cuda.current_stream()
        decodes = self._maker.in_order(batch.decodes)
        unread = 0 if after is None else 1
        if self.use_graphs and not batch.prefills:
            rows = min(size for size in self.graphs if size >= len(decodes))
            inputs = self._inputs.decodes(rows)
            inputs.copy_from(self._maker.make([], rows, unread))
        else:
            rows = 0
            inputs = self._maker.make(batch.prefills, len(decodes), unread).to(self.device)
        if after is not None:
            row_of = {request: row for row, request in enumerate(after.requests)}
            drawn = np.array([row_of[request] for request in decodes])
            newest = after.draws.tokens.index_select(0, to_device(drawn, self.device))
            inputs.tokens[: len(decodes)].copy_(newest)
        if rows:
            self.graphs[rows].replay()
        else:
            self._forward(inputs)
        requests = decodes + batch.ended_prefills
        return Launched(requests, self.logits[: len(requests)])

    def draw(self, launched: Launched, requests: list[Request]) -> None:
        """Draws the tokens of a step, and starts their copy to the host.

        A guide's mask follows from the tokens before, so call this after those are accepted. Rows
        of others than these requests, which have ended, are drawn too and ignored.
        """
        if not launched.requests:  # chunks in the middle of prompts
            return
        masks: list[np.ndarray | None] = []
        going_on = set(requests)
        for request in launched.requests:
            mask = None
            try:
                mask = request.allowed_ids(self.vocab_size) if request in going_on else None
            except Exception as error:
                launched.errors[request] = error
            masks.append(mask)
        launched.draws = draw_tokens(
            launched.logits,
            self.vocab_size,
            [request.params for request in launched.requests],
            [len(request.ids) for request in launched.requests],
            masks,
        )
        launched.read = launched.draws.to_host()
        if self.device.type == "cuda":
            launched.drawn = torch.cuda.Event()
            launched.drawn.record()

    def read(self, launched: Launched, requests: list[Request]) -> list[Result]:
        """Waits for the draws of the requests; one that cannot be drawn has its error."""
        if not requests:
            return []
        if launched.drawn is not None:
            launched.drawn.synchronize()
        draws = launched.read.listed([request.params for request in launched.requests])
        results = dict(zip(launched.requests, draws, strict=True)) | launched.errors
        return [results[request] for request in requests]

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
        decode = prefill = None
        rows, chunks = len(inputs.context_lens), len(inputs.prefill_tables)
        if rows:
            work = DecodeWork(
                items=inputs.decode_items,
                num_items=inputs.num_decode_items,
                bounds=self._bounds,
                partial=self._partial,
                lse=self._lse,
            )
            decode = DecodeInputs(rows, inputs.decode_tables, inputs.context_lens, work)
        if chunks:
            prefill = PrefillInputs(inputs.prefill_tables, inputs.prefill_items)
        attention = PagedAttention(*self.kv_cache, inputs.slots, decode, prefill)
        hidden = self.model(inputs.tokens, inputs.positions, attention)
        if chunks:
            hidden = hidden.index_select(0, inputs.last_tokens)
        if len(hidden):
            output_logits(self.model, hidden, out=self.logits[: len(hidden)])


class Graph:
    """A captured step that only decodes.

    The graphs share one memory pool, so they must replay on one stream, one after the other.
    """

    def __init__(self, runner: ModelRunner, rows: int):
        self._graph = torch.cuda.CUDAGraph()
        pool = next((other._graph.pool() for other in runner.graphs.values()), None)
        # thread_local: what another thread calls, a trainer's, does not break the capture
        with torch.cuda.graph(
            self._graph,
            pool=pool,
            stream=runner.capture_stream,
            capture_error_mode="thread_local",
        ):
            runner._forward(runner._inputs.decodes(rows))

    def replay(self) -> None:
        """Computes the step again."""
        self._graph.replay()


def graph_sizes(max_running: int) -> list[int]:
    """Returns the batch sizes that have a graph: 1, 2, 4, 8, multiples of 16, and max_running."""
    sizes = [1, 2, 4, 8, *range(16, max_running + 1, 16)]
    return sorted({*(size for size in sizes if size < max_running), max_running})


def free_memory(device: torch.device) -> int:
    """Returns the bytes of the device that no process holds."""
    return torch.cuda.mem_get_info(device)[0]
