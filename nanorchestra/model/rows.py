"""What a decoder layer computes row by row in training on a CPU, in C: native/rows.c.

ops.py describes the functions, and takes these where `computes` says so. They read and write memory
once where torch's operations do so several times.
"""

from __future__ import annotations

import ctypes
from functools import cache

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from nanorchestra.model.compiler import address, compiled_for

LANES = 16  # numbers that are computed together: the largest LANES of native.h


def computes(size: int, x: Tensor, *others: Tensor | None) -> bool:
    """Returns True if rows.c computes with x [T, ...] in parts of `size`, and the other tensors.

    They are on a CPU and in one dtype: fp32, or bf16 if the CPU has instructions for it.
    """
    same = all(y is None or (y.dtype, y.device) == (x.dtype, x.device) for y in others)
    fits = x.dim() == 2 and x.device.type == "cpu" and size % LANES == 0
    return fits and same and _library(x.dtype) is not None


class _Norm(torch.autograd.Function):
    """ops.add_rms_norm of (x, residual, weight, eps); without a residual ops.rms_norm of x."""

    @staticmethod
    def forward(ctx, x, residual, weight, eps):
        x, weight = x.contiguous(), weight.contiguous()
        out, scales = torch.empty_like(x), x.new_empty(len(x), dtype=torch.float32)
        summed = None
        if residual is not None:
            residual, summed = residual.contiguous(), torch.empty_like(x)
        _call("norm_forward", x, residual, weight, summed, out, scales, *x.shape, eps)
        ctx.save_for_backward(x if summed is None else summed, weight, scales)
        return out if summed is None else (out, summed)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad, grad_summed=None):
        x, weight, scales = ctx.saved_tensors
        grad = grad.contiguous()
        if grad_summed is not None:
            grad_summed = grad_summed.contiguous()
        grad_x, sums = torch.empty_like(x), _sums_of_blocks(x, x.shape[1])
        _call("norm_backward", grad, grad_summed, x, weight, scales, grad_x, sums, *x.shape)
        grad_residual = grad_x if ctx.needs_input_grad[1] else None
        return grad_x, grad_residual, sums.sum(0).to(weight.dtype), None


class _SwiGLU(torch.autograd.Function):
    """ops.swiglu, of the same arguments."""

    @staticmethod
    def forward(ctx, gate_up):
        gate_up = gate_up.contiguous()
        ctx.save_for_backward(gate_up)
        out = gate_up.new_empty(len(gate_up), gate_up.shape[1] // 2)
        _call("swiglu_forward", gate_up, out, *out.shape)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        (gate_up,) = ctx.saved_tensors
        grad_gate_up = torch.empty_like(gate_up)
        _call("swiglu_backward", grad.contiguous(), gate_up, grad_gate_up, *grad.shape)
        return grad_gate_up


class _Heads(torch.autograd.Function):
    """ops.qk_norm_rope, of the same arguments."""

    @staticmethod
    def forward(ctx, qkv, q_norm, k_norm, rotation, kv_heads, eps):
        qkv = qkv.contiguous()
        if q_norm is not None:
            q_norm, k_norm = q_norm.contiguous(), k_norm.contiguous()
        ctx.save_for_backward(qkv, q_norm, k_norm)
        ctx.rest = rotation, kv_heads, eps
        dim = 2 * rotation.cos.shape[1]
        tokens, heads = len(qkv), qkv.shape[1] // dim - 2 * kv_heads
        q, k, v = (qkv.new_empty(tokens, count, dim) for count in (heads, kv_heads, kv_heads))
        _call_heads("heads_forward", (qkv, q_norm, k_norm, *ctx.rest), q, k, v)
        return q, k, v

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        qkv, q_norm, k_norm = ctx.saved_tensors
        grad_qkv = torch.empty_like(qkv)
        grads = [grad.contiguous() for grad in grads]
        sums = None
        if q_norm is not None:
            sums = _sums_of_blocks(qkv, 2, len(q_norm))
        given = (qkv, q_norm, k_norm, *ctx.rest)
        _call_heads("heads_backward", given, *grads, grad_qkv=grad_qkv, grad_norms=sums)
        of_norms = (None, None) if sums is None else sums.sum(0).to(q_norm.dtype)
        return grad_qkv, *of_norms, None, None, None


norm, swiglu, qk_norm_rope = _Norm.apply, _SwiGLU.apply, _Heads.apply


class _HeadsArguments(ctypes.Structure):
    """`head_rows` of native/rows.c."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("qkv", "q_norm", "k_norm", "cos", "sin")),
        *((name, ctypes.c_void_p) for name in ("q", "k", "v", "grad_qkv", "grad_norms")),
        *((name, ctypes.c_int64) for name in ("rows", "heads", "kv_heads", "dim")),
        ("eps", ctypes.c_float),
    ]


def _call_heads(function, given, q, k, v, **results) -> None:
    qkv, q_norm, k_norm, rotation, kv_heads, eps = given
    tensors = {"qkv": qkv, "q_norm": q_norm, "k_norm": k_norm, "q": q, "k": k, "v": v, **results}
    tensors |= {"cos": rotation.cos.contiguous(), "sin": rotation.sin.contiguous()}
    heads = _HeadsArguments(
        **{name: address(tensor) for name, tensor in tensors.items()},
        rows=len(q),
        heads=q.shape[1],
        kv_heads=kv_heads,
        dim=q.shape[2],
        eps=eps,
    )
    getattr(_library(qkv.dtype), function)(ctypes.byref(heads), torch.get_num_threads())


def _call(function: str, *arguments: Tensor | float | None) -> None:
    """Calls a function of rows.c with these arguments, and the number of threads."""
    call = getattr(_library(arguments[0].dtype), function)
    numbers = (int, float)
    call(*(x if isinstance(x, numbers) else address(x) for x in arguments), torch.get_num_threads())


def _sums_of_blocks(x, *size) -> Tensor:
    """Returns zeros fp32 [blocks, *size], for a sum over each block of x's rows."""
    blocks = -(-len(x) // _library(x.dtype).rows_of_block())
    return x.new_zeros(blocks, *size, dtype=torch.float32)


@cache
def _library(dtype) -> ctypes.CDLL | None:
    """Returns rows.c for this dtype, or None where it cannot be had."""
    loaded = compiled_for(dtype, "rows.c")
    if loaded is not None:
        pointer, size, number = ctypes.c_void_p, ctypes.c_long, ctypes.c_int
        last = size, size, number
        loaded.norm_forward.argtypes = [*[pointer] * 6, size, size, ctypes.c_float, number]
        loaded.norm_backward.argtypes = [*[pointer] * 7, *last]
        loaded.swiglu_forward.argtypes = [*[pointer] * 2, *last]
        loaded.swiglu_backward.argtypes = [*[pointer] * 3, *last]
    return loaded
