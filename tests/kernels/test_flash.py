"""Flash attention over packs, forward and backward, against float64.

"The same bits": what a sequence or a tree gives does not depend on its neighbours, on its place in
the pack, or on the run.
"""

import pytest
import torch
from kernel_check import (
    ATTENTION,
    DEVICE,
    DTYPES,
    GRADIENT,
    assert_close,
    poison_new_tensors,
    randn,
    survives,
)

from kernels import flash, flash_backward, flash_plan
from kernels.common import FP32
from kernels.flash import flash_forward, reference
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
    poison_new_tensors(monkeypatch)


def set_tiles(monkeypatch, forward, queries, keys):
    names = ("CONFIGS", "QUERY_CONFIGS", "KEY_CONFIGS")
    for name, (block_m, block_n) in zip(names, (forward, queries, keys), strict=True):
        tile = {"BLOCK_M": block_m, "BLOCK_N": block_n, "num_warps": 4, "num_stages": 2}
        for module in (flash, flash_backward, flash_plan):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, {80: tile, FP32: tile})


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
    out = reference(q, k, v, spans)[0]
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


@pytest.mark.parametrize("length", [1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 2 * BLOCK + 1])
def test_lengths_around_the_tiles(generator, length):
    check(inputs(generator, length, heads=1), sequences(length))


@pytest.mark.parametrize("heads, kv_heads", [(2, 2), (4, 1), (6, 3)])
def test_grouped_queries(generator, heads, kv_heads):
    check(inputs(generator, 18, heads, kv_heads), sequences(18))


@pytest.mark.parametrize("dim", flash.HEAD_DIMS)
def test_head_dimensions(generator, dim):
    check(inputs(generator, 20, heads=1, dim=dim), sequences(20))


def test_random_trees_and_unequal_tiles(generator, monkeypatch):
    """Segments of random lengths, each on a random earlier one or its first tokens."""
    number = lambda high: int(torch.randint(high, (), generator=generator))
    for tiles in ([(16, 16)] * 3, [(64, 32), (32, 16), (16, 32)]):
        set_tiles(monkeypatch, *tiles)
        segments, sees, spans, end = [], [], [], 0
        for _ in range(6):
            length, prefixes = 1 + number(15), []
            if segments and number(4):
                parent = number(len(segments))
                start, size = segments[parent]
                prefixes = [*sees[parent], (start, start + 1 + number(size))]
            spans += [(end, end + length, *keys) for keys in [*prefixes, (end, end + length)]]
            segments.append((end, length))
            sees.append(prefixes)
            end += length
        check(inputs(generator, end, heads=1), spans)


@pytest.mark.parametrize("dtype", DTYPES)
def test_log_sum_exp(generator, dtype):
    q, k, v, _ = inputs(generator, 42, dtype=dtype)
    _, lse = flash_forward(q, k, v, plan(TREE, DEVICE, dtype).forward)
    want = reference(q.double(), k.double(), v.double(), TREE)[1]
    assert lse.dtype == torch.float32 and (lse - want).abs().max() < 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_tree_has_the_same_bits_in_any_pack_and_run(generator, dtype):
    before, rows = 21, slice(21, 63)
    data = inputs(generator, 63, heads=1, dtype=dtype)
    pack = sequences(before) + [tuple(x + before for x in span) for span in TREE]
    first, again = run(*data, pack), run(*data, pack)
    alone = run(*(x[rows] for x in data), TREE)
    for one, two, part in zip(first, again, alone, strict=True):
        assert torch.equal(one, two) and torch.equal(one[rows], part)


def test_neighbours_do_not_leak(generator):
    """NaN in one sequence stays there."""
    data = inputs(generator, 40, heads=1)
    clean = run(*data, sequences(19, 21))
    for x in data:
        x[:19] = float("nan")
    for one, two in zip(clean, run(*data, sequences(19, 21)), strict=True):
        assert torch.equal(one[19:], two[19:]) and two[:19].isnan().all()


def test_large_scores(generator):
    """Scores of hundreds overflow exp: only their distance to the largest may be used."""
    q, k, v, grad = inputs(generator, 20)
    out, lse = flash_forward(q * 30, k * 30, v, plan(sequences(20), DEVICE, q.dtype).forward)
    want = reference((q * 30).double(), (k * 30).double(), v.double(), sequences(20))
    assert (out - want[0]).abs().max() < 1e-2 and (lse - want[1]).abs().max() < 1e-2
    results = run(q - 30, k + 3, v, grad, sequences(20))  # log-sum-exp about -360
    assert all(x.isfinite().all() for x in results)


