"""Compiles every kernel for GPUs that are not there, and looks at what came out: `python -m kernels.compile [--arch 80 89 90] [--kernel NAME]`.

The launchers themselves are called, at the shapes of Qwen3-8B (cases.py), with a driver that compiles and runs nothing (fakegpu.py). Of each
kernel: registers a thread, spilled bytes, shared memory, and which instructions its machine code holds. It fails where registers spill, where
shared memory does not fit, where a kernel that multiplies matrices does so without tensor cores, or where a pointwise one loads narrowly.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile

import triton

from kernels import fakegpu

MATRIX = {
    80: ("HMMA",),
    89: ("HMMA",),
    90: ("HGMMA", "HMMA"),
}  # the tensor cores' instructions, by architecture
WIDE = (
    "LDG.E.128",
    "LDG.E.64",
    "LDGSTS.E.BYPASS.128",
    "LDGSTS.E.128",
    "UTMALDG",
)  # 8 bytes a thread and more, or a bulk copy


def instructions(cubin: bytes) -> str:
    """The machine code of a kernel, as text."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run(
            [triton.knobs.nvidia.cuobjdump.path, "-sass", file.name],
            capture_output=True,
            text=True,
            check=True,
        ).stdout


def check(arch: int, wanted: str) -> list[str]:
    """Compiles for one architecture and prints a line a kernel; returns what is wrong."""
    import torch

    from kernels.cases import Maker, cases

    driver, problems, marks = fakegpu.activate(arch), [], {}
    maker = Maker("cpu", random=False)
    for case in cases():
        if wanted not in case.name or not case.compiles:
            continue
        driver.compiled.clear()  # a kernel that an earlier case has compiled alike is not compiled again
        try:
            with torch.no_grad():
                case.run(*case.make(maker))
        except triton.runtime.errors.OutOfResources as error:
            problems.append(f"sm_{arch} {case.name}: {error}")
        for kernel in driver.compiled:
            name = case.kernel, kernel.name
            if name not in marks:
                code = instructions(kernel.cubin)
                marks[name] = (
                    next((mark for mark in MATRIX[arch] if mark in code), "-"),
                    "wide" if any(load in code for load in WIDE) else "-",
                )
            tensor, width = marks[name]
            print(
                f"sm_{arch}  {case.name:46} {kernel.name:22} {kernel.registers:4} registers  {kernel.stack:4} B spilled  {kernel.shared:7,} B shared  "
                f"{tensor:6} {width}",
                flush=True,
            )
            if kernel.stack:
                problems.append(
                    f"sm_{arch} {case.name}: {kernel.name} spills {kernel.stack} bytes a thread"
                )
        found = [mark for (kernel, _), mark in marks.items() if kernel == case.kernel]
        if found and case.flops and all(tensor == "-" for tensor, _ in found):
            problems.append(f"sm_{arch} {case.name}: no tensor core instruction")
        if found and not case.flops and all(width == "-" for _, width in found):
            problems.append(f"sm_{arch} {case.name}: no wide load")
    return problems


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m kernels.compile", description=__doc__.splitlines()[0]
    )
    parser.add_argument(
        "--arch",
        type=int,
        nargs="+",
        choices=fakegpu.SHARED_MEMORY,
        default=[80, 89, 90],
        help="compute capabilities (default: 80 89 90)",
    )
    parser.add_argument("--kernel", default="", help="only cases whose name contains this")
    options = parser.parse_args(argv)
    if os.environ.get("TRITON_INTERPRET") == "1":
        print(
            "TRITON_INTERPRET=1 is set: kernels are interpreted and cannot be compiled; unset it",
            file=sys.stderr,
        )
        return 1
    if len(options.arch) > 1:  # a kernel keeps what it was compiled to: one process an architecture
        command = [sys.executable, "-m", "kernels.compile", "--kernel", options.kernel, "--arch"]
        runs = [
            subprocess.Popen([*command, str(arch)], stdout=subprocess.PIPE, text=True)
            for arch in options.arch
        ]
        for run in runs:
            print(run.communicate()[0], end="", flush=True)
        return max(run.returncode for run in runs)
    problems = check(options.arch[0], options.kernel)
    for problem in problems:
        print(f"WRONG: {problem}", file=sys.stderr)
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
