"""The inputs of a GPU's step: one block of memory, filled on the host and copied at once.

`Sizes` gives the shapes of all inputs, so equal sizes can share a captured graph. Padding has no
effect: its slots are -1, its rows have no keys, its items of work no rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from os.path import commonprefix
from typing import NamedTuple

import torch

from kernels.decode_plan import SPLIT, decode_work
from kernels.prefill import prefill_work
from nanorchestra.engine.request import Request
from nanorchestra.engine.runner import token_inputs
from nanorchestra.engine.sampler import uniforms
from nanorchestra.engine.scheduler import Plan

# Numbers of decodes that have a graph. A larger batch is launched kernel by kernel.
BATCHES = (0, 1, 2, 4, *range(8, 64, 8), *range(64, 513, 32))
TOKENS = "tokens", "positions", "slots"
CHUNKS = (0, 32, 64, 128, 256, 384)  # tokens of chunks in a step that has a graph


class Sizes(NamedTuple):
    """The counts of a step: what a graph is captured for."""

    decodes: int
    own: int  # items of decode_plan.py
    shared: int
    tokens: int  # of chunks
    chunks: int
    work: int  # items of prefill.py
    sampled: int
    pages: int  # of a row of the tables, a multiple of 4
    truncated: bool = False  # a row has top-k or top-p

    def padded(self) -> Sizes:
        """Returns the sizes of the graph for these: about 1.5 times the work at most."""
        return self._replace(
            decodes=at_least(BATCHES, self.decodes),
            own=grown(self.own),
            shared=grown(self.shared),
            tokens=at_least(CHUNKS, self.tokens),
            chunks=grown(self.chunks),
            work=grown(self.work),
            sampled=at_least(BATCHES, self.sampled),
            pages=4 * grown(self.pages // 4),
        )


def grown(count: int) -> int:
    """Returns the least number from `count` on of 0, 4, 6, 9, 13, 19, ...: each 1.5 times more."""
    size = 4
    while size < count:
        size += size // 2
    return size if count else 0


def at_least(bounds: Iterable[int], count: int) -> int:
    """Returns the first of the bounds from `count` on."""
    return next(bound for bound in bounds if bound >= count)


class Inputs:
    """Tensors of one block: of the T tokens, decodes first, and of the R sampled rows.

    tokens, positions, slots int64 [T]; of the decodes: source int64 [D], their rows in the step
    before, lengths and starts int32 [D], own and shared int32 [N, 3]; tables int32, of the decodes
    and then of the chunks, and work int32 [W, 4]; rows int64 [R], their places among the tokens,
    uniform fp64 [R], the noise of their draws, temperature and top_p fp32 [R], top_k int32 [R].
    """

    def __init__(self, sizes: Sizes, device: torch.device | str, pinned: bool = False):
        decodes, own, shared, tokens, chunks, work, rows, pages, _ = self.sizes = sizes
        long = dict.fromkeys(TOKENS, (decodes + tokens,)) | {"source": (decodes,), "rows": (rows,)}
        short = {"own": (own, 3), "shared": (shared, 3), "work": (work, 4), "top_k": (rows,)}
        short |= {"lengths": (decodes,), "starts": (decodes,), "tables": (decodes + chunks, pages)}
        shapes = (
            (torch.int64, long),
            (torch.int32, short),
            (torch.float32, {"temperature": (rows,), "top_p": (rows,)}),
            (torch.float64, {"uniform": (rows,)}),
        )
        fields = [(name, dtype, shape) for dtype, each in shapes for name, shape in each.items()]
        # Each begins at a multiple of 16 bytes, which the kernels are compiled for.
        words = [-(-math.prod(shape) * dtype.itemsize // 16) * 2 for _, dtype, shape in fields]
        self.flat = torch.zeros(sum(words), dtype=torch.int64, device=device, pin_memory=pinned)
        for (name, dtype, shape), part in zip(fields, self.flat.split(words), strict=True):
            setattr(self, name, part.view(dtype)[: math.prod(shape)].view(shape))
        self.slots.fill_(-1)

    def write(self, name: str, values: Sequence, start: int = 0) -> None:
        """Writes the first values of an input on the host, from row `start` on."""
        if len(values):
            getattr(self, name).numpy()[start : start + len(values)] = values


class Host:
    """Fills the inputs of steps in host memory; pinned, so that copies of it wait for nothing.

    most: rows of an item of shared work (decode_plan.group_rows).
    """

    def __init__(self, page_size: int, most: int, pinned: bool):
        self.page_size, self.most, self.pinned = page_size, most, pinned
        self._grouped: tuple[list, list[Request], list] = [], [], []

    def fill(self, plan: Plan, before: dict[Request, int] | None, captured: bool) -> Inputs:
        """Returns a step's inputs, padded to the sizes of a graph if `captured`.

        before: the rows of the draws that are the decodes' newest ids, which the device alone has.
        """
        order, groups = self._groups(plan.decodes)
        ahead, sampling = before is not None, plan.sampling
        lengths = [len(request.ids) + ahead for request in order]
        work = decode_work(lengths, groups, self.most)
        chunked, starts, counts = zip(*plan.prefills, strict=True) if plan.prefills else ((),) * 3
        prefill = prefill_work(starts, counts)
        tables = [request.table.pages for request in (*order, *chunked)]
        sizes = Sizes(
            *(len(order), len(work.own), len(work.shared), sum(counts), len(chunked), len(prefill)),
            sampled=len(sampling),
            pages=-(-max(map(len, tables)) // 4) * 4,
            truncated=any(request.params.truncated for request in sampling),
        )
        host = Inputs(sizes.padded() if captured else sizes, "cpu", self.pinned)
        first = host.sizes.decodes
        decodes = [(request, length - 1, 1) for request, length in zip(order, lengths, strict=True)]
        for start, chunks in ((0, decodes), (first, plan.prefills)):
            for name, values in zip(TOKENS, token_inputs(chunks, self.page_size), strict=True):
                host.write(name, values, start)
        if ahead:
            host.write("source", [before[request] for request in order])
        for row, pages in enumerate(tables):
            row += (first - len(order)) * (row >= len(order))
            host.tables.numpy()[row, : len(pages)] = pages
        place = {request: i for i, request in enumerate(order)}
        place |= zip(chunked, (first + end - 1 for end in accumulate(counts)), strict=True)
        place |= {request: place[leader] for request, leader in plan.forks}
        params = [request.params for request in sampling]
        places = [len(request.ids) + ahead for request in sampling]
        values = {
            "lengths": lengths,
            "starts": work.starts,
            "own": work.own,
            "shared": work.shared,
            "work": prefill,
            "rows": [place[request] for request in sampling],
            "uniform": uniforms([p.seed for p in params], places),
        }
        for name in ("temperature", "top_k", "top_p"):
            values[name] = [getattr(p, name) for p in params]
        for name, rows in values.items():
            host.write(name, rows)
        return host

    def _groups(self, decodes) -> tuple[list[Request], list[tuple[int, int, int]]]:
        """Orders them by the pages they share; (first row, rows, shared keys) of each group."""
        if self._grouped[0] != decodes:
            size, order, groups = self.page_size, [], []
            whole = [r.table.pages[: (len(r.ids) - 1) // size] for r in decodes]
            for indices, pages in group_by_prefix(whole):
                shared = pages * size // SPLIT * SPLIT
                if shared:
                    groups.append((len(order), len(indices), shared))
                order += [decodes[i] for i in indices]
            self._grouped = list(decodes), order, groups
        return self._grouped[1:]


def group_by_prefix(tables: Sequence[list[int]]) -> list[tuple[list[int], int]]:
    """Says which rows read which leading pages together: (rows, number of pages), each row once.

    Sorted tables with a long common prefix are neighbours. A row stays with the neighbour that it
    shares clearly more with, so that a system prompt common to all does not split the groups.
    """
    order = sorted(range(len(tables)), key=tables.__getitem__)
    neighbours = pairwise(tables[i] for i in order)
    common = [len(commonprefix(pair)) for pair in neighbours] + [0]
    groups, start = [], 0
    for i, here in enumerate(common):
        if here == 0 or 4 * here < 3 * max(common[max(i - 1, 0) : i + 2]):
            groups.append((order[start : i + 1], min(common[start:i], default=0)))
            start = i + 1
    return groups
