"""Products with weights in 8 and 4 bits: against float64, against the layer, and a row's bits."""

import pytest
import torch
from kernel_check import DEVICE, DTYPES, POINTWISE, assert_close, randn
from torch import nn

from kernels import quantised
from kernels.quantised import quantised_linear
from nanorchestra.model.quantise import QuantisedLinear


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    monkeypatch.setattr(quantised, "BLOCK_N", 16)
    monkeypatch.setattr(quantised, "BLOCK_K", 32)


def weights(generator, bits, n, k, group=128):
    """All values occur; scales of neighbouring rows and groups differ by much."""

    def draw(high, *shape):
        return torch.randint(0, high, shape, generator=generator).to(DEVICE)

    groups = 1 if bits == 8 else k // group
    scales = (10 ** torch.rand(n, groups, generator=generator) * 1e-3).to(DEVICE)
    if bits == 8:
        return (draw(256, n, k) - 128).to(torch.int8), scales
    return draw(256, n, k // 2).to(torch.uint8), scales.half()


def eights(generator, n, k):
    """Numbers of fp8, all but NaN, with a scale a row."""
    values, scales = weights(generator, 8, n, k)
    bits = values.view(torch.uint8)
    return bits.masked_fill(bits & 127 == 127, 7).view(torch.float8_e4m3fn), scales


def reference(values, scales, zeros=None):
    """W [N, K] in float64, which holds it exactly: as the layer that stores it computes W."""
    bits = 4 if values.dtype == torch.uint8 else 8
    n, k = len(values), values.shape[1] * 8 // bits
    layer = QuantisedLinear(nn.Linear(k, n, device=DEVICE), values.dtype, k // scales.shape[1])
    layer.values, layer.scales, layer.zeros = values, scales, zeros
    return layer.dequantise(torch.float64)


def exact(x, weight):
    return x.double() @ weight.T


def compare(generator, bits, m, n, k, dtype, group=128):
    x, weight = randn(generator, m, k, dtype=dtype), weights(generator, bits, n, k, group)
    assert_close(quantised_linear(x, *weight, x.dtype), exact(x, reference(*weight)), POINTWISE)


@pytest.mark.parametrize("dtype", DTYPES)
def test_sizes_around_the_tiles(generator, dtype):
    random = torch.randint(8, 50, (3,), generator=generator).tolist()
    for m, n, k in [
        (1, 1, 1),
        (8, 15, 31),
        (9, 17, 33),
        (16, 16, 129),
        (17, 33, 128),
        (64, 48, 65),
    ]:
        compare(generator, 8, m, n, k, dtype)
    compare(generator, 8, *random, dtype)
    for group, m, n, groups in [(128, 1, 16, 1), (64, 8, 15, 5), (256, 9, 17, 3), (32, 33, 33, 9)]:
        compare(generator, 4, m, n, groups * group, dtype, group)
    compare(generator, 4, random[0], random[1], 128 * (random[2] // 10 + 1), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers_of_fp8(generator, dtype):
    """In one product, in splits of K, with tails."""
    for m, n, k in [(1, 16, 32), (9, 17, 33), (20, 5, 320)]:
        x, weight = randn(generator, m, k, dtype=dtype), eights(generator, n, k)
        assert_close(quantised_linear(x, *weight, x.dtype), exact(x, reference(*weight)), 3.2)


@pytest.mark.parametrize("dtype", DTYPES)
def test_zero_points(generator, dtype):
    """All of 0 .. 15 beside all values, in one product, in splits of K and over many rows of x."""
    for group, m, n, groups in [(32, 1, 16, 1), (64, 9, 33, 5), (128, 20, 17, 9), (256, 3, 9, 2)]:
        k = group * groups
        x, (values, scales) = (
            randn(generator, m, k, dtype=dtype),
            weights(generator, 4, n, k, group),
        )
        zeros = torch.randint(0, 16, (n, groups), generator=generator).to(DEVICE, torch.uint8)
        got = quantised_linear(x, values, scales, dtype, zeros)
        assert_close(got, exact(x, reference(values, scales, zeros)), POINTWISE)
        eight = torch.full_like(zeros, 8)
        plain = quantised_linear(x, values, scales, dtype)
        assert torch.equal(quantised_linear(x, values, scales, dtype, eight), plain)


@pytest.mark.parametrize("bits", [8, 4])
def test_the_tiles_of_a_gpu(generator, monkeypatch, bits):
    """Over all of K or over splits of it, with tails of N and of the rows."""
    monkeypatch.undo()
    for m, k in ((3, 384), (20, 1152)):
        compare(generator, bits, m, 40, k, torch.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("k", [64, 256], ids=["one split", "two"])
def test_a_row_has_the_same_bits_in_any_batch_and_run(generator, bits, dtype, k):
    x = randn(generator, 34, k, dtype=dtype)
    weight = weights(generator, bits, 20, k, 32)
    out = quantised_linear(x, *weight, x.dtype)
    order = torch.randperm(34, generator=generator).to(DEVICE)
    for rows in (order, slice(0, 1), slice(33, 34), slice(5, 14), slice(13, 30), slice(None)):
        assert torch.equal(out[rows], quantised_linear(x[rows], *weight, dtype))
