"""Attention over pages: shared prefixes, padding and the decode copy, against SDPA."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from nanorchestra.engine import attention
from nanorchestra.engine.attention import DecodeBatch, group_by_prefix
from nanorchestra.model.ops import cache_rows, store_kv

HEADS, KV_HEADS, DIM, PAGE, LAYERS = 6, 2, 8, 4, 2


@pytest.fixture(params=[attention.BLOCK_FLOATS, 1000], ids=["usual", "small blocks"])
def blocks(request, monkeypatch):
    monkeypatch.setattr(attention, "BLOCK_FLOATS", request.param)


class Row:
    """What a DecodeBatch reads of a request."""

    def __init__(self, pages: list[int], length: int):
        self.table, self.ids = SimpleNamespace(pages=pages), [0] * length


def caches(pages: int) -> tuple[torch.Tensor, torch.Tensor]:
    return tuple(torch.randn(LAYERS, pages, KV_HEADS, PAGE, DIM) for _ in range(2))


def tables_of_groups(rng: random.Random, groups: list[int]) -> list[list[int]]:
    """Page tables: a common first page, then for each group a shared run, then own pages."""
    unused = list(range(1, 400))
    rng.shuffle(unused)
    tables, root = [], unused.pop()
    for size in groups:
        shared = [root] + [unused.pop() for _ in range(rng.randrange(5))]
        tables += [shared + [unused.pop() for _ in range(rng.randrange(1, 6))] for _ in range(size)]
    rng.shuffle(tables)
    return tables


def reference(q, layer_caches, tables, starts, counts) -> torch.Tensor:
    """One row at a time, by public operators: q [T, H, D] -> [T, H, D]."""
    out = []
    for part, table, start in zip(q.split(counts), tables, starts, strict=True):
        length = start + len(part)
        k, v = (cache[table].transpose(1, 2).flatten(0, 1)[:length] for cache in layer_caches)
        mask = torch.ones(len(part), length, dtype=torch.bool).tril(length - len(part))
        heads_first = (x.transpose(0, 1)[None] for x in (part, k, v))
        attended = F.scaled_dot_product_attention(*heads_first, mask, enable_gqa=True)
        out.append(attended[0].transpose(0, 1))
    return torch.cat(out)


@pytest.mark.parametrize("seed", range(4))
def test_decoding_goes_on_while_rows_drop_out(seed, blocks):
    rng = random.Random(seed)
    torch.manual_seed(seed)
    pools, tables = caches(500), tables_of_groups(rng, [9, 1, 6, 4])
    requests = [
        Row(table + [400 + 2 * i, 401 + 2 * i], len(table) * PAGE - rng.randrange(PAGE - 1))
        for i, table in enumerate(tables)
    ]
    batch, steps = DecodeBatch(*pools, HEADS), 0
    batch.start(requests)
    while True:
        alive = list(batch.rows)
        starts = [len(request.ids) - 1 for request in alive]
        tables = [request.table.pages for request in alive]
        slots = [t[s // PAGE] * PAGE + s % PAGE for t, s in zip(tables, starts, strict=True)]
        rows = cache_rows(torch.tensor(slots), KV_HEADS, PAGE)
        q = torch.randn(len(alive), HEADS, DIM)
        k, v = (torch.randn(len(alive), KV_HEADS, DIM) for _ in range(2))
        for layer in range(LAYERS):
            own = [pool[layer] for pool in pools]
            store_kv(k, v, *own, rows)
            expected = reference(q, own, tables, starts, [1] * len(alive))
            attended = batch.attend(layer, q, k, v)
            torch.testing.assert_close(attended, expected, atol=2e-6, rtol=1e-5)
        steps += 1
        if steps == 2:
            alive.remove(rng.choice(alive))
        for request in alive:
            request.ids.append(0)
        if not batch.follow(set(alive)):
            break
    assert steps > PAGE, "the copy has room for a page more at least"


def test_a_system_prompt_common_to_all_does_not_split_groups():
    bodies = [[1, 2, 3, *range(10 * g + 4, 10 * g + 14)] for g in range(5)]
    groups = group_by_prefix([body + [1000 + i] for body in bodies for i in range(8)])
    assert sorted((len(rows), shared) for rows, shared in groups) == [(8, 13)] * 5
