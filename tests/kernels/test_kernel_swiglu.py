"""SwiGLU and its gradient, against float64."""

import pytest
import torch
from kernel_check import DEVICE, DTYPES, GRADIENT, POINTWISE, assert_close, poisoned, randn

from kernels import swiglu

SMALL = {"BLOCK": 32}
SHAPES = [(1, 1), (3, 31), (2, 32), (5, 33), (3, 64), (1, 97)]


def shapes(generator):
    return [
        *SHAPES,
        tuple(int(torch.randint(1, high, (), generator=generator)) for high in (8, 150)),
    ]


@pytest.mark.parametrize("dtype", DTYPES)
def test_swiglu_is_exact(generator, dtype):
    for T, F in shapes(generator):
        gate_up = randn(generator, T, 2 * F, dtype=dtype, scale=2.0)
        guarded = poisoned(T * F + 64, dtype=dtype)
        out = swiglu.swiglu(gate_up, out=guarded[: T * F].view(T, F), config=SMALL)
        assert_close(out, swiglu.reference(gate_up.double()), POINTWISE)
        assert guarded[T * F :].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_gradient_is_exact(generator, monkeypatch, dtype):
    real = torch.empty
    for T, F in shapes(generator):
        gate_up, grad = (
            randn(generator, T, 2 * F, dtype=dtype, scale=2.0),
            randn(generator, T, F, dtype=dtype),
        )
        exact = gate_up.double().requires_grad_()
        swiglu.reference(exact).backward(grad.double())
        monkeypatch.setattr(
            torch, "empty", lambda *shape, **how: real(*shape, **how).fill_(float("nan"))
        )
        out = swiglu.swiglu_backward(grad, gate_up, config=SMALL)
        monkeypatch.undo()
        assert_close(out, exact.grad, GRADIENT)


@pytest.mark.filterwarnings("ignore:overflow")  # exp(1e4) = inf, whose reciprocal is 0
def test_large_gates_neither_overflow_nor_lose_their_sign():
    gate = torch.tensor([-1e4, -100.0, -20.0, 0.0, 20.0, 100.0, 1e4], device=DEVICE)
    gate_up = torch.cat((gate, torch.full_like(gate, 2.0)))[None]
    exact = gate_up.double().requires_grad_()
    expected = swiglu.reference(exact)
    expected.sum().backward()
    assert_close(swiglu.swiglu(gate_up), expected.detach(), POINTWISE)
    assert_close(swiglu.swiglu_backward(torch.ones_like(gate)[None], gate_up), exact.grad, GRADIENT)


def test_autograd_with_expanded_gradients_and_strided_rows(generator):
    gate_up = randn(generator, 5, 100)[:, 7:87].requires_grad_()
    exact = gate_up.detach().double().requires_grad_()
    swiglu.swiglu_train(gate_up).sum().backward()  # the gradient of a sum has strides of 0
    swiglu.reference(exact).sum().backward()
    assert_close(gate_up.grad, exact.grad, GRADIENT)


def test_the_operators_are_registered_soundly(generator):
    gate_up = randn(generator, 3, 24)
    torch.library.opcheck(swiglu.swiglu_train, (gate_up.clone().requires_grad_(),))
    torch.library.opcheck(swiglu._backward, (torch.ones(3, 12, device=DEVICE), gate_up))


def test_a_row_alone_is_bitwise_the_row_in_a_batch_and_so_is_a_second_run(generator):
    gate_up, grad = randn(generator, 5, 74), randn(generator, 5, 37)
    for run in (
        lambda rows: swiglu.swiglu(gate_up[rows], config=SMALL),
        lambda rows: swiglu.swiglu_backward(grad[rows], gate_up[rows], config=SMALL),
    ):
        batch = run(slice(0, 5))
        assert all(torch.equal(run(slice(row, row + 1))[0], batch[row]) for row in range(5))
        assert torch.equal(run(slice(0, 5)), batch)


def test_a_row_beyond_two_billion_elements(generator):
    """An offset in 32 bits would wrap around to the front of the storage. Only the pages touched take memory."""
    storage = torch.empty(2**32 + 32, dtype=torch.float16, device=DEVICE)
    gate_up = storage.as_strided((3, 32), (2**30, 1), 2**31)
    storage[:32] = float("nan")
    gate_up.copy_(randn(generator, 3, 32, dtype=torch.float16))
    assert_close(swiglu.swiglu(gate_up), swiglu.reference(gate_up.double()), POINTWISE)
    grad = torch.ones(3, 16, dtype=torch.float16, device=DEVICE)
    assert torch.equal(
        swiglu.swiglu_backward(grad, gate_up), swiglu.swiglu_backward(grad, gate_up.contiguous())
    )


def test_no_rows():
    assert swiglu.swiglu(torch.empty(0, 16, device=DEVICE)).shape == (0, 8)
    assert swiglu.swiglu_backward(
        torch.empty(0, 8, device=DEVICE), torch.empty(0, 16, device=DEVICE)
    ).shape == (0, 16)


def test_refusals():
    gate_up = torch.ones(4, 8, device=DEVICE)
    with pytest.raises(ValueError, match="gate_up has 7 columns; expected an even number"):
        swiglu.swiglu(gate_up[:, :7])
    with pytest.raises(ValueError, match=r"gate_up has strides \(1, 4\)"):
        swiglu.swiglu(torch.ones(8, 4, device=DEVICE).T)
    with pytest.raises(ValueError, match="gate_up is torch.int64"):
        swiglu.swiglu(gate_up.long())
    with pytest.raises(ValueError, match="gate_up has shape"):
        swiglu.swiglu(gate_up[None])
    with pytest.raises(ValueError, match=r"out has shape \(4, 8\); expected \[4, 4\]"):
        swiglu.swiglu(gate_up, out=torch.empty_like(gate_up))
    with pytest.raises(ValueError, match="grad is torch.float16; expected torch.float32"):
        swiglu.swiglu_backward(gate_up[:, :4].half(), gate_up)
