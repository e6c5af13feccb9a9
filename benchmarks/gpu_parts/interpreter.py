"""Teaches Triton's interpreter bfloat16, fp8, and products whose rows do not depend on their place.

The tests and the rehearsal of benchmarks/gpu.py import it before a kernel runs on a CPU.

The interpreter keeps bfloat16 as 16-bit integers and computes with these. Here casts, products and
operations of two operands go through fp32 and round to nearest even. Reductions and functions of
one operand do not: a kernel turns what it loads into fp32 first, as it should anyway. fp8 (e4m3) is
converted as a GPU does it: to the nearest number, 448 at most. A kernel that calls functions of its
own takes about two thirds of the time.
"""

from __future__ import annotations

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

_patch = interpreter._patch_lang
_dot, _cast = InterpreterBuilder.create_dot, InterpreterBuilder.cast_impl
_binary, _convert = InterpreterBuilder.binary_op, InterpreterBuilder.create_fp_to_fp


def _widened(handle) -> np.ndarray:
    if handle.dtype.scalar == tl.bfloat16:
        return (handle.data.astype(np.uint32) << 16).view(np.float32)
    return handle.data


def _rounded(x: np.ndarray) -> np.ndarray:
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(x), np.uint16(0x7FC0), nearest.astype(np.uint16)).astype(np.uint16)


def create_dot(self, a, b, accumulator, precision, max_num_imprecise):
    """Through float64: BLAS sums float32 in an order that depends on the place in the matrix."""
    kind = accumulator.data.dtype
    if kind.kind != "f" or 8 in (a.dtype.primitive_bitwidth, b.dtype.primitive_bitwidth):
        return _dot(self, a, b, accumulator, precision, max_num_imprecise)
    product = np.matmul(_widened(a), _widened(b), dtype=np.float64)
    return TensorHandle(product.astype(kind) + accumulator.data, accumulator.dtype.scalar)


def cast_impl(self, source, dtype):
    """Through fp32 from and to bfloat16."""
    have, want = source.dtype.scalar, dtype.scalar
    if have == tl.bfloat16:
        wide = TensorHandle(_widened(source), tl.float32)
        return wide if want == tl.float32 else _cast(self, wide, dtype)
    if want == tl.bfloat16:
        return TensorHandle(_rounded(source.data.astype(np.float32)), tl.bfloat16)
    return _cast(self, source, dtype)


def create_fp_to_fp(self, source, dtype, rounding):
    """Through fp32 from and to fp8."""
    have, want = source.dtype.scalar, dtype.scalar
    if have == tl.float8e4nv:
        wide = torch.from_numpy(source.data.view(np.uint8)).view(torch.float8_e4m3fn).float()
        return self.cast_impl(TensorHandle(wide.numpy(), tl.float32), dtype)
    if want == tl.float8e4nv:
        wide = torch.from_numpy(np.array(_widened(source), np.float32)).clamp(-448, 448)
        return TensorHandle(wide.to(torch.float8_e4m3fn).view(torch.uint8).numpy(), want)
    return _convert(self, source, dtype, rounding)


def binary_op(self, left, right, op):
    """In fp32 for bfloat16, and rounded."""
    if left.dtype.scalar != tl.bfloat16:
        return _binary(self, left, right, op)
    result = op(_widened(left), _widened(right))
    if result.dtype == np.bool_:
        return TensorHandle(result, tl.int1)
    return TensorHandle(_rounded(result), tl.bfloat16)


def patch_lang(function):
    """Replaces the language by the interpreter's once: it is asked to at every call of a function.

    The call of a kernel begins with the true language, and the functions that it calls find what
    the kernel has replaced.
    """
    seen = [x for x in function.__globals__.values() if x is tl or x is tl.core]
    if not any(tl.core.is_builtin(language.load) for language in seen):
        return interpreter._LangPatchScope()
    scope = _patch(function)
    # Triton 3.6 leaves it to NumPy, which from 2.4 on makes no number of an array [1].
    scope.set_attr(tl.tensor, "__index__", lambda self: int(self.handle.data.item()))
    return scope


interpreter._patch_lang = patch_lang
InterpreterBuilder.create_dot, InterpreterBuilder.cast_impl = create_dot, cast_impl
InterpreterBuilder.binary_op, InterpreterBuilder.create_fp_to_fp = binary_op, create_fp_to_fp
