"""Compiles every kernel for GPUs that are not there.

    python -m benchmarks.gpu_parts.compile [--kernel NAME]

The launchers themselves run, on tensors without memory and at the shapes of cases.py, with a driver
whose launches compile and do nothing else. Triton specialises as on the GPU and refuses what does
not fit it. Of each kernel: registers of a thread, spilled bytes of a thread, shared memory of a
block, and the instruction that multiplies matrices. Exit status 1 if a kernel spills or does not
fit.
"""

import argparse
import re
import subprocess
import sys
import tempfile
from multiprocessing import get_context

import torch
import triton
from triton.backends.compiler import GPUTarget

from benchmarks.gpu_parts.cases import select

ARCHITECTURES = (80, 89, 90)  # A100, RTX 4090, H100 and H200: each has configurations in tiles.toml
# Bytes of shared memory that a block may have.
SHARED_MEMORY = {80: 166912, 86: 101376, 89: 101376, 90: 232448, 120: 101376}


class Driver:
    """What Triton asks of a driver. `compiled` collects (name, machine code, shared memory)."""

    def __init__(self, arch: int):
        self.arch, self.utils = arch, self
        self.compiled: list[tuple[str, bytes, int]] = []
        self.launcher_cls = lambda source, metadata: lambda *args, **kwargs: None
        self.get_current_device = self.get_current_stream = lambda device=0: 0

    def get_device_properties(self, device: int) -> dict[str, int]:
        """Returns the limits that Triton checks a kernel against."""
        return {"max_shared_mem": SHARED_MEMORY[self.arch]}

    def load_binary(self, name: str, cubin: bytes, shared: int, device: int) -> tuple[int, ...]:
        """Records a kernel; returns its module, function, registers, spills and most threads."""
        self.compiled.append((name, cubin, shared))
        return 1, 1, 0, 0, 1024

    def get_current_target(self) -> GPUTarget:
        """Returns the GPU to compile for."""
        return GPUTarget("cuda", self.arch, 32)


def compile_cases(arch: int, word: str) -> list[str]:
    """Returns a line for each kernel of the cases that no earlier case has compiled."""
    driver, lines = Driver(arch), []
    triton.runtime.driver.set_active(driver)
    for case in select(word):
        if "fp8" in case.name and arch < 89:
            continue  # it has no such numbers
        driver.compiled.clear()
        title = f"sm_{arch}  {case.name:42}"
        try:
            with torch.device("meta"):
                case.call(*case.make())
        except triton.runtime.errors.OutOfResources as error:
            lines.append(f"{title} WRONG: {error}")
            continue
        for name, cubin, shared in driver.compiled:
            with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
                file.write(cubin)
                file.flush()
                command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", "-sass", file.name]
                code = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            registers, spilled = map(int, re.search(r"REG:(\d+) STACK:(\d+)", code).groups())
            mma = re.search(r"HG?MMA|$", code)[0]
            lines.append(
                f"{title} {name:18} {registers:4} registers  {spilled:4} B spilled  "
                f"{shared:7,} B shared  {mma}{'  WRONG: spills' * bool(spilled)}"
            )
    return lines


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks.gpu_parts.compile", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--kernel", default="", help="only cases whose name contains this")
    options = parser.parse_args(argv)
    select(options.kernel)
    # a kernel keeps what it was compiled to: one process a GPU
    tasks = [(arch, options.kernel) for arch in ARCHITECTURES]
    with get_context("spawn").Pool(len(tasks)) as pool:
        lines = sum(pool.starmap(compile_cases, tasks), [])
    print("\n".join(lines))
    return int(any("WRONG" in line for line in lines))


if __name__ == "__main__":
    sys.exit(main())
