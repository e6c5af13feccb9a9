"""Computes a scheduled batch on a GPU, with Triton kernels and captured CUDA graphs.

All inputs of a step lie in one block of memory of fixed capacity (`StepInputs`), which the host
fills in pinned memory and copies at once. A step that only decodes replays a graph, which holds the
forward pass, the output matrix, top-k, top-p and the draw; there is one graph for each of about 35
batch sizes, captured when the runner is made. A step with prefill launches the same computation
kernel by kernel. After the start nothing is captured or compiled, and no call waits for the GPU but
`read`.

The tokens that a step draws stay on the device too (`Draws`). The next step takes its inputs from
there, so that the host may launch it before it has read them.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from os.path import commonprefix  # of any lists, not of paths alone

import numpy as np
import torch
from torch import Tensor

from kernels.common import FP8, SIZES
from kernels.paged_decode import (
    DecodeWork,
    SharedPrefix,
    decode_items,
    decode_scratch,
    rows_per_item,
)
from kernels.paged_prefill import ITEM_TOKENS, prefill_items
from kernels.sample import sample, truncation_floor
from nanorchestra.engine.cpu_runner import Result
from nanorchestra.engine.sampler import Draw, uniforms
from nanorchestra.engine.scheduler import Batch, MixedPrefill
from nanorchestra.engine.score import output_logits
from nanorchestra.engine.sequence import GREEDY_BELOW, Request
from nanorchestra.errors import require
from nanorchestra.model.attention import DecodeInputs, PagedAttention, PrefillInputs
from nanorchestra.model.qwen3 import Qwen3

MIXED_PREFILL_TOKENS = 384  # a GPU multiplies 150 to 250 rows while it reads the weights once


def graph_sizes(max_running: int) -> list[int]:
    """Returns the batch sizes that have a graph: 1, 2, 4, 8, then every 16th up to max_running."""
    sizes = [1, 2, 4, 8, *range(16, max_running + 1, 16)]
    return sorted({*(size for size in sizes if size < max_running), max_running})


class Arena:
    """One block of memory that is handed out as tensors, each at a multiple of 16 bytes.

    Triton compiles a kernel for pointers that are multiples of 16, and anew for others.
    """

    def __init__(self, num_bytes: int, device: torch.device | str, pinned: bool = False):
        self.memory = torch.zeros(num_bytes, dtype=torch.uint8, device=device, pin_memory=pinned)
        self.used = 0

    def tensor(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Returns the next tensor of this shape."""
        num_bytes = prod(shape) * dtype.itemsize
        part = self.memory[self.used : self.used + num_bytes]
        self.used += -(-num_bytes // 16) * 16
        return part.view(dtype).view(shape)


@dataclass(frozen=True)
class Capacity:
    """The largest step."""

    tokens: int  # of one step
    rows: int  # decodes and chunks
    splits: int  # parts that the keys of the longest row are cut into (kernels/paged_decode.py)
    table_width: int  # pages of the longest row


class StepInputs:
    """The inputs of a step, at their maximum capacity. Decodes come first, then chunks.

    Padding up to the size of a graph has no effect: its slots are -1, its rows see no keys.
    """

    def __init__(self, capacity: Capacity, arena: Arena):
        tokens, rows = capacity.tokens, capacity.rows
        int32, float32, float64 = torch.int32, torch.float32, torch.float64
        # Of every token.
        self.tokens = arena.tensor(tokens, dtype=int32)
        self.positions = arena.tensor(tokens, dtype=int32)
        self.slots = arena.tensor(tokens, dtype=int32)  # page * page_size + offset of its KV
        # Row of the token among the last step's draws, or -1 if `tokens` has it already.
        self.drawn_row = arena.tensor(rows, dtype=int32)
        # Of every row that is sampled.
        self.sampled_token = arena.tensor(rows, dtype=int32)  # index of its last token in `tokens`
        self.uniform = arena.tensor(rows, dtype=float64)  # noise of the draw
        self.temperature = arena.tensor(rows, dtype=float32)
        self.top_p = arena.tensor(rows, dtype=float32)
        self.top_k = arena.tensor(rows, dtype=int32)
        # Of attention: decodes.
        self.context_lens = arena.tensor(rows, dtype=int32)
        self.num_decode_items = arena.tensor(1, dtype=int32)
        self.decode_items = arena.tensor(rows * capacity.splits, 3, dtype=int32)
        # Of attention: chunks, in tiles of ITEM_TOKENS tokens.
        tiles = -(-tokens // ITEM_TOKENS) + rows
        self.prefill_items = arena.tensor(tiles, 4, dtype=int32)
        # Last, so that a copy can end after the rows that are there.
        self._bytes_before_tables = arena.used
        self.block_tables = arena.tensor(rows, capacity.table_width, dtype=int32)
        self.memory = arena.memory

    @staticmethod
    def allocate(
        capacity: Capacity, device: torch.device | str, pinned: bool = False
    ) -> StepInputs:
        """Returns inputs in memory of just their size, which a trial without memory tells."""
        trial = Arena(1 << 40, "meta")
        StepInputs(capacity, trial)
        return StepInputs(capacity, Arena(trial.used, device, pinned))

    def bytes_of_rows(self, rows: int) -> int:
        """Returns the bytes from the beginning up to the block tables of so many rows."""
        return self._bytes_before_tables + self.block_tables[:rows].numel() * torch.int32.itemsize


class Draws:
    """What a step has drawn, in one block: tokens int32 and log-probabilities fp32 [rows]."""

    def __init__(self, rows: int, device: torch.device | str, pinned: bool = False):
        arena = Arena(2 * (4 * rows + 16), device, pinned)
        self.tokens = arena.tensor(rows, dtype=torch.int32)
        self.logprobs = arena.tensor(rows, dtype=torch.float32)
        self.memory = arena.memory


class Masks:
    """The rows that the host has to mask, and a bit for each id that may be drawn there."""

    def __init__(self, rows: int, vocab_size: int, device: torch.device | str, pinned=False):
        width = -(-vocab_size // 8)  # bytes
        arena = Arena(4 * rows + 16 + rows * width, device, pinned)
        self.rows = arena.tensor(rows, dtype=torch.int32)
        self._bytes_before_bits = arena.used
        self.allowed_bits = arena.tensor(rows, width, dtype=torch.uint8)  # lowest bit first
        self.memory = arena.memory

    def bytes_of_rows(self, rows: int) -> int:
        """Returns the bytes from the beginning up to the bits of so many rows."""
        return self._bytes_before_bits + self.allowed_bits[:rows].numel()


@dataclass(frozen=True)
class StepShape:
    """The counts that the launches of a step depend on. A graph has `decodes` alone."""

    decodes: int
    prefill_tokens: int = 0
    chunks: int = 0
    prefill_items: int = 0
    sampled: int = 0

    @property
    def tokens(self) -> int:
        """Number of tokens."""
        return self.decodes + self.prefill_tokens


class Launched:
    """A step that the GPU computes or is about to."""

    def __init__(self, row_of: dict[Request, int], logits: Tensor | None):
        self.row_of = row_of  # the row of each sampled request among the draws
        self.logits = logits  # fp32 [rows, vocab], until the next launch
        self.errors: dict[Request, Exception] = {}  # of requests that cannot be drawn
        self.top: dict[Request, int] = {}  # the row of a request in:
        self.top_values: Tensor | None = None  # fp32 [n, k], on their way to the host
        self.top_ids: Tensor | None = None  # int64 [n, k]


class ModelRunner:
    """Owns the KV pages: kv_cache [2, layers, num_pages, Hkv, page_size, D], keys then values.

    `launch` starts a step, `draw` finishes its draws once the tokens before it are known to the
    host, and `read` waits for them. A step may be launched when the one before it has been drawn;
    it need not have been read.

    use_graphs: whether decode-only steps replay graphs. overlaps: whether the engine may launch a
    step before it reads the one before.
    """

    overlaps = True

    def __init__(
        self,
        model: Qwen3,
        num_pages: int,
        page_size: int,
        vocab_size: int,
        kv_dtype: torch.dtype,
        max_batch_tokens: int,
        max_running: int,
        max_context: int,
    ):
        config, weight = model.config, model.embed_tokens.weight
        for name, value in (("head_dim", config.head_dim), ("page size", page_size)):
            right = f"the GPU's kernels take {', '.join(map(str, SIZES))}"
            require(value in SIZES, f"engine: {name} is {value}; {right}")
        allowed = kv_dtypes(weight)
        names = " or ".join(map(str, allowed))
        require(kv_dtype in allowed, f"engine: kv_dtype is {kv_dtype}; expected {names} here")

        self.model = model
        self.device = weight.device
        self.page_size = page_size
        self.vocab_size = vocab_size
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        self._rows_per_item = rows_per_item(heads // kv_heads)

        # A token costs its products with all matrices, and 4 FLOPs an element of q for each key.
        q, kv = heads * config.head_dim, kv_heads * config.head_dim
        matrices = config.hidden_size * (2 * q + 2 * kv + 3 * config.intermediate_size)
        self.mixed_prefill = MixedPrefill(MIXED_PREFILL_TOKENS, matrices / (2 * q))

        # Memory that keeps its address from here on.
        on_gpu = weight.is_cuda
        shape = (2, config.num_hidden_layers, num_pages, kv_heads, page_size, config.head_dim)
        self.kv_cache = torch.zeros(shape, dtype=kv_dtype, device=self.device)
        rows = min(max_running, max_batch_tokens)
        bounds, partial, lse = decode_scratch(
            rows, max_context, heads, config.head_dim, self.device
        )
        self._bounds = bounds.tolist()
        self._split_bounds, self._partial, self._lse = bounds, partial, lse
        self.capacity = Capacity(
            tokens=max_batch_tokens,
            rows=rows,
            splits=len(self._bounds) - 1,
            table_width=-(-max_context // page_size),
        )
        self.inputs = StepInputs.allocate(self.capacity, self.device)
        self.draws = Draws(rows, self.device)
        self._masks = Masks(rows, vocab_size, self.device)
        # Two host blocks in turn: the copy of one may wait on the GPU while the next is filled.
        self._host_inputs = [
            StepInputs.allocate(self.capacity, "cpu", pinned=on_gpu) for _ in range(2)
        ]
        self._host_draws = Draws(rows, "cpu", pinned=on_gpu)
        self._host_masks = Masks(rows, vocab_size, "cpu", pinned=on_gpu)
        self._host_tables: list[list[list[int]]] = [[[]] * rows for _ in range(2)]
        self._grouped: tuple[list[Request], list[Request], list[SharedPrefix]] = ([], [], [])
        self._drawn = torch.cuda.Event() if on_gpu else None

        self.graphs: dict[int, Graph] = {}
        self.use_graphs = on_gpu
        if on_gpu:
            with torch.cuda.device(self.device):
                self.warm_up()
                self.capture()
                self.warm_up()  # takes the memory again that capturing has given back

    # Before the first request.

    def warm_up(self) -> None:
        """Runs steps of all kinds, so that every kernel is compiled and memory has been taken."""
        capacity = self.capacity
        longest = capacity.table_width * self.page_size
        for tokens in (capacity.tokens, 65, 64, 17, 16, 1):  # bounds of tiles in quantised.py
            counts = []
            left = min(tokens, capacity.tokens)
            while left and len(counts) < capacity.rows:
                counts.append(min(left, longest))
                left -= counts[-1]
            items = prefill_items([0] * len(counts), counts)
            self.inputs.slots.fill_(-1)
            self.inputs.block_tables.zero_()
            self.inputs.prefill_items[: len(items)].copy_(items)
            shape = StepShape(
                decodes=0,
                prefill_tokens=sum(counts),
                chunks=len(counts),
                prefill_items=len(items),
                sampled=len(counts),
            )
            self.inputs.sampled_token.zero_()
            self._compute(shape)
        self.inputs.context_lens.zero_()
        self.inputs.num_decode_items.zero_()
        for rows in graph_sizes(capacity.rows):
            self._compute(StepShape(decodes=rows, sampled=rows))

    def capture(self) -> None:
        """Captures the graphs, the largest first: the others then find its memory."""
        for rows in reversed(graph_sizes(self.capacity.rows)):
            self.graphs[rows] = Graph(self, rows)

    # A step.

    def launch(self, batch: Batch, after: Launched | None = None) -> Launched:
        """Starts a step, and does not wait for it.

        after: the step before, if the host has not read its draws yet. They are the newest ids of
        the batch's requests, and are taken on the device.
        """
        with self._on_device():
            for copy in batch.page_copies:
                self.kv_cache[:, :, copy.target].copy_(self.kv_cache[:, :, copy.source])
            self._host_inputs.reverse()
            self._host_tables.reverse()
            decodes, shared = self._by_prefix(batch.decodes)
            sampled = decodes + batch.sampled[len(decodes) :]
            host, shape = self._fill(batch, decodes, shared, sampled, after)
            used = host.bytes_of_rows(shape.decodes + shape.chunks)
            self.inputs.memory[:used].copy_(host.memory[:used], non_blocking=True)
            graph = self.graphs.get(shape.decodes) if not shape.prefill_tokens else None
            if graph is not None and self.use_graphs:
                logits = graph.replay()
            else:
                logits = self._compute(shape)
            return Launched({request: row for row, request in enumerate(sampled)}, logits)

    def draw(self, launched: Launched, requests: list[Request]) -> None:
        """Finishes the draws of a step: rows whose guide forbids ids are drawn again.

        The masks need all tokens before, so the host must have read the step before this one. Then
        starts the copy of the draws to the host. It stands before the next launch, behind which it
        would wait for that step too.
        """
        with self._on_device():
            self._draw_special(launched, requests)
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
            top = _top_logprobs(launched, request)
            results.append(Draw(tokens[row], logprobs[row], top))
        return results

    def clear_pages(self, pages: list[int] | None = None) -> None:
        """Zeroes pages, by default all: attention may read what lies beyond a sequence's end."""
        if pages is None:
            self.kv_cache.zero_()
            return
        for page in pages:
            self.kv_cache[:, :, page].zero_()

    # The inputs of a step, on the host.

    def _fill(self, batch, decodes, shared, sampled, after) -> tuple[StepInputs, StepShape]:
        """Fills a host block with the inputs of a step, padded to the size of a graph.

        decodes: those of the batch in the order of their rows, of which `shared` have prefixes in
        common. sampled: the requests in the order of their draws.
        """
        host, host_tables = self._host_inputs[0], self._host_tables[0]
        rows = len(decodes)
        if self.use_graphs and not batch.prefills:
            rows = min(size for size in self.graphs if size >= rows)
        tokens, positions, slots, drawn_rows, context_lens = [], [], [], [], []
        for request in decodes:
            ids, pages = request.ids, request.sequence.block_table
            position = len(ids) - 1 if after is None else len(ids)
            tokens.append(ids[-1])
            positions.append(position)
            slots.append(self._slot(pages, position))
            drawn_rows.append(-1 if after is None else after.row_of[request])
            context_lens.append(position + 1)
        items = decode_items(context_lens, shared, self._bounds, self._rows_per_item)
        for _ in range(rows - len(decodes)):
            tokens.append(0)
            positions.append(0)
            slots.append(-1)
            drawn_rows.append(-1)
            context_lens.append(0)
        for chunk in batch.prefills:
            pages = chunk.request.sequence.block_table
            tokens += chunk.request.ids[chunk.start : chunk.end]
            positions += range(chunk.start, chunk.end)
            slots += [self._slot(pages, position) for position in range(chunk.start, chunk.end)]
        _write(host.tokens, tokens)
        _write(host.positions, positions)
        _write(host.slots, slots)
        _write(host.drawn_row, drawn_rows)
        _write(host.context_lens, context_lens)
        _write(host.num_decode_items, [len(items)])
        _write(host.decode_items, items)

        tables = [request.sequence.block_table for request in decodes]
        tables += [[]] * (rows - len(decodes))
        tables += [chunk.request.sequence.block_table for chunk in batch.prefills]
        block_tables = host.block_tables.numpy()
        for row, pages in enumerate(tables):
            if pages != host_tables[row]:  # most are as they were
                block_tables[row, : len(pages)] = pages
                host_tables[row] = list(pages)

        tiles = prefill_items(
            [chunk.start for chunk in batch.prefills], [chunk.count for chunk in batch.prefills]
        )
        # A tile names its block table and its first token, counted from the first chunk on.
        _write(host.prefill_items, tiles.numpy())

        last_tokens = list(range(len(decodes)))
        end = rows
        for chunk in batch.prefills:
            end += chunk.count
            if chunk.is_last:
                last_tokens.append(end - 1)
        params = [request.params for request in sampled]
        unread = 0 if after is None else 1
        noise = uniforms(
            [p.seed for p in params], [len(request.ids) + unread for request in sampled]
        )
        # Padding is drawn too, the cheapest way: greedily.
        padding = 0 if batch.prefills else rows - len(sampled)
        _write(host.sampled_token, last_tokens)
        _write(host.uniform, [*noise, *[0.0] * padding])
        _write(host.temperature, [p.temperature for p in params] + [0.0] * padding)
        _write(host.top_p, [p.top_p for p in params] + [1.0] * padding)
        _write(host.top_k, [p.top_k for p in params] + [0] * padding)
        shape = StepShape(
            decodes=rows,
            prefill_tokens=batch.prefill_tokens,
            chunks=len(batch.prefills),
            prefill_items=len(tiles),
            sampled=len(sampled) + padding,
        )
        return host, shape

    def _slot(self, pages, position) -> int:
        return pages[position // self.page_size] * self.page_size + position % self.page_size

    def _by_prefix(self, decodes) -> tuple[list[Request], list[SharedPrefix]]:
        """Orders the decodes by the pages that they share, and says which rows share what."""
        if self._grouped[0] != decodes:
            full_pages = []
            for request in decodes:
                count = (len(request.ids) - 1) // self.page_size
                full_pages.append(request.sequence.block_table[:count])
            ordered, shared = [], []
            for indices, pages in group_by_prefix(full_pages):
                if pages and len(indices) > 1:
                    keys = pages * self.page_size
                    shared.append(SharedPrefix(len(ordered), len(indices), keys))
                ordered += [decodes[i] for i in indices]
            self._grouped = (list(decodes), ordered, shared)
        return self._grouped[1:]

    # The computation, which graphs capture.

    @torch.inference_mode()
    def _compute(self, shape: StepShape) -> Tensor | None:
        """Computes a step from `inputs` into `draws`; returns the logits of the sampled rows."""
        inputs, rows = self.inputs, shape.decodes
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
        sampled = shape.sampled
        if not sampled:
            return None
        if shape.prefill_tokens:
            hidden = hidden.index_select(0, inputs.sampled_token[:sampled])
        logits = output_logits(self.model, hidden)
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
        return logits

    @torch.inference_mode()
    def _draw_special(self, launched, requests):
        """Draws the rows whose guide forbids ids again, from the step's logits.

        So are those that report their most probable ids, for these ids' sake.
        """
        special, bits = [], []
        for request in requests:
            try:
                allowed = request.allowed_ids()
            except Exception as error:
                launched.errors[request] = error
                continue
            if allowed is not None:
                bits.append(np.packbits(allowed[: self.vocab_size], bitorder="little"))
                special.append(request)
            elif request.params.top_logprobs:
                bits.append(np.full(self._masks.allowed_bits.shape[1], 255, np.uint8))
                special.append(request)
        if not special:
            return
        count = len(special)
        _write(self._host_masks.rows, [launched.row_of[request] for request in special])
        _write(self._host_masks.allowed_bits, np.stack(bits))
        used = self._masks.bytes_of_rows(count)
        self._masks.memory[:used].copy_(self._host_masks.memory[:used], non_blocking=True)

        rows = self._masks.rows[:count].long()
        shifts = torch.arange(8, dtype=torch.uint8, device=self.device)
        allowed = self._masks.allowed_bits[:count, :, None] >> shifts & 1  # [n, bytes, 8]
        allowed = allowed.flatten(1)[:, : self.vocab_size].bool()
        logits = launched.logits.index_select(0, rows)[:, : self.vocab_size]
        logits = logits.masked_fill(~allowed, -torch.inf)
        inputs = self.inputs
        uniform, temperature, top_k, top_p = (
            values.index_select(0, rows)
            for values in (inputs.uniform, inputs.temperature, inputs.top_k, inputs.top_p)
        )
        tokens, logprobs = sample(logits, uniform, temperature, top_k, top_p, self.vocab_size)
        self.draws.tokens.index_copy_(0, rows, tokens.int())
        self.draws.logprobs.index_copy_(0, rows, logprobs)

        most = max(request.params.top_logprobs for request in special)
        if most:
            floor = truncation_floor(logits, temperature, top_k, top_p, self.vocab_size)
            scale = torch.where(temperature < GREEDY_BELOW, 1.0, temperature)[:, None]
            kept = logits.masked_fill(logits < floor[:, None], -torch.inf)
            values, ids = (kept / scale).log_softmax(1).topk(most)
            launched.top = {request: row for row, request in enumerate(special)}
            launched.top_values = self._to_host(values)
            launched.top_ids = self._to_host(ids)

    def _to_host(self, values) -> Tensor:
        host = torch.empty(values.shape, dtype=values.dtype, pin_memory=values.is_cuda)
        return host.copy_(values, non_blocking=True)

    def _on_device(self):
        """The runner's GPU is current: events, streams and kernels belong to the current one."""
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()


class Graph:
    """A captured decode-only step. The graphs share one memory pool: one runs at a time."""

    def __init__(self, runner: ModelRunner, rows: int):
        self._graph = torch.cuda.CUDAGraph()
        pool = next((other._graph.pool() for other in runner.graphs.values()), None)
        # thread_local: a trainer may be at work in another thread
        with torch.cuda.graph(self._graph, pool=pool, capture_error_mode="thread_local"):
            self._logits = runner._compute(StepShape(decodes=rows, sampled=rows))

    def replay(self) -> Tensor:
        """Computes the step again; returns its logits."""
        self._graph.replay()
        return self._logits


def group_by_prefix(tables: Sequence[list[int]]) -> list[tuple[list[int], int]]:
    """Says which rows read which leading pages together: (rows, number of pages), each row once.

    Sorted tables with a long common prefix are neighbours. A row stays with the neighbour that it
    shares clearly more with, so that a system prompt common to all does not split the groups.
    """
    order = sorted(range(len(tables)), key=tables.__getitem__)
    # common[i]: pages that rows i and i + 1 in this order begin with
    common = [len(commonprefix(pair)) for pair in pairwise(tables[i] for i in order)] + [0]
    groups = []
    start = 0
    for i, here in enumerate(common):
        nearby = max(common[max(i - 1, 0) : i + 2])
        if here == 0 or 4 * here < 3 * nearby:  # the group ends with row i
            pages = min(common[start:i], default=0)
            groups.append((order[start : i + 1], pages))
            start = i + 1
    return groups


def kv_dtypes(weight: Tensor) -> tuple[torch.dtype, ...]:
    """Returns the dtypes that the KV of a model with this weight may have.

    FP8 is for cards that compute with it, from sm_89 on.
    """
    if weight.is_cuda and torch.cuda.get_device_capability(weight.device) < (8, 9):
        return (weight.dtype,)
    return (weight.dtype, FP8)


def free_memory(device: torch.device) -> int:
    """Returns the bytes that the device has left."""
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]


def _write(tensor, values) -> None:
    """Writes the first rows of a host tensor."""
    if len(values):
        tensor.numpy()[: len(values)] = values


def _top_logprobs(launched, request) -> list[tuple[int, float]]:
    count = request.params.top_logprobs
    if not count or request not in launched.top:
        return []
    row = launched.top[request]
    ids = launched.top_ids[row, :count].tolist()
    values = launched.top_values[row, :count].tolist()
    return list(zip(ids, values, strict=True))
