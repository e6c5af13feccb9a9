"""Sequences on shuffled cache pages, for the tests of the attention kernels.

What no sequence has stored is NaN, and block table entries past the end are far out of range.
"""

from __future__ import annotations

import itertools
import math

import torch
from kernel_check import DEVICE, poisoned, randn

OUT_OF_RANGE = 2**30  # a page that no cache has


class Cache:
    """Pages of sequences of given lengths, whose first `shared` keys are the same."""

    def __init__(self, generator, lengths, dtype, heads=4, kv_heads=2, dim=16, page=16, shared=0):
        used = [math.ceil(n / page) for n in lengths]
        free = iter((torch.randperm(sum(used) + 3, generator=generator) + 1).tolist())
        common = list(itertools.islice(free, shared // page))
        self.k = poisoned(sum(used) + 4, kv_heads, page, dim, dtype=dtype)
        self.v = poisoned(sum(used) + 4, kv_heads, page, dim, dtype=dtype)
        width = max(used, default=0) + 3
        block_tables = torch.full((len(lengths), width), OUT_OF_RANGE, dtype=torch.int32)
        for row, (n, pages) in enumerate(zip(lengths, used, strict=True)):
            block_table = (common + list(itertools.islice(free, pages)))[:pages]
            block_tables[row, :pages] = torch.tensor(block_table, dtype=torch.int32)
            for index, number in enumerate(block_table):
                stored = min(page, n - index * page)
                for cache in (self.k, self.v):
                    cache[number, :, :stored] = randn(generator, kv_heads, stored, dim, dtype=dtype)
        self.block_tables = block_tables.to(DEVICE)[:, :-1]  # a row stride beyond the width
        self.context_lens = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
        self.set_queries(generator, len(lengths), heads)

    def set_queries(self, generator, rows: int, heads: int) -> None:
        """Draws queries as a view of the fused projection."""
        _, kv_heads, _, dim = self.k.shape
        qkv = randn(generator, rows, heads + 2 * kv_heads, dim, dtype=self.k.dtype)
        self.q = qkv[:, :heads]
