"""Flash attention over packs, forward and backward, against float64: trees of sequences, lengths around the tiles, any dtype.

"Bitwise": what a sequence or tree gives must not depend on its neighbours, on where it lies in the pack, or on the run.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from kernel_check import (
    ATTENTION,
    DEVICE,
    DTYPES,
    GRADIENT,
    assert_close,
    poisoned,
    randn,
    survives,
)
from packed_reference import segment_attention

from kernels import flash, flash_backward
from kernels.flash import Work, flash_forward, reference
from kernels.flash_plan import (
    Span,
    flash_attention,
    plan,
    varlen_spans,
    work_of_keys,
    work_of_queries,
)
from nanorchestra.model.packed_attention import Segment

BLOCK, DIM = 16, 16
TREE = [
    Segment(0, 19),
    Segment(19, 9, 0, 19),
    Segment(28, 6, 19, 9),
    Segment(34, 8, 0, 19),
]  # 28.. sees 0..19, 19..28 and itself
TREE_SPANS = [
    (0, 19, 0, 19),
    (19, 28, 19, 28),
    (28, 34, 28, 34),
    (34, 42, 34, 42),
    (19, 42, 0, 19),
    (28, 34, 19, 28),
]


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Tiles of 16 on every card, so that short sequences have tiles with and without a mask; and outputs that start as NaN."""
    tile = {"BLOCK_M": BLOCK, "BLOCK_N": BLOCK, "num_warps": 4, "num_stages": 2}
    for module, name in (
        (flash, "CONFIGS"),
        (flash_backward, "QUERY_CONFIGS"),
        (flash_backward, "KEY_CONFIGS"),
    ):
        monkeypatch.setattr(module, name, {arch: tile for arch in getattr(module, name)})
    monkeypatch.setattr(flash, "FLOAT32", tile)
    monkeypatch.setattr(
        flash.torch, "empty", lambda shape, dtype, device: poisoned(*shape, dtype=dtype)
    )


def inputs(
    generator,
    tokens: int,
    heads: int = 2,
    kv_heads: int = 1,
    dim: int = DIM,
    dtype: torch.dtype = torch.float32,
):
    """q, k, v and the gradient of the output."""
    return [
        randn(generator, tokens, n, dim, dtype=dtype) for n in (heads, kv_heads, kv_heads, heads)
    ]


def run(q, k, v, grad, spans):
    """out and the three gradients, through autograd."""
    q, k, v = (x.detach().clone().requires_grad_() for x in (q, k, v))
    out = flash_attention(q, k, v, plan(spans, DEVICE, q.dtype, BLOCK))
    return out.detach(), *torch.autograd.grad(out, (q, k, v), grad)


def exact(q, k, v, grad, attend):
    q, k, v = (x.detach().double().requires_grad_() for x in (q, k, v))
    out = attend(q, k, v)
    return out.detach(), *torch.autograd.grad(out, (q, k, v), grad.double())


