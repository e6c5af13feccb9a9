"""Compiles every kernel for GPUs that are not there: `python -m kernels.compile [--kernel NAME]`.

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

import torch
import triton
from triton.backends.compiler import GPUTarget

from kernels.cases import Case, select

SHARED_MEMORY = {80: 166912, 89: 101376, 90: 232448}  # bytes a block may have


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


def compile_case(case: Case, driver: Driver) -> bool:
    """Prints a line for each kernel that no earlier case has compiled; returns whether all fit."""
    driver.compiled.clear()
    title, fine = f"sm_{driver.arch}  {case.name:42}", True
    try:
        with torch.device("meta"):
            case.functions()["own"](*case.make())
    except triton.runtime.errors.OutOfResources as error:
        print(f"{title} WRONG: {error}", flush=True)
        return False
    for name, cubin, shared in driver.compiled:
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(cubin)
            file.flush()
            command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", "-sass", file.name]
            code = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        registers, spilled = map(int, re.search(r"REG:(\d+) STACK:(\d+)", code).groups())
        mma = re.search(r"HG?MMA|$", code)[0]
        print(
            f"{title} {name:18} {registers:4} registers  {spilled:4} B spilled  "
            f"{shared:7,} B shared  {mma}{'  WRONG: spills' * bool(spilled)}",
            flush=True,
        )
        fine = fine and not spilled
    return fine


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status."""
    about = __doc__.split("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m kernels.compile", description=about)
    parser.add_argument("--kernel", default="", help="only cases whose name contains this")
    parser.add_argument("--arch", type=int, nargs="+", choices=SHARED_MEMORY, default=[80, 89, 90])
    options = parser.parse_args(argv)
    cases = select(options.kernel)
    if len(options.arch) == 1:
        driver = Driver(options.arch[0])
        triton.runtime.driver.set_active(driver)
        return int(not all([compile_case(case, driver) for case in cases]))
    # a kernel keeps what it was compiled to: one process a GPU
    command = [sys.executable, "-m", "kernels.compile", "--kernel", options.kernel, "--arch"]
    runs = [
        subprocess.Popen([*command, str(arch)], stdout=subprocess.PIPE, text=True)
        for arch in options.arch
    ]
    for run in runs:
        print(run.communicate()[0], end="", flush=True)
    return max(run.returncode for run in runs)


if __name__ == "__main__":
    sys.exit(main())
