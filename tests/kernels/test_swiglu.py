"""SwiGLU and its gradient, against float64."""

import pytest
import torch
from kernel_check import DEVICE, DTYPES, GRADIENT, POINTWISE, assert_close, randn

from kernels import swiglu as module
from kernels.swiglu import naive_swiglu, swiglu


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    monkeypatch.setattr(module, "BLOCK", 32)


def check(gate_up, grad):
    def gradient(run, dtype):
        leaf = gate_up.detach().to(dtype).requires_grad_()
        return torch.autograd.grad(run(leaf), leaf, grad.to(dtype))[0]

    assert_close(swiglu(gate_up), naive_swiglu(gate_up.double()), POINTWISE)
    exact = gradient(naive_swiglu, torch.float64)
    assert_close(gradient(swiglu, gate_up.dtype), exact, GRADIENT)


@pytest.mark.parametrize("dtype", DTYPES)
def test_output_and_gradient_are_exact(generator, dtype):
    """Also where rows lie apart."""
    for tokens, width in [(1, 1), (3, 31), (2, 32), (5, 33), (3, 64), (1, 97)]:
        wide = randn(generator, tokens, 2 * width + 9, dtype=dtype, scale=2.0)
        check(wide[:, 5 : 5 + 2 * width], randn(generator, tokens, width, dtype=dtype))


@pytest.mark.filterwarnings("ignore:overflow")  # exp(1e4) = inf, whose reciprocal is 0
def test_large_gates_neither_overflow_nor_lose_their_sign():
    gate = torch.tensor([-1e4, -100.0, -20.0, 0.0, 20.0, 100.0, 1e4], device=DEVICE)
    gate_up = torch.cat((gate, torch.full_like(gate, 2.0)))[None]
    check(gate_up, torch.ones(1, 7, device=DEVICE))
