"""Prefill attention: against float64, over pages of NaN where nothing was stored, in any chunks."""

import pytest
import torch
from kernel_check import ATTENTION, DEVICE, DTYPES, assert_close, poisoned
from paged_cache import Cache

from kernels import paged_prefill, softmax
from kernels.paged_prefill import naive_prefill_attention, prefill_attention, prefill_items


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    monkeypatch.setattr(softmax, "BLOCK_N", 16)
    monkeypatch.setattr(paged_prefill, "ITEM_TOKENS", 16)


class Chunks(Cache):
    """counts[i] new tokens at positions starts[i].. of sequence i, their keys and values stored."""

    def __init__(self, generator, starts, counts, dtype, heads=2, **shape):
        ends = [start + count for start, count in zip(starts, counts, strict=True)]
        super().__init__(generator, ends, dtype, heads, **({"kv_heads": 1} | shape))
        self.set_queries(generator, sum(counts), heads)
        self.starts, self.counts = starts, counts

    def exact(self):
        inputs = (x.double() for x in (self.q, self.k, self.v))
        return naive_prefill_attention(*inputs, self.block_tables, self.starts, self.counts)

    def attend(self, items=None):
        """Returns the output; `items` in place of the list of all chunks."""
        if items is None:
            items = prefill_items(self.starts, self.counts)
        out = poisoned(*self.q.shape, dtype=self.q.dtype)
        inputs = self.q, self.k, self.v, self.block_tables, items.to(DEVICE)
        assert prefill_attention(*inputs, out) is out
        return out


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "starts, counts",
    [([0, 0, 0, 47], [1, 16, 17, 31]), ([33, 0, 16, 14], [18, 0, 16, 2])],
    ids=str,
)
def test_chunks_around_tiles_and_pages(generator, dtype, starts, counts):
    chunks = Chunks(generator, starts, counts, dtype)
    assert_close(chunks.attend(), chunks.exact(), ATTENTION)


@pytest.mark.parametrize(
    "heads, kv_heads, dim, page, block, tokens",
    [
        (3, 1, 64, 32, 32, 16),
        (4, 2, 16, 16, 64, 32),
        (2, 1, 128, 64, 32, 64),
        (16, 1, 16, 256, 64, 16),
        (1, 1, 256, 16, 16, 128),  # two programs for an item
    ],
)
def test_head_counts_head_dims_and_pages(
    generator, monkeypatch, heads, kv_heads, dim, page, block, tokens
):
    monkeypatch.setattr(softmax, "BLOCK_N", block)
    monkeypatch.setattr(paged_prefill, "ITEM_TOKENS", tokens)
    start, count = torch.randint(1, 40, (2,), generator=generator).tolist()
    shape = {"heads": heads, "kv_heads": kv_heads, "dim": dim, "page": page}
    chunks = Chunks(generator, [start], [count], torch.bfloat16, **shape)
    assert_close(chunks.attend(), chunks.exact(), ATTENTION)


def test_the_tiles_of_a_gpu(generator, monkeypatch):
    monkeypatch.undo()
    chunks = Chunks(generator, [70, 0], [60, 129], torch.bfloat16, page=64)
    assert_close(chunks.attend(), chunks.exact(), ATTENTION)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_sequence_has_the_same_bits_in_any_batch_and_order_and_wherever_a_chunk_begins(
    generator, dtype
):
    """A tile of keys is the same, masked or not. No token of the other sequences is touched."""
    chunks = Chunks(generator, [3, 2, 0], [5, 40, 17], dtype, heads=1)
    items = prefill_items(chunks.starts, chunks.counts)
    out = chunks.attend()
    assert torch.equal(out, chunks.attend(items.flip(0))), "items in another order"
    alone = chunks.attend(items[items[:, 0] == 1])
    assert torch.equal(out[5:45], alone[5:45])
    assert alone.isnan().all(2).all(1).sum() == 5 + 17
    for cuts in ([16, 24], [1, 30, 9]):
        parts, done = [], 0
        for count in cuts:
            part = prefill_items([0, 2 + done], [0, count])
            part[:, 1] = part[:, 1] + 5 + done  # the first row in q
            parts.append(part)
            done += count
        assert torch.equal(chunks.attend(torch.cat(parts))[5:45], out[5:45])
