"""The page cache: exact prefix sharing, reference counts, LRU eviction, weight versions. No torch, no model."""

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


def test_a_prefix_is_matched_up_to_full_pages_and_never_wholly():
    cache = PageCache(16, page_size=4)
    filled(cache, list(range(10)))  # two full pages and a half
    for ids, matched in (
        (range(10), 8),
        (range(20), 8),
        (range(9), 8),
        (range(8), 4),
        (range(5), 4),
        (range(4), 0),
        ([0, 1, 2, 9, 4], 0),
    ):
        table = PageTable()
        assert cache.match(table, list(ids)) == matched == table.written
        cache.release(table)


def test_a_page_is_matchable_only_when_full_and_committed():
    cache = PageCache(16, page_size=4)
    table, ids = PageTable(), list(range(12))
    cache.grow(table, 12)
    for written, matchable in (
        (3, 0),
        (4, 4),
        (7, 4),
        (12, 8),
    ):  # the last page is never matched: one token must be computed
        cache.commit(table, ids, written)
        other = PageTable()
        assert cache.match(other, ids) == matchable
        cache.release(other)


def test_the_same_tokens_after_another_prefix_are_another_page():
    cache = PageCache(16, page_size=2)
    filled(cache, [1, 1, 5, 5, 0])
    filled(cache, [2, 2, 6, 6, 0])
    table = PageTable()
    assert cache.match(table, [1, 1, 6, 6, 0]) == 2


def test_two_sequences_that_compute_the_same_page_end_up_with_one():
    """Freeing a duplicate while a table still pointed at it was mini-sglang's use-after-free: the table must take the canonical page."""
    cache = PageCache(16, page_size=4)
    a, b, ids = PageTable(), PageTable(), list(range(9))
    cache.grow(a, 9), cache.grow(b, 9)
    cache.commit(a, ids, 9)
    own = list(b.pages)
    cache.commit(b, ids, 9)
    assert b.pages[:2] == a.pages[:2] and b.pages[2] == own[2]
    cache.check([a, b])
    assert cache.available == 16 - 4
    cache.release(a)
    cache.check([b])
    table = PageTable()
    assert cache.match(table, ids) == 8 and table.pages == b.pages[:2]


def test_growth_is_all_or_nothing():
    cache = PageCache(4, page_size=4)
    a, b = PageTable(), PageTable()
    assert cache.grow(a, 9) and len(a.pages) == 3
    assert not cache.grow(b, 8) and b.pages == [] and cache.available == 1
    cache.check([a, b])


def test_the_least_recently_used_prefix_is_evicted_from_its_end():
    cache = PageCache(6, page_size=2)
    first, second = [1] * 6, [2] * 6
    cache.release(filled(cache, first))
    cache.release(filled(cache, second))
    cache.release(filled(cache, first))  # used again, so `second` is the oldest now
    table = PageTable()
    assert cache.grow(table, 2)
    probe = PageTable()
    assert cache.match(probe, second + [0]) == 4  # its last page went
    cache.release(probe)
    assert cache.match(probe, first + [0]) == 6
    cache.check([table, probe])


def test_release_is_idempotent():
    cache = PageCache(8, page_size=2)
    table = filled(cache, [1, 2, 3])
    cache.release(table)
    cache.release(table)
    assert cache.available == 8
    cache.check([])


def test_pages_of_older_weights_never_match():
    cache = PageCache(8, page_size=2)
    cache.release(filled(cache, [1, 2, 3, 4, 5]))
    kept = filled(cache, [7, 7, 7, 7])  # still held when the weights change
    cache.set_version(1)
    table = PageTable()
    assert cache.match(table, [1, 2, 3, 4, 5]) == 0 and cache.match(table, [7, 7, 7, 7, 7]) == 0
    cache.check([kept])
    cache.release(kept)
    assert cache.match(table, [7, 7, 7, 7, 7]) == 0
    cache.check([])


