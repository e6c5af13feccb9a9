"""Computes a scheduled batch on a GPU, with Triton kernels and captured CUDA graphs.

The inputs of a step lie in one block of memory of fixed capacity (step_inputs.py), which one copy
brings to the GPU. A step that only decodes replays a graph: the forward pass, the output matrix,
top-k, top-p and the draw. Each of a few batch sizes has a graph (`graph_sizes`: 36 sizes for 512
running requests), captured when the runner is made. A step with prefill launches the same
computation kernel by kernel. After the start no step is captured or compiled. Only `read` and
`wait` wait for the GPU.

The tokens that a step draws stay on the device too (`Draws`). The next step takes its inputs from
there, so that the host may launch it before it has read them.
"""

from __future__ import annotations

import numpy as np
import torch

from kernels.common import SIZES
from kernels.paged_decode import DecodeWork, decode_scratch, rows_per_item, split_bounds
from kernels.paged_prefill import prefill_items
from kernels.sample import sample, truncation_floor
from nanorchestra.engine.sampler import Draw, Result
from nanorchestra.engine.scheduler import Batch
from nanorchestra.engine.score import output_logits
from nanorchestra.engine.sequence import (
    GREEDY_BELOW,
    MOST_TOP_LOGPROBS,
    Request,
    TopLogprobs,
)
from nanorchestra.engine.step_inputs import (
    Arena,
    Capacity,
    HostInputs,
    StepInputs,
    StepShape,
    write,
)
from nanorchestra.errors import require
from nanorchestra.model.attention import DecodeInputs, PagedAttention, PrefillInputs
from nanorchestra.model.qwen3 import ModelConfig, Qwen3

DRAWN_AGAIN = 32  # rows at a time: each takes several copies of its logits, 0.6 MB each


class Draws:
    """The newest draws, in one block: tokens int32 and log-probabilities fp32 [rows].

    Those on the device are read by the next step.
    """

    def __init__(self, rows: int, device: torch.device | str, pinned: bool = False):
        arena = Arena(2 * (4 * rows + 16), device, pinned)
        self.tokens = arena.tensor(rows, dtype=torch.int32)
        self.logprobs = arena.tensor(rows, dtype=torch.float32)
        self.memory = arena.memory


