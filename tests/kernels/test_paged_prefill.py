"""Prefill attention: against float64, over pages of NaN where nothing was stored, in any chunks."""

import pytest
import torch
from kernel_check import ATTENTION, DEVICE, DTYPES, assert_close, poisoned, randn
from paged_cache import Cache
from torch.nn.functional import scaled_dot_product_attention

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


def test_the_naive_version_against_pytorch(generator):
    """Without context, with one, and a sequence that is not in the batch."""
    chunks = Chunks(generator, [0, 5, 3], [20, 17, 0], torch.float32, heads=4, kv_heads=2)
    out = chunks.exact()
    first = 0
    for sequence, (start, count) in enumerate(zip(chunks.starts, chunks.counts, strict=True)):
        keys, values = [], []
        for j in range(start + count):  # a key at a time
            page = chunks.block_tables[sequence, j // 16]
            keys.append(chunks.k[page, :, j % 16].double())
            values.append(chunks.v[page, :, j % 16].double())
        keys, values = torch.stack(keys, 1), torch.stack(values, 1)  # [Hkv, context_len, D]
        for i in range(count):  # a token at a time, without a mask
            q = chunks.q[first + i].double()[:, None]  # [H, 1, D]
            seen = start + i + 1
            expected = scaled_dot_product_attention(
                q, keys[:, :seen], values[:, :seen], enable_gqa=True
            )
            assert torch.allclose(out[first + i], expected[:, 0], atol=1e-12)
        first += count


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "starts, counts",
    [
        ([0, 0, 0], [1, 16, 17]),
        ([0, 0], [15, 33]),
        ([5, 16, 31], [1, 16, 2]),
        ([33, 0], [18, 0]),
        ([47], [31]),
        ([14, 30], [2, 18]),
    ],
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
        (2, 2, 32, 64, 16, 32),
        (2, 1, 128, 64, 32, 64),
        (16, 1, 16, 256, 64, 16),
        (10, 2, 32, 128, 32, 32),
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


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_sequence_has_the_same_bits_in_any_batch_and_order(generator, dtype):
    """And no token of the other sequences is touched."""
    chunks = Chunks(generator, [3, 20, 0], [20, 5, 17], dtype, heads=1)
    items = prefill_items(chunks.starts, chunks.counts)
    out = chunks.attend()
    assert torch.equal(out, chunks.attend(items.flip(0))), "items in another order"
    first = 0
    for sequence, count in enumerate(chunks.counts):
        alone = chunks.attend(items[items[:, 0] == sequence])
        assert torch.equal(out[first : first + count], alone[first : first + count])
        assert alone.isnan().all(2).all(1).sum() == 42 - count
        first += count


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_where_a_chunk_begins_does_not_matter(generator, dtype):
    """Cut elsewhere, the tokens have the same bits: a tile of keys is the same, masked or not."""
    chunks = Chunks(generator, [2], [40], dtype, heads=1)
    whole = chunks.attend()
    for cuts in ([16, 24], [1, 30, 9]):
        parts, done = [], 0
        for count in cuts:
            items = prefill_items([2 + done], [count])
            items[:, 1] += done  # the first row in q
            parts.append(items)
            done += count
        assert torch.equal(chunks.attend(torch.cat(parts)), whole)


def test_offsets_beyond_32_bits(generator):
    """Page 32,769 begins at element 2**31 + 65,536, token 2 of q at 2**31. Little takes memory."""
    cache = torch.empty(32770, 1, 256, 256, dtype=torch.float16, device=DEVICE)
    cache[-1, 0, :20] = randn(generator, 20, 256, dtype=torch.float16)
    q = torch.empty(2**31 + 256, dtype=torch.float16, device=DEVICE)
    q = q.as_strided((3, 1, 256), (2**30, 256, 1))
    q.copy_(randn(generator, 3, 1, 256, dtype=torch.float16))
    block_tables = torch.tensor([[32769]], dtype=torch.int32, device=DEVICE)
    out = poisoned(3, 1, 256, dtype=torch.float16)
    prefill_attention(q, cache, cache, block_tables, prefill_items([17], [3]).to(DEVICE), out)
    last = cache[-1:].double()
    expected = naive_prefill_attention(q.double(), last, last, block_tables * 0, [17], [3])
    assert_close(out, expected, ATTENTION)


def test_items_hold_each_token_once_and_begin_with_the_longest(generator):
    starts = torch.randint(0, 90, (9,), generator=generator).tolist()
    counts = torch.randint(0, 70, (9,), generator=generator).tolist()
    items = prefill_items(starts, counts).tolist()
    seen = []
    for sequence, first_token, tokens, position in items:
        assert 1 <= tokens <= 16
        seen += [(first_token + i, sequence, position + i) for i in range(tokens)]
    expected = []
    for sequence, (start, count) in enumerate(zip(starts, counts, strict=True)):
        for i in range(count):
            expected.append((len(expected), sequence, start + i))
    assert sorted(seen) == expected
    visible = [position + tokens for _, _, tokens, position in items]
    assert visible == sorted(visible, reverse=True)
    assert prefill_items([7], [0]).shape == (0, 4)