def test_with_new_weights_pages_are_handed_out_as_at_first():
    """Rows are batched in the order of their pages, so that what was computed before would show in the last bits of what comes."""
    cache = PageCache(8, page_size=2)
    first, second = filled(cache, [1, 2, 3]), filled(cache, [7, 8, 9, 10, 11])
    cache.release(first)
    cache.release(second)
    cache.set_version(1)
    assert (
        filled(cache, [5, 5, 5, 5, 5]).pages
        == filled(PageCache(8, page_size=2), [5, 5, 5, 5, 5]).pages
    )


def test_misuse_is_an_error():
    cache = PageCache(8, page_size=2)
    table = filled(cache, [1, 2, 3])
    with pytest.raises(ValueError, match="empty table"):
        cache.match(table, [1, 2, 3])
    with pytest.raises(ValueError, match="cannot commit"):
        cache.commit(table, [1, 2, 3, 4, 5], 5)


@pytest.mark.parametrize("module", ["cache", "scheduler", "types"])
def test_the_bookkeeping_never_imports_torch(module):
    code = (
        f"import sys, types; package = types.ModuleType('nanorchestra'); package.__path__ = ['nanorchestra']; "
        f"sys.modules['nanorchestra'] = package; import nanorchestra.{module}; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


class CountingCache(PageCache):
    evictions = 0

    def _evict(self) -> int:
        self.evictions += 1
        return super()._evict()


class CacheMachine(RuleBasedStateMachine):
    """Random use against a dict: whatever happens, a sequence reads its own history, and what was committed is found again."""

    sequences = Bundle("sequences")
    tokens = st.lists(st.integers(0, 1), min_size=1, max_size=9)

    def __init__(self):
        super().__init__()
        self.cache = CountingCache(num_pages=12, page_size=2)
        self.pool = FakePool(self.cache)
        self.live: dict[int, tuple[PageTable, list[int]]] = {}
        self.committed: set[tuple[int, ...]] = (
            set()
        )  # prefixes of this version that were committed, evicted or not
        self.next = 0

    @rule(target=sequences, ids=tokens)
    def open(self, ids):
        table = PageTable()
        matched = self.cache.match(table, ids)
        expected = 0
        while expected + 2 <= len(ids) - 1 and tuple(ids[: expected + 2]) in self.committed:
            expected += 2
        assert matched <= expected and matched < len(ids)
        assert matched == expected or self.cache.evictions, (
            "a committed prefix was not found though nothing was evicted"
        )
        self.live[self.next] = (table, list(ids))
        self.next += 1
        return self.next - 1

    @rule(key=sequences, more=tokens, chunk=st.integers(1, 20))
    def compute(self, key, more, chunk):
        if key not in self.live:
            return
        table, ids = self.live[key]
        ids += more
        before = (list(table.pages), self.cache.available)
        if not self.cache.grow(table, len(ids)):
            assert (table.pages, self.cache.available) == before
            return
        assert self.cache.writable(table, len(ids))
        self.pool.copy(self.cache.copies)
        self.cache.copies = {}
        count = min(chunk, len(ids) - table.written)
        self.pool.write(table, ids, table.written, count)
        self.cache.commit(table, ids, table.written + count)
        if table.root == self.cache.root:
            self.committed |= {tuple(ids[:n]) for n in range(2, table.written + 1, 2)}

    @rule(target=sequences, key=sequences)
    def fork(self, key):
        if key not in self.live:
            return multiple()
        table, ids = self.live[key]
        other = PageTable()
        self.cache.fork(table, other, table.written)
        self.pool.fork(table, other)
        self.live[self.next] = (other, list(ids))
        self.next += 1
        return self.next - 1

    @rule(key=consumes(sequences))
    def release(self, key):
        if key in self.live:
            self.cache.release(self.live.pop(key)[0])

    @precondition(lambda self: self.next % 5 == 4)
    @rule(keep=st.booleans())
    def new_weights(self, keep):
        if not keep:
            for table, _ in self.live.values():
                self.cache.release(table)
            self.live.clear()
        self.committed.clear()
        self.pool.remember(table for table, _ in self.live.values())
        self.cache.set_version(self.cache.version + 1)
        for table, _ in self.live.values():
            self.cache.detach(table)

    @invariant()
    def sound(self):
        self.cache.check(table for table, _ in self.live.values())
        for table, ids in self.live.values():
            self.pool.assert_reads(table, ids, table.written)


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
