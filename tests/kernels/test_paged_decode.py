"""Decode attention: against float64, over pages of NaN where nothing was stored, grouped or not.

The tolerance is that of a pointwise kernel: neither the weights nor the partial results are
rounded. Scratch starts as NaN, has more rows than the batch, and the work list goes on with items
that no cache has.
"""

import numpy as np
import pytest
import torch
from kernel_check import DEVICE, DTYPES, POINTWISE, assert_close, poisoned
from paged_cache import OUT_OF_RANGE, Cache

from kernels import paged_decode, softmax
from kernels.paged_decode import (
    SharedPrefix,
    SplitScratch,
    decode_attention,
    decode_items,
    naive_decode_attention,
    rows_per_item,
    split_bounds,
)

BOUNDS = [0, 16, 32, 64, 96, 160, 224]  # small splits that grow


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    monkeypatch.setattr(softmax, "BLOCK_N", 16)


def work_of(cache, items, bounds, spare_rows=3):
    """Returns items, that go on with nonsense, their number, and scratch that is NaN."""
    rows = len(cache.context_lens) + spare_rows
    heads, dim = cache.q.shape[1:]
    capacity = np.full((len(items) + 50, 3), OUT_OF_RANGE, np.int32)
    capacity[: len(items)] = items
    splits = len(bounds) - 1
    scratch = SplitScratch(
        torch.tensor(bounds, dtype=torch.int32, device=DEVICE),
        poisoned(rows, splits, heads, dim, dtype=torch.float32),
        poisoned(rows, splits, heads, dtype=torch.float32),
    )
    num_items = torch.tensor([len(items)], dtype=torch.int32, device=DEVICE)
    return torch.from_numpy(capacity).to(DEVICE), num_items, scratch


def items_of(cache, prefixes=(), bounds=BOUNDS, rows=slice(None)):
    portion = rows_per_item(cache.q.shape[1] // cache.k.shape[1])
    return decode_items(cache.context_lens[rows].tolist(), prefixes, bounds, portion)


def attend(cache, rows=slice(None), prefixes=(), bounds=BOUNDS, items=None, spare_rows=3):
    """Returns the output of some rows; `items` in place of the list that these rows make.

    Rows without keys must not be written, and are 0 here as in the naive version.
    """
    if items is None:
        items = items_of(cache, prefixes, bounds, rows)
    q = cache.q[rows]
    work = work_of(cache, items, bounds, spare_rows)
    out = poisoned(*q.shape, dtype=q.dtype)
    inputs = q, cache.k, cache.v, cache.block_tables[rows], cache.context_lens[rows]
    assert decode_attention(*inputs, *work, out) is out
    without_keys = cache.context_lens[rows] == 0
    assert out[without_keys].isnan().all()
    out[without_keys] = 0
    return out


def exact(cache):
    inputs = (x.double() for x in (cache.q, cache.k, cache.v))
    return naive_decode_attention(*inputs, cache.block_tables, cache.context_lens)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_lengths_around_tiles_pages_and_splits(generator, dtype):
    cache = Cache(generator, [1, 15, 16, 17, 31, 32, 33, 64, 65, 0, 97], dtype, 2, 1)
    out = attend(cache)
    assert_close(out, exact(cache), POINTWISE)


@pytest.mark.parametrize(
    "heads, kv_heads, dim, page, block",
    [
        (1, 1, 16, 16, 16),
        (4, 2, 128, 16, 16),
        (10, 2, 32, 64, 16),
        (7, 1, 16, 256, 64),
        (16, 1, 256, 32, 64),
    ],
)
def test_head_counts_head_dims_and_pages(generator, monkeypatch, heads, kv_heads, dim, page, block):
    """Of 1 to 16 query heads a kv head, grouped in one item or in as many as there are rows."""
    monkeypatch.setattr(softmax, "BLOCK_N", block)
    shared = max(64, page)
    lengths = [shared + 1, shared, shared + 6]
    cache = Cache(generator, lengths, torch.bfloat16, heads, kv_heads, dim, page, shared=shared)
    bounds = list(range(0, 384, 64))
    out = attend(cache, prefixes=[SharedPrefix(0, 3, shared)], bounds=bounds)
    assert_close(out, exact(cache), POINTWISE)
    assert torch.equal(out, attend(cache, bounds=bounds))


def test_the_tiles_and_splits_of_a_gpu(generator, monkeypatch):
    """A longer table of splits, those of a longer context, gives the same bits."""
    monkeypatch.undo()
    cache = Cache(generator, [300, 64, 2049], torch.bfloat16, 2, 1, page=64)
    out = attend(cache, bounds=split_bounds(2049))
    assert_close(out, exact(cache), POINTWISE)
    assert torch.equal(out, attend(cache, bounds=split_bounds(40960)))


def test_many_splits_are_merged_in_blocks(generator):
    """The one key of the last split, a block of its own, weighs more than any split before it."""
    bounds = list(range(0, 16 * 18, 16))
    cache = Cache(generator, [16 * 16 + 1], torch.float32, heads=1, kv_heads=1)
    query = cache.q[0, 0]  # the key's score is 5
    cache.k[cache.block_tables[0, 16], 0, 0] = query * (5 * 16**0.5 / query.square().sum())
    assert_close(attend(cache, bounds=bounds), exact(cache), POINTWISE)


LENGTHS = [32, 33, 65, 0, 23, 34, 33]  # of rows whose first 32 keys are the same
SHARED = [SharedPrefix(5, 2, 32), SharedPrefix(0, 3, 32)]


@pytest.mark.parametrize("dtype, heads", [(torch.bfloat16, 5), (torch.float32, 1)], ids=str)
def test_a_row_has_the_same_bits_in_any_batch_group_and_order(generator, monkeypatch, dtype, heads):
    cache = Cache(generator, LENGTHS, dtype, heads, 1, shared=32)
    out = attend(cache)
    assert_close(out, exact(cache), POINTWISE)
    for row in (1, 3, 6):
        assert torch.equal(out[row], attend(cache, slice(row, row + 1))[0]), f"row {row} alone"
    assert torch.equal(out[1:3], attend(cache, slice(1, 3), [SharedPrefix(0, 2, 32)])), "a part"
    assert torch.equal(out, attend(cache, spare_rows=0)), "in scratch for these rows alone"
    items = items_of(cache, SHARED)
    shuffled = items[torch.randperm(len(items), generator=generator).numpy()]
    assert torch.equal(out, attend(cache, items=shuffled)), "items in another order"
    for programs in (1, 60):
        monkeypatch.setattr(paged_decode, "multiprocessors", lambda device, n=programs: n)
        assert torch.equal(out, attend(cache, prefixes=SHARED)), f"another grid: {programs}"
    rows = torch.randperm(7, generator=generator).to(DEVICE)
    cache.q = cache.q[rows]
    cache.block_tables = cache.block_tables[rows]
    cache.context_lens = cache.context_lens[rows]
    assert torch.equal(out[rows], attend(cache)), "rows in another order"


@pytest.mark.filterwarnings("ignore:invalid value", "ignore:divide by zero")
def test_a_list_stays_right_until_a_row_enters_a_new_split(generator):
    """The lengths are those on the device: items of a row that has ended are without effect."""
    cache = Cache(generator, [40, 70, 17], torch.bfloat16, 2, 1)
    earlier = items_of(cache)
    now = Cache(generator, [64, 96, 0], torch.bfloat16, 2, 1)
    assert_close(attend(now, items=earlier), exact(now), POINTWISE)
