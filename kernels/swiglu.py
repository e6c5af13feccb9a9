"""SwiGLU: silu(gate) * up with silu(x) = x * sigmoid(x) (Shazeer 2020, eq. 5), for [gate | up] as one matrix product leaves them; and its gradient.

Forward: 3 elements moved for each of T * F outputs (T = 8192, F = 12288, bf16: 604 MB), about 10 FLOPs: bandwidth is the limit. Backward: 5
elements moved, with s = sigmoid(gate): dgate = grad * up * s * (1 + gate * (1 - s)), dup = grad * gate * s; s is computed again, nothing is
kept but the input. One program owns BLOCK neighbouring columns of one row. The arithmetic is fp32, every result is rounded once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.common import Config, check, pick, require

CONFIGS = {
    80: {"BLOCK": 2048, "num_warps": 4},
    89: {"BLOCK": 2048, "num_warps": 4},
    90: {"BLOCK": 2048, "num_warps": 4},
}


def swiglu(gate_up: Tensor, out: Tensor | None = None, config: Config | None = None) -> Tensor:
    """gate_up [T, 2 * F], its rows any stride apart, the gate in the first half -> [T, F]. F need not be a power of two."""
    T, F = _check(gate_up)
    out = torch.empty(T, F, dtype=gate_up.dtype, device=gate_up.device) if out is None else out
    check("out", out, (T, F), (gate_up.dtype,), inner=2)
    config = pick(CONFIGS, config)
    _swiglu[(T * triton.cdiv(F, config["BLOCK"]),)](gate_up, out, gate_up.stride(0), F, **config)
    return out


def swiglu_backward(grad: Tensor, gate_up: Tensor, config: Config | None = None) -> Tensor:
    """The gradient for gate_up [T, 2 * F] from grad [T, F]."""
    T, F = _check(gate_up)
    check("grad", grad, (T, F), (gate_up.dtype,), inner=2)
    out = torch.empty(T, 2 * F, dtype=gate_up.dtype, device=gate_up.device)
    config = pick(CONFIGS, config)
    _swiglu_backward[(T * triton.cdiv(F, config["BLOCK"]),)](
        grad, gate_up, out, gate_up.stride(0), F, **config
    )
    return out


def _check(gate_up: Tensor) -> tuple[int, int]:
    check("gate_up", gate_up, (None, None))
    T, width = gate_up.shape
    require(
        width >= 2 and width % 2 == 0,
        f"gate_up has {width} columns; expected an even number of at least 2",
    )
    return T, width // 2


# for training: swiglu_train(gate_up) is swiglu with a gradient
swiglu_train = torch.library.custom_op(
    "nanorchestra::swiglu", swiglu, mutates_args=(), schema="(Tensor gate_up) -> Tensor"
)
_backward = torch.library.custom_op(
    "nanorchestra::swiglu_backward",
    swiglu_backward,
    mutates_args=(),
    schema="(Tensor grad, Tensor gate_up) -> Tensor",
)

swiglu_train.register_fake(
    lambda gate_up: gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
)
_backward.register_fake(lambda grad, gate_up: gate_up.new_empty(gate_up.shape))
swiglu_train.register_autograd(
    lambda ctx, grad: _backward(grad.contiguous(), *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


@triton.jit
def _swiglu(gate_up_ptr, out_ptr, stride, F: tl.constexpr, BLOCK: tl.constexpr):
    row = (tl.program_id(0) // tl.cdiv(F, BLOCK)).to(tl.int64)
    cols = tl.program_id(0) % tl.cdiv(F, BLOCK) * BLOCK + tl.arange(0, BLOCK)
    inside = cols < F
    gate = tl.load(gate_up_ptr + row * stride + cols, inside, 0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * stride + F + cols, inside, 0.0).to(tl.float32)
    tl.store(out_ptr + row * F + cols, gate * tl.sigmoid(gate) * up, inside)


@triton.jit
def _swiglu_backward(grad_ptr, gate_up_ptr, out_ptr, stride, F: tl.constexpr, BLOCK: tl.constexpr):
    row = (tl.program_id(0) // tl.cdiv(F, BLOCK)).to(tl.int64)
    cols = tl.program_id(0) % tl.cdiv(F, BLOCK) * BLOCK + tl.arange(0, BLOCK)
    inside = cols < F
    gate = tl.load(gate_up_ptr + row * stride + cols, inside, 0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * stride + F + cols, inside, 0.0).to(tl.float32)
    grad = tl.load(grad_ptr + row * F + cols, inside, 0.0).to(tl.float32)
    s = tl.sigmoid(gate)
    tl.store(out_ptr + row * 2 * F + cols, grad * up * s * (1 + gate * (1 - s)), inside)
    tl.store(out_ptr + row * 2 * F + F + cols, grad * gate * s, inside)


def reference(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return gate * gate.sigmoid() * up
