"""Flash attention over packs, forward and backward, against float64.

"The same bits": what a sequence or a tree gives does not depend on its neighbours, on its place in
the pack, or on the run.
"""

import pytest
import torch
from kernel_check import ATTENTION, DEVICE, DTYPES, GRADIENT, assert_close, randn
from torch.nn.functional import scaled_dot_product_attention

from kernels.common import FP32, TILES
from kernels.flash import HEAD_DIMS, Span, flash_attention, flash_work, naive_attention

BLOCK, DIM = 16, 16
TREE = [  # segments 0..19, 19..28 on it, 28..34 on both, 34..42 on the first
    Span(0, 19, 0, 19),
    Span(19, 28, 0, 19),
    Span(19, 28, 19, 28),
    Span(28, 34, 0, 19),
    Span(28, 34, 19, 28),
    Span(28, 34, 28, 34),
    Span(34, 42, 0, 19),
    Span(34, 42, 34, 42),
]


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Short sequences then have tiles with and without a mask."""
    set_tiles(monkeypatch, *[(BLOCK, BLOCK)] * 3)


def set_tiles(monkeypatch, forward, queries, keys):
    names = ("flash_forward", "flash_backward_queries", "flash_backward_keys")
    for name, (block_m, block_n) in zip(names, (forward, queries, keys), strict=True):
        tile = {"BLOCK_M": block_m, "BLOCK_N": block_n, "num_stages": 2}
        monkeypatch.setitem(TILES, name, {"80": tile, FP32: tile})


def inputs(generator, tokens, heads=2, kv_heads=1, dim=DIM, dtype=torch.float32):
    """q, k, v and the gradient of the output."""
    counts = heads, kv_heads, kv_heads, heads
    return [randn(generator, tokens, n, dim, dtype=dtype) for n in counts]


def sequences(*lengths):
    """The spans of sequences without prefixes."""
    spans, end = [], 0
    for length in lengths:
        spans.append(Span(end, end + length, end, end + length))
        end += length
    return spans


def run(q, k, v, grad, spans):
    """The output and the three gradients."""
    q, k, v = (x.detach().clone().requires_grad_() for x in (q, k, v))
    out = flash_attention(q, k, v, flash_work(spans, DEVICE, q.dtype))
    return out.detach(), *torch.autograd.grad(out, (q, k, v), grad)


def exact(q, k, v, grad, spans):
    """The same by the naive version in float64."""
    q, k, v = (x.detach().double().requires_grad_() for x in (q, k, v))
    out = naive_attention(q, k, v, spans)
    return out.detach(), *torch.autograd.grad(out, (q, k, v), grad.double())


def check(data, spans):
    """dq and dk of 16 bits may be off by more: delta is that of the rounded output."""
    results = run(*data, spans)
    short = GRADIENT if results[0].dtype == torch.float32 else 1.5 * GRADIENT
    multiples = ATTENTION, short, short, GRADIENT
    for result, want, multiple in zip(results, exact(*data, spans), multiples, strict=True):
        if want.abs().max() < 1e-12:  # a query with one key in sight has no gradient
            assert result.abs().max() < 1e-5
        else:
            assert_close(result, want, multiple)


def test_the_naive_version_is_torchs_attention_with_a_mask(generator):
    q, k, v, _ = (x.double() for x in inputs(generator, 42, heads=4, kv_heads=2))
    seen = torch.zeros(42, 42, dtype=torch.bool, device=DEVICE)  # [query, key]
    for span in TREE:
        block = seen[span.start : span.end, span.key_start : span.key_end].fill_(True)
        if span.causal:
            block.tril_()
    heads_first = (x.transpose(0, 1) for x in (q, k, v))
    want = scaled_dot_product_attention(*heads_first, seen, enable_gqa=True).transpose(0, 1)
    torch.testing.assert_close(naive_attention(q, k, v, TREE), want)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_tree(generator, dtype):
    check(inputs(generator, 42, dtype=dtype), TREE)


@pytest.mark.parametrize(
    "length, heads, kv_heads, dim",
    [(length, 1, 1, DIM) for length in (1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 2 * BLOCK + 1)]
    + [(18, heads, kv_heads, DIM) for heads, kv_heads in ((2, 2), (4, 1), (6, 3))]
    + [(20, 1, 1, dim) for dim in HEAD_DIMS],
)
def test_lengths_heads_and_dimensions(generator, length, heads, kv_heads, dim):
    check(inputs(generator, length, heads, kv_heads, dim), sequences(length))


def test_random_trees_and_unequal_tiles(generator, monkeypatch):
    """Segments of random lengths, each on a random earlier one or its first tokens."""
    draws = torch.randint(10**6, (99,), generator=generator).tolist()
    for tiles in ([(16, 16)] * 3, [(64, 32), (32, 16), (16, 32)]):
        set_tiles(monkeypatch, *tiles)
        segments, sees, spans, end = [], [], [], 0
        for _ in range(6):
            length, prefixes = 1 + draws.pop() % 15, []
            if segments and draws.pop() % 4:
                parent = draws.pop() % len(segments)
                start, size = segments[parent]
                prefixes = [*sees[parent], (start, start + 1 + draws.pop() % size)]
            for keys in [*prefixes, (end, end + length)]:
                spans.append(Span(end, end + length, *keys))
            segments.append((end, length))
            sees.append(prefixes)
            end += length
        check(inputs(generator, end, heads=1), spans)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_tree_has_the_same_bits_in_any_pack_and_run(generator, dtype):
    before, rows = 21, slice(21, 63)
    data = inputs(generator, 63, heads=1, dtype=dtype)
    pack = sequences(before) + [Span(*(x + before for x in span)) for span in TREE]
    first, again = run(*data, pack), run(*data, pack)
    alone = run(*(x[rows] for x in data), TREE)
    for one, two, part in zip(first, again, alone, strict=True):
        assert torch.equal(one, two) and torch.equal(one[rows], part)


def test_large_scores(generator):
    """Scores of hundreds overflow exp: only their distance to the largest may be used."""
    q, k, v, grad = inputs(generator, 20)
    data = q * 30, k * 30, v, grad
    out, want = (each(*data, sequences(20))[0] for each in (run, exact))
    assert (out - want).abs().max() < 1e-2
    results = run(q - 30, k + 3, v, grad, sequences(20))  # log-sum-exp about -360
    assert all(x.isfinite().all() for x in results)


def test_views_and_gradients_of_stride_zero(generator):
    """Slices of one matrix, and the gradient of a sum."""
    qkv = randn(generator, 10, 4, DIM).requires_grad_()
    q, k, v = qkv[:, :2], qkv[:, 2:3], qkv[:, 3:]
    flash_attention(q, k, v, flash_work(sequences(10), DEVICE, q.dtype)).sum().backward()
    grads = exact(q, k, v, torch.ones_like(q), sequences(10))[1:]
    assert_close(qkv.grad, torch.cat(grads, 1), GRADIENT)


def test_work_lists_name_the_spans_of_each_block():
    """The example of flash.py, in blocks of 16 tokens: two answers on a prompt of 20."""
    spans = [Span(0, 20, 0, 20)]
    for start, end in ((20, 30), (30, 36)):
        spans += [Span(start, end, 0, 20), Span(start, end, start, end)]
    work = flash_work(spans, "cpu", torch.float32)

    def listed(work_list):
        visited = {}
        for first, last, visit, end in work_list.blocks.tolist():
            visited[first, last] = [tuple(span) for span in work_list.visits[visit:end].tolist()]
        return visited

    prompt, first_on, first, second_on, second = (tuple(span) for span in spans)
    assert listed(work.forward) == {
        (16, 32): [prompt, first_on, second_on, first, second],
        (32, 36): [second_on, second],
        (0, 16): [prompt],
    }
    assert list(listed(work.backward_keys)) == [(0, 16), (16, 32), (32, 36)]  # longest first
    assert listed(work.backward_keys) == {
        (0, 16): [prompt, first_on, second_on],
        (16, 32): [prompt, first_on, second_on, first, second],
        (32, 36): [second],
    }


def test_what_does_not_fit_is_refused():
    """Work of another dtype, too: its blocks may be longer than the tiles, which leave the rest."""
    work = flash_work(sequences(5), DEVICE, torch.float32)
    for heads, dim, dtype, message in (
        ((3, 2, 2), 16, torch.float32, "3 query heads; expected a multiple of 2"),
        ((2, 2, 2), 24, torch.float32, r"head_dim is 24; expected one of \(16, 32, 64, 128\)"),
        ((2, 2, 1), 16, torch.float32, r"v has shape \[5, 1, 16\]; expected \[5, 2, 16\]"),
        ((2, 2, 2), 16, torch.bfloat16, "q is torch.bfloat16; expected torch.float32"),
    ):
        q, k, v = (torch.ones(5, count, dim, dtype=dtype, device=DEVICE) for count in heads)
        with pytest.raises(ValueError, match=message):
            flash_attention(q, k, v, work)
    with pytest.raises(ValueError, match="the pack has no spans; expected at least one"):
        flash_work([], DEVICE, torch.float32)


def test_without_gradients_the_output_has_the_same_bits(generator):
    q, k, v, _ = inputs(generator, 42)
    work = flash_work(TREE, DEVICE, q.dtype)
    leaf = q.clone().requires_grad_()
    out = flash_attention(leaf, k, v, work)
    with torch.no_grad():
        alone = flash_attention(leaf, k, v, work)
    assert out.requires_grad and not alone.requires_grad and torch.equal(out, alone)
