"""The page cache: exact prefix sharing, reference counts, LRU eviction, copy-on-write."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    multiple,
    precondition,
    rule,
)
from paged_world import FakePool

from nanorchestra.engine.cache import PageCache, PageTable


def filled(cache: PageCache, ids: list[int]) -> PageTable:
    """A table whose pages hold all of `ids`."""
    table = PageTable()
    cache.match(table, ids)
    assert cache.grow(table, len(ids))
    cache.commit(table, ids, len(ids))
    return table


def matched(cache: PageCache, ids: list[int]) -> int:
    table = PageTable()
    cache.match(table, ids)
    length = table.written
    cache.release(table)
    return length


def test_the_least_recently_used_prefix_is_evicted_from_its_end():
    cache = PageCache(6, page_size=2)
    for token in (1, 2, 1):  # the prefix of 1 is used again, so that of 2 is the oldest
        cache.release(filled(cache, [token] * 6))
    assert cache.grow(PageTable(), 2)
    assert matched(cache, [2] * 6 + [0]) == 4 and matched(cache, [1] * 6 + [0]) == 6


def test_pages_of_older_weights_never_match_and_pages_are_handed_out_as_at_first():
    cache, ids = PageCache(8, page_size=2), [1, 2, 3, 4, 5]
    cache.release(filled(cache, [9, 9]))
    cache.release(filled(cache, ids))
    cache.clear(1)
    assert matched(cache, ids) == 0
    assert filled(cache, ids).pages == filled(PageCache(8, page_size=2), ids).pages


@pytest.mark.parametrize("module", ["cache", "scheduler", "request", "guide", "stream"])
def test_the_bookkeeping_never_imports_torch(module):
    code = f"import sys, nanorchestra.engine.{module}; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


class CountingCache(PageCache):
    evictions = 0

    def _evict(self) -> int:
        self.evictions += 1
        return super()._evict()


class CacheMachine(RuleBasedStateMachine):
    """Random use against a dict: sequences read their own history, what was committed is found."""

    sequences = Bundle("sequences")
    tokens = st.lists(st.integers(0, 1), min_size=1, max_size=9)

    def __init__(self):
        super().__init__()
        self.cache = CountingCache(num_pages=12, page_size=2)
        self.pool = FakePool(self.cache)
        self.live: dict[int, tuple[PageTable, list[int]]] = {}
        self.committed: set[tuple[int, ...]] = set()  # prefixes of this version, evicted or not
        self.version = self.next = 0

    def _add(self, table: PageTable, ids: list[int]) -> int:
        self.live[self.next] = (table, list(ids))
        self.next += 1
        return self.next - 1

    @rule(target=sequences, ids=tokens)
    def open(self, ids):
        table, expected = PageTable(), 0
        self.cache.match(table, ids)
        while expected + 2 < len(ids) and tuple(ids[: expected + 2]) in self.committed:
            expected += 2
        assert table.written == expected or table.written < expected and self.cache.evictions
        return self._add(table, ids)

    @rule(key=sequences, more=tokens, chunk=st.integers(1, 20))
    def compute(self, key, more, chunk):
        if key not in self.live:
            return
        table, ids = self.live[key]
        ids += more
        before = list(table.pages), self.cache.available
        if not self.cache.grow(table, len(ids)):
            assert (table.pages, self.cache.available) == before
            return
        assert self.cache.missing(table, len(ids)) == 0
        self.pool.copy(self.cache.copies)
        self.cache.copies = {}
        count = min(chunk, len(ids) - table.written)
        self.pool.write(table, ids, table.written, count)
        self.cache.commit(table, ids, table.written + count)
        self.committed |= {tuple(ids[:n]) for n in range(2, table.written + 1, 2)}

    @rule(target=sequences, key=sequences)
    def fork(self, key):
        if key not in self.live:
            return multiple()
        table, ids = self.live[key]
        other = PageTable()
        self.cache.fork(table, other, table.written)
        return self._add(other, ids)

    @rule(key=consumes(sequences))
    def release(self, key):
        if key in self.live:
            table, _ = self.live.pop(key)
            self.cache.release(table)
            self.cache.release(table)  # is idempotent

    @precondition(lambda self: self.next % 5 == 4)
    @rule()
    def new_weights(self):
        for table, _ in self.live.values():
            self.cache.release(table)
        self.live.clear()
        self.committed.clear()
        self.version += 1
        self.cache.clear(self.version)

    @invariant()
    def sound(self):
        self.cache.check(table for table, _ in self.live.values())
        for table, ids in self.live.values():
            self.pool.assert_reads(table, ids, table.written)


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
