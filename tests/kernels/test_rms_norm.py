"""RMSNorm, alone and after a residual addition, against float64."""

import pytest
import torch
from kernel_check import DEVICE, DTYPES, POINTWISE, assert_close, randn

from kernels import rms_norm as module
from kernels.rms_norm import add_rms_norm, naive_rms_norm, rms_norm

EPS = 1e-6
SHAPES = [(1, 1), (3, 64), (2, 65), (9, 16), (5, 31), (2, 300)]


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Rows of up to 32 elements share a tile; longer ones have more than one."""
    monkeypatch.setattr(module, "TILE", 64)


def inputs(generator, tokens, width, dtype=torch.float32):
    weight = 1 + 0.3 * randn(generator, width, dtype=dtype)
    return randn(generator, tokens, width, dtype=dtype), weight


@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_are_exact_and_a_sum_made_in_the_kernel_has_the_bits_of_one_made_before(
    generator, dtype
):
    """And so has its norm; the arguments stay as they are."""
    random = torch.randint(1, 400, (2,), generator=generator).tolist()
    for tokens, width in [*SHAPES, (random[0] % 12 + 1, random[1])]:
        x, weight = inputs(generator, tokens, width, dtype)
        residual = randn(generator, tokens, width, dtype=dtype, scale=3.0)
        before = [t.clone() for t in (x, residual, weight)]
        exact = naive_rms_norm(x.double(), weight.double(), EPS)
        assert_close(rms_norm(x, weight, EPS), exact, POINTWISE)
        out, summed = add_rms_norm(x, residual, weight, EPS)
        assert torch.equal(summed, x + residual)
        assert torch.equal(out, rms_norm(x + residual, weight, EPS))
        assert all(torch.equal(a, b) for a, b in zip((x, residual, weight), before, strict=True))


def test_small_rows_feel_eps(generator):
    """Rows whose mean square is as small as eps, and rows of zeros."""
    x, weight = inputs(generator, 4, 32)
    x *= torch.tensor([1e-3, 3e-3, 0.0, 1.0], device=DEVICE)[:, None]
    expected = naive_rms_norm(x.double(), weight.double(), EPS)
    assert_close(rms_norm(x, weight, EPS), expected, POINTWISE)
