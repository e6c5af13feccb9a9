"""Decode attention: against float64, over pages of NaN where nothing was stored, grouped or not.

The tolerance is that of a pointwise kernel: neither the weights nor the partial results are
rounded.
"""

import pytest
import torch
from kernel_check import DEVICE, DTYPES, POINTWISE, assert_close, randn
from paged_cache import Cache, joined

from kernels import attention, decode, decode_plan
from kernels.attention import reference
from kernels.common import FP8
from kernels.decode import decode_attention
from kernels.decode_plan import DecodeWork, decode_work, group_rows


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    monkeypatch.setattr(attention, "BLOCK_N", 16)
    split_keys(monkeypatch, 32)
    monkeypatch.setattr(decode_plan, "TILE", {2: 16, 4: 8})


def split_keys(monkeypatch, keys):
    for module in (decode, decode_plan):
        monkeypatch.setattr(module, "SPLIT", keys)


def placed(work):
    return DecodeWork(*(x.to(DEVICE) for x in work[:3]), work.results)


def attend(cache, rows=slice(None), groups=(), padding=0):
    q, lengths = cache.q[rows], cache.lengths[rows]
    most = group_rows(q.shape[1] // cache.k.shape[1], q.element_size())
    work = decode_work(lengths.tolist(), groups, most)
    items = (torch.nn.functional.pad(x, (0, 0, 0, padding)) for x in work[1:3])
    work = placed(DecodeWork(work.starts, *items, work.results + padding))
    inputs = cache.tables[rows], lengths, work
    return decode_attention(q, cache.k, cache.v, *inputs, q.new_empty(q.shape))


def exact(cache):
    inputs = (x.double() for x in (cache.q, cache.k, cache.v))
    return reference(*inputs, cache.tables, (cache.lengths - 1).tolist(), [1] * len(cache.q))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_lengths_around_tiles_pages_and_splits(generator, dtype):
    cache = Cache(generator, [1, 15, 16, 17, 31, 32, 33, 64, 65, 0], dtype, 2, 1)
    out = attend(cache)
    assert_close(out, exact(cache), POINTWISE)
    assert (out[9] == 0).all()  # no keys


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_keys_and_values_in_8_bits(generator, dtype):
    """They are widened as they are read: exact on what the cache holds."""
    cache = Cache(generator, [1, 17, 33, 65], dtype, 2, 1)
    cache.k, cache.v = cache.k.to(FP8), cache.v.to(FP8)
    assert_close(attend(cache), exact(cache), POINTWISE)


@pytest.mark.parametrize(
    "heads, kv_heads, dim, page, block, split",
    [
        (1, 1, 16, 16, 16, 16),
        (3, 1, 64, 32, 32, 64),
        (10, 2, 32, 64, 16, 64),
        (4, 4, 16, 16, 64, 64),
        (8, 1, 128, 16, 16, 32),
        (2, 1, 256, 32, 64, 32),
    ],
)
def test_shapes(generator, monkeypatch, heads, kv_heads, dim, page, block, split):
    monkeypatch.setattr(attention, "BLOCK_N", block)
    split_keys(monkeypatch, split)
    lengths = torch.randint(1, 3 * split, (2,), generator=generator).tolist()
    cache = Cache(generator, lengths, torch.bfloat16, heads, kv_heads, dim, page)
    assert_close(attend(cache), exact(cache), POINTWISE)


def test_the_tiles_of_a_gpu(generator, monkeypatch):
    monkeypatch.undo()
    cache = Cache(generator, [decode.SPLIT + 65, 64], torch.bfloat16, page=64)
    assert_close(attend(cache), exact(cache), POINTWISE)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_has_the_same_bits_in_any_batch_and_run(generator, dtype):
    cache = Cache(generator, [70, 3, 0, 32], dtype, 2, 1)
    out = attend(cache)
    assert torch.equal(out, attend(cache))
    assert torch.equal(out, attend(cache, padding=5))  # a larger grid
    for row in range(4):
        assert torch.equal(out[row], attend(cache, slice(row, row + 1))[0])


def test_many_splits_are_merged_in_blocks(generator, monkeypatch):
    """The one key of the last split, a block of its own, weighs more than any split before it."""
    split_keys(monkeypatch, 16)
    cache = Cache(generator, [16 * 16 + 1], torch.float32, heads=1, kv_heads=1)
    query = cache.q[0, 0]  # the key's score is 5
    cache.k[cache.tables[0, 16], 0, 0] = query * (5 * 16**0.5 / query.square().sum())
    assert_close(attend(cache), exact(cache), POINTWISE)


def test_offsets_beyond_32_bits(generator):
    """Page 32,769 begins at element 2**31 + 65,536. Only one page takes memory."""
    cache = torch.empty(32770, 1, 256, 256, dtype=torch.float16, device=DEVICE)
    cache[-1, 0, :20] = randn(generator, 20, 256, dtype=torch.float16)
    q = randn(generator, 1, 1, 256, dtype=torch.float16)
    table, lengths = (torch.tensor(x, dtype=torch.int32).to(DEVICE) for x in ([[32769]], [20]))
    work = placed(decode_work([20], ()))
    out = decode_attention(q, cache, cache, table, lengths, work, q.new_empty(q.shape))
    last = cache[-1:].double()
    assert_close(out, reference(q.double(), last, last, table * 0, [19], [1]), POINTWISE)


@pytest.mark.parametrize(
    "dtype, heads", [(torch.bfloat16, 2), (torch.float16, 3), (torch.float32, 1)], ids=str
)
def test_groups_read_shared_pages_once(generator, dtype, heads):
    """Rows 0-2 share 64 keys, row 3 none, rows 4 and 5 share 64 of which their group names 32."""
    lengths = [64, 65, 97], [40], [66, 70]
    cache = joined(*(Cache(generator, part, dtype, heads, 1, shared=64) for part in lengths))
    expected = exact(cache)
    cache.tables[1:3, :4] = 2**30  # shared pages are read through the first row only
    groups = [(4, 2, 32), (0, 3, 64)]  # in any order
    out = attend(cache, groups=groups)
    assert_close(out, expected, POINTWISE)
    assert torch.equal(out[3], attend(cache, slice(3, 4))[0])  # in no group
    assert torch.equal(out, attend(cache, groups=groups[::-1], padding=3))


def test_a_group_in_several_tiles(generator):
    """More query heads than a tile has rows: in fp32 8 a tile, so 2 of the 6 rows."""
    cache = Cache(generator, [64, 65, 97, 64, 70, 66], torch.float32, 3, 1, shared=64)
    assert_close(attend(cache, groups=[(0, 6, 64)]), exact(cache), POINTWISE)


def test_the_work_has_each_split_once_and_none_is_empty(generator):
    """Lengths that differ much: 3 + 1 + 512 splits, not 3 x 512."""
    for _ in range(20):
        count = int(torch.randint(1, 9, (), generator=generator))
        lengths = torch.randint(0, 700, (count,), generator=generator).tolist()
        shared = min(lengths[: count // 2], default=0)
        groups = [(0, count // 2, shared)] if count > 3 else []
        work = decode_work(lengths, groups, 3)
        splits = [-(-n // 32) for n in lengths]
        assert work.results == sum(splits) and max(map(len, work[1:3])) <= work.results
        covered = [
            (first + i, split)
            for items in (work.own, work.shared)
            for first, rows, split in items.tolist()
            for i in range(rows)
        ]
        assert sorted(covered) == [(row, s) for row, n in enumerate(splits) for s in range(n)]
        assert len(work.shared) == len(groups) * -(-(count // 2) // 3) * (shared // 32)
