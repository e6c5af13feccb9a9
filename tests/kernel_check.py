"""What the tests of kernels share.

Results are judged by their distance to float64, in multiples of the rounding of the exact result.
`program_order` runs the programs of a launch in another order than the interpreter's, and
`GuardPages` ends the process at an access outside of a tensor.
"""

from __future__ import annotations

import ctypes
import faulthandler
import itertools
import mmap
import os
import random
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from triton.runtime.interpreter import InterpreterBuilder

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


ORDERS = ("ascending", "descending")
_start_launch, _start_program = InterpreterBuilder.set_grid_dim, InterpreterBuilder.set_grid_idx


@contextmanager
def program_order(order: str) -> Iterator[None]:
    """Lets the interpreter run the programs of each launch in one of ORDERS, or "shuffled".

    A GPU runs them in any order. The interpreter runs one after the other, so that a program which
    reads what an earlier one has written goes unnoticed in ascending order.
    """
    generator = random.Random(0)

    def set_grid_dim(self, *sizes):
        _start_launch(self, *sizes)
        programs = list(itertools.product(*map(range, sizes)))
        if order == "descending":
            programs.reverse()
        if order == "shuffled":
            generator.shuffle(programs)
        self.programs_left = iter(programs)

    def set_grid_idx(self, *_):
        _start_program(self, *next(self.programs_left))

    before = InterpreterBuilder.set_grid_dim, InterpreterBuilder.set_grid_idx
    InterpreterBuilder.set_grid_dim, InterpreterBuilder.set_grid_idx = set_grid_dim, set_grid_idx
    try:
        yield
    finally:
        InterpreterBuilder.set_grid_dim, InterpreterBuilder.set_grid_idx = before


class GuardPages(TorchDispatchMode):
    """Places the memory of every tensor that is made between two pages that cannot be accessed.

    An access before its first page or past its last one ends the process with SIGSEGV. The tensor
    ends where its last page ends.
    """

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        input_storages = set()
        for x in tree_leaves((args, kwargs)):
            if isinstance(x, Tensor):
                input_storages.add(x.untyped_storage().data_ptr())

        def guarded(x: Tensor) -> Tensor:
            if x.untyped_storage().data_ptr() in input_storages:
                return x  # a view, or changed in place
            return self.move(x)

        return tree_map_only(Tensor, guarded, function(*args, **kwargs))

    def move(self, x: Tensor) -> Tensor:
        """Returns x in memory with guard pages."""
        storage = x.untyped_storage()
        if x.device.type != "cpu" or storage.nbytes() == 0:
            return x
        page = mmap.PAGESIZE
        pages = -(-storage.nbytes() // page) * page
        memory = mmap.mmap(-1, pages + 2 * page)
        first = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        offset = page + pages - storage.nbytes()
        ctypes.memmove(first + offset, storage.data_ptr(), storage.nbytes())
        for guard in (first, first + page + pages):
            protected = ctypes.CDLL(None).mprotect(ctypes.c_void_p(guard), page, 0)
            assert protected == 0
        flat = torch.frombuffer(memory, dtype=torch.uint8, count=storage.nbytes(), offset=offset)
        return flat.view(x.dtype).as_strided(x.shape, x.stride(), x.storage_offset())


def exit_code(run: Callable[[], object]) -> int:
    """Returns how a forked process that calls `run` ends: 0, 1 at an exception, or -signal."""
    process = os.fork()
    if process == 0:
        code = 1
        faulthandler.disable()
        try:
            run()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
