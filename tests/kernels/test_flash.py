"""Flash attention over packs, forward and backward, against float64.

"The same bits": what a sequence or a tree gives does not depend on its neighbours, on its place in
the pack, or on the run.
"""

import pytest
import torch
from kernel_check import ATTENTION, DEVICE, DTYPES, GRADIENT, assert_close, randn

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


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_tree(generator, dtype):
    check(inputs(generator, 42, dtype=dtype), TREE)


@pytest.mark.parametrize(
    "length, heads, kv_heads, dim",
    [(length, 1, 1, DIM) for length in (1, BLOCK, BLOCK + 1, 2 * BLOCK)]
    + [(18, heads, kv_heads, DIM) for heads, kv_heads in ((4, 1), (6, 3))]
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
def test_a_tree_has_the_same_bits_in_any_pack_and_without_gradients(generator, dtype):
    before, rows = 21, slice(21, 63)
    data = inputs(generator, 63, heads=1, dtype=dtype)
    pack = sequences(before) + [Span(*(x + before for x in span)) for span in TREE]
    alone = [x[rows] for x in data]
    results = run(*alone, TREE)
    for one, part in zip(run(*data, pack), results, strict=True):
        assert torch.equal(one[rows], part)
    with torch.no_grad():
        out = flash_attention(*alone[:3], flash_work(TREE, DEVICE, dtype))
    assert torch.equal(out, results[0])


def test_large_scores(generator):
    """Scores of hundreds overflow exp: only their distance to the largest may be used."""
    q, k, v, grad = inputs(generator, 20)
    data = q * 30, k * 30, v, grad
    out, want = (each(*data, sequences(20))[0] for each in (run, exact))
    assert (out - want).abs().max() < 1e-2
    results = run(q - 30, k + 3, v, grad, sequences(20))  # log-sum-exp about -360
    assert all(x.isfinite().all() for x in results)
