"""Products with weights in 8 and 4 bits: against float64, against the layer, and a row's bits."""

import pytest
import torch
from kernel_check import DEVICE, DTYPES, POINTWISE, assert_close, randn
from torch import nn

from kernels import quantised
from kernels.quantised import naive_quantised_linear, quantised_linear
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


def exact(x, values, scales, zeros=None):
    return naive_quantised_linear(x.double(), values, scales, zeros)


def compare(generator, bits, m, n, k, dtype, group=128):
    x, weight = randn(generator, m, k, dtype=dtype), weights(generator, bits, n, k, group)
    assert_close(quantised_linear(x, *weight, x.dtype), exact(x, *weight), POINTWISE)


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
        assert_close(got, exact(x, values, scales, zeros), POINTWISE)
        eight = torch.full_like(zeros, 8)
        plain = quantised_linear(x, values, scales, dtype)
        assert torch.equal(quantised_linear(x, values, scales, dtype, eight), plain)


@pytest.mark.parametrize("bits", [8, 4])
def test_the_tiles_of_a_gpu(generator, monkeypatch, bits):
    """Over all of K or over splits of it, with tails of N and of the rows."""
    monkeypatch.undo()
    for m, k in ((3, 384), (20, 1152)):
        compare(generator, bits, m, 40, k, torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("k", [64, 256], ids=["one split", "two"])
def test_a_row_has_the_same_bits_in_any_batch_and_run(generator, bits, dtype, k):
    x = randn(generator, 34, k, dtype=dtype)
    weight = weights(generator, bits, 20, k, 32)
    out = quantised_linear(x, *weight, x.dtype)
    order = torch.randperm(34, generator=generator).to(DEVICE)
    for rows in (order, slice(0, 1), slice(33, 34), slice(5, 14), slice(13, 30), slice(None)):
        assert torch.equal(out[rows], quantised_linear(x[rows], *weight, dtype))


@pytest.mark.parametrize("kind", [torch.int8, torch.uint8])
def test_the_layer_holds_what_the_kernel_reads(generator, kind):
    """A rounded layer of 192 columns, as those of nano: 4 bits in groups of 64."""
    layer = QuantisedLinear(
        nn.Linear(192, 20, device=DEVICE), kind, 64 if kind == torch.uint8 else 192
    )
    layer.write(slice(0, 20), randn(generator, 20, 192, scale=0.1))
    x = randn(generator, 3, 192)
    expected = x.double() @ layer.dequantise(torch.float64).T
    got = quantised_linear(x, layer.values, layer.scales, torch.float32)
    assert_close(got, expected, 3.2)


def test_wrong_shapes_are_refused():
    x, values = torch.ones(4, 192), torch.ones(8, 96, dtype=torch.uint8)
    with pytest.raises(ValueError, match="scales has 5 groups for 192 columns; expected groups"):
        quantised_linear(x, values, torch.ones(8, 5).half(), torch.float32)
    with pytest.raises(ValueError, match="x has 65 rows; expected at most 64"):
        quantised_linear(torch.ones(65, 192), values, torch.ones(8, 3).half(), torch.float32)
    with pytest.raises(ValueError, match="192 columns; expected a multiple of the group, 128"):
        QuantisedLinear(nn.Linear(192, 8), torch.uint8, 128)
