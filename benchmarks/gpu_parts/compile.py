"""Compiles every kernel for GPUs that are not there, and holds the result against a budget.

    python -m benchmarks.gpu_parts.compile [--kernel NAME]

The launchers themselves run, on tensors without memory and at the shapes of cases.py, with a driver
whose launches compile and do nothing else. Triton specialises as on the GPU and refuses what does
not fit it. Of each kernel: registers of a thread, spilled bytes of a thread, shared memory of a
block, how many programs fit on a multiprocessor at once, the instruction that multiplies matrices,
and the loads in the loop of that instruction that the program waits for. Exit status 1 if a kernel
spills in that loop, or without one anywhere, does not fit, breaks its budget, is compiled anew for
another number of tokens, or touches memory before the kernel in front of it has ended.
"""

import argparse
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from dataclasses import dataclass, replace
from multiprocessing import get_context
from typing import NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget

from benchmarks.gpu_parts.cases import QWEN3_8B, Case, all_cases, other_shapes, select

ARCHITECTURES = (80, 89, 90, 100, 120)  # A100, RTX 4090, H100 and H200, B200, RTX 5090
# Bytes of shared memory that a block may have.
SHARED_MEMORY = {80: 166912, 86: 101376, 89: 101376, 90: 232448, 100: 232448, 120: 101376}
# A multiprocessor: bytes of shared memory, of which each program takes 1 KiB more; warps; programs.
MULTIPROCESSOR = {
    80: (167936, 64, 32),
    89: (102400, 48, 24),
    90: (233472, 64, 32),
    100: (233472, 64, 32),
    120: (102400, 48, 24),
}
REGISTERS = 65536  # of a multiprocessor
# On tensor cores: HMMA, HGMMA of a warpgroup, UTCHMMA of a block, of integers IMMA. HFMA2.MMA loads
# a constant.
PRODUCT = re.compile(r"\b(?:[HI]G?MMA|UTCHMMA)\b")
WIDE_PRODUCT = {90: "HGMMA", 100: "UTCHMMA"}  # of many rows; HMMA on other GPUs
# Programmatic dependent launch: the wait for the kernel in front, and what lets the next one in.
WAIT, RELEASE = "ACQBULK", "PREEXIT"
# Accesses to memory that a kernel in front may have written, or still read.
ACCESS = r"LDG|LDGSTS|STG|LD|ST|ATOMG?|REDG?|UBLKCP|UTMA\w+"
TOKENS = (1, 777, 2000)  # a kernel is compiled once for all of them


class Binary(NamedTuple):
    """A kernel as it is loaded on a GPU."""

    kernel: str
    cubin: bytes
    shared: int  # bytes of a block
    warps: int
    early: bool  # launched before the kernel in front of it has ended


class Driver:
    """What Triton asks of a driver. `compiled` collects the kernels that it loads."""

    def __init__(self, arch: int):
        self.arch, self.utils = arch, self
        self.compiled: list[Binary] = []
        self.warps, self.early = 0, False  # of the kernel that is loaded next
        self.get_current_device = self.get_current_stream = lambda device=0: 0

    def launcher_cls(self, source, metadata):
        """Returns a launcher that does nothing."""
        self.warps, self.early = metadata.num_warps, metadata.launch_pdl
        return lambda *args, **kwargs: None

    def get_device_properties(self, device: int) -> dict[str, int]:
        """Returns the limits that Triton checks a kernel against."""
        return {"max_shared_mem": SHARED_MEMORY[self.arch]}

    def load_binary(self, name: str, cubin: bytes, shared: int, device: int) -> tuple[int, ...]:
        """Records a kernel; returns its module, function, registers, spills and most threads."""
        self.compiled.append(Binary(name, cubin, shared, self.warps, self.early))
        return 1, 1, 0, 0, 1024

    def get_current_target(self) -> GPUTarget:
        """Returns the GPU to compile for."""
        return GPUTarget("cuda", self.arch, 32)


