"""Compiles the C of native/ for this machine, at its first use."""

from __future__ import annotations

import ctypes
import hashlib
import os
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

import torch

SOURCES = Path(__file__).with_name("native")
LARGEST_DIM = 256  # of a head, MAX_DIM of native.h
COMMAND = "cc -O3 -march=native -fopenmp -fPIC -shared"
CPU_FEATURES = ("flags", "Features")  # how a line of /proc/cpuinfo begins: on x86, on ARM


@cache
def compiled(name: str, *options: str) -> ctypes.CDLL | None:
    """Returns the C file `name` of native/ as a library, or None where it cannot be had.

    It is compiled into ~/.cache/nanorchestra (XDG_CACHE_HOME), once for each source and CPU. If the
    compiler fails, one line on stderr says so.
    """
    command = [*COMMAND.split(), *options]
    source = SOURCES / name
    text = source.read_text() + (SOURCES / "native.h").read_text()
    key = hashlib.sha256(f"{command}{_cpu_features()}{text}".encode()).hexdigest()[:16]
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nanorchestra"
    built = folder / f"{source.stem}-{key}.so"
    try:
        if not built.exists():
            _compile(command, source, built)
        return ctypes.CDLL(str(built))
    except (OSError, subprocess.CalledProcessError) as error:
        reason = str(error)
        if isinstance(error, subprocess.CalledProcessError):
            reason = f"{command[0]}: {_first_error(error.stderr)}"
        print(f"{name} cannot be compiled, so torch computes: {reason}", file=sys.stderr)
        return None


def compiled_for(dtype: torch.dtype, name: str) -> ctypes.CDLL | None:
    """Returns a C file that computes in fp32, or in bf16 if the CPU has instructions for it."""
    if dtype == torch.bfloat16 and torch.cpu._is_avx512_bf16_supported():
        return compiled(name, "-DBF16")
    return compiled(name) if dtype == torch.float32 else None


def address(tensor: torch.Tensor | None) -> int | None:
    """Returns where a tensor's numbers lie, for a C function; None for NULL."""
    return None if tensor is None else tensor.data_ptr()


def _cpu_features() -> str:
    """Returns the line of /proc/cpuinfo that lists the instructions of the CPU, or ""."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else ()
    return next((line for line in lines if line.startswith(CPU_FEATURES)), "")


def _compile(command: list[str], source: Path, built: Path) -> None:
    """Compiles a C file into the file `built`, which is whole whenever it exists."""
    built.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=built.parent) as directory:
        part = Path(directory) / built.name
        command = [*command, "-o", str(part), str(source)]
        subprocess.run(command, check=True, capture_output=True, text=True, errors="replace")
        part.replace(built)


def _first_error(stderr: str) -> str:
    """Returns the first line of a compiler's output that tells of an error, or its last line."""
    lines = stderr.strip().splitlines() or ["it says nothing"]
    return next((line for line in lines if "error" in line), lines[-1])
