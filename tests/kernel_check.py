"""How the kernels are judged: by their distance to float64, as a multiple of what rounding the exact result to the dtype would cost."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable

import numpy as np
import torch
import triton.language as tl
from torch import Tensor
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
POINTWISE, ATTENTION, GRADIENT = 1.1, 1.6, 2.0  # multiples of the rounding floor
_FLOORS = {
    torch.bfloat16: 1.66e-3,
    torch.float16: 2.1e-4,
    torch.float32: 2.5e-8,
}  # of normally distributed values
_FP32_SUMS = 2e-6  # what fp32 arithmetic itself may lose: matters for fp32 results only


def randn(
    generator: torch.Generator, *shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0
) -> Tensor:
    return (torch.randn(*shape, generator=generator) * scale).to(dtype).to(DEVICE)


def poisoned(*shape: int, dtype: torch.dtype) -> Tensor:
    """What a kernel that forgets to write leaves behind: NaN."""
    return torch.full(shape, float("nan"), dtype=dtype, device=DEVICE)


def assert_close(out: Tensor, exact: Tensor, multiple: float) -> None:
    """The error of `out`, relative in the Frobenius norm, is at most `multiple` times that of `exact` (float64) rounded to out.dtype, and
    no element is off by more than 8 roundings of the largest."""
    assert exact.dtype == torch.float64 and out.shape == exact.shape, (out.shape, exact.shape)
    assert torch.isfinite(out).all(), (
        f"{int((~torch.isfinite(out)).sum())} of {out.numel()} elements are not finite"
    )
    size = exact.norm() + 1e-300
    error = ((out.double() - exact).norm() / size).item()
    floor = max(
        ((exact.to(out.dtype).double() - exact).norm() / size).item(), _FLOORS[out.dtype] / 4
    )
    if out.dtype == torch.float32:
        floor = max(floor, _FP32_SUMS)
    assert error <= multiple * floor, (
        f"relative error {error:.3g}, {error / floor:.2f} times the rounding floor {floor:.3g} (allowed: {multiple})"
    )
    worst = (out.double() - exact).abs().max().item()
    allowed = 8 * max(torch.finfo(out.dtype).eps, _FP32_SUMS) * max(exact.abs().max().item(), 1e-30)
    assert worst <= allowed, f"one element is off by {worst:.3g} (allowed: {allowed:.3g})"


def at_the_end_of_memory(tensor: Tensor) -> Tensor:
    """A copy behind which lies a page that nobody may read."""
    page, size = mmap.PAGESIZE, tensor.nbytes
    readable = -(-size // page) * page
    memory = mmap.mmap(-1, readable + page)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(address + readable), page, 0) == 0
    return (
        torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(), offset=readable - size)
        .view(tensor.shape)
        .copy_(tensor)
    )


def survives(work: Callable[[], object]) -> bool:
    """Whether a child process gets through `work`: one that reads what it may not is killed."""
    child = os.fork()
    if not child:
        try:
            work()
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitpid(child, 0)[1] == 0


def only_the_last_program(monkeypatch, module, name: str) -> None:
    """Launches of the kernel run the last program of their grid, no other."""
    kernel = getattr(module, name)

    class Launcher:
        def __getitem__(self, grid):
            last = [size - 1 for size in grid] + [0, 0]
            place = lambda self, axis: TensorHandle(np.array([last[axis]], np.int32), tl.int32)
            monkeypatch.setattr(InterpreterBuilder, "create_get_program_id", place)
            return kernel[(1,)]

    monkeypatch.setattr(module, name, Launcher())
