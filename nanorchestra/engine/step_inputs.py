"""The inputs of a step on a GPU, as the host makes them: decodes first, then chunks of prefill."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from os.path import commonprefix  # of any lists, not of paths alone

import numpy as np
import torch
from torch import Tensor

from kernels.paged_decode import SharedPrefix, decode_items
from kernels.paged_prefill import prefill_items
from nanorchestra.engine.sampler import staged, to_device
from nanorchestra.engine.scheduler import Chunk
from nanorchestra.engine.sequence import Request

SAME_GROUP = 3 / 4  # rows are a group if they share this part of what either shares with others


@dataclass(frozen=True)
class StepInputs:
    """What the decoder reads in a step: arrays of the host, or tensors of the device, int32.

    A step that only decodes is padded to the size of a graph by rows without effect: their slots
    are -1, and they see no keys.
    """

    # Of every token.
    tokens: np.ndarray | Tensor  # [T]
    positions: np.ndarray | Tensor  # [T]
    slots: np.ndarray | Tensor  # [T]: page * page_size + offset of its keys and values
    # Of decodes (kernels/paged_decode.py).
    context_lens: np.ndarray | Tensor  # [decodes]
    decode_tables: np.ndarray | Tensor  # [decodes, width]: the pages of each
    decode_items: np.ndarray | Tensor  # [items, 3]
    num_decode_items: np.ndarray | Tensor  # [1]
    # Of chunks (kernels/paged_prefill.py).
    prefill_tables: np.ndarray | Tensor  # [chunks, width]: the pages of each
    prefill_items: np.ndarray | Tensor  # [items, 4]
    # Of a step with chunks, each row that is sampled: the index of its last token.
    last_tokens: np.ndarray | Tensor  # [sampled]

    def to(self, device: torch.device) -> StepInputs:
        """Returns arrays of the host as tensors on the device, which a GPU fills later."""
        return StepInputs(*[to_device(array, device) for array in vars(self).values()])

    def decodes(self, rows: int) -> StepInputs:
        """Returns the part of these tensors that a step of so many decodes, and no chunk, reads."""
        return StepInputs(
            self.tokens[:rows],
            self.positions[:rows],
            self.slots[:rows],
            self.context_lens[:rows],
            self.decode_tables[:rows],
            self.decode_items,
            self.num_decode_items,
            self.prefill_tables[:0],
            self.prefill_items[:0],
            self.last_tokens[:0],
        )

    def copy_from(self, inputs: StepInputs) -> None:
        """Copies the arrays of a step to the beginning of these tensors; a GPU does it later."""
        for mine, array in zip(vars(self).values(), vars(inputs).values(), strict=True):
            mine[: len(array)].copy_(staged(array, mine.device), non_blocking=True)


def empty_step(rows: int, items: int, width: int, device: torch.device) -> StepInputs:
    """Returns tensors with room for a step of so many decodes, which are without effect."""

    def zeros(*shape):
        return torch.zeros(shape, dtype=torch.int32, device=device)

    return StepInputs(
        tokens=zeros(rows),
        positions=zeros(rows),
        slots=zeros(rows) - 1,
        context_lens=zeros(rows),
        decode_tables=zeros(rows, width),
        decode_items=zeros(items, 3),
        num_decode_items=zeros(1),
        prefill_tables=zeros(0, width),
        prefill_items=zeros(0, 4),
        last_tokens=zeros(0),
    )


class StepMaker:
    """Makes the inputs of steps, and remembers which decodes share pages.

    table_width: pages of the longest row. bounds, rows_per_item: those of kernels/paged_decode.py.
    """

    def __init__(self, page_size: int, table_width: int, bounds: Sequence[int], rows_per_item: int):
        self.page_size = page_size
        self.table_width = table_width
        self.bounds = bounds
        self.rows_per_item = rows_per_item
        self._decodes: list[Request] = []
        self._ordered: list[Request] = []
        self._shared: list[SharedPrefix] = []

    def in_order(self, decodes: list[Request]) -> list[Request]:
        """Returns the decodes in the order of their rows: those that share pages are neighbours.

        Kept while the same requests decode, since their shared pages stay: `commit` exchanges only
        pages that were not indexed, and shared ones are. A request that loses its pages and shares
        any is missing from a batch before it is back.
        """
        if self._decodes != decodes:
            self._decodes, self._ordered, self._shared = list(decodes), [], []
            full_pages = []
            for request in decodes:
                count = (len(request.ids) - 1) // self.page_size
                full_pages.append(request.sequence.block_table[:count])
            for indices, pages in group_by_prefix(full_pages):
                if pages and len(indices) > 1:
                    keys = pages * self.page_size
                    self._shared.append(SharedPrefix(len(self._ordered), len(indices), keys))
                self._ordered += [decodes[index] for index in indices]
        return self._ordered

    def make(self, chunks: Sequence[Chunk], rows: int, unread: int = 0) -> StepInputs:
        """Returns the inputs of the decodes last put in order and of the chunks, on the host.

        rows: of decodes, padding included. unread: the ids of each decode that the device has drawn
        and the host has not read, 0 or 1. Their `tokens` are then to be overwritten.
        """
        decodes, padding = self._ordered, rows - len(self._ordered)
        tokens = [request.ids[-1] for request in decodes]
        positions = [len(request.ids) - 1 + unread for request in decodes]
        tables = [request.sequence.block_table for request in decodes]
        slots = [self._slot(*each) for each in zip(tables, positions, strict=True)]
        context_lens = [position + 1 for position in positions]
        decode_work = decode_items(context_lens, self._shared, self.bounds, self.rows_per_item)
        tokens += [0] * padding
        positions += [0] * padding
        slots += [-1] * padding
        context_lens += [0] * padding

        last_tokens = list(range(len(decodes))) if chunks else []
        for chunk in chunks:
            pages = chunk.request.sequence.block_table
            tokens += chunk.request.ids[chunk.start : chunk.end]
            positions += range(chunk.start, chunk.end)
            slots += [self._slot(pages, position) for position in range(chunk.start, chunk.end)]
            if chunk.is_last:
                last_tokens.append(len(tokens) - 1)
        return StepInputs(
            tokens=_int32(tokens),
            positions=_int32(positions),
            slots=_int32(slots),
            context_lens=_int32(context_lens),
            decode_tables=self._tables(tables, rows),
            decode_items=decode_work,
            num_decode_items=_int32([len(decode_work)]),
            prefill_tables=self._tables(
                [chunk.request.sequence.block_table for chunk in chunks], len(chunks)
            ),
            prefill_items=prefill_items(
                [chunk.start for chunk in chunks], [chunk.count for chunk in chunks]
            ).numpy(),
            last_tokens=_int32(last_tokens),
        )

    def _slot(self, pages, position) -> int:
        return pages[position // self.page_size] * self.page_size + position % self.page_size

    def _tables(self, tables, rows) -> np.ndarray:
        """Returns block tables int32 [rows, width]; entries behind a sequence's pages are 0."""
        array = np.zeros((rows, self.table_width), np.int32)
        for row, pages in enumerate(tables):
            array[row, : len(pages)] = pages
        return array


def _int32(values) -> np.ndarray:
    return np.array(values, np.int32)


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
