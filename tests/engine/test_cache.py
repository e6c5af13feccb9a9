"""The page cache: exact prefix sharing and LRU eviction; test_scheduler.py storms it."""

from __future__ import annotations

import subprocess
import sys

import pytest
from invariants import check_cache

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


def test_a_prefix_is_matched_up_to_full_pages_and_never_wholly():
    cache = PageCache(16, page_size=4)
    filled(cache, list(range(10)))  # two full pages and a half
    for length, found in ((20, 8), (9, 8), (8, 4), (5, 4), (4, 0)):
        assert matched(cache, list(range(length))) == found


def test_two_sequences_that_compute_the_same_page_end_up_with_one():
    """mini-sglang freed the duplicate while a table still pointed at it: a use-after-free."""
    cache, ids = PageCache(16, page_size=4), list(range(9))
    a, b = PageTable(), PageTable()
    for table in (a, b):
        cache.match(table, ids)
        cache.grow(table, 9)
    own = list(b.pages)
    cache.commit(a, ids, 9)
    cache.commit(b, ids, 9)
    assert b.pages == [*a.pages[:2], own[2]] and cache.available == 16 - 4
    check_cache(cache, [a, b])
    cache.release(a)
    check_cache(cache, [b])


def test_a_shared_page_is_copied_before_it_is_written_and_counts_as_a_page_taken():
    cache, other, third = PageCache(2, page_size=4), PageTable(), PageTable()
    table = filled(cache, [1, 2, 3])
    cache.fork(table, other, 3)
    assert cache.grow(other, 4) and cache.copies == {other.pages[0]: table.pages[0]}
    cache.fork(table, third, 3)
    assert not cache.grow(third, 4) and third.pages == table.pages
    check_cache(cache, [table, other, third])


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
