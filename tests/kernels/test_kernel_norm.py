"""RMSNorm, alone, after a residual addition, and its gradients, against float64."""

import pytest
import torch
from kernel_check import DEVICE, DTYPES, GRADIENT, POINTWISE, assert_close, poisoned, randn

from kernels import norm

EPS = 1e-6
SMALL = {"TILE": 64}  # rows of up to 32 elements share a tile; longer ones have more than one
SHAPES = [
    (1, 1),
    (1, 64),
    (3, 64),
    (1, 63),
    (2, 65),
    (7, 16),
    (8, 16),
    (9, 16),
    (5, 31),
    (4, 33),
    (2, 300),
]


def inputs(generator, T, N, dtype):
    return randn(generator, T, N, dtype=dtype), 1 + 0.3 * randn(generator, N, dtype=dtype)


def random_shape(generator):
    return [
        int(torch.randint(low, high, (), generator=generator)) for low, high in ((1, 12), (8, 400))
    ]


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_is_exact(generator, dtype):
    for T, N in [*SHAPES, random_shape(generator)]:
        x, weight = inputs(generator, T, N, dtype)
        guarded = poisoned(T * N + 512, dtype=dtype)
        out = norm.rms_norm(x, weight, EPS, out=guarded[: T * N].view(T, N), config=SMALL)
        assert_close(out, norm.reference(x.double(), weight.double(), EPS), POINTWISE)
        assert guarded[T * N :].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_add_rms_norm_is_exact_and_rounds_the_sum_for_the_residual_only(generator, dtype):
    for T, N in [*SHAPES, random_shape(generator)]:
        x, weight = inputs(generator, T, N, dtype)
        residual = randn(generator, T, N, dtype=dtype, scale=3.0)
        total = x.double() + residual.double()
        out, updated = norm.add_rms_norm(
            x, residual, weight, EPS, out=poisoned(T, N, dtype=dtype), config=SMALL
        )
        assert updated is residual
        assert_close(residual, total, POINTWISE)
        assert_close(out, norm.reference(total, weight.double(), EPS), POINTWISE)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("programs", [1, 3])
def test_the_gradients_are_exact(generator, monkeypatch, dtype, programs):
    real = torch.empty
    for T, N in [
        *SHAPES[1:],
        random_shape(generator),
    ]:  # the gradient of a single element is 0 but for eps: nothing to be relative to
        x, weight = inputs(generator, T, N, dtype)
        grad = randn(generator, T, N, dtype=dtype)
        exact = x.double().requires_grad_(), weight.double().requires_grad_()
        norm.reference(*exact, EPS).backward(grad.double())
        monkeypatch.setattr(
            torch, "empty", lambda *shape, **how: real(*shape, **how).fill_(float("nan"))
        )
        dx, dweight = norm.rms_norm_backward(
            grad, x, weight, EPS, config=SMALL | {"PROGRAMS": programs}
        )
        monkeypatch.undo()
        assert_close(dx, exact[0].grad, GRADIENT)
        assert_close(dweight, exact[1].grad, GRADIENT)


def test_small_rows_feel_eps(generator):
    """Rows whose mean square is as small as eps, and rows of zeros: the norm is finite and eps counts."""
    x, weight = inputs(generator, 4, 32, torch.float32)
    x *= torch.tensor([1e-3, 3e-3, 0.0, 1.0], device=DEVICE)[:, None]
    exact = x.double().requires_grad_()
    expected = norm.reference(exact, weight.double(), EPS)
    expected.backward(torch.ones_like(expected))
    assert_close(norm.rms_norm(x, weight, EPS), expected.detach(), POINTWISE)
    assert_close(
        norm.add_rms_norm(x, torch.zeros_like(x), weight, EPS)[0], expected.detach(), POINTWISE
    )
    dx = norm.rms_norm_backward(torch.ones_like(x), x, weight, EPS)[0]
    for row, exact_row in zip(
        dx, exact.grad
    ):  # each by itself: the gradients of small rows are large
        assert_close(row, exact_row, GRADIENT)


def test_autograd_with_expanded_gradients_and_strided_rows(generator):
    wide, weight = inputs(generator, 5, 80, torch.float32)
    x, weight = wide[:, 8:56].requires_grad_(), weight[:48].requires_grad_()
    exact = x.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    norm.rms_norm_train(x, weight, EPS).sum().backward()  # the gradient of a sum has strides of 0
    norm.reference(*exact, EPS).sum().backward()
    assert_close(x.grad, exact[0].grad, GRADIENT)
    assert_close(weight.grad, exact[1].grad, GRADIENT)


def test_weights_in_fp32_under_activations_in_bf16(generator):
    x, weight = randn(generator, 6, 48, dtype=torch.bfloat16), randn(generator, 48)
    assert_close(
        norm.rms_norm(x, weight, EPS), norm.reference(x.double(), weight.double(), EPS), POINTWISE
    )
    assert norm.rms_norm_backward(x, x, weight, EPS)[1].dtype == torch.float32


