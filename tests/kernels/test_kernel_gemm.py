"""The batch-invariant product against float64, and the bits of a row in any company."""

import pytest
import torch
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

from kernels import gemm
from kernels.gemm import invariant_linear, reference

SMALL = {"BLOCK_M": 16, "BLOCK_N": 16, "BLOCK_K": 32, "GROUP": 2}  # BLOCK_K is 16 in fp32


def compare(generator, m, n, k, dtype, bias=True, config=SMALL):
    x, weight = (
        randn(generator, m, k, dtype=dtype),
        randn(generator, n, k, dtype=dtype, scale=k**-0.5),
    )
    bias = (
        randn(generator, n, dtype=dtype) if bias and m * n > 1 else None
    )  # or a bias might cancel the one element
    out = poisoned(m, n, dtype=dtype)
    assert invariant_linear(x, weight, bias, out=out, config=config) is out
    assert_close(
        out,
        reference(x.double(), weight.double(), None if bias is None else bias.double()),
        POINTWISE,
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_random_shapes(generator, dtype):
    for _ in range(3):
        m, n, k = (int(torch.randint(1, high, (), generator=generator)) for high in (60, 60, 150))
        compare(generator, m, n, k, dtype)


@pytest.mark.parametrize(
    "m, n, k",
    [
        (1, 1, 1),
        (1, 16, 32),
        (15, 17, 33),
        (16, 15, 31),
        (17, 16, 32),
        (40, 3, 64),
        (2, 50, 160),
        (80, 33, 16),
    ],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_sizes_around_the_tiles(generator, m, n, k, dtype):
    compare(generator, m, n, k, dtype)


def test_the_tiles_of_the_cards(generator):
    """A vocabulary's tail and a row of K that no tile divides, with no bias."""
    compare(generator, 130, 140, 72, torch.bfloat16, bias=False, config=gemm.CONFIGS[90])


def test_long_sums_keep_fp32(generator):
    """Thousands of equal terms: a sum kept in 16 bits stands still after a few hundred."""
    x, weight = (
        torch.full((1, 2048), 0.125, device=DEVICE),
        randn(generator, 16, 2048, scale=0.01) + 1,
    )
    for dtype in DTYPES:
        a, b = x.to(dtype), weight.to(dtype)
        assert_close(
            invariant_linear(a, b, config=SMALL | {"BLOCK_K": 128}),
            reference(a.double(), b.double()),
            POINTWISE,
        )


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_in_any_company(generator, dtype):
    x, weight, bias = (
        randn(generator, 50, 50, dtype=dtype),
        randn(generator, 20, 50, dtype=dtype),
        randn(generator, 20, dtype=dtype),
    )
    out = invariant_linear(x, weight, bias, config=SMALL)
    assert torch.equal(out, invariant_linear(x, weight, bias, config=SMALL)), "and twice the same"
    order = torch.randperm(50, generator=generator).to(DEVICE)
    assert torch.equal(out[order], invariant_linear(x[order], weight, bias, config=SMALL)), (
        "at any place"
    )
    for row in (0, 15, 33, 49):
        assert torch.equal(
            out[row], invariant_linear(x[row : row + 1], weight, bias, config=SMALL)[0]
        ), "and alone"
    assert torch.equal(out[7:40], invariant_linear(x[7:40], weight, bias, config=SMALL))


@pytest.mark.skipif(DEVICE == "cuda", reason="needs memory that ends where a tensor does")
@pytest.mark.parametrize("which", range(3))
def test_nothing_behind_a_tensor_is_read(generator, which):
    """Each tensor in turn ends where the readable memory ends; in a child, which dies of a read beyond."""
    tensors = [randn(generator, 5, 40), randn(generator, 20, 40), randn(generator, 20)]

    def work():
        tensors[which] = at_the_end_of_memory(tensors[which])
        invariant_linear(*tensors, config=SMALL)

    assert survives(work)


def test_no_rows(generator):
    assert invariant_linear(randn(generator, 0, 8), randn(generator, 4, 8)).shape == (0, 4)


@pytest.mark.skipif(
    DEVICE == "cuda", reason="looks at one program of millions, which only the interpreter can"
)
@pytest.mark.parametrize(
    "m, n, k",
    [(34_000_000, 16, 64), (34_000_000, 64, 16), (16, 34_000_000, 64)],
    ids=["x", "out", "weight"],
)
def test_offsets_beyond_int32(generator, monkeypatch, m, n, k):
    """More than 2^31 elements, of which only the last tile's are touched; in a child, since a wrapped offset reads at random."""
    x, weight, out = (torch.empty(shape, dtype=torch.float16) for shape in ((m, k), (n, k), (m, n)))
    x[-16:], weight[-16:], out[-16:, -16:] = (
        randn(generator, 16, k),
        randn(generator, 16, k),
        float("nan"),
    )
    exact = reference(x[-16:].double(), weight[-16:].double())
    only_the_last_program(monkeypatch, gemm, "_invariant_kernel")

    def work():
        invariant_linear(x, weight, out=out, config=SMALL | {"BLOCK_M": min(m, 16)})
        assert torch.allclose(out[-16:, -16:].double(), exact, rtol=2e-3, atol=1e-3)

    assert survives(work)


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(x=(3, 4, 5)), "x has shape"),
        (dict(weight=(6, 9)), r"weight has shape \(6, 9\); expected \[\*, 8\]"),
        (dict(bias=(5,)), "bias has shape"),
        (dict(out=(3, 5)), "out has shape"),
        (dict(dtype=torch.float64), "x is torch.float64"),
        (dict(mixed=True), "weight is torch.float16"),
        (dict(strided=True), "contiguous"),
    ],
)
def test_refusals(change, message):
    dtype = change.get("dtype", torch.float32)
    shapes = dict(x=(3, 8), weight=(6, 8), bias=(6,), out=(3, 6)) | {
        k: v for k, v in change.items() if isinstance(v, tuple)
    }
    x, weight, bias, out = (
        torch.zeros(shapes[name], dtype=dtype, device=DEVICE)
        for name in ("x", "weight", "bias", "out")
    )
    if "mixed" in change:
        weight = weight.half()
    if "strided" in change:
        x = torch.zeros(3, 16, device=DEVICE)[:, :8]
    with pytest.raises(ValueError, match=message):
        invariant_linear(x, weight, bias, out)
