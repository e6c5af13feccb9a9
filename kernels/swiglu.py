"""SwiGLU, silu(gate) * up with silu(x) = x * sigmoid(x) (Shazeer 2020, eq. 5), and its gradient.

gate and up stand side by side in one row, as one matrix product leaves them. Forward: 3 elements
moved for each of T * F outputs (T = 8192, F = 12288, bf16: 604 MB) and about 10 FLOPs. Backward: 5
elements moved; with s = sigmoid(gate), dgate = grad * up * s * (1 + gate * (1 - s)) and dup = grad
* gate * s. Bandwidth is the limit of both. One program owns BLOCK neighbouring columns of one row.
The arithmetic is fp32, and every result is rounded once.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.common import check, require

BLOCK = 2048


def swiglu(gate_up: Tensor) -> Tensor:
    """Returns silu(gate) * up, differentiable: gate_up [T, 2 * F], the gate first -> [T, F].

    Rows may have any stride.
    """
    return _SwiGLU.apply(gate_up)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate_up):
        check((None, None), strided=True, gate_up=gate_up)
        rows, width = gate_up.shape
        require(width % 2 == 0, f"gate_up has {width} columns; expected an even number")
        ctx.save_for_backward(gate_up)
        return _launch(gate_up, None, gate_up.new_empty(rows, width // 2))

    @staticmethod
    def backward(ctx, grad):
        (gate_up,) = ctx.saved_tensors
        return _launch(gate_up, grad.contiguous(), gate_up.new_empty(gate_up.shape))


def _launch(gate_up, grad, out) -> Tensor:
    rows, width = gate_up.shape
    grid = (rows * triton.cdiv(width // 2, BLOCK),)
    _swiglu[grid](gate_up, grad, out, gate_up.stride(0), width // 2, BLOCK)
    return out


@triton.jit
def _swiglu(gate_up_ptr, grad_ptr, out_ptr, stride, F: tl.constexpr, BLOCK: tl.constexpr):
    """Fills out with the product [T, F], or if grad_ptr is given with the gradient [T, 2 * F]."""
    row = (tl.program_id(0) // tl.cdiv(F, BLOCK)).to(tl.int64)
    cols = tl.program_id(0) % tl.cdiv(F, BLOCK) * BLOCK + tl.arange(0, BLOCK)
    inside = cols < F
    gate = tl.load(gate_up_ptr + row * stride + cols, inside, 0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * stride + F + cols, inside, 0.0).to(tl.float32)
    s = tl.sigmoid(gate)
    if grad_ptr is None:
        tl.store(out_ptr + row * F + cols, gate * s * up, inside)
    else:
        grad = tl.load(grad_ptr + row * F + cols, inside, 0.0).to(tl.float32)
        tl.store(out_ptr + row * 2 * F + cols, grad * up * s * (1 + gate * (1 - s)), inside)
        tl.store(out_ptr + row * 2 * F + F + cols, grad * gate * s, inside)


def reference(gate_up: Tensor) -> Tensor:
    """Returns what swiglu computes, in the dtype of its argument."""
    gate, up = gate_up.chunk(2, dim=-1)
    return gate * gate.sigmoid() * up
