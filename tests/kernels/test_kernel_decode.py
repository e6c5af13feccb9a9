"""Decode attention: against float64, over pages full of NaN where nothing was stored; alone or in company; grouped or not.

The tolerance is that of a pointwise kernel: the weights are not rounded, nor are the partial results.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from kernel_check import DEVICE, DTYPES, POINTWISE, assert_close, poisoned, randn

from kernels import decode, decode_shared
from kernels.decode import decode_attention, reference

SMALL = {"SPLIT": 32, "BLOCK_N": 16, "num_warps": 4, "num_stages": 1}


class Cache:
    """Sequences of given lengths on shuffled pages; what no sequence has stored is NaN, and table entries past the end are far out of range."""

    def __init__(
        self,
        generator,
        lengths,
        dtype=torch.float32,
        heads=4,
        kv_heads=2,
        dim=16,
        page=16,
        shared=0,
    ):
        used = [math.ceil(n / page) for n in lengths]
        free = iter((torch.randperm(sum(used) + 3, generator=generator) + 1).tolist())
        common = list(itertools.islice(free, shared // page))
        self.k, self.v = (
            poisoned(sum(used) + 4, kv_heads, page, dim, dtype=dtype) for _ in range(2)
        )
        tables = torch.full((len(lengths), max(used, default=0) + 3), 2**30, dtype=torch.int32)
        for row, (n, pages) in enumerate(zip(lengths, used)):
            mine = (common + list(itertools.islice(free, pages)))[:pages]
            tables[row, :pages] = torch.tensor(mine, dtype=torch.int32)
            for index, number in enumerate(mine):
                stored = min(page, n - index * page)
                self.k[number, :, :stored] = randn(generator, kv_heads, stored, dim, dtype=dtype)
                self.v[number, :, :stored] = randn(generator, kv_heads, stored, dim, dtype=dtype)
        self.tables = tables.to(DEVICE)[:, : tables.shape[1] - 1]  # a row stride beyond the width
        self.lengths = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
        self.q = randn(generator, len(lengths), heads + 2 * kv_heads, dim, dtype=dtype)[
            :, :heads
        ]  # a view of the fused projection

    def exact(self):
        return reference(
            self.q.double(), self.k.double(), self.v.double(), self.tables, self.lengths
        )

    def attend(self, rows=slice(None), **options):
        settings = {"max_length": int(self.lengths.max()) or 1, "config": SMALL} | options
        return decode_attention(
            self.q[rows], self.k, self.v, self.tables[rows], self.lengths[rows], **settings
        )


@pytest.fixture(autouse=True)
def _poison(monkeypatch):
    """Everything the launchers allocate starts as NaN."""
    monkeypatch.setattr(
        decode.torch,
        "empty",
        lambda shape, dtype, device: torch.full(shape, float("nan"), dtype=dtype, device=device),
    )


def groups_of(*groups):
    return torch.tensor(groups, dtype=torch.int32, device=DEVICE)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_lengths_around_tiles_pages_and_splits(generator, dtype):
    cache = Cache(generator, [1, 15, 16, 17, 31, 32, 33, 64, 65, 0], dtype, 2, 1)
    out = poisoned(10, 2, 16, dtype=dtype)
    assert cache.attend(out=out) is out
    assert_close(out, cache.exact(), POINTWISE)
    assert (out[9] == 0).all()  # no keys


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
def test_shapes(generator, heads, kv_heads, dim, page, block, split):
    lengths = torch.randint(1, 3 * split, (2,), generator=generator).tolist()
    cache = Cache(generator, lengths, torch.bfloat16, heads, kv_heads, dim, page)
    assert_close(
        cache.attend(config=SMALL | {"BLOCK_N": block, "SPLIT": split}), cache.exact(), POINTWISE
    )


def test_peaked_and_flat_scores(generator):
    """A large q puts the weight on a few keys of one split; q = 0 gives the mean, the worst case for rounded weights."""
    cache = Cache(generator, [90, 90], torch.bfloat16)
    cache.q[0] *= 30
    cache.q[1] = 0
    assert_close(cache.attend(), cache.exact(), POINTWISE)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_alone_gives_the_same_bits(generator, dtype):
    cache = Cache(generator, [70, 3, 0, 32], dtype, 2, 1)
    out = cache.attend()
    assert torch.equal(out, cache.attend())
    assert torch.equal(out, cache.attend(max_length=100))  # a larger grid changes nothing
    for row in range(4):
        assert torch.equal(out[row], cache.attend(slice(row, row + 1))[0])


def test_many_splits_are_merged_in_blocks(generator):
    """The last split is a block of its own, and its one key weighs a quarter of the whole: more than any split before it."""
    cache = Cache(generator, [16 * 16 + 1], heads=1, kv_heads=1)
    query = cache.q[0, 0]
    cache.k[cache.tables[0, 16], 0, 0] = query * (
        5 * 16**0.5 / query.square().sum()
    )  # its score is 5
    assert_close(cache.attend(config=SMALL | {"SPLIT": 16}), cache.exact(), POINTWISE)


def test_the_default_configuration(generator):
    cache = Cache(generator, [decode.SPLIT + 65, 64], torch.bfloat16, page=64)
    assert_close(cache.attend(config=None), cache.exact(), POINTWISE)


def test_offsets_beyond_32_bits(generator):
    """Page 32,769 begins at element 2**31 + 65,536. Memory is reserved for all pages and used for one."""
    cache = torch.tensor([], dtype=torch.float16, device=DEVICE).new_empty(32770, 1, 256, 256)
    cache[-1, 0, :20] = randn(generator, 20, 256, dtype=torch.float16)
    q, lengths = (
        randn(generator, 1, 1, 256, dtype=torch.float16),
        torch.tensor([20], dtype=torch.int32, device=DEVICE),
    )
    out = decode_attention(
        q,
        cache,
        cache,
        torch.full_like(lengths, 32769)[:, None],
        lengths,
        max_length=20,
        config=SMALL,
    )
    last = cache[-1:].double()
    assert_close(
        out,
        reference(q.double(), last, last, torch.zeros_like(lengths)[:, None], lengths),
        POINTWISE,
    )


def test_no_rows(generator):
    assert Cache(generator, [20]).attend(slice(0, 0)).shape == (0, 4, 16)


@pytest.fixture
def company(generator):
    """Makes a batch: rows 0-2 share 64 keys, row 3 shares none, rows 4 and 5 share 64 of which their group names 32; and the groups."""

    def make(dtype=torch.float32, heads=2):
        parts = [
            Cache(generator, lengths, dtype, heads, 1, shared=64)
            for lengths in ([64, 65, 97], [40], [66, 70])
        ]
        return joined(*parts), groups_of(
            (4, 2, 32), (0, 0, 64), (0, 3, 64)
        )  # in any order; the second is padding

    return make


@pytest.mark.parametrize(
    "dtype, heads", [(torch.bfloat16, 2), (torch.float16, 3), (torch.float32, 1)], ids=str
)
def test_groups_read_shared_pages_once(company, dtype, heads, monkeypatch):
    monkeypatch.setattr(decode_shared, "ROWS", 4)
    cache, groups = company(dtype, heads)
    out = cache.attend(groups=groups)
    assert_close(out, cache.exact(), POINTWISE)
    assert torch.equal(out[3], cache.attend(slice(3, 4))[0])  # in no group


def test_a_group_in_several_tiles(company, monkeypatch):
    """More query heads than a tile has rows; and the same again gives the same bits, in any order of the groups."""
    monkeypatch.setattr(decode_shared, "ROWS", 16)
    cache, groups = company(heads=3)  # fp32: 8 rows a tile, 8 tiles, of which 4 or 6 have rows
    out = cache.attend(groups=groups)
    assert_close(out, cache.exact(), POINTWISE)
    assert torch.equal(out, cache.attend(groups=groups[[2, 0, 1]], max_length=130))


def joined(*caches):
    """Several caches' sequences as one batch over one cache."""
    whole = caches[0]
    pages = list(itertools.accumulate([len(cache.k) for cache in caches], initial=0))
    width = max(cache.tables.shape[1] for cache in caches)
    tables = [
        torch.nn.functional.pad(cache.tables + first, (0, width - cache.tables.shape[1]))
        for cache, first in zip(caches, pages)
    ]
    whole.tables, whole.q, whole.lengths = (
        torch.cat(tables),
        torch.cat([c.q for c in caches]),
        torch.cat([c.lengths for c in caches]),
    )
    whole.k, whole.v = torch.cat([c.k for c in caches]), torch.cat([c.v for c in caches])
    return whole


