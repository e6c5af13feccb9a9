"""Attention over pages: shared prefixes, chunks, padding and the copy that decoding goes on with, against the plain reference."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from nanorchestra.engine import attention
from nanorchestra.engine.attention import (
    DecodeAttention,
    PagedAttention,
    Rows,
    Scratch,
    group_by_prefix,
)
from nanorchestra.model.ops import cache_rows, store_kv

HEADS, KV_HEADS, DIM, PAGE, LAYERS = 6, 2, 8, 4, 2


@pytest.fixture(params=["usual", "small blocks", "no copy"])
def limits(request, monkeypatch):
    if request.param == "small blocks":
        monkeypatch.setattr(attention, "BLOCK_FLOATS", 1000)
    if request.param == "no copy":
        monkeypatch.setattr(attention, "COPY_BYTES", 0)


def caches(pages: int) -> tuple[torch.Tensor, torch.Tensor]:
    return tuple(torch.randn(LAYERS, pages, KV_HEADS, PAGE, DIM) for _ in range(2))


def tables_of_groups(rng: random.Random, groups: list[int]) -> list[list[int]]:
    """Page tables: a common first page, then for each group a shared run, then own pages. Shuffled."""
    unused = list(range(1, 400))
    rng.shuffle(unused)
    tables, root = [], unused.pop()
    for size in groups:
        shared = [root] + [unused.pop() for _ in range(rng.randrange(5))]
        tables += [shared + [unused.pop() for _ in range(rng.randrange(1, 6))] for _ in range(size)]
    rng.shuffle(tables)
    return tables


def paged_attention(q, k_cache, v_cache, block_table, length: int) -> torch.Tensor:
    """One sequence's last T positions against all its `length` positions, by public operators: q [T, H, D], block_table int64 [pages] -> [T, H, D]."""
    k, v = (
        cache[block_table].transpose(1, 2).flatten(0, 1)[:length] for cache in (k_cache, v_cache)
    )  # [length, Hkv, D]
    mask = torch.ones(q.shape[0], length, dtype=torch.bool).tril(length - q.shape[0])
    heads_first = (x.transpose(0, 1)[None] for x in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(*heads_first, mask, enable_gqa=True)[
        0
    ].transpose(0, 1)


def reference(q, k_cache, v_cache, rows: Rows, layer: int) -> torch.Tensor:
    out = torch.empty_like(q)
    for table, start, count, first in zip(
        rows.tables, rows.starts.tolist(), rows.counts.tolist(), rows.firsts.tolist()
    ):
        mine = slice(first, first + count)
        out[mine] = paged_attention(
            q[mine], k_cache[layer], v_cache[layer], torch.tensor(table), start + count
        )
    return out


@pytest.mark.parametrize("seed", range(4))
def test_chunks_of_any_length_see_their_own_history(seed, limits):
    rng = random.Random(seed)
    torch.manual_seed(seed)
    k_cache, v_cache = caches(400)
    tables = tables_of_groups(rng, [1, 8, 3, 11])
    counts = np.array([rng.choice((1, 1, 2, 3, 7)) for _ in tables])
    starts = np.array(
        [
            rng.randrange(max(0, len(t) * PAGE - 8), len(t) * PAGE - c + 1)
            for t, c in zip(tables, counts)
        ]
    )
    rows = Rows(tables, starts, counts, np.cumsum(counts) - counts)
    groups = group_by_prefix([t[: s // PAGE] for t, s in zip(tables, starts)])
    paged = PagedAttention(k_cache, v_cache, rows, groups, HEADS, Scratch(torch.device("cpu")))
    for layer in range(LAYERS):
        q = torch.randn(counts.sum(), HEADS, DIM)
        torch.testing.assert_close(
            paged(layer, q), reference(q, k_cache, v_cache, rows, layer), atol=2e-6, rtol=1e-5
        )


@pytest.mark.parametrize("seed", range(4))
def test_decoding_goes_on_while_rows_drop_out_and_order_changes(seed, limits):
    rng = random.Random(seed)
    torch.manual_seed(seed)
    k_cache, v_cache = caches(500)
    tables = [
        table + [400 + 2 * i, 401 + 2 * i]
        for i, table in enumerate(tables_of_groups(rng, [9, 1, 6, 4]))
    ]
    starts = np.array([(len(t) - 2) * PAGE - rng.randrange(1, PAGE) for t in tables])
    groups = group_by_prefix([t[: s // PAGE] for t, s in zip(tables, starts)])
    decode = DecodeAttention(
        k_cache,
        v_cache,
        Rows(tables, starts, np.ones_like(starts), np.arange(len(tables))),
        groups,
        HEADS,
        Scratch(torch.device("cpu")),
    )
    alive, steps = list(range(len(tables))), 0
    while True:
        q, k, v = (
            torch.randn(len(alive), HEADS, DIM),
            torch.randn(len(alive), KV_HEADS, DIM),
            torch.randn(len(alive), KV_HEADS, DIM),
        )
        now = Rows(
            [tables[i] for i in alive],
            starts[alive],
            np.ones(len(alive), np.int64),
            np.arange(len(alive)),
        )
        slots = torch.tensor(
            [t[s // PAGE] * PAGE + s % PAGE for t, s in zip(now.tables, now.starts.tolist())]
        )
        for layer in range(LAYERS):
            store_kv(k, v, k_cache[layer], v_cache[layer], cache_rows(slots, KV_HEADS, PAGE))
            decode.store(layer, k, v)
            torch.testing.assert_close(
                decode(layer, q), reference(q, k_cache, v_cache, now, layer), atol=2e-6, rtol=1e-5
            )
        steps += 1
        if steps == 2:
            alive.remove(rng.choice(alive))
            rng.shuffle(alive)
        starts[alive] += 1
        if not decode.follow(np.array(alive)):
            break
    assert steps > PAGE if decode.copied else steps == 1, (
        "the copy has room for a page more at least"
    )


def test_a_batch_that_has_lost_too_many_is_made_anew():
    k_cache, v_cache = caches(40)
    tables = [[i, i + 20] for i in range(16)]
    rows = Rows(tables, np.full(16, 5), np.ones(16, np.int64), np.arange(16))
    decode = DecodeAttention(
        k_cache, v_cache, rows, group_by_prefix(tables), HEADS, Scratch(torch.device("cpu"))
    )
    assert decode.follow(np.arange(14)) and not decode.follow(np.arange(13))


@pytest.mark.parametrize("seed", range(20))
def test_groups_partition_the_rows_and_share_what_they_say(seed):
    rng = random.Random(seed)
    tables = [
        table[: rng.randrange(len(table) + 1)]
        for table in tables_of_groups(rng, [rng.randrange(1, 9) for _ in range(6)])
    ]
    groups = group_by_prefix(tables)
    assert sorted(i for indices, _ in groups for i in indices) == list(range(len(tables)))
    for indices, shared in groups:
        assert len({tuple(tables[i][:shared]) for i in indices}) == 1 and all(
            len(tables[i]) >= shared for i in indices
        )


def test_a_system_prompt_common_to_all_does_not_tear_groups_apart():
    system = [1, 2, 3]
    tables = [
        system + [10 * g + n for n in range(4, 14)] + [1000 + 10 * g + i]
        for g in range(5)
        for i in range(8)
    ]
    groups = group_by_prefix(tables)
    assert sorted((len(indices), shared) for indices, shared in groups) == [(8, 13)] * 5
