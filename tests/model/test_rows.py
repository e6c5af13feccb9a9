"""The C of a layer's rows in training, forward and backward, against float64 in plain PyTorch."""

import pytest
import torch

from nanorchestra.model import ops, rows
from nanorchestra.model.rope import Rotation

ROUNDING = {torch.float32: 1e-6, torch.bfloat16: 1e-2}  # of a gradient, relative to its norm


def randn(*shape, seed, dtype):
    """Normal numbers in the dtype, in float64."""
    numbers = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return numbers.to(dtype).double()


def run(function, inputs, grads, dtype):
    """The results of a function of leaves in a dtype, and the gradients of the leaves."""
    leaves = [x.to(dtype, copy=True).requires_grad_() for x in inputs]
    results = function(*leaves)
    results = results if isinstance(results, tuple) else (results,)
    torch.autograd.backward(results, [grad.to(dtype) for grad in grads])
    return [x.detach() for x in results] + [x.grad for x in leaves]


def check(function, inputs, grads, dtype):
    exact = run(function, inputs, grads, torch.float64)
    for ours, expected in zip(run(function, inputs, grads, dtype), exact, strict=True):
        assert ours.dtype == dtype
        assert (ours.double() - expected).norm() <= ROUNDING[dtype] * expected.norm()


@pytest.fixture(params=ROUNDING)
def dtype(request):
    if rows._library(request.param) is None:
        pytest.skip("without a compiler, or instructions for bfloat16")
    return request.param


@pytest.fixture(params=["in C", "in torch"])
def where(request, monkeypatch):
    """Where the functions of ops.py compute."""
    if request.param == "in torch":
        monkeypatch.setattr(rows, "computes", lambda *given: False)


@pytest.mark.parametrize("tokens, size", [(0, 16), (1, 16), (70, 48), (33, 576)])
@pytest.mark.usefixtures("where")
def test_norms_and_swiglu_and_their_gradients_are_exact(dtype, tokens, size):
    x, residual, grad, grad_summed = (
        randn(tokens, size, seed=seed, dtype=dtype) for seed in range(4)
    )
    weight = randn(size, seed=4, dtype=dtype)
    check(lambda x, w: ops.rms_norm(x, w, 1e-5), [x, weight], [grad], dtype)
    added = [x, residual, weight]
    check(lambda x, r, w: ops.add_rms_norm(x, r, w, 1e-5), added, [grad, grad_summed], dtype)
    check(ops.swiglu, [torch.cat((3 * x, residual), 1)], [grad], dtype)


@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.usefixtures("where")
def test_the_norm_and_rotation_of_heads_and_their_gradients_are_exact(dtype, normed):
    tokens, heads, kv_heads, dim = 70, 5, 2, 32
    qkv = randn(tokens, (heads + 2 * kv_heads) * dim, seed=0, dtype=dtype)
    norms = [randn(dim, seed=seed, dtype=dtype) for seed in (1, 2)] if normed else []
    grads = [
        randn(tokens, count, dim, seed=3 + seed, dtype=dtype)
        for seed, count in enumerate((heads, kv_heads, kv_heads))
    ]
    angles = torch.arange(tokens)[:, None] / torch.arange(1, dim // 2 + 1)
    rotation = Rotation(angles.cos(), angles.sin())

    def rotate(qkv, q_norm=None, k_norm=None):
        return ops.qk_norm_rope(qkv, q_norm, k_norm, rotation, kv_heads, 1e-5)

    check(rotate, [qkv, *norms], grads, dtype)


def test_large_gates_neither_overflow_nor_lose_their_sign(dtype):
    gate = torch.tensor([-1e4, -100.0, -20.0, 0.0, 20.0, 100.0, 1e4, 1.0] * 2, dtype=torch.float64)
    check(
        ops.swiglu,
        [torch.cat((gate, gate.new_full((16,), 2.0)))[None]],
        [gate[None] * 0 + 1],
        dtype,
    )


def test_gradients_have_the_same_bits_on_any_number_of_threads(dtype):
    x, grad = (randn(2000, 64, seed=seed, dtype=dtype) for seed in (0, 1))
    weight, threads, seen = randn(64, seed=2, dtype=dtype), torch.get_num_threads(), set()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            results = run(lambda x, w: ops.rms_norm(x, w, 1e-5), [x, weight], [grad], dtype)
            seen.add(b"".join(each.float().numpy().tobytes() for each in results))
    finally:
        torch.set_num_threads(threads)
    assert len(seen) == 1
