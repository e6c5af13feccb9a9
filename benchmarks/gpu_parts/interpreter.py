"""Teaches Triton's interpreter bfloat16, and products whose rows do not depend on their place.

The tests and the rehearsal of benchmarks/gpu.py import it before a kernel runs on a CPU.

The interpreter keeps bfloat16 as 16-bit integers and computes with these. Here casts, products and
operations of two operands go through fp32 and round to nearest even. Reductions and functions of
one operand do not: a kernel turns what it loads into fp32 first, as it should anyway.

It is also made faster, two to three times with small blocks. The language is replaced once, not at
every launch. What the type of a block holds is computed once, not at every operation.
"""

from __future__ import annotations

from operator import index

import numpy as np
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

_patch = interpreter._patch_lang
_dot, _cast = InterpreterBuilder.create_dot, InterpreterBuilder.cast_impl
_binary = InterpreterBuilder.binary_op
_make_block, _make_tensor = tl.block_type.__init__, tl.tensor.__init__
_broadcast, _np_dtype = TritonSemantic.broadcast_impl_value, interpreter._get_np_dtype
_blocks, _shapes, _np_dtypes = {}, {}, {}  # what is computed once, by name
_patched = set()


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


def binary_op(self, left, right, op):
    """In fp32 for bfloat16, and rounded."""
    if left.dtype.scalar != tl.bfloat16:
        return _binary(self, left, right, op)
    result = op(_widened(left), _widened(right))
    if result.dtype == np.bool_:
        return TensorHandle(result, tl.int1)
    return TensorHandle(_rounded(result), tl.bfloat16)


def patch_lang(function):
    """Replaces the language by the interpreter's at the first call of a function, for good."""
    if function not in _patched:
        _patched.add(function)
        # Triton 3.6 leaves it to NumPy, which from 2.4 on makes no number of an array [1].
        _patch(function).set_attr(tl.tensor, "__index__", lambda self: int(self.handle.data.item()))
    return interpreter._LangPatchScope()  # there is nothing to take back


def make_block(self, element_ty, shape):
    """Takes the place of block_type.__init__."""
    key = str(element_ty), *map(index, shape)
    if key not in _blocks:
        _make_block(self, element_ty, shape)
        _blocks[key] = dict(vars(self))
    vars(self).update(_blocks[key], element_ty=element_ty)


def make_tensor(self, handle, type):
    """Takes the place of tensor.__init__."""
    key = type.name if type.is_block() else ""
    if key not in _shapes:
        _make_tensor(self, handle, type)
        _shapes[key] = self.shape, self.numel
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.shape, self.numel = _shapes[key]


def broadcast_impl_value(self, left, right):
    """Returns operands of the same shape as they are."""
    blocks = left.type.is_block(), right.type.is_block()
    if blocks == (True, True) and left.type.shape.values == right.type.shape.values:
        return left, right
    return _broadcast(self, left, right)


def get_np_dtype(dtype):
    """Returns NumPy's type of a Triton type."""
    if dtype.name not in _np_dtypes:
        _np_dtypes[dtype.name] = _np_dtype(dtype)
    return _np_dtypes[dtype.name]


interpreter._patch_lang = patch_lang
InterpreterBuilder.create_dot, InterpreterBuilder.cast_impl = create_dot, cast_impl
InterpreterBuilder.binary_op = binary_op
tl.block_type.__init__, tl.tensor.__init__ = make_block, make_tensor
TritonSemantic.broadcast_impl_value, interpreter._get_np_dtype = broadcast_impl_value, get_np_dtype