class Masks:
    """The rows that are drawn again, and a bit for each id that may be drawn there."""

    def __init__(
        self, rows: int, vocab_size: int, device: torch.device | str, pinned: bool = False
    ):
        width = -(-vocab_size // 8)  # bytes
        arena = Arena(4 * rows + 16 + rows * width, device, pinned)
        self.rows = arena.tensor(rows, dtype=torch.int32)
        self._bytes_before_bits = arena.used
        self.allowed_bits = arena.tensor(rows, width, dtype=torch.uint8)  # lowest bit first
        self.memory = arena.memory

    def bytes_of_rows(self, rows: int) -> int:
        """Returns the bytes from the beginning up to the bits of so many rows."""
        return self._bytes_before_bits + self.allowed_bits[:rows].numel()


class TopDraws:
    """The most probable ids of rows that are drawn again: [rows, MOST_TOP_LOGPROBS]."""

    def __init__(self, rows: int, pinned: bool):
        shape = (rows, MOST_TOP_LOGPROBS)
        self.ids = torch.empty(shape, dtype=torch.int64, pin_memory=pinned)
        self.logprobs = torch.empty(shape, dtype=torch.float32, pin_memory=pinned)


class Launched:
    """A step that the GPU computes, or is about to."""

    def __init__(self, sampled: list[Request]):
        self.row_of = {request: row for row, request in enumerate(sampled)}  # among the draws
        self.redrawn_row_of: dict[Request, int] = {}  # among those that are drawn again
        self.errors: dict[Request, Exception] = {}  # of requests that cannot be drawn


def bytes_beside_pages(
    config: ModelConfig, dtype: torch.dtype, tokens: int, rows: int, max_context: int
) -> int:
    """Returns about what a ModelRunner takes on the device beside the KV pages.

    Scratch of attention, logits, rows that are drawn again, and the activations of an eager step,
    of which those of a layer's MLP are the most.
    """
    splits = len(split_bounds(max_context)) - 1
    heads, head_dim = config.num_attention_heads, config.head_dim
    scratch = 4 * rows * splits * heads * (head_dim + 1)
    logits = 4 * config.vocab_size * (rows + 5 * min(rows, DRAWN_AGAIN))
    widths = 6 * config.hidden_size + 3 * config.intermediate_size + 4 * heads * head_dim
    return scratch + logits + tokens * widths * dtype.itemsize


class ModelRunner:
    """Owns the KV pages: kv_cache [2, layers, num_pages, Hkv, page_size, D], keys then values.

    A step k is `launch(k)`, `draw(k)`, `read(k)`, on the current stream.
    Device memory (inputs, logits, draws) is that of the last launch, so `draw(k)` comes before
    `launch(k + 1)`; `read(k)` may come after it. Host memory of draws and masks is written again by
    `draw(k + 1)`, so `read(k)` comes before that.

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
        num_pages: int,
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

        self.model = model
        self.device = weight.device
        self.vocab_size = vocab_size
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads

        # Memory on the device, which keeps its address from here on; so do the model's weights and
        # its rotary frequencies, which a graph reads too.
        self._frequencies = model.rope_frequencies(self.device)
        rows = min(max_running, max_batch_tokens)
        shape = (2, config.num_hidden_layers, num_pages, kv_heads, page_size, config.head_dim)
        self.kv_cache = torch.zeros(shape, dtype=weight.dtype, device=self.device)
        self._split_bounds, self._partial, self._lse = decode_scratch(
            rows, max_context, heads, config.head_dim, self.device
        )
        bounds = self._split_bounds.tolist()
        self.capacity = Capacity(
            tokens=max_batch_tokens,
            rows=rows,
            splits=len(bounds) - 1,
            table_width=-(-max_context // page_size),
        )
        self.inputs = StepInputs.allocate(self.capacity, self.device)
        self.logits = torch.zeros(rows, config.vocab_size, device=self.device)  # fp32
        self.draws = Draws(rows, self.device)
        self._masks = Masks(rows, vocab_size, self.device)

        # Memory of the host.
        on_gpu = weight.is_cuda
        per_item = rows_per_item(heads // kv_heads)
        self._host = HostInputs(self.capacity, page_size, bounds, per_item, pinned=on_gpu)
        self._host_draws = Draws(rows, "cpu", pinned=on_gpu)
        self._host_masks = Masks(rows, vocab_size, "cpu", pinned=on_gpu)
        self._host_top = TopDraws(rows, pinned=on_gpu)
        self._drawn = torch.cuda.Event() if on_gpu else None

        self.graphs: dict[int, Graph] = {}  # by batch size
        self.use_graphs = on_gpu
        self.capture_stream = None
        self._stream = None  # of the last launch
        if on_gpu:
            self.capture_stream = torch.cuda.Stream()
            self.warm_up()  # compiles
            self.capture()  # each capture gives the memory that torch keeps back
            self.warm_up()  # takes the memory of eager steps before the first request

    # Before the first request.

    def warm_up(self) -> None:
        """Runs steps of all kinds, so that every kernel is compiled and memory has been taken."""
        self._warm_up_prefill()
        self.inputs.context_lens.zero_()
        self.inputs.num_decode_items.zero_()
        for rows in graph_sizes(self.capacity.rows):
            self._compute(StepShape(decodes=rows, sampled=rows))
        self._host_masks.rows.zero_()
        for count in (1, 8, DRAWN_AGAIN):
            self._draw_again(slice(0, min(count, self.capacity.rows)))

    def _warm_up_prefill(self):
        """Prefills on page 0, of as many tokens as a step can have, and of few."""
        longest = self.capacity.table_width * self.kv_cache.shape[4]
        inputs = self.inputs
        inputs.slots.fill_(-1)
        inputs.block_tables.zero_()
        inputs.sampled_token.zero_()
        # quantised.py has other tiles on both sides of 8, 16 and 64 rows.
        for tokens in (self.capacity.tokens, 65, 64, 17, 16, 9, 8, 1):
            counts = []
            left = min(tokens, self.capacity.tokens)  # of a small capacity
            while left and len(counts) < self.capacity.rows:
                counts.append(min(left, longest))
                left -= counts[-1]
            items = prefill_items([0] * len(counts), counts)
            inputs.prefill_items[: len(items)].copy_(items)
            shape = StepShape(
                decodes=0,
                prefill_tokens=sum(counts),
                chunks=len(counts),
                prefill_items=len(items),
                sampled=len(counts),
            )
            self._compute(shape)

    def capture(self) -> None:
        """Captures the graphs, the largest first: the others then use its memory in the pool."""
        for rows in reversed(graph_sizes(self.capacity.rows)):
            self.graphs[rows] = Graph(self, rows)

    # A step.

    def launch(self, batch: Batch, after: Launched | None = None) -> Launched:
        """Starts a step, and does not wait for it (engine.py)."""
        if self.device.type == "cuda":
            self._stream = torch.cuda.current_stream()
        sizes = sorted(self.graphs) if self.use_graphs else ()
        step = self._host.fill(batch, None if after is None else after.row_of, sizes)
        used = step.inputs.bytes_of_rows(step.shape.decodes + step.shape.chunks)
        self.inputs.memory[:used].copy_(step.inputs.memory[:used], non_blocking=True)
        if self.use_graphs and not batch.prefills:
            self.graphs[step.shape.decodes].replay()
        else:
            self._compute(step.shape)
        return Launched(step.sampled)

    def draw(self, launched: Launched, requests: list[Request]) -> None:
        """Draws again the rows whose guide forbids ids or that report their most probable ids.

        Then starts the copy of all draws to the host. A guide's mask follows from the tokens
        before, so call this after those are accepted; and before the next launch, which overwrites
        the logits, and behind which the copy would wait for that step too.
        """
        redrawn = self._fill_masks(launched, requests)
        if redrawn:
            launched.redrawn_row_of = {request: row for row, request in enumerate(redrawn)}
            used = self._masks.bytes_of_rows(len(redrawn))
            masks, host = self._masks.memory[:used], self._host_masks.memory[:used]
            masks.copy_(host, non_blocking=True)
        for start in range(0, len(redrawn), DRAWN_AGAIN):
            self._draw_again(slice(start, min(start + DRAWN_AGAIN, len(redrawn))))
        self._host_draws.memory.copy_(self.draws.memory, non_blocking=True)
        if self._drawn is not None:
            self._drawn.record()

    def read(self, launched: Launched, requests: list[Request]) -> list[Result]:
        """Waits for the draws of the requests; one that cannot be drawn has its error."""
        if self._drawn is not None:
            self._drawn.synchronize()
        tokens = self._host_draws.tokens.tolist()
        logprobs = self._host_draws.logprobs.tolist()
        results = []
        for request in requests:
            if request in launched.errors:
                results.append(launched.errors[request])
                continue
            row = launched.row_of[request]
            top = self._top_logprobs(launched, request)
            results.append(Draw(tokens[row], logprobs[row], top))
        return results

    def wait(self) -> None:
        """Waits for everything that was launched: the host's memory may be written again."""
        if self._stream is not None:
            self._stream.synchronize()

    # The computation, which graphs capture.

    @torch.inference_mode()
    def _compute(self, shape: StepShape) -> None:
        """Computes a step: from `inputs` into `kv_cache`, `logits` and `draws`.

        Nothing here may depend on a value on the device: graphs capture it.
        """
        inputs, rows, sampled = self.inputs, shape.decodes, shape.sampled
        tokens = inputs.tokens[: shape.tokens]
        decode = prefill = None
        if rows:
            work = DecodeWork(
                items=inputs.decode_items,
                num_items=inputs.num_decode_items,
                bounds=self._split_bounds,
                partial=self._partial,
                lse=self._lse,
            )
            decode = DecodeInputs(
                rows, inputs.block_tables[:rows], inputs.context_lens[:rows], work
            )
        if shape.prefill_tokens:
            prefill = PrefillInputs(
                inputs.block_tables[rows : rows + shape.chunks],
                inputs.prefill_items[: shape.prefill_items],
            )
        else:  # the newest ids may be known to the device alone
            drawn_row = inputs.drawn_row[:rows]
            drawn = self.draws.tokens.index_select(0, drawn_row.clamp(min=0))
            tokens = torch.where(drawn_row >= 0, drawn, tokens)
        attention = PagedAttention(*self.kv_cache, inputs.slots[: shape.tokens], decode, prefill)
        hidden = self.model(tokens, inputs.positions[: shape.tokens], attention)
        if not sampled:
            return
        if shape.prefill_tokens:
            hidden = hidden.index_select(0, inputs.sampled_token[:sampled])
        logits = self.logits[:sampled]
        output_logits(self.model, hidden, out=logits)
        drawn, logprobs = sample(
            logits,
            inputs.uniform[:sampled],
            inputs.temperature[:sampled],
            inputs.top_k[:sampled],
            inputs.top_p[:sampled],
            self.vocab_size,
        )
        self.draws.tokens[:sampled].copy_(drawn)
        self.draws.logprobs[:sampled].copy_(logprobs)

    # Rows that are drawn again: their guide forbids ids, or they report the most probable ones.

    def _fill_masks(self, launched, requests) -> list[Request]:
        """Fills the host's masks; returns the requests to be drawn again, in the order of masks.

        Requests that report their most probable ids are among them, since only this path has them.
        """
        redrawn, bits = [], []
        for request in requests:
            try:
                allowed = request.allowed_ids(self.vocab_size)
            except Exception as error:
                launched.errors[request] = error
                continue
            if allowed is not None:
                bits.append(np.packbits(allowed, bitorder="little"))
                redrawn.append(request)
            elif request.params.top_logprobs:
                bits.append(np.full(self._masks.allowed_bits.shape[1], 255, np.uint8))
                redrawn.append(request)
        write(self._host_masks.rows, [launched.row_of[request] for request in redrawn])
        write(self._host_masks.allowed_bits, bits)
        return redrawn

    @torch.inference_mode()
    def _draw_again(self, part: slice) -> None:
        """Draws the rows of these masks again, at most DRAWN_AGAIN, over the step's own draws.

        The noise is the step's, so a row whose mask allows what it has drawn draws it again. Copies
        their most probable ids to the host, whether they are asked for or not.
        """
        rows = self._masks.rows[part].long()
        shifts = torch.arange(8, dtype=torch.uint8, device=self.device)
        allowed = (self._masks.allowed_bits[part, :, None] >> shifts) & 1  # [rows, bytes, 8]
        allowed = allowed.flatten(1)[:, : self.vocab_size].bool()
        # As wide as the step's own logits: the kernels are compiled for their stride.
        logits = self.logits.index_select(0, rows)
        logits[:, : self.vocab_size].masked_fill_(~allowed, -torch.inf)
        inputs = self.inputs
        uniform = inputs.uniform.index_select(0, rows)
        temperature = inputs.temperature.index_select(0, rows)
        top_k = inputs.top_k.index_select(0, rows)
        top_p = inputs.top_p.index_select(0, rows)
        tokens, logprobs = sample(logits, uniform, temperature, top_k, top_p, self.vocab_size)
        self.draws.tokens.index_copy_(0, rows, tokens.int())
        self.draws.logprobs.index_copy_(0, rows, logprobs)

        floor = truncation_floor(logits, temperature, top_k, top_p, self.vocab_size)[:, None]
        logits = logits[:, : self.vocab_size]
        kept = logits.masked_fill(logits < floor, -torch.inf)
        scale = torch.where(temperature < GREEDY_BELOW, 1.0, temperature)[:, None]
        most = min(MOST_TOP_LOGPROBS, self.vocab_size)
        values, ids = (kept / scale).log_softmax(1).topk(most)  # [rows, most]
        self._host_top.logprobs[part, :most].copy_(values, non_blocking=True)
        self._host_top.ids[part, :most].copy_(ids, non_blocking=True)

    def _top_logprobs(self, launched, request) -> TopLogprobs:
        count = min(request.params.top_logprobs, self.vocab_size)
        if not count:
            return []
        row = launched.redrawn_row_of[request]
        ids = self._host_top.ids[row, :count].tolist()
        logprobs = self._host_top.logprobs[row, :count].tolist()
        return list(zip(ids, logprobs, strict=True))


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
            runner._compute(StepShape(decodes=rows, sampled=rows))

    def replay(self) -> None:
        """Computes the step again."""
        self._graph.replay()


def graph_sizes(max_running: int) -> list[int]:
    """Returns the batch sizes that have a graph: 1, 2, 4, 8, multiples of 16, and max_running."""
    sizes = [1, 2, 4, 8, *range(16, max_running + 1, 16)]
    return sorted({*(size for size in sizes if size < max_running), max_running})


def free_memory(device: torch.device) -> int:
    """Returns the bytes that the device has left. Gives torch's cached memory back for it."""
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]