@dataclass(frozen=True)
class Report:
    """What a kernel was compiled to."""

    kernel: str
    registers: int  # of a thread
    spilled: int  # bytes of a thread
    shared: int  # bytes of a block
    programs: int  # that fit on a multiprocessor at once
    product: str  # the instruction that multiplies matrices, if there is one
    loads: int  # in its innermost loop, that the program waits for
    early: bool  # launched before the kernel in front of it has ended
    waits: bool  # for that kernel before it touches memory, and lets the next one in after that
    spills: int  # accesses of local memory in that loop, or anywhere if there is none

    def __str__(self) -> str:
        line = (
            f"{self.kernel:24} {self.registers:3} registers  {self.spilled:3} B spilled  "
            f"{self.shared:7,} B shared  {self.programs:2} programs"
        )
        if self.early:
            line += "  early"
        if self.product:
            line += f"  {self.product:5} {self.loads} loads"
        return line


@dataclass(frozen=True)
class KernelBudget:
    """What a kernel may take. None may spill in the loop of its products."""

    programs: int  # at least so many fit on a multiprocessor at once
    product: str = ""  # HMMA, HGMMA (or what WIDE_PRODUCT has in its place), or none
    loads: int = 0  # at most so many loads in the loop of products are waited for


# Attention of decodes and products with few rows have the same instruction on every GPU: the bits
# of a row must not depend on the batch. The page of the next tile is a load that a loop waits for,
# as are the scales of 4-bit weights.
BUDGETS = {
    "_rms_norm": KernelBudget(programs=6),
    "_qk_norm_rope": KernelBudget(programs=8),
    "_qk_norm_rope_backward": KernelBudget(programs=4),
    "_swiglu": KernelBudget(programs=12),
    "_swiglu_backward": KernelBudget(programs=8),
    "_attend_splits": KernelBudget(programs=2, product="HMMA", loads=1),
    "_merge_splits": KernelBudget(programs=8),
    "_attend_chunks": KernelBudget(programs=1, product="HGMMA", loads=1),
    "flash_forward": KernelBudget(programs=1, product="HGMMA"),
    "flash_backward_queries": KernelBudget(programs=1, product="HGMMA"),
    "flash_backward_keys": KernelBudget(programs=1, product="HGMMA"),
    "_product": KernelBudget(programs=2, product="HMMA", loads=4),
    "_add_parts": KernelBudget(programs=8),
}


