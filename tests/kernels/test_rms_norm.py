"""RMSNorm, alone and after a residual addition, against float64."""

import pytest
import torch
from kernel_check import DEVICE, DTYPES, POINTWISE, assert_close, randn

from kernels import rms_norm as module
from kernels.rms_norm import add_rms_norm, naive_add_rms_norm, naive_rms_norm, rms_norm

EPS = 1e-6
SHAPES = [(1, 1), (1, 64), (3, 64), (1, 63), (2, 65), (7, 16), (8, 16), (9, 16), (5, 31), (2, 300)]


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Rows of up to 32 elements share a tile; longer ones have more than one."""
    monkeypatch.setattr(module, "TILE", 64)


def inputs(generator, tokens, width, dtype=torch.float32):
    weight = 1 + 0.3 * randn(generator, width, dtype=dtype)
    return randn(generator, tokens, width, dtype=dtype), weight


@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_are_exact(generator, dtype):
    random = torch.randint(1, 400, (2,), generator=generator).tolist()
    for tokens, width in [*SHAPES, (random[0] % 12 + 1, random[1])]:
        x, weight = inputs(generator, tokens, width, dtype)
        exact = naive_rms_norm(x.double(), weight.double(), EPS)
        assert_close(rms_norm(x, weight, EPS), exact, POINTWISE)
    assert rms_norm(x[:0], weight, EPS).shape == (0, width)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sum_made_in_the_kernel_has_the_bits_of_one_made_before(generator, dtype):
    """And so has its norm; the arguments stay as they are."""
    for tokens, width in SHAPES:
        x, weight = inputs(generator, tokens, width, dtype)
        residual = randn(generator, tokens, width, dtype=dtype, scale=3.0)
        before = [t.clone() for t in (x, residual, weight)]
        out, summed = add_rms_norm(x, residual, weight, EPS)
        assert torch.equal(summed, x + residual)
        assert torch.equal(out, rms_norm(x + residual, weight, EPS))
        exact = naive_add_rms_norm(x.double(), residual.double(), weight.double(), EPS)
        assert_close(summed, exact[1], POINTWISE)
        assert all(torch.equal(a, b) for a, b in zip((x, residual, weight), before, strict=True))


def test_small_rows_feel_eps(generator):
    """Rows whose mean square is as small as eps, and rows of zeros."""
    x, weight = inputs(generator, 4, 32)
    x *= torch.tensor([1e-3, 3e-3, 0.0, 1.0], device=DEVICE)[:, None]
    expected = naive_rms_norm(x.double(), weight.double(), EPS)
    assert_close(rms_norm(x, weight, EPS), expected, POINTWISE)
    assert_close(add_rms_norm(x, torch.zeros_like(x), weight, EPS)[0], expected, POINTWISE)


@pytest.mark.parametrize("width", [16, 100])
def test_a_row_has_the_same_bits_in_any_batch_and_run(generator, width):
    x, weight = inputs(generator, 7, width)
    residual = randn(generator, 7, width)

    def run(rows):
        return rms_norm(x[rows], weight, EPS), *add_rms_norm(x[rows], residual[rows], weight, EPS)

    batch = run(slice(0, 7))
    for row in range(7):
        for got, of_batch in zip(run(slice(row, row + 1)), batch, strict=True):
            assert torch.equal(got, of_batch[row : row + 1])
    assert all(torch.equal(a, b) for a, b in zip(run(slice(0, 7)), batch, strict=True))


def test_offsets_beyond_32_bits(generator):
    """A wrapped offset would read the front of the storage. Only the touched pages take memory."""
    storage = torch.empty(2**32 + 16, dtype=torch.float16, device=DEVICE)
    x = storage.as_strided((3, 16), (2**30, 1), 2**31)
    storage[:16] = float("nan")
    x.copy_(randn(generator, 3, 16, dtype=torch.float16))
    weight = torch.ones(16, dtype=torch.float16, device=DEVICE)
    exact = naive_rms_norm(x.double(), weight.double(), EPS)
    assert_close(rms_norm(x, weight, EPS), exact, POINTWISE)
    zeros = torch.zeros(3, 16, dtype=torch.float16, device=DEVICE)
    assert_close(add_rms_norm(x, zeros, weight, EPS)[0], exact, POINTWISE)


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="rows of 8193; expected 1 to 8192"):
        rms_norm(torch.ones(1, 8193), torch.ones(8193), EPS)
    x, weight = torch.ones(2, 8), torch.ones(8)
    with pytest.raises(ValueError, match=r"residual has shape \[2, 4\]"):
        add_rms_norm(x, torch.ones(2, 4), weight, EPS)
