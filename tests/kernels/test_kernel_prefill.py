"""Prefill attention: against float64, over pages full of NaN where nothing was stored; chunked or not, alone or in company."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from kernel_check import ATTENTION, DEVICE, DTYPES, assert_close, poisoned, randn
from test_kernel_decode import Cache

from kernels import prefill
from kernels.prefill import prefill_attention, prefill_work, reference

SMALL = {"ROWS": 16, "BLOCK_M": 16, "BLOCK_N": 16, "num_warps": 4, "num_stages": 1}


class Chunks(Cache):
    """counts[i] new tokens at positions starts[i].. of sequence i, their keys and values stored."""

    def __init__(
        self, generator, starts, counts, dtype=torch.float32, heads=2, kv_heads=1, dim=16, page=16
    ):
        super().__init__(
            generator, [a + b for a, b in zip(starts, counts)], dtype, heads, kv_heads, dim, page
        )
        self.q = randn(generator, sum(counts), heads + 2 * kv_heads, dim, dtype=dtype)[
            :, :heads
        ]  # a view of the fused projection
        self.starts, self.counts = starts, counts

    def exact(self):
        return reference(
            self.q.double(), self.k.double(), self.v.double(), self.tables, self.starts, self.counts
        )

    def attend(self, work=None, **options):
        settings = {"config": SMALL, "out": poisoned(*self.q.shape, dtype=self.q.dtype)} | options
        work = (
            prefill_work(self.starts, self.counts, settings["config"]["ROWS"])
            if work is None
            else work
        )
        return prefill_attention(
            self.q, self.k, self.v, self.tables, torch.tensor(work, device=DEVICE), **settings
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


@pytest.mark.parametrize(
    "heads, kv_heads, dim, page, config",
    [
        (3, 1, 64, 32, SMALL | {"BLOCK_N": 32}),
        (4, 2, 16, 16, SMALL | {"BLOCK_N": 64, "ROWS": 32}),
        (2, 2, 32, 64, SMALL | {"ROWS": 32, "BLOCK_M": 32}),
        (2, 1, 128, 64, SMALL | {"BLOCK_N": 32, "ROWS": 64, "BLOCK_M": 32}),
        (1, 1, 256, 16, SMALL),
    ],
    ids=str,
)
def test_shapes(generator, heads, kv_heads, dim, page, config):
    start, count = torch.randint(1, 40, (2,), generator=generator).tolist()
    chunks = Chunks(generator, [start], [count], torch.bfloat16, heads, kv_heads, dim, page)
    assert_close(chunks.attend(config=config), chunks.exact(), ATTENTION)


def test_the_default_configuration(generator):
    chunks = Chunks(generator, [70, 0], [60, 129], torch.bfloat16, page=64)
    assert_close(chunks.attend(config={"ROWS": prefill.ROWS}), chunks.exact(), ATTENTION)


def test_peaked_and_flat_scores(generator):
    chunks = Chunks(generator, [9, 9], [20, 20], torch.bfloat16)
    chunks.q[:20] *= 30
    chunks.q[20:] = 0
    assert_close(chunks.attend(), chunks.exact(), ATTENTION)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_same_bits_alone_and_again(generator, dtype):
    chunks = Chunks(generator, [3, 20, 0], [20, 5, 17], dtype, heads=1)
    work = prefill_work(chunks.starts, chunks.counts, 16)
    out = chunks.attend()
    assert torch.equal(out, chunks.attend())
    for sequence in range(3):
        mine = work[work[:, 0] == sequence]
        alone, (first, count) = (
            chunks.attend(mine),
            (sum(chunks.counts[:sequence]), chunks.counts[sequence]),
        )
        assert torch.equal(out[first : first + count], alone[first : first + count])
        assert (
            alone.isnan().all(2).all(1).sum() == 42 - count
        )  # and no row of the others is touched


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_where_a_chunk_begins_does_not_matter(generator, dtype):
    """Cut anywhere else, the rows have the same bits: a tile of keys is the same tile, masked or not."""
    chunks = Chunks(generator, [2], [40], dtype, heads=1)
    whole = chunks.attend()
    for cuts in ([16, 24], [1, 30, 9]):
        parts = []
        for done, count in zip(np.cumsum([0, *cuts]), cuts):
            parts.append(
                prefill_work([2 + done], [count], 16) + np.array([0, done, 0, 0], np.int32)
            )
        assert torch.equal(chunks.attend(np.concatenate(parts)), whole)


def test_offsets_beyond_32_bits(generator):
    """Page 32,769 begins at element 2**31 + 65,536. Memory is reserved for all pages and used for one."""
    cache = torch.tensor([], dtype=torch.float16, device=DEVICE).new_empty(32770, 1, 256, 256)
    cache[-1, 0, :32] = randn(generator, 32, 256, dtype=torch.float16)
    q, table = (
        randn(generator, 3, 1, 256, dtype=torch.float16),
        torch.tensor([[32769]], dtype=torch.int32, device=DEVICE),
    )
    out = prefill_attention(
        q,
        cache,
        cache,
        table,
        torch.tensor(prefill_work([17], [3], 16), device=DEVICE),
        config=SMALL,
    )
    last = cache[-1:].double()
    assert_close(
        out, reference(q.double(), last, last, torch.zeros_like(table), [17], [3]), ATTENTION
    )


def test_padding_items(generator):
    chunks = Chunks(generator, [3], [10])
    padding = np.array([[0, 0, 0, 0], [2**30, 2**30, 0, 2**30]], np.int32)
    assert torch.equal(
        chunks.attend(np.concatenate([padding, prefill_work([3], [10], 16)])), chunks.attend()
    )
    assert chunks.attend(np.zeros((0, 4), np.int32)).isnan().all()


def test_work_list():
    work = prefill_work([10, 0, 100], [3, 70, 0], 32)
    assert work.dtype == np.int32
    assert work.tolist() == [[1, 67, 6, 64], [1, 35, 32, 32], [1, 3, 32, 0], [0, 0, 3, 10]]
    assert prefill_work([], [], 32).shape == (0, 4)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"q": lambda c: c.q[0]}, r"q has shape"),
        ({"q": lambda c: c.q[:, :, ::2]}, r"q has strides"),
        ({"k": lambda c: c.k.half()}, r"k_cache is torch.float16; expected torch.float32"),
        ({"v": lambda c: c.v[:, :, ::2]}, r"v_cache has shape"),
        ({"tables": lambda c: c.tables.long()}, r"tables is torch.int64"),
    ],
)
def test_refusals(generator, change, message):
    chunks = Chunks(generator, [4], [8])
    out = poisoned(*chunks.q.shape, dtype=torch.float32)
    for name, make in change.items():
        setattr(chunks, name, make(chunks))
    with pytest.raises(ValueError, match=message):
        chunks.attend(out=out)


def test_refused_settings(generator):
    chunks = Chunks(generator, [4], [8])
    for options, message in [
        ({"work": np.zeros((1, 3), np.int32)}, "work has shape"),
        ({"work": np.zeros((1, 4), np.int64)}, "work is torch.int64"),
        ({"out": poisoned(8, 2, 8, dtype=torch.float32)}, "out has shape"),
        ({"config": SMALL | {"ROWS": 24}}, "ROWS is 24; expected a multiple of BLOCK_M, 16"),
    ]:
        with pytest.raises(ValueError, match=message):
            chunks.attend(**options)