def test_shared_pages_are_read_through_the_first_row_only(generator):
    """What the others' tables say about the shared pages does not matter: nothing of it is read."""
    cache = Cache(generator, [70, 80], shared=64)
    expected = cache.exact()
    cache.tables[1, :4] = 2**30
    assert_close(cache.attend(groups=groups_of((0, 2, 64))), expected, POINTWISE)


def test_without_groups_nothing_changes(generator):
    cache = Cache(generator, [70, 80])
    assert torch.equal(cache.attend(), cache.attend(groups=groups_of((0, 0, 0))))
    assert torch.equal(
        cache.attend(), cache.attend(groups=torch.zeros(0, 3, dtype=torch.int32, device=DEVICE))
    )


@pytest.mark.parametrize(
    "change, message",
    [
        ({"q": lambda c: c.q[0]}, r"q has shape"),
        ({"q": lambda c: c.q.transpose(1, 2)[:, :16]}, r"expected|strides"),
        ({"q": lambda c: c.q[:, :3]}, r"3 query heads; expected a multiple of the cache's 2"),
        ({"q": lambda c: c.q.bfloat16()}, r"k_cache is torch.float32; expected torch.bfloat16"),
        ({"k": lambda c: c.k[:, :, ::2]}, r"k_cache has strides"),
        (
            {"k": lambda c: c.k[:, :, :8].contiguous(), "v": lambda c: c.v[:, :, :8].contiguous()},
            r"page_size is 8; expected a power of two",
        ),
        ({"v": lambda c: c.v[:1]}, r"v_cache has shape"),
        ({"tables": lambda c: c.tables.long()}, r"tables is torch.int64"),
        ({"tables": lambda c: c.tables[:1]}, r"tables has 1 rows for 2 queries"),
        ({"tables": lambda c: c.tables.T.contiguous().T}, r"tables has strides"),
        ({"lengths": lambda c: c.lengths[:1]}, r"lengths has shape"),
        ({"lengths": lambda c: c.lengths.long()}, r"lengths is torch.int64"),
    ],
)
def test_refusals(generator, change, message):
    cache = Cache(generator, [20, 30])
    for name, make in change.items():
        setattr(cache, name, make(cache))
    with pytest.raises(ValueError, match=message):
        decode_attention(
            cache.q, cache.k, cache.v, cache.tables, cache.lengths, max_length=30, config=SMALL
        )


def test_refused_settings(generator):
    cache = Cache(generator, [20, 30])
    for options, message in [
        ({"max_length": 0}, "max_length is 0"),
        ({"config": SMALL | {"SPLIT": 24}}, "SPLIT is 24; expected a multiple of BLOCK_N, 16"),
        ({"out": poisoned(2, 4, 8, dtype=torch.float32)}, "out has shape"),
        ({"groups": groups_of((0, 2))}, "groups has shape"),
    ]:
        with pytest.raises(ValueError, match=message):
            cache.attend(**options)


@pytest.mark.parametrize("dim", [24, 8, 512])
def test_refused_head_sizes(generator, dim):
    with pytest.raises(
        ValueError, match=f"head_dim is {dim}; expected a power of two from 16 to 256"
    ):
        Cache(generator, [20], dim=dim).attend()
