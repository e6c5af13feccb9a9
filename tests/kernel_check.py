"""Judges kernels by their distance to float64, in multiples of the rounding of the exact result."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
import triton.language as tl
from torch import Tensor
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
POINTWISE, ATTENTION, GRADIENT = 1.1, 1.6, 2.0  # multiples of the rounding floor
# the floor of normally distributed values
_FLOORS = {torch.bfloat16: 1.66e-3, torch.float16: 2.1e-4, torch.float32: 2.5e-8}
_FP32_SUMS = 2e-6  # what fp32 sums may lose: matters for fp32 results only


def randn(
    generator: torch.Generator, *shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0
) -> Tensor:
    return (torch.randn(*shape, generator=generator) * scale).to(dtype).to(DEVICE)


def poisoned(*shape: int, dtype: torch.dtype) -> Tensor:
    """Returns what a kernel that forgets to write leaves behind: NaN."""
    return torch.full(shape, float("nan"), dtype=dtype, device=DEVICE)


def poison_new_tensors(monkeypatch) -> None:
    """Makes the launchers allocate NaN, or an id that does not exist."""
    new_empty = torch.Tensor.new_empty

    def poison(self, *shape, **options):
        out = new_empty(self, *shape, **options)
        return out.fill_(float("nan") if out.is_floating_point() else 77)

    monkeypatch.setattr(torch.Tensor, "new_empty", poison)


def assert_close(out: Tensor, exact: Tensor, multiple: float) -> None:
    """Asserts that the relative error is at most `multiple` times that of rounding `exact`.

    The norm is Frobenius', exact is float64, and no element may be off by more than 8 roundings of
    the largest.
    """
    assert exact.dtype == torch.float64 and out.shape == exact.shape, (out.shape, exact.shape)
    assert torch.isfinite(out).all(), f"{int((~torch.isfinite(out)).sum())} are not finite"
    size = exact.norm() + 1e-300
    error = ((out.double() - exact).norm() / size).item()
    rounding = ((exact.to(out.dtype).double() - exact).norm() / size).item()
    floor = max(rounding, _FLOORS[out.dtype] / 4)
    if out.dtype == torch.float32:
        floor = max(floor, _FP32_SUMS)
    assert error <= multiple * floor, f"error {error:.3g}: {error / floor:.2f} times the rounding"
    worst = (out.double() - exact).abs().max().item()
    allowed = 8 * max(torch.finfo(out.dtype).eps, _FP32_SUMS) * max(exact.abs().max().item(), 1e-30)
    assert worst <= allowed, f"one element is off by {worst:.3g} (allowed: {allowed:.3g})"


def at_the_end_of_memory(tensor: Tensor) -> Tensor:
    """Returns a copy behind which lies a page that cannot be read."""
    page, size = mmap.PAGESIZE, tensor.nbytes
    readable = -(-size // page) * page
    memory = mmap.mmap(-1, readable + page)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(address + readable), page, 0) == 0
    options = {"count": tensor.numel(), "offset": readable - size}
    copy = torch.frombuffer(memory, dtype=tensor.dtype, **options)
    return copy.view(tensor.shape).copy_(tensor)


def survives(work: Callable[[], object]) -> bool:
    """Returns whether a child process gets through `work`: a forbidden read kills it."""
    child = os.fork()
    if not child:
        try:
            work()
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitpid(child, 0)[1] == 0


def only_the_last_program(monkeypatch, module, name: str) -> None:
    """Makes launches of the kernel run the last program of their grid, no other."""
    kernel = getattr(module, name)

    class Launcher:
        def __getitem__(self, grid):
            last = [size - 1 for size in grid] + [0, 0]
            place = lambda self, axis: TensorHandle(np.array([last[axis]], np.int32), tl.int32)
            monkeypatch.setattr(InterpreterBuilder, "create_get_program_id", place)
            return kernel[(1,)]

    monkeypatch.setattr(module, name, Launcher())


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal, block_table=None
):
    """Stands in for flash-attn: computes in plain PyTorch what its documentation says."""
    assert causal and cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
    outputs = []
    for i in range(len(cu_seqlens_q) - 1):
        (first, last), (start, end) = (x[i : i + 2].tolist() for x in (cu_seqlens_q, cu_seqlens_k))
        rows, length = last - first, end - start
        assert 0 < rows <= max_seqlen_q and length <= max_seqlen_k
        keys, values = k[start:end], v[start:end]
        if block_table is not None:
            assert k.shape[1] % 256 == 0 and k.stride(-1) == 1
            keys, values = (x[block_table[i].long()].flatten(0, 1)[:length] for x in (k, v))
        # aligned with the last query and the last key
        mask = torch.ones(rows, length, dtype=torch.bool).tril(length - rows)
        heads_first = (x.transpose(0, 1)[None] for x in (q[first:last], keys, values))
        out = F.scaled_dot_product_attention(*heads_first, mask, enable_gqa=True)
        outputs.append(out[0].transpose(0, 1))
    return torch.cat(outputs)
