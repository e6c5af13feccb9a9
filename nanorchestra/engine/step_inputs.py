"""The inputs of a step on a GPU: named tensors of fixed capacity, and how the host fills them.

`StepInputs` lays all inputs out in one block of memory. The GPU has one such block, whose address a
captured graph keeps; the host has two in pinned memory, which `HostInputs` fills in turn. A launch
is then one copy. Decodes come first, then chunks of prefill.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from os.path import commonprefix  # of any lists, not of paths alone

import torch
from torch import Tensor

from kernels.paged_decode import SharedPrefix, decode_items
from kernels.paged_prefill import ITEM_TOKENS, prefill_items
from nanorchestra.engine.sampler import uniforms
from nanorchestra.engine.scheduler import Batch
from nanorchestra.engine.sequence import Request

SAME_GROUP = 3 / 4  # rows are a group if they share this part of what either shares with others


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
    """The inputs of a step, at their maximum capacity.

    Padding up to the size of a graph has no effect: its slots are -1, its rows see no keys.
    """

    def __init__(self, capacity: Capacity, arena: Arena):
        tokens, rows = capacity.tokens, capacity.rows
        int32, float32, float64 = torch.int32, torch.float32, torch.float64
        # Of every token.
        self.tokens = arena.tensor(tokens, dtype=int32)
        self.positions = arena.tensor(tokens, dtype=int32)
        self.slots = arena.tensor(tokens, dtype=int32)  # page * page_size + offset of its KV
        # Of every decode: the row of the last step's draws that holds its newest id, for a step
        # launched before the host has read that; else -1, and `tokens` has the id. A step with
        # prefill is never launched so early, and does not read it.
        self.drawn_row = arena.tensor(rows, dtype=int32)
        # Of every row that is sampled.
        self.sampled_token = arena.tensor(rows, dtype=int32)  # index of its last token in `tokens`
        self.uniform = arena.tensor(rows, dtype=float64)  # noise of the draw
        self.temperature = arena.tensor(rows, dtype=float32)
        self.top_p = arena.tensor(rows, dtype=float32)
        self.top_k = arena.tensor(rows, dtype=int32)
        # Of attention: decodes (kernels/paged_decode.py).
        self.context_lens = arena.tensor(rows, dtype=int32)
        self.num_decode_items = arena.tensor(1, dtype=int32)
        self.decode_items = arena.tensor(rows * capacity.splits, 3, dtype=int32)
        # Of attention: chunks (kernels/paged_prefill.py). An item names its block table and its
        # first token, both counted from the first chunk on.
        most_items = -(-tokens // ITEM_TOKENS) + rows
        self.prefill_items = arena.tensor(most_items, 4, dtype=int32)
        # Last, so that a copy can end after the rows that are there: at 512 rows of 40,960 keys in
        # pages of 64 they are 1.3 MB, and what is before them 0.4 MB.
        self._bytes_before_tables = arena.used
        self.block_tables = arena.tensor(rows, capacity.table_width, dtype=int32)
        self.memory = arena.memory

    @staticmethod
    def allocate(
        capacity: Capacity, device: torch.device | str, pinned: bool = False
    ) -> StepInputs:
        """Returns inputs in a block of just their size, which a first pass on "meta" measures."""
        measured = Arena(1 << 40, "meta")
        StepInputs(capacity, measured)
        return StepInputs(capacity, Arena(measured.used, device, pinned))

    def bytes_of_rows(self, rows: int) -> int:
        """Returns the bytes from the beginning up to the block tables of so many rows."""
        return self._bytes_before_tables + self.block_tables[:rows].numel() * 4


@dataclass(frozen=True)
class StepShape:
    """The counts that fix the launches of a step.

    A graph is captured for a number of `decodes`, as many of them sampled, and no prefill.
    """

    decodes: int  # padding included
    prefill_tokens: int = 0
    chunks: int = 0
    prefill_items: int = 0
    sampled: int = 0  # padding included

    @property
    def tokens(self) -> int:
        """Number of tokens."""
        return self.decodes + self.prefill_tokens


@dataclass
class FilledStep:
    """A step whose inputs the host has filled."""

    inputs: StepInputs
    shape: StepShape
    sampled: list[Request]  # in the order of their draws


@dataclass
class _HostBlock:
    """A block in pinned memory, and the block table that each of its rows holds."""

    inputs: StepInputs
    tables: list[list[int]]


@dataclass
class _Grouping:
    """Decodes in the order of their rows, with what neighbours share."""

    decodes: list[Request]  # as the scheduler gave them
    ordered: list[Request]
    shared: list[SharedPrefix]


class HostInputs:
    """Fills the inputs of steps in host memory.

    bounds, rows_per_item: those of kernels/paged_decode.py.
    """

    def __init__(
        self,
        capacity: Capacity,
        page_size: int,
        bounds: Sequence[int],
        rows_per_item: int,
        pinned: bool,
    ):
        self.page_size = page_size
        self.bounds = bounds
        self.rows_per_item = rows_per_item
        # Two blocks in turn. The block of step k is filled again for step k + 2, whose launch
        # follows `read(k)` or `wait()`: by then its copy has ended.
        self._blocks = [
            _HostBlock(StepInputs.allocate(capacity, "cpu", pinned), [[]] * capacity.rows)
            for _ in range(2)
        ]
        self._grouping = _Grouping([], [], [])

    def fill(
        self, batch: Batch, drawn: Mapping[Request, int] | None, graph_sizes: Sequence[int]
    ) -> FilledStep:
        """Fills the next block with the inputs of a batch.

        drawn: the rows of the draws that are the newest ids of the decodes, where the host has not
        read them. graph_sizes: what a step that only decodes is padded to; none: it is not.
        """
        self._blocks.reverse()
        block = self._blocks[0]
        grouping = self._by_prefix(batch.decodes)
        decodes = grouping.ordered
        rows = len(decodes)
        if graph_sizes and not batch.prefills:
            rows = min(size for size in graph_sizes if size >= rows)
        padding = rows - len(decodes)
        self._fill_decodes(block.inputs, grouping, drawn, padding)
        num_items = self._fill_chunks(block.inputs, batch, rows)
        self._fill_tables(block, decodes, padding, batch)
        sampled = decodes + batch.ended_prefills
        unread = 0 if drawn is None else 1  # ids of a request that the device alone has
        self._fill_draws(block.inputs, batch, sampled, rows, padding, unread)
        shape = StepShape(
            decodes=rows,
            prefill_tokens=batch.prefill_tokens,
            chunks=len(batch.prefills),
            prefill_items=num_items,
            sampled=len(sampled) + padding,
        )
        return FilledStep(block.inputs, shape, sampled)

    def _fill_decodes(self, inputs, grouping, drawn, padding):
        """One token of each decode, and the work list of their attention."""
        tokens, positions, slots, drawn_rows, context_lens = [], [], [], [], []
        for request in grouping.ordered:
            position = len(request.ids) - 1
            drawn_row = -1
            if drawn is not None:  # the newest id is not among `ids` yet
                position += 1
                drawn_row = drawn[request]
            tokens.append(request.ids[-1])  # ignored where the device has a newer one
            positions.append(position)
            slots.append(self._slot(request.sequence.block_table, position))
            drawn_rows.append(drawn_row)
            context_lens.append(position + 1)
        items = decode_items(context_lens, grouping.shared, self.bounds, self.rows_per_item)
        write(inputs.tokens, tokens + [0] * padding)
        write(inputs.positions, positions + [0] * padding)
        write(inputs.slots, slots + [-1] * padding)
        write(inputs.drawn_row, drawn_rows + [-1] * padding)
        write(inputs.context_lens, context_lens + [0] * padding)
        write(inputs.num_decode_items, [len(items)])
        write(inputs.decode_items, items)

    def _fill_chunks(self, inputs, batch, rows) -> int:
        """The tokens of the chunks, behind the rows of decodes; returns the number of items."""
        if not batch.prefills:
            return 0
        tokens, positions, slots = [], [], []
        for chunk in batch.prefills:
            pages = chunk.request.sequence.block_table
            tokens += chunk.request.ids[chunk.start : chunk.end]
            positions += range(chunk.start, chunk.end)
            slots += [self._slot(pages, position) for position in range(chunk.start, chunk.end)]
        items = prefill_items(
            [chunk.start for chunk in batch.prefills], [chunk.count for chunk in batch.prefills]
        )
        write(inputs.tokens, tokens, rows)
        write(inputs.positions, positions, rows)
        write(inputs.slots, slots, rows)
        write(inputs.prefill_items, items.numpy())
        return len(items)

    def _fill_tables(self, block, decodes, padding, batch):
        """The block tables of decodes, padding and chunks. Most are in their row already."""
        tables = [request.sequence.block_table for request in decodes]
        tables += [[]] * padding
        tables += [chunk.request.sequence.block_table for chunk in batch.prefills]
        block_tables = block.inputs.block_tables.numpy()
        for row, pages in enumerate(tables):
            if pages != block.tables[row]:
                block_tables[row, : len(pages)] = pages
                block.tables[row] = list(pages)

    def _fill_draws(self, inputs, batch, sampled, rows, padding, unread):
        """What the draws need. Padding is drawn too, the cheapest way: greedily."""
        last_tokens = list(range(len(sampled) - len(batch.ended_prefills)))
        end = rows
        for chunk in batch.prefills:
            end += chunk.count
            if chunk.is_last:
                last_tokens.append(end - 1)
        params = [request.params for request in sampled]
        # The noise is that of the position which the drawn token will have.
        positions = [len(request.ids) + unread for request in sampled]
        noise = uniforms([p.seed for p in params], positions)
        write(inputs.sampled_token, last_tokens)
        write(inputs.uniform, [*noise, *[0.0] * padding])
        write(inputs.temperature, [p.temperature for p in params] + [0.0] * padding)
        write(inputs.top_p, [p.top_p for p in params] + [1.0] * padding)
        write(inputs.top_k, [p.top_k for p in params] + [0] * padding)

    def _slot(self, pages, position) -> int:
        return pages[position // self.page_size] * self.page_size + position % self.page_size

    def _by_prefix(self, decodes) -> _Grouping:
        """Orders the decodes by the pages that they share, and says which rows share what.

        Kept while the same requests decode, since their shared pages stay: `commit` exchanges only
        pages that were not indexed, and shared ones are. A request that loses its pages and shares
        any is missing from a batch before it is back.
        """
        if self._grouping.decodes == decodes:
            return self._grouping
        full_pages = []
        for request in decodes:
            count = (len(request.ids) - 1) // self.page_size
            full_pages.append(request.sequence.block_table[:count])
        ordered, shared = [], []
        for indices, pages in group_by_prefix(full_pages):
            if pages and len(indices) > 1:
                shared.append(SharedPrefix(len(ordered), len(indices), pages * self.page_size))
            ordered += [decodes[index] for index in indices]
        self._grouping = _Grouping(list(decodes), ordered, shared)
        return self._grouping


def group_by_prefix(tables: Sequence[list[int]]) -> list[tuple[list[int], int]]:
    """Says which rows read which leading pages together: (rows, number of pages), each row once.

    Sorted tables with a long common prefix are neighbours. A row stays with the neighbour that it
    shares clearly more with, so that a system prompt common to all does not split the groups. For
    example [1, 2, 3], [1, 9, 8], [1, 2, 4], [1, 9, 7] are two groups: rows 0 and 2, which share two
    pages, and rows 1 and 3. That all share page 1 is not used.
    """
    order = sorted(range(len(tables)), key=tables.__getitem__)
    # common[i]: pages that rows i and i + 1 of this order begin with
    common = [len(commonprefix(pair)) for pair in pairwise(tables[row] for row in order)] + [0]
    groups = []
    start = 0
    for i, here in enumerate(common):
        before = common[i - 1] if i > 0 else 0
        after = common[i + 1] if i + 1 < len(common) else 0
        if here == 0 or here < SAME_GROUP * max(before, after):  # the group ends with row i
            pages = min(common[start:i], default=0)
            groups.append((order[start : i + 1], pages))
            start = i + 1
    return groups


def write(tensor: Tensor, values: Sequence, start: int = 0) -> None:
    """Writes rows of a host tensor, from `start` on."""
    if len(values):
        tensor.numpy()[start : start + len(values)] = values
