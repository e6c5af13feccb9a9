"""SwiGLU and its gradient, against float64."""

import pytest
import torch
from kernel_check import DEVICE, DTYPES, GRADIENT, POINTWISE, assert_close, randn

from kernels import swiglu as module
from kernels.swiglu import naive_swiglu, swiglu

SHAPES = [(1, 1), (3, 31), (2, 32), (5, 33), (3, 64), (1, 97)]


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    monkeypatch.setattr(module, "BLOCK", 32)


def gradient(gate_up, grad, run):
    gate_up = gate_up.detach().requires_grad_()
    return torch.autograd.grad(run(gate_up), gate_up, grad)[0]


@pytest.mark.parametrize("dtype", DTYPES)
def test_output_and_gradient_are_exact(generator, dtype):
    """Also where rows lie apart."""
    for tokens, width in SHAPES:
        gate_up = randn(generator, tokens, 2 * width + 9, dtype=dtype, scale=2.0)[
            :, 5 : 5 + 2 * width
        ]
        grad = randn(generator, tokens, width, dtype=dtype)
        assert_close(swiglu(gate_up), naive_swiglu(gate_up.double()), POINTWISE)
        exact = gradient(gate_up.double(), grad.double(), naive_swiglu)
        assert_close(gradient(gate_up, grad, swiglu), exact, GRADIENT)
    assert swiglu(gate_up[:0]).shape == (0, width)


@pytest.mark.filterwarnings("ignore:overflow")  # exp(1e4) = inf, whose reciprocal is 0
def test_large_gates_neither_overflow_nor_lose_their_sign():
    gate = torch.tensor([-1e4, -100.0, -20.0, 0.0, 20.0, 100.0, 1e4], device=DEVICE)
    gate_up = torch.cat((gate, torch.full_like(gate, 2.0)))[None]
    grad = torch.ones(1, 7, device=DEVICE)
    assert_close(swiglu(gate_up), naive_swiglu(gate_up.double()), POINTWISE)
    exact = gradient(gate_up.double(), grad.double(), naive_swiglu)
    assert_close(gradient(gate_up, grad, swiglu), exact, GRADIENT)


def test_a_row_has_the_same_bits_in_any_batch_and_run_and_without_gradients(generator):
    gate_up, grad = randn(generator, 5, 74), randn(generator, 5, 37)
    for run in (
        lambda rows: swiglu(gate_up[rows]),
        lambda rows: gradient(gate_up[rows], grad[rows], swiglu),
    ):
        batch = run(slice(0, 5))
        assert all(torch.equal(run(slice(row, row + 1))[0], batch[row]) for row in range(5))
        assert torch.equal(run(slice(0, 5)), batch)
    with torch.no_grad():
        without_gradients = swiglu(gate_up)
    assert torch.equal(without_gradients, swiglu(gate_up))


def test_offsets_beyond_32_bits(generator):
    """A wrapped offset would read the front of the storage. Only the touched pages take memory."""
    storage = torch.empty(2**32 + 32, dtype=torch.float16, device=DEVICE)
    gate_up = storage.as_strided((3, 32), (2**30, 1), 2**31)
    storage[:32] = float("nan")
    gate_up.copy_(randn(generator, 3, 32, dtype=torch.float16))
    assert_close(swiglu(gate_up), naive_swiglu(gate_up.double()), POINTWISE)
    d_out = randn(generator, 3, 16, dtype=torch.float16)
    near = gradient(gate_up + 0, d_out, swiglu)
    assert torch.equal(gradient(gate_up, d_out, swiglu), near)


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="gate_up has 7 columns; expected an even number"):
        swiglu(torch.ones(4, 7))
