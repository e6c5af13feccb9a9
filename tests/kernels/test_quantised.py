"""Products with weights in 8 and 4 bits: against float64, against the layer, and a row's bits."""

import pytest
import torch
from kernel_check import DEVICE, DTYPES, POINTWISE, assert_close, randn
from torch import nn

from kernels import quantised
from kernels.quantised import naive_quantised_linear, quantised_linear
from nanorchestra.model.quantise import QuantisedLinear

SIZES = [  # bits, rows of x, outputs, columns, columns that share a scale
    (8, 1, 1, 1, 1),
    (8, 16, 16, 129, 129),
    (8, 128, 48, 65, 65),
    (4, 1, 16, 128, 128),
    (4, 8, 15, 320, 64),
    (4, 9, 17, 512, 256),
    (4, 97, 33, 288, 32),
]


@pytest.fixture
def small_tiles(monkeypatch):
    monkeypatch.setattr(quantised, "BLOCK_N", 16)
    monkeypatch.setattr(quantised, "BLOCK_K", 32)


def weights(generator, bits, n, k, group):
    """All values and zero points occur; scales of neighbouring rows and groups differ by much."""

    def draw(high, *shape):
        return torch.randint(0, high, shape, generator=generator).to(DEVICE)

    scales = (10 ** torch.rand(n, k // group, generator=generator) * 1e-3).to(DEVICE)
    if bits == 8:
        return (draw(256, n, k) - 128).to(torch.int8), scales, None
    values, zeros = draw(256, n, k // 2), draw(16, n, k // group)
    return values.to(torch.uint8), scales.half(), zeros.to(torch.uint8)


def compare(generator, bits, m, n, k, group, dtype):
    """With the zero points, and without: those are 8."""
    x = randn(generator, m, k, dtype=dtype)
    values, scales, zeros = weights(generator, bits, n, k, group)
    got = quantised_linear(x, values, scales, dtype)
    assert_close(got, naive_quantised_linear(x.double(), values, scales), POINTWISE)
    if zeros is not None:
        got = quantised_linear(x, values, scales, dtype, zeros)
        assert_close(got, naive_quantised_linear(x.double(), values, scales, zeros), POINTWISE)


@pytest.mark.parametrize("dtype", DTYPES)
def test_products_are_exact_around_the_tiles(generator, small_tiles, dtype):
    m, n, k = torch.randint(8, 50, (3,), generator=generator).tolist()
    for sizes in [*SIZES, (8, m, n, k, k), (4, m, n, 128 * (k // 10 + 1), 128)]:
        compare(generator, *sizes, dtype)


@pytest.mark.parametrize("bits", [8, 4])
def test_the_tiles_of_a_gpu(generator, bits):
    """Over all of K or over splits of it, with tails of N and of the rows."""
    for m, k in ((3, 384), (20, 1152)):
        compare(generator, bits, m, 40, k, 128 if bits == 4 else k, torch.bfloat16)


@pytest.mark.parametrize("kind, group", [(torch.int8, 192), (torch.uint8, 64)])
def test_the_layer_holds_what_the_kernel_reads(generator, small_tiles, kind, group):
    """A rounded layer of 192 columns, as those of nano: 4 bits in groups of 64."""
    layer = QuantisedLinear(nn.Linear(192, 20, device=DEVICE), kind, group)
    layer.write(slice(0, 20), randn(generator, 20, 192, scale=0.1))
    x = randn(generator, 3, 192)
    expected = x.double() @ layer.dequantise(torch.float64).T
    got = quantised_linear(x, layer.values, layer.scales, torch.float32)
    assert_close(got, expected, 3.2)
