"""Decode attention: against float64, over pages of NaN where nothing was stored, grouped or not.

The tolerance is that of a pointwise kernel: neither the weights nor the partial results are
rounded. Scratch starts as NaN, has more rows than the batch, and the work list goes on with items
that no cache has.
"""

import numpy as np
import pytest
import torch
from kernel_check import DEVICE, DTYPES, POINTWISE, assert_close, poisoned, randn
from paged_cache import OUT_OF_RANGE, Cache, joined
from torch.nn.functional import scaled_dot_product_attention

from kernels import paged_decode, softmax
from kernels.paged_decode import (
    DecodeScratch,
    SharedPrefix,
    decode_attention,
    decode_items,
    decode_scratch,
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
    scratch = DecodeScratch(
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
    """Returns the output of some rows; `items` in place of the list that these rows make."""
    if items is None:
        items = items_of(cache, prefixes, bounds, rows)
    q = cache.q[rows]
    work = work_of(cache, items, bounds, spare_rows)
    out = poisoned(*q.shape, dtype=q.dtype)
    inputs = q, cache.k, cache.v, cache.block_tables[rows], cache.context_lens[rows]
    assert decode_attention(*inputs, *work, out) is out
    return out


def exact(cache):
    inputs = (x.double() for x in (cache.q, cache.k, cache.v))
    return naive_decode_attention(*inputs, cache.block_tables, cache.context_lens)


def test_the_naive_version_against_pytorch(generator):
    cache = Cache(generator, [5, 0, 40], torch.float32)
    out = exact(cache)
    for row, context_len in enumerate([5, 0, 40]):
        if context_len == 0:
            assert (out[row] == 0).all()
            continue
        keys, values = [], []
        for j in range(context_len):  # a key at a time
            page = cache.block_tables[row, j // 16]
            keys.append(cache.k[page, :, j % 16].double())
            values.append(cache.v[page, :, j % 16].double())
        keys, values = torch.stack(keys, 1), torch.stack(values, 1)  # [Hkv, context_len, D]
        q = cache.q[row].double()[:, None]  # [H, 1, D]
        expected = scaled_dot_product_attention(q, keys, values, enable_gqa=True)
        assert torch.allclose(out[row], expected[:, 0], atol=1e-12)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_lengths_around_tiles_pages_and_splits(generator, dtype):
    cache = Cache(generator, [1, 15, 16, 17, 31, 32, 33, 64, 65, 0, 97], dtype, 2, 1)
    out = attend(cache)
    assert_close(out, exact(cache), POINTWISE)
    assert (out[9] == 0).all()  # no keys


@pytest.mark.parametrize(
    "heads, kv_heads, dim, page, block",
    [
        (1, 1, 16, 16, 16),
        (4, 2, 128, 16, 16),
        (3, 1, 64, 32, 32),
        (8, 2, 16, 256, 16),
        (10, 2, 32, 64, 16),
        (7, 1, 16, 16, 64),
        (16, 2, 64, 128, 32),
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


@pytest.mark.parametrize(
    "lengths", [[127, 128, 129, 2047, 2048, 2049], [8191, 8193, 10240, 10241]], ids=str
)
def test_the_splits_of_a_gpu(generator, monkeypatch, lengths):
    monkeypatch.setattr(softmax, "BLOCK_N", 128)  # fewer steps of the interpreter
    cache = Cache(generator, lengths, torch.bfloat16, 2, 1, page=256)
    bounds = split_bounds(max(lengths))
    assert_close(attend(cache, bounds=bounds), exact(cache), POINTWISE)


def test_the_tiles_of_a_gpu(generator, monkeypatch):
    monkeypatch.undo()
    cache = Cache(generator, [300, 64], torch.bfloat16, page=64)
    assert_close(attend(cache, bounds=split_bounds(300)), exact(cache), POINTWISE)


def test_many_splits_are_merged_in_blocks(generator):
    """The one key of the last split, a block of its own, weighs more than any split before it."""
    bounds = list(range(0, 16 * 18, 16))
    cache = Cache(generator, [16 * 16 + 1], torch.float32, heads=1, kv_heads=1)
    query = cache.q[0, 0]  # the key's score is 5
    cache.k[cache.block_tables[0, 16], 0, 0] = query * (5 * 16**0.5 / query.square().sum())
    assert_close(attend(cache, bounds=bounds), exact(cache), POINTWISE)


@pytest.fixture
def shared_cache(generator):
    """Makes rows 0-2 that share 32 keys, row 3 without keys, row 4, rows 5-6 that share 32."""

    def make(dtype, heads):
        lengths = [32, 33, 65], [0, 23], [34, 33]
        return joined(*(Cache(generator, part, dtype, heads, 1, shared=32) for part in lengths))

    return make


SHARED = [SharedPrefix(5, 2, 33), SharedPrefix(0, 3, 32)]


@pytest.mark.parametrize("dtype, heads", [(torch.bfloat16, 5), (torch.float32, 1)], ids=str)
def test_a_row_has_the_same_bits_in_any_batch_and_group(generator, shared_cache, dtype, heads):
    cache = shared_cache(dtype, heads)
    out = attend(cache)
    assert_close(out, exact(cache), POINTWISE)
    for row in range(7):
        assert torch.equal(out[row], attend(cache, slice(row, row + 1))[0]), f"row {row} alone"
    assert torch.equal(out, attend(cache, prefixes=SHARED)), "in groups"
    assert torch.equal(out, attend(cache, prefixes=SHARED[::-1])), "groups in another order"
    assert torch.equal(out[1:3], attend(cache, slice(1, 3), [SharedPrefix(0, 2, 32)])), "a part"
    assert torch.equal(out, attend(cache, spare_rows=0)), "in scratch for these rows alone"
    rows = torch.randperm(7, generator=generator).to(DEVICE)
    cache.q = cache.q[rows]
    cache.block_tables = cache.block_tables[rows]
    cache.context_lens = cache.context_lens[rows]
    assert torch.equal(out[rows], attend(cache)), "rows in another order"


def test_a_row_has_the_same_bits_in_any_order_of_items_and_grid(
    generator, shared_cache, monkeypatch
):
    cache = shared_cache(torch.bfloat16, 5)
    out = attend(cache)
    items = items_of(cache, SHARED)
    shuffled = items[torch.randperm(len(items), generator=generator).numpy()]
    assert torch.equal(out, attend(cache, items=shuffled)), "items in another order"
    for programs in (1, 60):
        monkeypatch.setattr(paged_decode, "multiprocessors", lambda device, n=programs: n)
        assert torch.equal(out, attend(cache, prefixes=SHARED)), f"another grid: {programs}"


def test_a_longer_table_of_splits_has_the_same_bits(generator, monkeypatch):
    monkeypatch.setattr(softmax, "BLOCK_N", 64)
    cache = Cache(generator, [300, 129], torch.bfloat16, 2, 1, page=64)
    out = attend(cache, bounds=split_bounds(300))
    assert torch.equal(out, attend(cache, bounds=split_bounds(40960)))


def test_groups_read_shared_pages_once(generator):
    """The shared pages of a group are read through the table of its first row only."""
    cache = Cache(generator, [64, 65, 97, 70], torch.bfloat16, 4, 1, shared=64)
    expected = exact(cache)
    cache.block_tables[1:4, :4] = OUT_OF_RANGE
    assert_close(attend(cache, prefixes=[SharedPrefix(0, 4, 64)]), expected, POINTWISE)


@pytest.mark.filterwarnings("ignore:invalid value", "ignore:divide by zero")
def test_a_list_stays_right_until_a_row_enters_a_new_split(generator):
    """The lengths are those on the device: items of a row that has ended are without effect."""
    cache = Cache(generator, [40, 70, 17], torch.bfloat16, 2, 1)
    earlier = items_of(cache)
    now = Cache(generator, [64, 96, 0], torch.bfloat16, 2, 1)
    assert_close(attend(now, items=earlier), exact(now), POINTWISE)


def test_the_grid_depends_on_rows_and_model_alone(generator, monkeypatch):
    grids = []

    class Recorder:
        def __init__(self, kernel):
            self.kernel = kernel

        def __getitem__(self, grid):
            grids[-1].append(grid)
            return self.kernel[grid]

    for name in ("_attend_splits", "_merge_splits"):
        monkeypatch.setattr(paged_decode, name, Recorder(getattr(paged_decode, name)))
    for lengths in ([1, 0], [200, 17]):
        grids.append([])
        attend(Cache(generator, lengths, torch.bfloat16))
    assert grids[0] == grids[1] and len(grids[0]) == 2


def test_offsets_beyond_32_bits(generator):
    """Page 32,769 begins at element 2**31 + 65,536, row 2 of q at 2**31. Little takes memory."""
    cache = torch.empty(32770, 1, 256, 256, dtype=torch.float16, device=DEVICE)
    cache[-1, 0, :20] = randn(generator, 20, 256, dtype=torch.float16)
    q = torch.empty(2**31 + 256, dtype=torch.float16, device=DEVICE)
    q = q.as_strided((3, 1, 256), (2**30, 256, 1))
    q.copy_(randn(generator, 3, 1, 256, dtype=torch.float16))
    block_tables = torch.tensor([[32769]] * 3, dtype=torch.int32, device=DEVICE)
    context_lens = torch.tensor([20, 13, 17], dtype=torch.int32, device=DEVICE)
    items = torch.from_numpy(decode_items([20, 13, 17], (), BOUNDS, 16)).to(DEVICE)
    num_items = torch.tensor([len(items)], dtype=torch.int32, device=DEVICE)
    scratch = decode_scratch(3, split_bounds(200), 1, 256, DEVICE)
    out = poisoned(3, 1, 256, dtype=torch.float16)
    bounds = torch.tensor(BOUNDS[:3], dtype=torch.int32, device=DEVICE)
    scratch = scratch._replace(bounds=bounds)
    decode_attention(q, cache, cache, block_tables, context_lens, items, num_items, scratch, out)
    last = cache[-1:].double()
    expected = naive_decode_attention(q.double(), last, last, block_tables * 0, context_lens)
    assert_close(out, expected, POINTWISE)


# The work list.


def test_splits_end_at_positions_that_depend_on_the_position_alone():
    bounds = split_bounds(131072)
    assert bounds == sorted(set(bounds)) and bounds[0] == 0
    assert {2048, 8192} <= set(bounds), "splits grow there"
    for max_context in (1, 128, 129, 2048, 2049, 8193, 40960, 131071):
        shorter = split_bounds(max_context)
        assert shorter == bounds[: len(shorter)]
        assert shorter[-2] < max_context <= shorter[-1]
    assert (split_bounds(1024)[-1], len(split_bounds(1024)) - 1) == (1024, 8)


@pytest.mark.parametrize("group, rows", [(1, 16), (2, 8), (3, 4), (4, 4), (5, 2), (8, 2), (16, 1)])
def test_rows_of_an_item(group, rows):
    assert rows_per_item(group) == rows


def test_the_example_of_the_docstring():
    items = decode_items([300, 200], [SharedPrefix(0, 2, 150)], [0, 128, 256, 384], 2)
    assert items.tolist() == [[0, 2, 0], [0, 1, 1], [1, 1, 1], [0, 1, 2]]
    assert decode_items([], [], [0, 128], 4).shape == (0, 3)


def test_the_list_has_each_split_of_each_row_once():
    """Lengths that differ much, and any number of groups."""
    random = np.random.default_rng()
    for _ in range(200):
        lengths = random.integers(0, random.integers(1, 12000), random.integers(1, 40)).tolist()
        bounds = split_bounds(12000)
        portion = int(random.choice([1, 2, 4, 16]))
        prefixes, first = [], 0
        while first < len(lengths):
            rows = int(random.integers(1, 12))
            members = lengths[first : first + rows]
            if random.random() < 0.7:
                keys = int(random.integers(0, min(members) + 1))
                prefixes.append(SharedPrefix(first, len(members), keys))
            first += rows
        random.shuffle(prefixes)
        items = decode_items(lengths, prefixes, bounds, portion)
        assert items.dtype == np.int32 and items.flags.c_contiguous

        covered, sizes = [], []
        for first, rows, split in items.tolist():
            assert 1 <= rows <= portion
            covered += [(row, split) for row in range(first, first + rows)]
            sizes.append(min(bounds[split + 1], lengths[first]) - bounds[split])
        expected = []
        for row, length in enumerate(lengths):
            expected += [(row, split) for split in range(len(bounds) - 1) if bounds[split] < length]
        assert sorted(covered) == expected
        assert sizes == sorted(sizes, reverse=True) and min(sizes, default=1) > 0

        for prefix in prefixes:
            portions = -(-prefix.rows // portion)
            for split in range(len(bounds) - 1):
                if bounds[split + 1] > prefix.keys:
                    break
                # Items of a split of a prefix, one after another
                mine = items[:, 2] == split
                mine &= items[:, 0] >= prefix.first_row
                mine &= items[:, 0] < prefix.first_row + prefix.rows
                places = np.flatnonzero(mine)
                assert len(places) == portions and np.ptp(places) == portions - 1


@pytest.mark.parametrize(
    "shape, message",
    [
        ({"heads": 3, "kv_heads": 2}, "3 query heads; expected a multiple of 2"),
        ({"heads": 17, "kv_heads": 1}, "17 query heads a kv head; expected at most 16"),
        ({"dim": 24}, "head_dim is 24; expected one of"),
        ({"page": 8}, "page_size is 8; expected one of"),
    ],
)
def test_models_that_are_refused(generator, shape, message):
    with pytest.raises(ValueError, match=message):
        attend(Cache(generator, [20], torch.float32, **shape), items=np.zeros((1, 3), np.int32))


def test_arguments_that_are_refused(generator):
    cache = Cache(generator, [20, 30], torch.float32)
    with pytest.raises(ValueError, match="the scratch has 1 rows; expected at least 2"):
        attend(cache, spare_rows=-1)
    with pytest.raises(ValueError, match="a row has 30 keys; expected at most 16"):
        decode_items([20, 30], [], [0, 16], 4)
    with pytest.raises(ValueError, match="a row has fewer keys than its shared prefix"):
        decode_items([20, 30], [SharedPrefix(0, 2, 21)], BOUNDS, 4)
    cache.v = cache.v.half()
    with pytest.raises(ValueError, match="v_cache is torch.float16; expected torch.float32"):
        attend(cache)