def inspect(binary: Binary, arch: int) -> Report:
    """Returns what the machine code of a kernel takes."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", "-sass", file.name]
        code = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, spilled = map(int, re.search(r"REG:(\d+) STACK:(\d+)", code).groups())
    loop = product_loop(code)
    product = PRODUCT.search("\n".join(loop) or code)
    order = re.findall(rf"\b({WAIT}|{RELEASE}|{ACCESS})\b", code)
    return Report(
        kernel=binary.kernel,
        registers=registers,
        spilled=spilled,
        shared=binary.shared,
        programs=resident_programs(registers, binary.shared, binary.warps, arch),
        product=product[0] if product else "",
        loads=len([instruction for instruction in loop if re.search(r"\bLDG\b", instruction)]),
        early=binary.early,
        waits=order[:2] == [WAIT, RELEASE],
        spills=len(re.findall(r"\b(?:LDL|STL)\b", "\n".join(loop) or code)),
    )


def product_loop(code: str) -> list[str]:
    """Returns the instructions of the shortest loop that multiplies matrices.

    LDGSTS in it copies to shared memory while the program goes on. LDG waits in a register.
    """
    instructions = []  # (address, text)
    for address, text in re.findall(r"/\*([0-9a-f]{4,5})\*/\s+(.*?)\s*;", code):
        instructions.append((int(address, 16), text))
    shortest: list[str] = []
    for end, text in instructions:
        target = re.search(r"\bBRA\b.*0x([0-9a-f]+)", text)
        if not target or int(target[1], 16) >= end:
            continue  # no jump back
        start = int(target[1], 16)
        body = [text for address, text in instructions if start <= address <= end]
        multiplies = any(PRODUCT.search(text) for text in body)
        if multiplies and (not shortest or len(body) < len(shortest)):
            shortest = body
    return shortest


def resident_programs(registers: int, shared: int, warps: int, arch: int) -> int:
    """Returns how many programs fit on a multiprocessor at once (CUDA programming guide, 16.2)."""
    shared_memory, most_warps, most_programs = MULTIPROCESSOR[arch]
    registers_of_warp = 32 * -(-registers // 8) * 8
    return min(
        REGISTERS // (registers_of_warp * warps),
        shared_memory // (shared + 1024),
        most_warps // warps,
        most_programs,
    )


def faults(report: Report, arch: int) -> list[str]:
    """Returns in what a kernel breaks its budget."""
    breaches = []
    if report.spills:
        breaches.append("spills in the loop" if report.product else "spills")
    if report.early and not report.waits:
        breaches.append("does not wait first")
    if report.kernel not in BUDGETS:
        return [*breaches, "has no budget"]
    budget = BUDGETS[report.kernel]
    if report.programs < budget.programs:
        breaches.append(f"expected {budget.programs} programs")
    product = budget.product
    if product == "HGMMA":
        product = WIDE_PRODUCT.get(arch, "HMMA")
    if report.product != product:
        breaches.append(f"expected {product or 'no products'}")
    if report.loads > budget.loads:
        breaches.append(f"expected {budget.loads} loads")
    return breaches


def compiled_cases(word: str) -> list[Case]:
    """Returns the cases whose name contains the word; exits with status 2 if there are none."""
    return select(word, all_cases(QWEN3_8B) + other_shapes())


def compile_cases(arch: int, word: str) -> list[str]:
    """Returns a line for each kernel of the cases that no earlier case has compiled."""
    driver = Driver(arch)
    triton.runtime.driver.set_active(driver)
    lines = []
    for case in compiled_cases(word):
        driver.compiled.clear()
        title = f"sm_{arch}  {case.name:47}"
        try:
            with torch.device("meta"):
                case.call(*case.make())
        except triton.runtime.errors.OutOfResources as error:
            lines.append(f"{title} WRONG: {error}")
            continue
        for binary in driver.compiled:
            report = inspect(binary, arch)
            line = f"{title} {report}"
            breaches = faults(report, arch)
            if breaches:
                line += f"  WRONG: {', '.join(breaches)}"
            lines.append(line)
    return lines


def specialisations(word: str) -> list[str]:
    """Returns a line for each kernel that is compiled anew for another number of TOKENS.

    Nothing is compiled: Triton asks a hook first, which keeps the key of the variant.
    """
    triton.runtime.driver.set_active(Driver(90))
    keys: dict[tuple[str, str], dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))

    def refuse(*, key, fn, **_) -> bool:
        keys[family, fn.name][tokens].add(str(key))
        return True

    triton.knobs.runtime.jit_cache_hook = refuse
    for tokens in TOKENS:
        shape = replace(
            QWEN3_8B,
            tokens=tokens,
            rows=tokens,
            context=tokens,
            long_context=tokens,
            prefix=QWEN3_8B.page,
        )
        for case in all_cases(shape):
            if word in case.name:
                family = re.sub(r"\d+", "#", case.name)
                with torch.device("meta"):
                    case.call(*case.make())
    triton.knobs.runtime.jit_cache_hook = None
    lines = []
    for (family, kernel), variants in sorted(keys.items()):
        if len({frozenset(kinds) for kinds in variants.values()}) > 1:
            counts = ", ".join(f"{len(variants[tokens])} at {tokens}" for tokens in TOKENS)
            lines.append(f"{family}: {kernel} WRONG: its variants differ by tokens: {counts}")
    return lines


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks.gpu_parts.compile", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--kernel", default="", help="only cases whose name contains this")
    options = parser.parse_args(argv)
    compiled_cases(options.kernel)
    # A kernel keeps the GPU of its first launch, so a process is given one task and then replaced.
    # On a loaded machine it would take a second task before the others have started.
    tasks = [(arch, options.kernel) for arch in ARCHITECTURES]
    with get_context("spawn").Pool(len(tasks) + 1, maxtasksperchild=1) as pool:
        differing = pool.apply_async(specialisations, (options.kernel,))
        lines = sum(pool.starmap(compile_cases, tasks, chunksize=1), [])
        lines += differing.get()
    print("\n".join(lines))
    return int(any("WRONG" in line for line in lines))


if __name__ == "__main__":
    sys.exit(main())
