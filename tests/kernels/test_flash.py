"""Flash attention over packs, forward and backward, against float64.

"The same bits": what a sequence or a tree gives does not depend on its neighbours, on its place in
the pack, or on the run.
"""

import pytest
import torch
from kernel_check import ATTENTION, DEVICE, DTYPES, GRADIENT, assert_close, randn

from kernels import flash
from kernels.common import FP32, TILES
from kernels.flash import reference
from kernels.flash_plan import flash_attention, plan

BLOCK, DIM = 16, 16
TREE = [  # segments 0..19, 19..28 on it, 28..34 on both, 34..42 on the first
    (0, 19, 0, 19),
    (19, 28, 0, 19),
    (19, 28, 19, 28),
    (28, 34, 0, 19),
    (28, 34, 19, 28),
    (28, 34, 28, 34),
    (34, 42, 0, 19),
    (34, 42, 34, 42),
]


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Short sequences then have tiles with and without a mask."""
    set_tiles(monkeypatch, *[(BLOCK, BLOCK)] * 3)


def set_tiles(monkeypatch, forward, queries, keys):
    names = ("flash_forward", "backward_queries", "backward_keys")
    for name, (block_m, block_n) in zip(names, (forward, queries, keys), strict=True):
        tile = {"BLOCK_M": block_m, "BLOCK_N": block_n, "num_stages": 2}
        monkeypatch.setitem(TILES, name, {"80": tile, FP32: tile})


def inputs(generator, tokens, heads=2, kv_heads=1, dim=DIM, dtype=torch.float32):
    """q, k, v and the gradient of the output."""
    counts = heads, kv_heads, kv_heads, heads
    return [randn(generator, tokens, n, dim, dtype=dtype) for n in counts]


def sequences(*lengths):
    ends = [sum(lengths[: i + 1]) for i in range(len(lengths))]
    return [(end - n, end) * 2 for n, end in zip(lengths, ends, strict=True)]


def run(q, k, v, grad, spans):
    """The output and the three gradients."""
    q, k, v = (x.detach().clone().requires_grad_() for x in (q, k, v))
    out = flash_attention(q, k, v, plan(spans, DEVICE, q.dtype))
    return out.detach(), *torch.autograd.grad(out, (q, k, v), grad)


def exact(q, k, v, grad, spans):
    q, k, v = (x.detach().double().requires_grad_() for x in (q, k, v))
    out = reference(q, k, v, spans)
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
    [(length, 1, 1, DIM) for length in (1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 2 * BLOCK + 1)]
    + [(18, heads, kv_heads, DIM) for heads, kv_heads in ((2, 2), (4, 1), (6, 3))]
    + [(20, 1, 1, dim) for dim in flash.HEAD_DIMS],
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
            spans += [(end, end + length, *keys) for keys in [*prefixes, (end, end + length)]]
            segments.append((end, length))
            sees.append(prefixes)
            end += length
        check(inputs(generator, end, heads=1), spans)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_tree_has_the_same_bits_in_any_pack_and_run(generator, dtype):
    before, rows = 21, slice(21, 63)
    data = inputs(generator, 63, heads=1, dtype=dtype)
    pack = sequences(before) + [tuple(x + before for x in span) for span in TREE]
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
    flash_attention(q, k, v, plan(sequences(10), DEVICE, q.dtype)).sum().backward()
    grads = exact(q, k, v, torch.ones_like(q), sequences(10))[1:]
    assert_close(qkv.grad, torch.cat(grads, 1), GRADIENT)
