"""Products with weights in 8 and 4 bits: against float64, against the layer, and a row's bits."""

import numpy as np
import pytest
import torch
import triton.language as tl
from kernel_check import (
    DEVICE,
    DTYPES,
    POINTWISE,
    assert_close,
    at_the_end_of_memory,
    only_the_last_program,
    poison_new_tensors,
    randn,
    survives,
)
from torch import nn
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from kernels import dequantise, quantised
from kernels.dequantise import reference
from kernels.quantised import ROWS, quantised_linear
from nanorchestra.model.quantise import QuantisedLinear


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    monkeypatch.setattr(quantised, "BLOCK_N", 16)
    monkeypatch.setattr(quantised, "BLOCK_K", 32)
    monkeypatch.setattr(dequantise, "BLOCK", 64)
    poison_new_tensors(monkeypatch)


def weights(generator, bits, n, k, group=128):
    """All values and zeros occur; scales of neighbouring rows and groups differ by much."""
    draw = lambda high, *shape: torch.randint(0, high, shape, generator=generator).to(DEVICE)
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
    random = torch.randint(1, 50, (3,), generator=generator).tolist()
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
    for group, m, n, groups in [(128, 1, 1, 1), (64, 8, 15, 5), (256, 9, 17, 3), (32, 33, 33, 9)]:
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


@pytest.mark.parametrize("zero", [0, 8, 15])
def test_every_corner_of_a_nibble(generator, zero):
    for nibbles in (0x0F, 0xF0, 0x08, 0x80, 0x00, 0xFF):
        values, scales, zeros, group = weights(generator, 4, 4, 128)
        values[:, ::3], zeros[:] = nibbles, zero
        x = randn(generator, 2, 128, dtype=torch.float16)
        out = quantised_linear(x, values, scales, zeros, group, None)
        assert_close(out, exact(x, reference(values, scales, zeros, group)), POINTWISE)


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


@pytest.fixture
def sums_in_order(monkeypatch):
    """The interpreter's product sums in an order that depends on the tile; that of mma does not."""

    def dot(self, a, b, accumulator, *options):
        a, b = (
            operand if operand.dtype != tl.bfloat16 else self.cast_impl(operand, tl.float32)
            for operand in (a, b)
        )
        total = accumulator.data.astype(np.float32)
        for column, row in zip(a.data.T.astype(np.float32), b.data.astype(np.float32), strict=True):
            total += column[:, None] * row
        return TensorHandle(total, tl.float32)

    if DEVICE == "cpu":
        monkeypatch.setattr(InterpreterBuilder, "create_dot", dot)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("k", [64, 256], ids=["one split", "two"])
def test_a_row_has_the_same_bits_in_any_batch_and_run(generator, sums_in_order, bits, dtype, k):
    x, bias = randn(generator, 34, k, dtype=dtype), randn(generator, 20, dtype=dtype)
    weight = weights(generator, bits, 20, k, 32)
    out = quantised_linear(x, *weight, bias)
    order = torch.randperm(34, generator=generator).to(DEVICE)
    for rows in (order, slice(0, 1), slice(33, 34), slice(5, 14), slice(13, 30), slice(None)):
        assert torch.equal(out[rows], quantised_linear(x[rows], *weight, bias))


@pytest.mark.skipif(DEVICE == "cuda", reason="needs memory that ends where a tensor does")
@pytest.mark.parametrize("bits", [8, 4])
def test_nothing_behind_a_tensor_is_read(generator, bits):
    """Each tensor in turn ends where the readable memory ends; a read beyond kills the child."""
    k = 100 if bits == 8 else 128
    x, (*parts, group) = randn(generator, 5, k), weights(generator, bits, 20, k)
    tensors = [x, *(part for part in parts if part is not None)]
    for which in range(len(tensors)):

        def work(which=which):
            given = [x, *parts]
            given[which] = at_the_end_of_memory(given[which])
            quantised_linear(*given, group, None)
            dequantise.dequantise(*given[1:], group, torch.float32)

        assert survives(work)