def test_the_operators_are_registered_soundly(generator):
    x, weight = inputs(generator, 3, 24, torch.float32)
    torch.library.opcheck(norm.rms_norm_train, (x.requires_grad_(), weight.requires_grad_(), EPS))
    torch.library.opcheck(norm._backward, (torch.ones_like(x), x.detach(), weight.detach(), EPS))


@pytest.mark.parametrize("N", [16, 100])
def test_a_row_alone_is_bitwise_the_row_in_a_batch_and_so_is_a_second_run(generator, N):
    x, weight = inputs(generator, 7, N, torch.float32)
    residual = randn(generator, 7, N)

    def run(rows):
        normed, total = norm.add_rms_norm(
            x[rows], residual[rows].clone(), weight, EPS, config=SMALL
        )
        gradients = norm.rms_norm_backward(residual[rows], x[rows], weight, EPS, config=SMALL)
        return norm.rms_norm(x[rows], weight, EPS, config=SMALL), normed, total, *gradients

    batch = run(slice(0, 7))
    for row in range(7):
        alone = run(slice(row, row + 1))
        assert all(torch.equal(a, b[row : row + 1]) for a, b in zip(alone[:4], batch[:4]))
    assert all(torch.equal(a, b) for a, b in zip(run(slice(0, 7)), batch))


def test_rows_that_lie_apart(generator):
    """A slice of wider rows is read where it lies; what lies between is untouched."""
    wide = torch.full((3, 100), float("nan"), device=DEVICE)
    wide[:, 20:60] = randn(generator, 3, 40)
    x, weight = wide[:, 20:60], randn(generator, 40)
    assert torch.equal(norm.rms_norm(x, weight, EPS), norm.rms_norm(x.contiguous(), weight, EPS))
    grad = randn(generator, 3, 40)
    apart, together = (
        (
            *norm.rms_norm_backward(grad, each, weight, EPS),
            *norm.add_rms_norm(each, grad.clone(), weight, EPS),
        )
        for each in (x, x.contiguous())
    )
    assert all(torch.equal(a, b) for a, b in zip(apart, together))


def test_a_row_beyond_two_billion_elements(generator):
    """An offset in 32 bits would wrap around to the front of the storage. Only the pages touched take memory."""
    storage = torch.empty(2**32 + 16, dtype=torch.float16, device=DEVICE)
    x = storage.as_strided((3, 16), (2**30, 1), 2**31)
    storage[:16] = float("nan")
    x.copy_(randn(generator, 3, 16, dtype=torch.float16))
    weight = torch.ones(16, dtype=torch.float16, device=DEVICE)
    exact = norm.reference(x.double(), weight.double(), EPS)
    assert_close(norm.rms_norm(x, weight, EPS), exact, POINTWISE)
    assert_close(
        norm.add_rms_norm(x, torch.zeros_like(x).contiguous(), weight, EPS)[0], exact, POINTWISE
    )
    assert torch.equal(
        norm.rms_norm_backward(weight.expand(3, 16).contiguous(), x, weight, EPS)[0],
        norm.rms_norm_backward(weight.expand(3, 16).contiguous(), x.contiguous(), weight, EPS)[0],
    )


def test_no_rows():
    x, weight = torch.empty(0, 16, device=DEVICE), torch.ones(16, device=DEVICE)
    assert (
        norm.rms_norm(x, weight, EPS).shape
        == norm.add_rms_norm(x, x.clone(), weight, EPS)[0].shape
        == (0, 16)
    )
    dx, dweight = norm.rms_norm_backward(x, x, weight, EPS)
    assert dx.shape == (0, 16) and torch.equal(dweight, torch.zeros_like(weight))


def test_refusals():
    x, weight = torch.ones(4, 8, device=DEVICE), torch.ones(8, device=DEVICE)
    with pytest.raises(ValueError, match=r"x has strides \(1, 4\)"):
        norm.rms_norm(torch.ones(8, 4, device=DEVICE).T, weight, EPS)
    with pytest.raises(ValueError, match="x is torch.float64"):
        norm.rms_norm(x.double(), weight, EPS)
    with pytest.raises(ValueError, match=r"weight has shape \(9,\); expected \[8\]"):
        norm.rms_norm(x, torch.ones(9, device=DEVICE), EPS)
    with pytest.raises(ValueError, match="8193 elements; supported are 1 to 8192"):
        norm.rms_norm(torch.ones(1, 8193, device=DEVICE), torch.ones(8193, device=DEVICE), EPS)
    with pytest.raises(ValueError, match="residual is torch.float16; expected torch.float32"):
        norm.add_rms_norm(x, x.half(), weight, EPS)
    with pytest.raises(ValueError, match="residual has strides"):
        norm.add_rms_norm(x, torch.ones(4, 16, device=DEVICE)[:, :8], weight, EPS)
    with pytest.raises(ValueError, match=r"out has shape \(3, 8\)"):
        norm.rms_norm(x, weight, EPS, out=x[:3])
    with pytest.raises(ValueError, match="grad has shape"):
        norm.rms_norm_backward(x[:2], x, weight, EPS)
