"""The invariants of the block manager and of the scheduler."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from nanorchestra.engine.block_manager import BlockManager
from nanorchestra.engine.scheduler import Scheduler
from nanorchestra.engine.sequence import ROOT, Sequence


def check_blocks(blocks: BlockManager, sequences: Iterable[Sequence]) -> None:
    """Walks over the invariants, given all live sequences."""
    sequences = list(sequences)
    held = Counter(page for sequence in sequences for page in sequence.block_table)
    states = [*blocks._free, *blocks._idle, *held]
    assert sorted(states) == list(range(blocks.num_pages)), "a page is lost, or in two states"
    counted = [held[page] for page in range(blocks.num_pages)]
    assert counted == blocks._references, "wrong references"
    indexed = {page for page, uid in enumerate(blocks._uids) if uid}
    assert blocks._index == {blocks._keys[page]: page for page in indexed}, "index and uids differ"
    assert indexed >= blocks._idle.keys(), "an idle page is not indexed"
    uids = {ROOT, *(blocks._uids[page] for page in indexed)}
    assert uids >= {parent for parent, _ in blocks._index}, "a page has lost the one before it"
    for sequence in sequences:
        shared = sequence.block_table[: sequence.num_indexed]
        own = sequence.block_table[sequence.num_indexed :]
        full = len(shared) * blocks.page_size
        most = full + len(own) * blocks.page_size
        assert full <= sequence.num_computed <= most, "wrong counts"
        chain = [ROOT, *(blocks._uids[page] for page in shared)]
        parents = [*(blocks._keys[page][0] for page in shared), sequence.last_uid]
        assert not sequence.block_table or parents == chain, "a sequence's pages are not a chain"
        assert not indexed & set(own), "a page is indexed too early"
        assert all(held[page] == 1 for page in own), "a page that is written to is shared"


def check_scheduler(scheduler: Scheduler) -> None:
    """Walks over the invariants of the scheduler and of its block manager."""
    running, waiting = scheduler.running, scheduler.waiting
    check_blocks(scheduler.blocks, [*(r.sequence for r in running), *scheduler.parked])
    arrivals = [(r.sequence.arrival, r.id) for r in running]
    assert arrivals == sorted(arrivals), "running is out of order"
    places = [(not r.resumes, r.sequence.arrival, r.id) for r in waiting]
    assert places == sorted(places), "waiting is out of order"
    held = {r.sequence for r in waiting if r.sequence.block_table}
    assert held <= scheduler.parked, "a waiting request holds pages"
    assert all(r.uncomputed > 0 for r in running + waiting), "a request has nothing to compute"