def test_splits_depend_on_the_weights_alone(monkeypatch):
    """Not on the number of rows: else the sum of a row would be cut elsewhere."""
    cuts = set()

    class Recorder:
        def __getitem__(self, grid):
            return lambda *given, **tile: cuts.add((grid[2:], given[9:], tile.get("BLOCK_K")))

    monkeypatch.setattr(quantised, "_product", Recorder())
    monkeypatch.setattr(quantised, "_add_parts", {(m, 4): lambda *_, **__: None for m in range(65)})
    values = torch.zeros(2000, 8192, dtype=torch.int8, device=DEVICE)
    scales = torch.ones(2000, 1, device=DEVICE)
    for m in range(1, ROWS + 1):
        x = torch.zeros(m, 8192, dtype=torch.bfloat16, device=DEVICE)
        quantised_linear(x, values, scales, None, 8192, None)
    assert len(cuts) == 1 and cuts.pop()[0][0] > 1


@pytest.mark.skipif(DEVICE == "cuda", reason="only the interpreter can run one program of millions")
@pytest.mark.parametrize("whole", [False, True], ids=["product", "dequantised"])
@pytest.mark.parametrize("bits", [8, 4])
def test_offsets_beyond_32_bits(generator, monkeypatch, bits, whole):
    """More than 2^31 bytes of weights, of which only the last rows are touched, in a child."""
    monkeypatch.undo()
    n, k = 34_000_000, 64 if bits == 8 else 128
    *parts, group = weights(generator, bits, 16, k)
    tensors = []
    for part in parts:
        tensors.append(None if part is None else part.new_empty(n, *part.shape[1:]))
        if part is not None:
            tensors[-1][-16:] = part
    x, weight = randn(generator, 4, k, dtype=torch.float16), reference(*parts, group)
    only_the_last_program(monkeypatch, quantised, "_product")
    only_the_last_program(monkeypatch, dequantise, "_dequantise")

    def work():
        if whole:
            out = dequantise.dequantise(*tensors, group, torch.float16)
            assert torch.allclose(out[-1].double(), weight[-1], rtol=2e-3)
        else:
            out = quantised_linear(x, *tensors, group, None)[:, -16:].double()
            assert torch.allclose(out, exact(x, weight), rtol=2e-3, atol=1e-3)

    assert survives(work)


def test_no_rows(generator):
    for bits in (8, 4):
        x, weight = randn(generator, 0, 128), weights(generator, bits, 4, 128)
        assert quantised_linear(x, *weight, None).shape == (0, 4)


@pytest.mark.parametrize(
    "bits, place, make, message",
    [
        (4, 0, lambda x: x[:, :127], r"x has shape \[2, 127\]; expected \[None, 128\]"),
        (4, 0, lambda x: x.double(), "x is torch.float64"),
        (4, 1, lambda values: values.int(), "values is torch.int32"),
        (4, 2, lambda scales: scales.float(), "scales is torch.float32"),
        (4, 3, lambda zeros: zeros.repeat(1, 2), "zeros has shape"),
        (4, 4, lambda group: 48, "group is 48; expected 32, 64, 128 or 256"),
        (4, 5, lambda bias: bias[:3], "bias has shape"),
        (8, 1, lambda values: values.view(torch.uint8), "values is torch.uint8"),
        (8, 1, lambda values: values.T.contiguous().T, "values has strides"),
        (8, 2, lambda scales: scales.half(), "scales is torch.float16"),
    ],
)
def test_refusals(generator, bits, place, make, message):
    x, bias = randn(generator, 2, 128), randn(generator, 4)
    given = [x, *weights(generator, bits, 4, 128), bias]
    given[place] = make(given[place])
    with pytest.raises(ValueError, match=message):
        quantised_linear(*given)
