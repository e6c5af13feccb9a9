"""Products with weights in 8 and 4 bits: against float64, against the layer, and a row's bits."""

import pytest
import torch
from kernel_check import (
    DEVICE,
    DTYPES,
    POINTWISE,
    assert_close,
    randn,
)
from torch import nn

from kernels import dequantise, quantised
from kernels.dequantise import reference
from kernels.quantised import ROWS, quantised_linear
from nanorchestra.model.quantise import QuantisedLinear


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    monkeypatch.setattr(quantised, "BLOCK_N", 16)
    monkeypatch.setattr(quantised, "BLOCK_K", 32)
    monkeypatch.setattr(dequantise, "BLOCK", 64)


def weights(generator, bits, n, k, group=128):
    """All values and zeros occur; scales of neighbouring rows and groups differ by much."""

    def draw(high, *shape):
        return torch.randint(0, high, shape, generator=generator).to(DEVICE)

    groups = 1 if bits == 8 else k // group
    scales = (10 ** torch.rand(n, groups, generator=generator) * 1e-3).to(DEVICE)
    if bits == 8:
        return (draw(256, n, k) - 128).to(torch.int8), scales, None, k
    values, zeros = draw(256, n, k // 2).to(torch.uint8), draw(16, n, groups).to(torch.uint8)
    return values, scales.half(), zeros, group


def exact(x, weight, bias=None):
    return x.double() @ weight.T + (0 if bias is None else bias.double())


def compare(generator, bits, m, n, k, dtype, group=128, with_bias=True):
    x, weight = randn(generator, m, k, dtype=dtype), weights(generator, bits, n, k, group)
    # a bias might cancel a single element
    bias = randn(generator, n, dtype=dtype) if with_bias and m * n > 1 else None
    out = quantised_linear(x, *weight, bias)
    assert_close(out, exact(x, reference(*weight), bias), POINTWISE)


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


@pytest.mark.parametrize("bits", [8, 4])
def test_the_tiles_of_a_gpu(generator, monkeypatch, bits):
    """Without a bias, over all of K or over splits of it, with tails of N and of the rows."""
    monkeypatch.undo()
    for m, k in ((3, 384), (20, 1152)):
        compare(generator, bits, m, 40, k, torch.bfloat16, with_bias=False)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", DTYPES)
def test_long_sums_keep_fp32(generator, monkeypatch, bits, dtype):
    """Thousands of terms of one sign, over splits: a sum kept in 16 bits would stand still."""
    monkeypatch.setattr(quantised, "BLOCK_K", 128)
    x = (1 + randn(generator, 2, 2048).abs()).to(dtype)
    values, scales, zeros, group = weights(generator, bits, 16, 2048)
    if bits == 8:
        values = values.abs().clamp(0, 127)
    weight = values, scales, None if bits == 8 else torch.zeros_like(zeros), group
    assert_close(quantised_linear(x, *weight, None), exact(x, reference(*weight)), POINTWISE)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits, group", [(8, 256), (4, 128), (4, 32)])
def test_agrees_with_the_layer_that_stores_it(generator, bits, group, dtype):
    """W bit for bit, the product within rounding; beyond ROWS rows it is the layer's own."""
    layer = QuantisedLinear(nn.Linear(256, 20, device=DEVICE), bits, group).requires_grad_(False)
    layer.write(slice(0, 20), randn(generator, 20, 256, scale=0.05))
    if bits == 4:
        drawn = torch.randint(0, 8, layer.zeros.shape, generator=generator)
        layer.zeros += drawn.to(torch.uint8).to(DEVICE)
    layer.bias.data = layer.bias.to(dtype)
    weight = layer.values, layer.scales, layer.zeros, group
    assert torch.equal(dequantise.dequantise(*weight, dtype), layer.dequantise(dtype))
    for rows in (3, ROWS, ROWS + 1):
        x = randn(generator, rows, 256, dtype=dtype)
        out = quantised_linear(x, *weight, layer.bias)
        if rows > ROWS:
            assert torch.equal(out, layer(x))
        else:
            assert_close(out, exact(x, layer.dequantise(torch.float64), layer.bias), POINTWISE)


@pytest.mark.parametrize("dtype", DTYPES)
def test_dequantised_sizes(generator, dtype):
    for n, k in [(1, 1), (3, 63), (5, 64), (2, 65), (3, 200)]:
        weight = weights(generator, 8, n, k)
        out = dequantise.dequantise(*weight, dtype)
        assert torch.equal(out, (weight[0] * weight[1]).to(dtype)), "in fp32, rounded once"
    for group, k in [(32, 32), (32, 160), (64, 448), (128, 384), (256, 256)]:
        weight = weights(generator, 4, 3, k, group)
        out = dequantise.dequantise(*weight, dtype)
        assert torch.equal(out, reference(*weight).float().to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("k", [64, 256], ids=["one split", "two"])
def test_a_row_has_the_same_bits_in_any_batch_and_run(generator, bits, dtype, k):
    x, bias = randn(generator, 34, k, dtype=dtype), randn(generator, 20, dtype=dtype)
    weight = weights(generator, bits, 20, k, 32)
    out = quantised_linear(x, *weight, bias)
    order = torch.randperm(34, generator=generator).to(DEVICE)
    for rows in (order, slice(0, 1), slice(33, 34), slice(5, 14), slice(13, 30), slice(None)):
        assert torch.equal(out[rows], quantised_linear(x[rows], *weight, bias))
