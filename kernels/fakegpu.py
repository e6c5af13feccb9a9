"""A GPU that is not there: with its driver active, every launch compiles its kernel for a chosen architecture, and does nothing else.

So the launchers themselves, called on CPU tensors of any content, compile exactly what they would run, and Triton refuses what would not
fit the card. Not for use together with the interpreter, nor beside a real GPU in one process.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import compiler

SHARED_MEMORY = {80: 166912, 86: 101376, 89: 101376, 90: 232448}  # bytes a block may have


@dataclass(frozen=True)
class Compiled:
    """What became of one launch: registers a thread, bytes of stack a thread (above 0: registers spill), shared memory of a block."""

    name: str
    registers: int
    stack: int
    shared: int
    cubin: bytes


class Driver:
    """What Triton asks of a driver. `compiled` collects the launches, each specialisation once."""

    def __init__(self, arch: int):
        self.arch, self.compiled, self.utils = arch, [], self
        self.launcher_cls = lambda source, metadata: lambda *args, **kwargs: None

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {
            "max_shared_mem": SHARED_MEMORY[self.arch],
            "multiprocessor_count": 132,
            "warpSize": 32,
            "max_num_regs": 65536,
        }

    def load_binary(self, name: str, cubin: bytes, shared: int, device: int) -> tuple[Any, ...]:
        registers, stack = _usage(cubin)
        self.compiled.append(Compiled(name, registers, stack, shared, cubin))
        return 1, 1, registers, stack // 4, 1024

    def unload_module(self, module: Any) -> None:
        pass

    def get_current_device(self) -> int:
        return 0

    def set_current_device(self, device: int) -> None:
        pass

    def get_current_stream(self, device: int = 0) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.arch, 32)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def is_active(self) -> bool:
        return True


def activate(arch: int) -> Driver:
    """From now on, launches in this process compile for `arch`."""
    compiler.max_shared_mem.cache_clear()
    driver = Driver(arch)
    triton.runtime.driver.set_active(driver)
    return driver


def _usage(cubin: bytes) -> tuple[int, int]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        found = re.search(
            r"REG:(\d+) STACK:(\d+)",
            subprocess.run(command, capture_output=True, text=True, check=True).stdout,
        )
    return int(found[1]), int(found[2])