def check_all(results, expected):
    """dq and dk of 16 bits may be off by more: delta is of the rounded output, which tells in short sequences (200 seeds: 2.3 at most)."""
    short = GRADIENT if results[0].dtype == torch.float32 else 1.5 * GRADIENT
    for result, want, multiple in zip(results, expected, (ATTENTION, short, short, GRADIENT)):
        if want.abs().max() < 1e-12:  # a query with one key in sight has no gradient
            assert result.abs().max() < 1e-5
        else:
            assert_close(result, want, multiple)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_tree_gives_what_segment_attention_gives(generator, dtype):
    """Prefix of a prefix, and a run of samples on one prefix: outputs and all gradients as of one segment at a time."""
    data = inputs(generator, 42, dtype=dtype)
    check_all(
        run(*data, TREE_SPANS), exact(*data, lambda q, k, v: segment_attention(TREE, q, k, v))
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_log_sum_exp(generator, dtype):
    q, k, v, _ = inputs(generator, 42, dtype=dtype)
    _, lse = flash_forward(q, k, v, work_of_queries(TREE_SPANS, BLOCK, DEVICE))
    want = reference(q.double(), k.double(), v.double(), TREE_SPANS)[1]
    assert lse.dtype == torch.float32 and (lse - want).abs().max() < 1e-5


@pytest.mark.parametrize("length", [1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 2 * BLOCK + 1])
def test_lengths_around_the_tiles(generator, length):
    data = inputs(generator, length, heads=1)
    check_all(
        run(*data, varlen_spans([0, length])),
        exact(*data, lambda q, k, v: segment_attention([Segment(0, length)], q, k, v)),
    )


@pytest.mark.parametrize("heads, kv_heads", [(2, 2), (4, 1), (6, 3)])
def test_grouped_queries(generator, heads, kv_heads):
    data = inputs(generator, 18, heads, kv_heads)
    check_all(
        run(*data, varlen_spans([0, 18])),
        exact(*data, lambda q, k, v: segment_attention([Segment(0, 18)], q, k, v)),
    )


@pytest.mark.parametrize("dim", flash.HEAD_DIMS)
def test_head_dimensions(generator, dim):
    data = inputs(generator, 20, heads=1, dim=dim)
    check_all(
        run(*data, varlen_spans([0, 20])),
        exact(*data, lambda q, k, v: segment_attention([Segment(0, 20)], q, k, v)),
    )


def test_random_trees(generator):
    """Segments of random lengths, each on a random earlier one or its first tokens, against a whole mask."""
    number = lambda high: int(torch.randint(high, (), generator=generator))
    segments, sees, spans, end = [], [], [], 0
    for _ in range(6):
        length, prefixes = 1 + number(12), []
        if segments and number(4):
            parent = number(len(segments))
            start, size = segments[parent]
            prefixes = [*sees[parent], (start, start + 1 + number(size))]
        spans += [Span(end, end + length, *prefix) for prefix in prefixes] + [
            Span(end, end + length, end, end + length)
        ]
        segments.append((end, length))
        sees.append(prefixes)
        end += length
    data = inputs(generator, end, heads=1)
    check_all(run(*data, spans), exact(*data, lambda q, k, v: reference(q, k, v, spans)[0]))


def test_unequal_tiles(generator):
    """Tiles of keys wider than the block of queries, and the reverse, as the real configurations have them; and keys after their queries."""
    q, k, v, grad = inputs(generator, 70, heads=1)
    spans = [(0, 37, 0, 37), (37, 70, 37, 70), (37, 70, 0, 37), (5, 30, 37, 60)]
    queries, keys = work_of_queries(spans, 16, DEVICE), work_of_keys(spans, 32, DEVICE)
    wide = {"BLOCK_M": 64, "BLOCK_N": 32}
    out, lse = flash_forward(q, k, v, queries, config=wide)
    grads = flash_backward.flash_backward(
        grad, q, k, v, out, lse, queries, keys, wide, wide | {"BLOCK_M": 16}
    )
    check_all((out, *grads), exact(q, k, v, grad, lambda q, k, v: reference(q, k, v, spans)[0]))


@pytest.mark.parametrize("dtype", DTYPES[:2])
def test_rounds_only_what_tensor_cores_multiply(generator, dtype):
    """Given the same rounded output, 1.65 is the most that rounding ds and the result costs, in 150 seeds; 2.0 if p and dp are rounded too."""
    q, k, v, grad = inputs(generator, 48, dtype=dtype)
    spans = varlen_spans([0, 48])
    works = work_of_queries(spans, BLOCK, DEVICE), work_of_keys(spans, BLOCK, DEVICE)
    out, lse = flash_forward(q, k, v, works[0])
    exact_lse = reference(q.double(), k.double(), v.double(), spans)[1]
    expected = flash_backward.reference(
        *(x.double() for x in (grad, q, k, v, out)), exact_lse, spans
    )
    for result, want in zip(
        flash_backward.flash_backward(grad, q, k, v, out, lse, *works), expected
    ):
        assert_close(result, want, 1.8)


def test_shares_of_parts_add_up(generator):
    """The backward pass of some of the spans, given the output over all of them, is their share of the gradients."""
    q, k, v, grad = inputs(generator, 42, heads=1)
    out, lse = flash_forward(q, k, v, work_of_queries(TREE_SPANS, BLOCK, DEVICE))
    sums = [torch.zeros_like(x) for x in (q, k, v)]
    for part in (TREE_SPANS[:4], TREE_SPANS[4:]):
        works = work_of_queries(part, BLOCK, DEVICE), work_of_keys(part, BLOCK, DEVICE)
        shares = flash_backward.flash_backward(grad, q, k, v, out, lse, *works)
        for total, share in zip(sums, shares):
            total += share.nan_to_num()  # NaN: rows that this part does not touch, and must not
    check_all(sums, exact(q, k, v, grad, lambda q, k, v: reference(q, k, v, TREE_SPANS)[0])[1:])


def test_only_covered_rows_are_written(generator):
    q, k, v, _ = inputs(generator, 40)
    spans = [(3, 21, 3, 21), (30, 33, 5, 9)]
    out, lse = flash_forward(q, k, v, work_of_queries(spans, BLOCK, DEVICE))
    written = torch.zeros(40, dtype=torch.bool, device=DEVICE)
    written[3:21] = written[30:33] = True
    assert torch.equal(out.isfinite().all(-1).all(-1), written) and torch.equal(
        lse.isfinite().all(-1), written
    )
    assert out[~written].isnan().all() and lse[~written].isnan().all()


def test_outputs_of_the_caller_are_filled(generator):
    q, k, v, _ = inputs(generator, 9)
    out, lse = poisoned(9, 2, DIM, dtype=q.dtype), poisoned(2, 9, dtype=torch.float32).T
    same = flash_forward(q, k, v, work_of_queries(varlen_spans([0, 9]), BLOCK, DEVICE), out, lse)
    assert same[0] is out and same[1] is lse and out.isfinite().all() and lse.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_bitwise_alone_in_a_pack_and_again(generator, dtype):
    """A tree behind another sequence gives the bits it gives alone, out and gradients, and so does the pack when run again."""
    before, rows = 21, slice(21, 63)
    data = inputs(generator, 63, dtype=dtype)
    pack = [(0, before, 0, before), *(tuple(x + before for x in span) for span in TREE_SPANS)]
    first, again = run(*data, pack), run(*data, pack)
    alone = run(*(x[rows] for x in data), TREE_SPANS)
    for one, two, part in zip(first, again, alone):
        assert torch.equal(one, two) and torch.equal(one[rows], part)


def test_neighbours_do_not_leak(generator):
    """NaN in one sequence stays there."""
    data = inputs(generator, 40)
    clean = run(*data, varlen_spans([0, 19, 40]))
    for x in data:
        x[:19] = float("nan")
    for one, two in zip(clean, run(*data, varlen_spans([0, 19, 40]))):
        assert torch.equal(one[19:], two[19:]) and two[:19].isnan().all()


def test_large_scores(generator):
    """Scores of hundreds overflow exp: only their distance to the largest may be used."""
    q, k, v, grad = inputs(generator, 20)
    data = q * 30, k * 30, v, grad
    out, lse = flash_forward(*data[:3], work_of_queries(varlen_spans([0, 20]), BLOCK, DEVICE))
    want, want_lse = reference(*(x.double() for x in data[:3]), varlen_spans([0, 20]))
    assert (out - want).abs().max() < 1e-2 and (
        lse - want_lse
    ).abs().max() < 1e-2  # fp32 scores of thousands have an error of 1e-4
    data = q - 30, k + 3, v, grad  # all scores far below 0, log-sum-exp about -360
    results = run(*data, varlen_spans([0, 20]))
    assert all(x.isfinite().all() for x in results)


def test_finite_differences(generator):
    """The gradient is the slope of the function itself, not only what another implementation says."""
    spans = [(0, 5, 0, 5), (5, 9, 5, 9), (5, 9, 0, 5)]
    data = inputs(generator, 9, heads=1)
    _, *grads = run(*data, spans)
    *values, grad = data
    work, step = work_of_queries(spans, BLOCK, DEVICE), 1e-2
    for index in range(3):
        direction = randn(generator, *values[index].shape)
        slope = 0.0
        for sign in (1, -1):
            moved = [x + sign * step * direction if i == index else x for i, x in enumerate(values)]
            slope += (
                sign * (flash_forward(*moved, work)[0].double() * grad).sum().item() / (2 * step)
            )
        assert slope == pytest.approx((grads[index] * direction).sum().item(), rel=1e-2, abs=1e-2)


@pytest.mark.skipif(DEVICE != "cpu", reason="needs memory that is promised but not there")
def test_offsets_beyond_32_bits(generator):
    """A short sequence behind 2^31 numbers: what an int32 offset would hit is not ours, so a child process tries it."""
    tokens, rows = 2**31 // DIM + 40, slice(-20, None)
    huge = lambda: torch.tensor([], dtype=torch.float16).set_(
        torch.UntypedStorage(tokens * DIM * 2), 0, (tokens, 1, DIM)
    )
    x, one, two, lse, delta = huge(), huge(), huge(), torch.zeros(1, tokens), torch.zeros(1, tokens)
    x[rows] = randn(generator, 20, 1, DIM, dtype=torch.float16)
    near = x[rows].clone()
    spans = varlen_spans([0, 20])
    out, small_lse = flash_forward(near, near, near, work_of_queries(spans, BLOCK))
    grads = flash_backward.flash_backward(
        near,
        near,
        near,
        near,
        out,
        small_lse,
        work_of_queries(spans, BLOCK),
        work_of_keys(spans, BLOCK),
    )
    far = [(tokens - 20, tokens, tokens - 20, tokens)]
    queries, keys = (
        (w.items, w.visits, tokens) for w in (work_of_queries(far, BLOCK), work_of_keys(far, BLOCK))
    )
    shape = {
        "H": 1,
        "G": 1,
        "D": DIM,
        "UNIT": DIM**-0.5 * flash.LOG2E,
        "BLOCK_M": BLOCK,
        "BLOCK_N": BLOCK,
    }

    def work():
        flash._forward[(2,)](x, x, x, one, lse, *queries, **shape)
        same = [torch.equal(one[rows], out), torch.equal(lse[0, rows], small_lse[:, 0])]
        delta[0, rows] = (near.float() * out.float()).sum(-1)[:, 0]
        flash_backward._backward_queries[(2,)](
            x, x, x, x, lse, delta, one, *queries, SCALE=DIM**-0.5, **shape
        )
        same += [torch.allclose(one[rows], grads[0], atol=1e-3)]
        flash_backward._backward_keys[(2,)](
            x, x, x, x, lse, delta, one, two, *keys, SCALE=DIM**-0.5, **shape
        )
        same += [torch.allclose(one[rows], grads[1], atol=1e-3), torch.equal(two[rows], grads[2])]
        assert all(same)

    assert survives(work)


def test_gradient_of_a_sum_has_stride_zero(generator):
    q, k, v, _ = inputs(generator, 5)
    q = q.requires_grad_()
    flash_attention(q, k, v, plan(varlen_spans([0, 5]), DEVICE, q.dtype, BLOCK)).sum().backward()
    assert_close(
        q.grad,
        exact(
            q, k, v, torch.ones_like(q), lambda q, k, v: segment_attention([Segment(0, 5)], q, k, v)
        )[1],
        GRADIENT,
    )


def test_views_of_one_projection(generator):
    """q, k and v that are slices of one matrix are copied where they must be."""
    grad = randn(generator, 10, 2, DIM)
    qkv = randn(generator, 10, 4, DIM)
    views = qkv[:, :2], qkv[:, 2:3], qkv[:, 3:]
    for one, two in zip(
        run(*views, grad, varlen_spans([0, 10])),
        run(*(x.contiguous() for x in views), grad, varlen_spans([0, 10])),
    ):
        assert torch.equal(one, two)
    assert (
        flash_attention(*views, plan(varlen_spans([0, 10]), DEVICE, qkv.dtype, BLOCK))
        .isfinite()
        .all()
    )


def test_work_list():
    """Longest blocks first; each block names its spans in the order of their keys; no block crosses into a sequence without a prefix."""
    work = work_of_queries([*TREE_SPANS, (42, 50, 42, 50)], BLOCK)
    assert sorted((first, last) for first, last, _, _ in work.items.tolist()) == [
        (0, 16),
        (16, 32),
        (32, 42),
        (42, 50),
    ]
    visits = {
        first: [tuple(s) for s in work.visits.tolist()[a:b]]
        for first, _, a, b in work.items.tolist()
    }
    assert visits[16] == [
        (0, 19, 0, 19),
        (19, 42, 0, 19),
        (19, 28, 19, 28),
        (28, 34, 19, 28),
        (28, 34, 28, 34),
    ]
    assert (
        work.items.tolist()[0][:2] == [16, 32]
        and work.items.tolist()[-1][:2] == [42, 50]
        and work.tokens == 50
    )
    keys = work_of_keys(TREE_SPANS, BLOCK)
    assert sorted((first, last) for first, last, _, _ in keys.items.tolist()) == [
        (0, 16),
        (16, 32),
        (32, 42),
    ]


def test_empty_work_writes_nothing(generator):
    q, k, v, grad = inputs(generator, 3)
    empty = work_of_queries([], BLOCK, DEVICE)
    out, lse = flash_forward(q, k, v, empty)
    assert out.isnan().all() and lse.isnan().all()
    none = inputs(generator, 0)
    assert [len(x) for x in run(*none, [])] == [0] * 4


def test_varlen_spans():
    assert varlen_spans([0, 3, 3, 8]) == [(0, 3, 0, 3), (3, 8, 3, 8)]
    for wrong in ([], [1, 2], [0, 3, 2]):
        with pytest.raises(ValueError, match="cu_seqlens"):
            varlen_spans(wrong)


@pytest.mark.parametrize(
    "spans, message",
    [
        ([(0, 0, 0, 4)], "empty"),
        ([(2, 4, 3, 3)], "empty"),
        ([(-1, 3, -1, 3)], "out of range"),
        ([(0, 4, 0, 3)], "end together"),
    ],
)
def test_spans_that_make_no_sense_are_refused(spans, message):
    with pytest.raises(ValueError, match=message):
        work_of_queries(spans, BLOCK)


def test_a_plan_must_cover_the_pack(generator):
    q, k, v, _ = inputs(generator, 6)
    with pytest.raises(ValueError, match="not every token"):
        plan([(0, 2, 0, 2), (3, 6, 3, 6)], DEVICE, q.dtype)
    with pytest.raises(ValueError, match="covers 5 tokens; q has 6"):
        flash_attention(q, k, v, plan(varlen_spans([0, 5]), DEVICE, q.dtype))
    with pytest.raises(ValueError, match="power of two"):
        work_of_queries(varlen_spans([0, 5]), 24)


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda q, k, v: (q[..., :12], k[..., :12], v[..., :12]), "contiguous"),
        (lambda q, k, v: [x[..., :12].contiguous() for x in (q, k, v)], "head_dim 12"),
        (lambda q, k, v: (q, k.double(), v), "k is torch.float64"),
        (lambda q, k, v: (q, k, v[:4]), "v has shape"),
        (lambda q, k, v: (q[:, :3].contiguous(), k, v), "3 query heads do not divide among 2"),
        (lambda q, k, v: (q, k.transpose(0, 1).contiguous().transpose(0, 1), v), "k has strides"),
        (lambda q, k, v: [x[:4] for x in (q, k, v)], "covers 5 tokens; q has 4"),
    ],
)
def test_refused_inputs(generator, change, message):
    q, k, v, _ = inputs(generator, 5, 4, 2)
    with pytest.raises(ValueError, match=message):
        flash_forward(*change(q, k, v), work_of_queries(varlen_spans([0, 5]), BLOCK, DEVICE))


def test_refused_outputs(generator):
    q, k, v, _ = inputs(generator, 5)
    work = work_of_queries(varlen_spans([0, 5]), BLOCK, DEVICE)
    with pytest.raises(ValueError, match="out has shape"):
        flash_forward(q, k, v, work, out=q[:4])
    with pytest.raises(ValueError, match="lse must be the transpose"):
        flash_forward(q, k, v, work, lse=torch.zeros(5, 2, device=DEVICE))
    with pytest.raises(ValueError, match="q has 5"):
        flash_forward(q, k, v, dataclasses.replace(work, tokens=6))
    assert isinstance(work, Work)
