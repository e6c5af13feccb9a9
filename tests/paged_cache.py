"""Sequences on shuffled cache pages for the tests of attention kernels.

What no sequence has stored is NaN, and table entries past the end are far out of range.
"""

from __future__ import annotations

import itertools
import math

import torch
from kernel_check import DEVICE, poisoned, randn


class Cache:
    """Pages of sequences of given lengths, whose first `shared` keys are the same."""

    def __init__(self, generator, lengths, dtype, heads=4, kv_heads=2, dim=16, page=16, shared=0):
        used = [math.ceil(n / page) for n in lengths]
        free = iter((torch.randperm(sum(used) + 3, generator=generator) + 1).tolist())
        common = list(itertools.islice(free, shared // page))
        shape = sum(used) + 4, kv_heads, page, dim
        self.k, self.v = (poisoned(*shape, dtype=dtype) for _ in range(2))
        tables = torch.full((len(lengths), max(used, default=0) + 3), 2**30, dtype=torch.int32)
        for row, (n, pages) in enumerate(zip(lengths, used, strict=True)):
            mine = (common + list(itertools.islice(free, pages)))[:pages]
            tables[row, :pages] = torch.tensor(mine, dtype=torch.int32)
            for index, number in enumerate(mine):
                stored = min(page, n - index * page)
                for cache in (self.k, self.v):
                    cache[number, :, :stored] = randn(generator, kv_heads, stored, dim, dtype=dtype)
        self.tables = tables.to(DEVICE)[:, :-1]  # a row stride beyond the width
        self.lengths = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
        self.set_queries(generator, len(lengths), heads)

    def set_queries(self, generator, rows: int, heads: int) -> None:
        """Draws queries as a view of the fused projection."""
        _, kv_heads, _, dim = self.k.shape
        q = randn(generator, rows, heads + 2 * kv_heads, dim, dtype=self.k.dtype)
        self.q = q[:, :heads]


def joined(*caches: Cache) -> Cache:
    """Returns the sequences of several caches as one batch over one cache."""
    whole = caches[0]
    firsts = itertools.accumulate([len(cache.k) for cache in caches], initial=0)
    width = max(cache.tables.shape[1] for cache in caches)
    whole.tables = torch.cat(
        [
            torch.nn.functional.pad(cache.tables + first, (0, width - cache.tables.shape[1]))
            for cache, first in zip(caches, firsts, strict=False)
        ]
    )
    for name in ("q", "lengths", "k", "v"):
        setattr(whole, name, torch.cat([getattr(cache, name) for cache in caches]))
    return whole