@pytest.mark.skipif(DEVICE != "cpu", reason="needs memory that is promised but not there")
def test_offsets_beyond_32_bits(generator):
    """A short sequence behind 2^31 numbers, in a child process: a wrapped offset reads anything."""
    tokens, rows = 2**31 // DIM + 40, slice(-20, None)
    storage = lambda: torch.UntypedStorage(tokens * DIM * 2)
    empty = torch.tensor([], dtype=torch.float16)
    x, one, two = (empty.new().set_(storage(), 0, (tokens, 1, DIM)) for _ in range(3))
    lse, delta = torch.zeros(1, tokens), torch.zeros(1, tokens)
    x[rows] = randn(generator, 20, 1, DIM, dtype=torch.float16)
    near = [x[rows].clone()] * 4
    work = plan(sequences(20), DEVICE, x.dtype)
    out, small_lse = flash_forward(*near[:3], work.forward)
    lse[:, rows] = small_lse
    grads = flash_backward.flash_backward(*near, out, small_lse, work.queries, work.keys)
    # the plan of the short sequence, moved
    items, visits = work.forward.items.clone(), work.forward.visits + (tokens - 20)
    items[:, :2] += tokens - 20
    tile = {"H": 1, "G": 1, "D": DIM, "BLOCK_M": BLOCK, "BLOCK_N": BLOCK}

    def far():
        flash._forward[(2,)](x, x, x, one, lse, items, visits, tokens, **tile)
        same = [torch.equal(one[rows], out), torch.equal(lse[:, rows], small_lse)]
        lists = lse, delta, two, items, visits, tokens
        flash_backward._backward_queries[(2,)](x, x, x, x, one, *lists, **tile)
        same.append(torch.equal(two[rows], grads[0]))
        results = one, two, items, visits, tokens
        flash_backward.backward_keys[(2,)](x, x, x, x, lse, delta, *results, **tile)
        assert all([*same, torch.equal(one[rows], grads[1]), torch.equal(two[rows], grads[2])])

    assert survives(far)


def test_views_and_gradients_of_stride_zero(generator):
    """Slices of one matrix, and the gradient of a sum."""
    qkv = randn(generator, 10, 4, DIM).requires_grad_()
    q, k, v = qkv[:, :2], qkv[:, 2:3], qkv[:, 3:]
    flash_attention(q, k, v, plan(sequences(10), DEVICE, q.dtype)).sum().backward()
    grads = exact(q, k, v, torch.ones_like(q), sequences(10))[1:]
    assert_close(qkv.grad, torch.cat(grads, 1), GRADIENT)


def test_work_list():
    """Longest blocks first; spans in the order of keys; no block crosses into another tree."""
    work = plan(TREE + sequences(42 + 8)[:0] + [(42, 50, 42, 50)], "cpu", torch.float32)
    blocks = [(first, last) for first, last, _, _ in work.forward.items.tolist()]
    assert sorted(blocks) == [(0, 16), (16, 32), (32, 42), (42, 50)] and work.tokens == 50
    assert blocks[0] == (16, 32) and blocks[-1] == (42, 50)
    _, _, start, end = work.forward.items[0].tolist()
    visits = [tuple(span) for span in work.forward.visits[start:end].tolist()]
    assert visits == sorted(
        (s for s in TREE if s[0] < 32 and s[1] > 16), key=lambda s: (s[2], s[0])
    )
    assert sorted(tuple(x[:2]) for x in work.keys.items.tolist()) == sorted(blocks)


def test_an_empty_pack(generator):
    assert [len(x) for x in run(*inputs(generator, 0), [])] == [0] * 4


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda q, k, v: [x[..., :12].contiguous() for x in (q, k, v)], "head_dim is 12"),
        (lambda q, k, v: (q, k.double(), v), "k is torch.float64"),
        (lambda q, k, v: (q, k, v[:4]), "v has shape"),
        (lambda q, k, v: (q[:, :3], k, v), "3 query heads; expected a multiple of 2"),
        (lambda q, k, v: [x[:4] for x in (q, k, v)], "covers 5 tokens; q has 4"),
    ],
)
def test_refused_inputs(generator, change, message):
    q, k, v, _ = inputs(generator, 5, 4, 2)
    with pytest.raises(ValueError, match=message):
        flash_attention(*change(q, k, v), plan(sequences(5), DEVICE, q.dtype))
