"""The invariants of the page cache and of the scheduler."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from nanorchestra.engine.cache import PageCache, PageTable
from nanorchestra.engine.scheduler import Scheduler


def check_cache(cache: PageCache, tables: Iterable[PageTable]) -> None:
    """Walks over the invariants, given all live tables."""
    tables = list(tables)
    held = Counter(page for table in tables for page in table.pages)
    states = [*cache._free, *cache._idle, *held]
    assert sorted(states) == list(range(cache.num_pages)), "a page is lost, or in two states"
    assert all(held[page] == refs for page, refs in enumerate(cache._refs)), "wrong references"
    indexed = {page for page, uid in enumerate(cache._uids) if uid}
    assert cache._index == {cache._keys[page]: page for page in indexed}, "index and uids differ"
    assert indexed >= cache._idle.keys(), "an idle page is not indexed"
    uids = {cache.root, *(cache._uids[page] for page in indexed)}
    assert uids >= {parent for parent, _ in cache._index}, "a page has lost its parent"
    for table in tables:
        first, rest = table.pages[: table.committed], table.pages[table.committed :]
        full = len(first) * cache.page_size
        assert full <= table.written <= full + len(rest) * cache.page_size, "wrong counts"
        chain = [cache.root, *(cache._uids[page] for page in first)]
        parents = [*(cache._keys[page][0] for page in first), table.parent]
        assert not table.pages or parents == chain, "a table's pages are not a chain"
        assert not indexed & set(rest), "a page is indexed too early"


def check_scheduler(scheduler: Scheduler) -> None:
    """Walks over the invariants of the scheduler and of its cache."""
    running, waiting = scheduler.running, scheduler.waiting
    check_cache(scheduler.cache, [*(r.table for r in running), *scheduler.parked])
    ages = [(r.table.age, r.id) for r in running]
    assert ages == sorted(ages), "running is out of order"
    places = [(not r.resumed, r.table.age, r.id) for r in waiting]
    assert places == sorted(places), "waiting is out of order"
    held = {r.table for r in waiting if r.table.pages}
    assert held <= scheduler.parked, "a waiting request holds pages"
    computed = all(len(r.ids) > r.table.written for r in running + waiting)
    assert computed, "a request has nothing to compute"
