"""The block manager: exact prefix sharing and LRU eviction; test_scheduler.py storms it."""

from __future__ import annotations

from invariants import check_blocks

from nanorchestra.engine.block_manager import BlockManager
from nanorchestra.engine.sequence import Sequence


def filled(blocks: BlockManager, ids: list[int]) -> Sequence:
    """A sequence whose pages hold all of `ids`."""
    sequence = Sequence(list(ids))
    blocks.match(sequence)
    assert blocks.grow(sequence, len(ids))
    blocks.commit(sequence, len(ids))
    return sequence


def matched(blocks: BlockManager, ids: list[int]) -> int:
    sequence = Sequence(list(ids))
    blocks.match(sequence)
    length = sequence.num_computed
    blocks.release(sequence)
    return length


def test_a_prefix_is_matched_up_to_full_pages_and_never_wholly():
    blocks = BlockManager(16, page_size=4)
    filled(blocks, list(range(10)))  # two full pages and a half
    for length, shared in ((20, 8), (9, 8), (8, 4), (5, 4), (4, 0)):
        assert matched(blocks, list(range(length))) == shared


def test_two_sequences_that_compute_the_same_page_end_up_with_one():
    """mini-sglang freed the duplicate while a table still pointed at it: a use-after-free."""
    blocks, ids = BlockManager(16, page_size=4), list(range(9))
    a, b = Sequence(list(ids)), Sequence(list(ids))
    for sequence in (a, b):
        blocks.match(sequence)
        blocks.grow(sequence, 9)
    own = list(b.block_table)
    blocks.commit(a, 9)
    blocks.commit(b, 9)
    assert b.block_table == [*a.block_table[:2], own[2]] and blocks.available == 16 - 4
    check_blocks(blocks, [a, b])
    blocks.release(a)
    check_blocks(blocks, [b])


def test_the_least_recently_used_prefix_is_evicted_from_its_end():
    blocks = BlockManager(6, page_size=2)
    for token in (1, 2, 1):  # the prefix of 1 is used again, so that of 2 is the oldest
        blocks.release(filled(blocks, [token] * 6))
    assert blocks.grow(Sequence(), 2)
    assert matched(blocks, [2] * 6 + [0]) == 4 and matched(blocks, [1] * 6 + [0]) == 6


def test_pages_of_older_weights_never_match_and_pages_are_handed_out_as_at_first():
    blocks, ids = BlockManager(8, page_size=2), [1, 2, 3, 4, 5]
    blocks.release(filled(blocks, [9, 9]))
    blocks.release(filled(blocks, ids))
    blocks.clear()
    assert matched(blocks, ids) == 0
    first = filled(BlockManager(8, page_size=2), ids)
    assert filled(blocks, ids).block_table == first.block_table
