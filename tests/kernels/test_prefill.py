"""Prefill attention: against float64, over pages of NaN where nothing was stored, in any chunks."""

from itertools import accumulate

import pytest
import torch
from kernel_check import ATTENTION, DEVICE, DTYPES, assert_close
from paged_cache import Cache

from kernels import attention, prefill
from kernels.attention import reference
from kernels.common import FP8
from kernels.prefill import prefill_attention, prefill_work


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    monkeypatch.setattr(attention, "BLOCK_N", 16)
    monkeypatch.setattr(prefill, "ROWS", 16)


class Chunks(Cache):
    """counts[i] new tokens at positions starts[i].. of sequence i, their keys and values stored."""

    def __init__(self, generator, starts, counts, dtype, heads=2, **shape):
        ends = [start + count for start, count in zip(starts, counts, strict=True)]
        super().__init__(generator, ends, dtype, heads, **({"kv_heads": 1} | shape))
        self.set_queries(generator, sum(counts), heads)
        self.starts, self.counts = starts, counts

    def exact(self):
        inputs = (x.double() for x in (self.q, self.k, self.v))
        return reference(*inputs, self.tables, self.starts, self.counts)

    def attend(self, work=None):
        work = prefill_work(self.starts, self.counts) if work is None else work
        return prefill_attention(
            self.q, self.k, self.v, self.tables, work.to(DEVICE), self.q.new_empty(self.q.shape)
        )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "starts, counts",
    [
        ([0, 0, 0], [1, 16, 17]),
        ([0, 0], [15, 33]),
        ([5, 16, 31], [1, 16, 2]),
        ([33, 0], [18, 0]),
        ([47], [31]),
        ([14, 30], [2, 18]),
    ],
    ids=str,
)
def test_chunks_around_tiles_and_pages(generator, dtype, starts, counts):
    chunks = Chunks(generator, starts, counts, dtype)
    assert_close(chunks.attend(), chunks.exact(), ATTENTION)


def test_keys_and_values_in_8_bits(generator):
    chunks = Chunks(generator, [0, 14], [33, 18], torch.bfloat16)
    chunks.k, chunks.v = chunks.k.to(FP8), chunks.v.to(FP8)
    assert_close(chunks.attend(), chunks.exact(), ATTENTION)


@pytest.mark.parametrize(
    "heads, kv_heads, dim, page, block, rows",
    [
        (3, 1, 64, 32, 32, 16),
        (4, 2, 16, 16, 64, 32),
        (2, 2, 32, 64, 16, 32),
        (2, 1, 128, 64, 32, 64),
        (1, 1, 256, 16, 16, 128),  # two programs for a work item
    ],
)
def test_shapes(generator, monkeypatch, heads, kv_heads, dim, page, block, rows):
    monkeypatch.setattr(attention, "BLOCK_N", block)
    monkeypatch.setattr(prefill, "ROWS", rows)
    start, count = torch.randint(1, 40, (2,), generator=generator).tolist()
    shape = {"heads": heads, "kv_heads": kv_heads, "dim": dim, "page": page}
    chunks = Chunks(generator, [start], [count], torch.bfloat16, **shape)
    assert_close(chunks.attend(), chunks.exact(), ATTENTION)


def test_the_tiles_of_a_gpu(generator, monkeypatch):
    monkeypatch.undo()
    chunks = Chunks(generator, [70, 0], [60, 129], torch.bfloat16, page=64)
    assert_close(chunks.attend(), chunks.exact(), ATTENTION)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_sequence_has_the_same_bits_in_any_batch_and_run(generator, dtype):
    """And no row of the other sequences is touched."""
    chunks = Chunks(generator, [3, 20, 0], [20, 5, 17], dtype, heads=1)
    work = prefill_work(chunks.starts, chunks.counts)
    out = chunks.attend()
    assert torch.equal(out, chunks.attend())
    for sequence, count in enumerate(chunks.counts):
        alone, first = chunks.attend(work[work[:, 0] == sequence]), sum(chunks.counts[:sequence])
        assert torch.equal(out[first : first + count], alone[first : first + count])
        assert alone.isnan().all(2).all(1).sum() == 42 - count


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_where_a_chunk_begins_does_not_matter(generator, dtype):
    """Cut anywhere else, the rows have the same bits: a tile of keys is the same, masked or not."""
    chunks = Chunks(generator, [2], [40], dtype, heads=1)
    whole = chunks.attend()
    for cuts in ([16, 24], [1, 30, 9]):
        parts = [
            prefill_work([2 + done], [count]) + torch.tensor([0, done, 0, 0], dtype=torch.int32)
            for done, count in zip(accumulate([0, *cuts]), cuts, strict=False)
        ]
        assert torch.equal(chunks.attend(torch.cat(parts)), whole)
