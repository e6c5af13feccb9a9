"""RMSNorm, alone, after a residual addition, and its gradients, against float64."""

import pytest
import torch
from kernel_check import DEVICE, DTYPES, GRADIENT, POINTWISE, assert_close, randn

from kernels import norm
from kernels.common import TILES

EPS = 1e-6
SHAPES = [(1, 1), (1, 64), (3, 64), (1, 63), (2, 65), (7, 16), (8, 16), (9, 16), (5, 31), (2, 300)]


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Rows of up to 32 elements share a tile; longer ones have more than one."""
    monkeypatch.setattr(norm, "TILE", 64)


def inputs(generator, tokens, width, dtype=torch.float32):
    return randn(generator, tokens, width, dtype=dtype), 1 + 0.3 * randn(
        generator, width, dtype=dtype
    )


def gradients(x, weight, grad, normed):
    x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
    return torch.autograd.grad(normed(x, weight, EPS), (x, weight), grad)


@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_are_exact_and_the_sum_is_rounded_for_the_residual_only(generator, dtype):
    random = torch.randint(1, 400, (2,), generator=generator).tolist()
    for tokens, width in [*SHAPES, (random[0] % 12 + 1, random[1])]:
        x, weight = inputs(generator, tokens, width, dtype)
        residual = randn(generator, tokens, width, dtype=dtype, scale=3.0)
        total = x.double() + residual.double()
        exact = norm.reference(x.double(), weight.double(), EPS)
        assert_close(norm.rms_norm(x, weight, EPS), exact, POINTWISE)
        out = norm.rms_norm(x, weight, EPS, residual)
        assert_close(residual, total, POINTWISE)
        assert_close(out, norm.reference(total, weight.double(), EPS), POINTWISE)
    assert norm.rms_norm(x[:0], weight, EPS).shape == (0, width)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("programs", [1, 3])
def test_gradients_are_exact(generator, monkeypatch, dtype, programs):
    tile = {"PROGRAMS": programs, "STAGES": 1}
    monkeypatch.setitem(TILES, "rms_norm_backward", {"80": tile})
    for tokens, width in SHAPES[1:]:  # but for eps, the gradient of a single element is 0
        x, weight = inputs(generator, tokens, width, dtype)
        grad = randn(generator, tokens, width, dtype=dtype)
        exact = gradients(x.double(), weight.double(), grad.double(), norm.reference)
        for got, want in zip(gradients(x, weight, grad, norm.rms_norm_train), exact, strict=True):
            assert_close(got, want, GRADIENT)


def test_small_rows_feel_eps(generator):
    """Rows whose mean square is as small as eps, and rows of zeros."""
    x, weight = inputs(generator, 4, 32)
    x *= torch.tensor([1e-3, 3e-3, 0.0, 1.0], device=DEVICE)[:, None]
    expected = norm.reference(x.double(), weight.double(), EPS)
    assert_close(norm.rms_norm(x, weight, EPS), expected, POINTWISE)
    assert_close(norm.rms_norm(x, weight, EPS, torch.zeros_like(x)), expected, POINTWISE)
    ones = torch.ones_like(x)
    exact = gradients(x.double(), weight.double(), ones.double(), norm.reference)[0]
    got = gradients(x, weight, ones, norm.rms_norm_train)[0]
    for row, exact_row in zip(got, exact, strict=True):
        assert_close(row, exact_row, GRADIENT)


@pytest.mark.parametrize("width", [16, 100])
def test_a_row_has_the_same_bits_in_any_batch_and_run(generator, width):
    x, weight = inputs(generator, 7, width)
    residual = randn(generator, 7, width)

    def run(rows):
        total = residual[rows].clone()
        normed = norm.rms_norm(x[rows], weight, EPS, total)
        dx, dweight = gradients(x[rows], weight, residual[rows], norm.rms_norm_train)
        return norm.rms_norm(x[rows], weight, EPS), normed, total, dx, dweight

    batch = run(slice(0, 7))
    for row in range(7):
        alone = run(slice(row, row + 1))
        assert all(
            torch.equal(a, b[row : row + 1]) for a, b in zip(alone[:4], batch[:4], strict=True)
        )
    assert all(torch.equal(a, b) for a, b in zip(run(slice(0, 7)), batch, strict=True))


def test_offsets_beyond_32_bits(generator):
    """A wrapped offset would read the front of the storage. Only the touched pages take memory."""
    storage = torch.empty(2**32 + 16, dtype=torch.float16, device=DEVICE)
    x = storage.as_strided((3, 16), (2**30, 1), 2**31)
    storage[:16] = float("nan")
    x.copy_(randn(generator, 3, 16, dtype=torch.float16))
    weight = torch.ones(16, dtype=torch.float16, device=DEVICE)
    exact = norm.reference(x.double(), weight.double(), EPS)
    assert_close(norm.rms_norm(x, weight, EPS), exact, POINTWISE)
    zeros, ones = torch.zeros(3, 16, dtype=torch.float16, device=DEVICE), weight.expand(3, 16)
    assert_close(norm.rms_norm(x, weight, EPS, zeros), exact, POINTWISE)
    far, near = (gradients(each, weight, ones, norm.rms_norm_train) for each in (x, x + 0))
    assert torch.equal(far[0], near[0])
