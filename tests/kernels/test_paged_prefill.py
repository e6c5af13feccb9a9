"""Prefill attention: against float64, over pages of NaN where nothing was stored, in any chunks.

Whole items and split ones have the same bits in every test. The work list goes on with items that
no cache has, and scratch starts as NaN.
"""

import numpy as np
import pytest
import torch
from kernel_check import ATTENTION, DEVICE, DTYPES, assert_close, poisoned
from paged_cache import OUT_OF_RANGE, Cache

from kernels import paged_prefill, softmax
from kernels.paged_decode import SplitScratch, split_bounds
from kernels.paged_prefill import (
    LEAST_SPLIT,
    naive_prefill_attention,
    prefill_attention,
    prefill_items,
    tokens_per_item,
)

BOUNDS = [0, 16, 48, 64, 96, 160]  # small splits


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    monkeypatch.setattr(softmax, "BLOCK_N", 16)
    monkeypatch.setattr(paged_prefill, "BLOCK_M", 16)


class Chunks(Cache):
    """counts[i] new tokens at positions starts[i].. of sequence i, their keys and values stored."""

    def __init__(self, generator, starts, counts, dtype, heads=2, **shape):
        ends = [start + count for start, count in zip(starts, counts, strict=True)]
        super().__init__(generator, ends, dtype, heads, **({"kv_heads": 1} | shape))
        self.set_queries(generator, sum(counts), heads)
        self.starts, self.counts = starts, counts
        seen = [range(start + 1, end + 1) for start, end in zip(starts, ends, strict=True)]
        self.seen = torch.tensor([n for each in seen for n in each], dtype=torch.int32)

    def exact(self):
        inputs = (x.double() for x in (self.q, self.k, self.v))
        return naive_prefill_attention(*inputs, self.block_tables, self.starts, self.counts)

    def items(self, whole, bounds=BOUNDS, cuts=None):
        """The list of all chunks, or of those that begin and end at cuts of the sequences."""
        heads, kv_heads, dim = self.q.shape[1], self.k.shape[1], self.q.shape[2]
        most = tokens_per_item(heads // kv_heads, dim, self.q.dtype)
        if cuts is None:
            return prefill_items(self.starts, self.counts, bounds, most, whole)
        parts, row = [], 0
        for sequence, counts in enumerate(cuts):
            start = self.starts[sequence]
            for count in counts:
                part = prefill_items([start], [count], bounds, most, whole, row)
                part[:, 0] = sequence
                parts.append(part)
                start, row = start + count, row + count
        return np.concatenate(parts)

    def attend(self, whole, bounds=BOUNDS, items=None):
        """Returns the output; `items` in place of the list of all chunks."""
        if items is None:
            items = self.items(whole, bounds)
        capacity = np.full((len(items) + 50, 4), OUT_OF_RANGE, np.int32)
        capacity[: len(items)] = items
        in_items = torch.zeros(len(self.q), dtype=torch.bool)
        for _, row, tokens, _ in items.tolist():
            in_items[row : row + tokens] = True
        splits = len(bounds) - 1
        rows = 0 if whole else len(self.q) + 3
        scratch = SplitScratch(
            torch.tensor(bounds, dtype=torch.int32, device=DEVICE),
            poisoned(rows, splits, *self.q.shape[1:], dtype=torch.float32),
            poisoned(rows, splits, self.q.shape[1], dtype=torch.float32),
        )
        out = poisoned(*self.q.shape, dtype=self.q.dtype)
        prefill_attention(
            self.q,
            self.k,
            self.v,
            self.block_tables,
            torch.where(in_items, self.seen, 0).to(DEVICE),
            torch.from_numpy(capacity).to(DEVICE),
            torch.tensor([len(items)], dtype=torch.int32, device=DEVICE),
            scratch,
            out,
            whole,
        )
        return out

    def check(self, bounds=BOUNDS):
        """Compares with float64, and whole items with split ones."""
        out = self.attend(True, bounds)
        assert_close(out, self.exact(), ATTENTION)
        assert torch.equal(out, self.attend(False, bounds))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "starts, counts",
    [([0, 0, 0, 47], [1, 16, 17, 31]), ([33, 0, 16, 14, 90], [18, 0, 16, 2, 8])],
    ids=str,
)
def test_chunks_around_tiles_pages_and_splits(generator, dtype, starts, counts):
    Chunks(generator, starts, counts, dtype).check()


@pytest.mark.parametrize(
    "heads, kv_heads, dim, page, block, rows",
    [
        (3, 1, 64, 32, 32, 16),
        (4, 2, 16, 16, 64, 32),
        (2, 1, 128, 64, 32, 64),
        (16, 1, 16, 256, 64, 16),
        (10, 2, 256, 16, 16, 128),  # five query heads a kv head
    ],
)
def test_head_counts_head_dims_and_pages(
    generator, monkeypatch, heads, kv_heads, dim, page, block, rows
):
    monkeypatch.setattr(softmax, "BLOCK_N", block)
    monkeypatch.setattr(paged_prefill, "BLOCK_M", rows)
    start, count = torch.randint(1, 40, (2,), generator=generator).tolist()
    shape = {"heads": heads, "kv_heads": kv_heads, "dim": dim, "page": page}
    Chunks(generator, [start], [count], torch.bfloat16, **shape).check([0, 64, 128])


def test_the_tiles_and_splits_of_a_gpu(generator, monkeypatch):
    """A longer table of splits, those of a longer context, gives the same bits."""
    monkeypatch.undo()
    chunks = Chunks(generator, [70, 0, 1000], [60, 129, 70], torch.bfloat16, page=64)
    bounds = split_bounds(1070, LEAST_SPLIT)
    assert bounds == [0, 1024, 2048]
    chunks.check(bounds)
    assert torch.equal(chunks.attend(False, bounds), chunks.attend(False, [*bounds, 3072, 4096]))


@pytest.mark.parametrize("whole", [True, False], ids=["whole", "split"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_sequence_has_the_same_bits_in_any_batch_and_order_and_wherever_a_chunk_begins(
    generator, dtype, whole
):
    """A tile of keys is the same, masked or not. No token of the other sequences is touched."""
    chunks = Chunks(generator, [3, 2, 0], [5, 40, 17], dtype, heads=1)
    items = chunks.items(whole)
    out = chunks.attend(whole)
    assert torch.equal(out, chunks.attend(whole, items=items[::-1])), "items in another order"
    alone = chunks.attend(whole, items=items[items[:, 0] == 1])
    assert torch.equal(out[5:45], alone[5:45])
    assert alone.isnan().all(2).all(1).sum() == 5 + 17
    for cuts in ([16, 24], [1, 30, 9]):
        cut = chunks.items(whole, cuts=[[5], cuts, [17]])
        assert torch.equal(chunks.attend(whole, items=cut), out)


def test_the_work_list_of_the_docstring():
    whole = prefill_items([1000], [40], [0, 1024, 2048], 32, whole=True)
    assert whole.tolist() == [[0, 32, 8, 2], [0, 0, 32, 2]]
    split = prefill_items([1000], [40], [0, 1024, 2048], 32, whole=False)
    assert split.tolist() == [[0, 0, 32, 0], [0, 32, 8, 0], [0, 32, 8, 1], [0, 0, 32, 1]]
