"""SwiGLU: silu(gate) * up, with silu(x) = x * sigmoid(x) (Shazeer 2020, eq. 5).

gate and up stand side by side in one row, as one matrix product leaves them. Forward moves 3
elements for each of the T * F outputs (T = 8192, F = 12288, bf16: 604 MB) with about 10 FLOPs,
backward 5 elements (1.0 GB): bandwidth is the limit of both. One program owns BLOCK neighbouring
columns of one row. The arithmetic is fp32, and every result is rounded once.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.common import check, dependent_launch, wait_for_previous

BLOCK = 2048


def naive_swiglu(gate_up: Tensor) -> Tensor:
    """Returns what swiglu computes, column by column, in the dtype of its argument."""
    width = gate_up.shape[1] // 2
    columns = []
    for i in range(width):
        gate = gate_up[:, i]  # [T]
        up = gate_up[:, width + i]
        columns.append(gate * gate.sigmoid() * up)
    return torch.stack(columns, dim=1)


def swiglu(gate_up: Tensor) -> Tensor:
    """Returns silu(gate) * up [T, F], differentiable.

    gate_up [T, 2 * F] of DTYPES with any row stride, the gate first. ValueError for other shapes.
    """
    check((None, None), strided=True, gate_up=gate_up)
    width = gate_up.shape[1]
    if width % 2 != 0:
        raise ValueError(f"gate_up has {width} columns; expected an even number")
    if not torch.is_grad_enabled():
        return _forward(gate_up)
    return _SwiGLU.apply(gate_up)


def _forward(gate_up: Tensor) -> Tensor:
    rows, width = gate_up.shape
    out = gate_up.new_empty(rows, width // 2)
    grid = (rows * triton.cdiv(width // 2, BLOCK),)
    _swiglu[grid](gate_up, out, gate_up.stride(0), width // 2, BLOCK, **dependent_launch())
    return out


@triton.jit
def _swiglu(
    gate_up_ptr,  # [T, 2 * F], rows `stride` apart
    out_ptr,  # [T, F]
    stride,
    F: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    wait_for_previous(DEPENDENT)
    row, cols, gate, up = _load_block(gate_up_ptr, stride, F, BLOCK)
    tl.store(out_ptr + row * F + cols, gate * tl.sigmoid(gate) * up, cols < F)


@triton.jit
def _load_block(gate_up_ptr, stride, F: tl.constexpr, BLOCK: tl.constexpr):
    """Returns the row of a program, its columns, and gate and up there, fp32 [BLOCK]."""
    programs_of_row = tl.cdiv(F, BLOCK)
    row = (tl.program_id(0) // programs_of_row).to(tl.int64)
    cols = tl.program_id(0) % programs_of_row * BLOCK + tl.arange(0, BLOCK)
    gate_ptr = gate_up_ptr + row * stride + cols
    gate = tl.load(gate_ptr, cols < F, 0.0).to(tl.float32)
    up = tl.load(gate_ptr + F, cols < F, 0.0).to(tl.float32)
    return row, cols, gate, up


# Backward, with s = sigmoid(gate):
#
#     d_gate = d_out * up * s * (1 + gate * (1 - s))        d_up = d_out * gate * s


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate_up):
        ctx.save_for_backward(gate_up)
        return _forward(gate_up)

    @staticmethod
    def backward(ctx, d_out):
        (gate_up,) = ctx.saved_tensors
        rows, width = gate_up.shape
        d_gate_up = gate_up.new_empty(rows, width)
        grid = (rows * triton.cdiv(width // 2, BLOCK),)
        _swiglu_backward[grid](
            gate_up, d_out.contiguous(), d_gate_up, gate_up.stride(0), width // 2, BLOCK
        )
        return d_gate_up


@triton.jit
def _swiglu_backward(
    gate_up_ptr,  # [T, 2 * F], rows `stride` apart
    d_out_ptr,  # [T, F]
    d_gate_up_ptr,  # [T, 2 * F]
    stride,
    F: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, cols, gate, up = _load_block(gate_up_ptr, stride, F, BLOCK)
    d_out = tl.load(d_out_ptr + row * F + cols, cols < F, 0.0).to(tl.float32)
    s = tl.sigmoid(gate)
    d_gate_ptr = d_gate_up_ptr + row * 2 * F + cols
    tl.store(d_gate_ptr, d_out * up * s * (1 + gate * (1 - s)), cols < F)
    tl.store(d_gate_ptr + F, d_out * gate * s, cols < F)
