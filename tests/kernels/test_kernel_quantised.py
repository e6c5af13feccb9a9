"""Products with weights in 8 and 4 bits: against float64, against nanorchestra/model/quantise.py, and the bits of a row in any company."""

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
    poisoned,
    randn,
    survives,
)
from torch import nn
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from kernels import dequantise, quantised
from kernels.quantised import (
    ROWS,
    dequantise_int4,
    dequantise_int8,
    int4_linear,
    int8_linear,
    quantised_linear,
    reference,
)
from nanorchestra.model.quantise import QuantisedLinear

SMALL = {"BLOCK_N": 16, "BLOCK_K": 32}


def int8_weights(generator, n, k):
    """All 256 values occur, and the scales of neighbouring rows differ by much."""
    return (
        torch.randint(-128, 128, (n, k), dtype=torch.int8, generator=generator).to(DEVICE),
        (10 ** torch.rand(n, 1, generator=generator) * 1e-3).to(DEVICE),
    )


def int4_weights(generator, n, k, group=128):
    """All 16 values and 16 zeros occur; low and high nibbles, groups and rows have nothing in common."""
    draw = lambda high, *shape: torch.randint(
        0, high, shape, dtype=torch.uint8, generator=generator
    ).to(DEVICE)
    scales = (10 ** torch.rand(n, k // group, generator=generator) * 1e-3).half().to(DEVICE)
    return draw(256, n, k // 2), scales, draw(16, n, k // group)


def exact(x, weight, bias=None):
    return x.double() @ weight.T + (0 if bias is None else bias.double())


def compare(generator, bits, m, n, k, dtype, group=128, with_bias=True, config=SMALL):
    x, out = randn(generator, m, k, dtype=dtype), poisoned(m, n, dtype=dtype)
    bias = (
        randn(generator, n, dtype=dtype) if with_bias and m * n > 1 else None
    )  # or a bias might cancel the one element
    if bits == 8:
        weights = int8_weights(generator, n, k)
        assert int8_linear(x, *weights, bias, out, config) is out
    else:
        weights = int4_weights(generator, n, k, group)
        assert int4_linear(x, *weights, group, bias, out, config) is out
    assert_close(
        out, exact(x, reference(*weights, *([group] if bits == 4 else [])), bias), POINTWISE
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [8, 4])
def test_random_shapes(generator, bits, dtype):
    for _ in range(3):
        m, n, k = (
            int(torch.randint(1, high, (), generator=generator)) for high in (ROWS + 1, 50, 300)
        )
        compare(generator, bits, m, n, k if bits == 8 else 128 * (k // 60 + 1), dtype)


@pytest.mark.parametrize(
    "m, n, k",
    [
        (1, 1, 1),
        (1, 16, 32),
        (8, 15, 31),
        (9, 17, 33),
        (16, 16, 129),
        (17, 33, 128),
        (32, 31, 127),
        (33, 1, 65),
        (64, 48, 200),
    ],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_int8_sizes_around_the_tiles(generator, dtype, m, n, k):
    compare(generator, 8, m, n, k, dtype)


@pytest.mark.parametrize(
    "group, m, n, groups",
    [
        (128, 1, 1, 1),
        (32, 1, 16, 4),
        (64, 8, 15, 5),
        (256, 9, 17, 3),
        (32, 17, 33, 9),
        (128, 33, 31, 2),
        (32, 64, 20, 8),
    ],
)
def test_int4_sizes_around_the_tiles(generator, group, m, n, groups):
    compare(generator, 4, m, n, groups * group, torch.bfloat16, group)


@pytest.mark.parametrize("bits", [8, 4])
def test_the_tiles_of_the_cards(generator, bits):
    """As they are launched there: without a bias, over all of K or over splits of it, with a tail of N and one of the rows."""
    for m, k in ((3, 384), (20, 1152)):
        compare(
            generator, bits, m, 40, k, torch.bfloat16, with_bias=False, config=quantised.CONFIGS[90]
        )


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", DTYPES)
def test_long_sums_keep_fp32(generator, bits, dtype):
    """Thousands of terms of one sign, over several splits: what is kept in 16 bits on the way stands still."""
    x = (1 + randn(generator, 2, 2048).abs()).to(dtype)
    if bits == 8:
        values, scales = int8_weights(generator, 16, 2048)
        weights = (values.abs().clamp(max=127), scales)
        out = int8_linear(x, *weights, config=SMALL | {"BLOCK_K": 128})
    else:
        values, scales, zeros = int4_weights(generator, 16, 2048)
        weights = (values, scales, torch.zeros_like(zeros))
        out = int4_linear(x, *weights, config=SMALL)
    assert_close(out, exact(x, reference(*weights)), POINTWISE)


@pytest.mark.parametrize("nibbles", [0x0F, 0xF0, 0x08, 0x80, 0x00, 0xFF])
@pytest.mark.parametrize("zero", [0, 8, 15])
def test_every_corner_of_a_nibble(generator, nibbles, zero):
    values, scales, zeros = int4_weights(generator, 4, 128)
    values[:, ::3], zeros[:] = nibbles, zero
    x = randn(generator, 2, 128, dtype=torch.float16)
    assert_close(
        int4_linear(x, values, scales, zeros, config=SMALL),
        exact(x, reference(values, scales, zeros)),
        POINTWISE,
    )


# The same as nanorchestra/model/quantise.py


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits, group", [(8, 256), (4, 128), (4, 32)])
def test_agrees_with_the_layer_that_stores_it(generator, bits, group, dtype):
    """W bit for bit, the product within the rounding floor; the product of more than ROWS rows is the layer's own forward, in W of x.dtype."""
    layer = QuantisedLinear(nn.Linear(256, 20, device=DEVICE), bits, group).requires_grad_(False)
    layer.write(slice(0, 20), randn(generator, 20, 256, scale=0.05))
    if bits == 4:
        layer.zeros += torch.randint(
            0, 8, layer.zeros.shape, dtype=torch.uint8, generator=generator
        ).to(DEVICE)
    layer.bias.data = layer.bias.to(dtype)
    out, weights = poisoned(20, 256, dtype=dtype), (layer.values, layer.scales)
    if bits == 8:
        dequantise_int8(*weights, dtype, out)
    else:
        dequantise_int4(*weights, layer.zeros, group, dtype, out)
    assert torch.equal(out, layer.dequantise(dtype))
    for rows in (3, ROWS, ROWS + 1):
        x = randn(generator, rows, 256, dtype=dtype)
        got = quantised_linear(x, layer.values, layer.scales, layer.zeros, group, layer.bias)
        if rows > ROWS:
            assert torch.equal(got, layer(x))
            assert torch.equal(
                quantised_linear(x, layer.values, layer.scales, layer.zeros, group),
                x @ layer.dequantise(dtype).T,
            )
        else:
            assert_close(got, exact(x, layer.dequantise(torch.float64), layer.bias), POINTWISE)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n, k", [(1, 1), (3, 63), (5, 64), (2, 65), (3, 200)])
def test_dequantised_int8_sizes(generator, n, k, dtype):
    weights, out = int8_weights(generator, n, k), poisoned(n, k, dtype=dtype)
    dequantise_int8(*weights, dtype, out, {"BLOCK": 64})
    assert torch.equal(out, (weights[0] * weights[1]).to(dtype)), (
        "the product in fp32, rounded once"
    )


@pytest.mark.parametrize("group, k", [(32, 32), (32, 160), (64, 448), (128, 384), (256, 256)])
def test_dequantised_int4_sizes(generator, group, k):
    weights, out = int4_weights(generator, 3, k, group), poisoned(3, k, dtype=torch.bfloat16)
    dequantise_int4(*weights, group, torch.bfloat16, out, {"BLOCK": 64})
    assert torch.equal(out, reference(*weights, group).float().bfloat16())


# Bits


@pytest.fixture
def sums_in_order(monkeypatch):
    """The interpreter's product sums in an order that hangs on the shape of the tile; mma's does not, and here neither does this."""
    if DEVICE == "cuda":
        return

    def dot(self, a, b, accumulator, *options):
        a, b = (
            operand if operand.dtype != tl.bfloat16 else self.cast_impl(operand, tl.float32)
            for operand in (a, b)
        )
        total = accumulator.data.astype(np.float32)
        for column, row in zip(a.data.T.astype(np.float32), b.data.astype(np.float32)):
            total += column[:, None] * row
        return TensorHandle(total, tl.float32)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", dot)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("k", [64, 256], ids=["one split", "two"])
def test_a_row_has_the_same_bits_in_any_company(generator, sums_in_order, bits, dtype, k):
    x, bias = randn(generator, 34, k, dtype=dtype), randn(generator, 20, dtype=dtype)
    weights = (
        int8_weights(generator, 20, k) if bits == 8 else (*int4_weights(generator, 20, k, 32), 32)
    )
    call = lambda x: (int8_linear if bits == 8 else int4_linear)(
        x, *weights, bias=bias, config=SMALL
    )
    out = call(x)
    assert torch.equal(out, call(x)), "and twice the same"
    order = torch.randperm(34, generator=generator).to(DEVICE)
    assert torch.equal(out[order], call(x[order])), "at any place"
    for rows in (slice(0, 1), slice(33, 34), slice(5, 14), slice(13, 30)):
        assert torch.equal(out[rows], call(x[rows])), "and alone, or in smaller company"


@pytest.mark.skipif(DEVICE == "cuda", reason="needs memory that ends where a tensor does")
@pytest.mark.parametrize("which", range(4))
@pytest.mark.parametrize("bits", [8, 4])
def test_nothing_behind_a_tensor_is_read(generator, bits, which):
    """Each tensor in turn ends where the readable memory ends; in a child, which dies of a read beyond."""
    k = 100 if bits == 8 else 128
    tensors = [
        randn(generator, 5, k),
        *(int8_weights(generator, 20, k) if bits == 8 else int4_weights(generator, 20, k)),
    ]
    if which == len(tensors):
        return

    def work():
        tensors[which] = at_the_end_of_memory(tensors[which])
        (int8_linear if bits == 8 else int4_linear)(*tensors, config=SMALL)
        (
            dequantise_int8(*tensors[1:], torch.float32)
            if bits == 8
            else dequantise_int4(*tensors[1:], 128, torch.float32)
        )

    assert survives(work)


@pytest.mark.parametrize("bits", [8, 4])
def test_parts_of_splits_are_all_written(generator, bits, monkeypatch):
    empty = torch.empty
    monkeypatch.setattr(
        quantised.torch,
        "empty",
        lambda *shape, **options: empty(*shape, **options).fill_(float("nan")),
    )
    compare(generator, bits, 5, 40, 640, torch.bfloat16)
    compare(generator, bits, 20, 40, 640, torch.bfloat16)


def test_splits_depend_on_the_weights_alone(generator, monkeypatch):
    """Not on the number of rows: or a row's sum would be cut elsewhere."""
    cuts = set()

    class Recorder:
        def __getitem__(self, grid):
            return lambda *arguments, **options: cuts.add(
                (grid[2], arguments[8], options["BLOCK_K"])
            )

    monkeypatch.setattr(quantised, "_int8_kernel", Recorder())
    values, scales = (
        torch.zeros(2000, 8192, dtype=torch.int8, device=DEVICE),
        torch.ones(2000, 1, device=DEVICE),
    )
    monkeypatch.setattr(
        quantised,
        "_add_parts",
        {(m, 4): lambda *arguments, **options: None for m in range(1, ROWS + 1)},
    )
    for m in range(1, ROWS + 1):
        int8_linear(torch.zeros(m, 8192, dtype=torch.bfloat16, device=DEVICE), values, scales)
    assert len(cuts) == 1 and cuts.pop()[0] > 1


@pytest.mark.skipif(
    DEVICE == "cuda", reason="looks at one program of millions, which only the interpreter can"
)
@pytest.mark.parametrize("what", ["int8", "int4", "dequantised int8", "dequantised int4"])
def test_offsets_beyond_int32(generator, monkeypatch, what):
    """More than 2^31 bytes of weights, of which only the last rows are touched; in a child, since a wrapped offset reads at random."""
    bits, n, k = int(what[-1]), 34_000_000, 64 if what[-1] == "8" else 128
    values = torch.empty(n, 64, dtype=torch.int8 if bits == 8 else torch.uint8)
    scales = torch.empty(n, 1, dtype=torch.float32 if bits == 8 else torch.float16)
    zeros = None if bits == 8 else torch.empty(n, 1, dtype=torch.uint8)
    for whole, part in zip(
        (values, scales, zeros),
        int8_weights(generator, 16, k) if bits == 8 else int4_weights(generator, 16, k),
    ):
        whole[-16:] = part
    tails = [tensor[-16:] for tensor in (values, scales, zeros) if tensor is not None]
    x, weight = randn(generator, 4, k, dtype=torch.float16), reference(*tails)
    for module, name in (
        (quantised, "_int8_kernel"),
        (quantised, "_int4_kernel"),
        (dequantise, "_dequantise"),
    ):
        only_the_last_program(monkeypatch, module, name)

    def work():
        if what.startswith("de"):
            out = torch.empty(n, k, dtype=torch.float16)
            dequantise_int8(values, scales, out.dtype, out) if bits == 8 else dequantise_int4(
                values, scales, zeros, 128, out.dtype, out
            )
            assert torch.allclose(out[-1].double(), weight[-1], rtol=2e-3)
        else:
            out = torch.empty(4, n, dtype=torch.float16)
            int8_linear(x, values, scales, out=out, config=SMALL) if bits == 8 else int4_linear(
                x, values, scales, zeros, out=out, config=SMALL
            )
            assert torch.allclose(out[:, -16:].double(), exact(x, weight), rtol=2e-3, atol=1e-3)

    assert survives(work)


def test_no_rows(generator):
    assert int8_linear(randn(generator, 0, 8), *int8_weights(generator, 4, 8)).shape == (0, 4)
    assert quantised_linear(randn(generator, 0, 128), *int4_weights(generator, 4, 128)).shape == (
        0,
        4,
    )


@pytest.mark.parametrize(
    "change, message",
    [
        (
            dict(x=torch.zeros(65, 128)),
            "x has 65 rows; expected at most 64: quantised_linear takes any number",
        ),
        (dict(x=torch.zeros(2, 127)), r"x has shape \(2, 127\); expected \[\*, 128\]"),
        (dict(x=torch.zeros(2, 256)[:, ::2]), "contiguous"),
        (dict(x=torch.zeros(2, 128).double()), "x is torch.float64"),
        (dict(values=torch.zeros(4, 64, dtype=torch.int32)), "values is torch.int32"),
        (dict(values=torch.zeros(0, 64, dtype=torch.uint8)), "expected no empty dimension"),
        (dict(bias=torch.zeros(5)), "bias has shape"),
        (dict(bias=torch.zeros(4).half()), "bias is torch.float16"),
        (dict(out=torch.zeros(2, 5)), "out has shape"),
        (dict(group=48), "128 columns in groups of 48"),
        (dict(group=256), "128 columns in groups of 256"),
        (dict(scales=torch.zeros(4, 1)), "scales is torch.float32; expected torch.float16"),
        (dict(scales=torch.zeros(4, 2).half()), "scales has shape"),
        (dict(zeros=torch.zeros(4, 2, dtype=torch.uint8)), "zeros has shape"),
    ],
)
def test_refusals_in_4_bits(change, message):
    given = (
        dict(
            x=torch.zeros(2, 128),
            values=torch.zeros(4, 64, dtype=torch.uint8),
            scales=torch.zeros(4, 1).half(),
            zeros=torch.zeros(4, 1, dtype=torch.uint8),
            group=128,
        )
        | change
    )
    with pytest.raises(ValueError, match=message):
        int4_linear(
            **{
                name: value.to(DEVICE) if torch.is_tensor(value) else value
                for name, value in given.items()
            }
        )


@pytest.mark.parametrize(
    "change, message",
    [
        (
            dict(values=torch.zeros(4, 128, dtype=torch.uint8)),
            "values is torch.uint8; expected torch.int8",
        ),
        (dict(scales=torch.zeros(4, 1).half()), "scales is"),
        (dict(scales=torch.zeros(4)), "scales has shape"),
        (dict(values=torch.zeros(128, 4, dtype=torch.int8).T), "contiguous"),
    ],
)
def test_refusals_in_8_bits(change, message):
    given = (
        dict(
            x=torch.zeros(2, 128),
            values=torch.zeros(4, 128, dtype=torch.int8),
            scales=torch.zeros(4, 1),
        )
        | change
    )
    given = {name: value.to(DEVICE) for name, value in given.items()}
    with pytest.raises(ValueError, match=message):
        int8_linear(**given)
    given.pop("x")
    with pytest.raises(ValueError, match=message):
        dequantise_int8(**given, dtype=torch.float16)
