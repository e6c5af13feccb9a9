"""The first day on a GPU in one command: every kernel, the engine and a GRPO step, on one card.

    python benchmarks/gpu.py --out DIR            every part that is not done yet
    python benchmarks/gpu.py --only decode grpo   parts whose name contains one of these, again
    python benchmarks/gpu.py --rehearse           all parts in small on the CPU

It needs PyTorch, Triton, NumPy, safetensors, tokenizers and tqdm, and no network; the GRPO steps,
which are train.py's own, need all of requirements.txt. A part runs in a process of its own with a
limit on its time, so that a fault of the driver or too little memory ends that part alone. It is
started only if its limit fits in the minutes of the call (`--minutes`, 9 by
default), so a call ends in time.

All results are in DIR/gpu-CARD.json (DIR is runs/ by default), written after every part. Another
call with the same DIR, or a copy of it on another machine with that card, goes on with the parts
that are left, and ends with those that failed. After a change of the code, `--only` runs parts
again, or another DIR all of them. Exit status 1 if a part has failed or was not reached.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import signal
import subprocess
import sys
import time
import traceback
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.gpu_parts import NotHereError, Part, write  # noqa: E402

# What the parts import. vLLM is measured beside the project where it is.
NEEDED = ("torch", "triton", "numpy", "safetensors", "tokenizers", "tqdm")
DONE = ("done", "not here")


@dataclass(frozen=True)
class GpuWork:
    """The work of a part: a function in a module of gpu_parts, and its seconds at most on a GPU."""

    module: str
    function: str
    limit: float


# In this order: what all else rests on, and what no test on a CPU can tell. The limits of the parts
# up to "decode" fit in one call, and those of the others in a second one.
PARTS = {
    "pointwise": GpuWork("kernels", "pointwise", 80),
    "attention": GpuWork("kernels", "paged_attention", 60),
    "training attention": GpuWork("kernels", "training_attention", 60),
    "output matrix": GpuWork("kernels", "outputs", 60),
    "quantised products": GpuWork("kernels", "quantised_products", 50),
    "grpo 0.6b": GpuWork("training", "small", 90),
    "decode": GpuWork("engine", "decode", 140),
    "tokens as on the CPU": GpuWork("engine", "tokens_as_on_cpu", 60),
    "steps": GpuWork("engine", "steps", 90),
    "serving": GpuWork("engine", "serving", 150),
    "grpo 4b": GpuWork("training", "large", 120),
    "vllm": GpuWork("engine", "vllm", 120),
}


def main(argv: list[str] | None = None) -> int:
    """Runs the parts that are left."""
    start = time.monotonic()
    options = arguments(argv)
    if options.part:
        return child(options.part, options.rehearse, options.file)
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        print(f"gpu.py: {', '.join(missing)} not installed; pip install them", file=sys.stderr)
        return 2
    about_machine = machine(options.rehearse)
    if not about_machine:
        print("gpu.py: there is no GPU here; --rehearse runs in small on the CPU", file=sys.stderr)
        return 2

    card = re.sub(r"nvidia|[^a-z0-9]+", "-", about_machine["card"].lower()).strip("-")
    report = options.out / f"gpu-{'rehearsal' if options.rehearse else card}.json"
    report.parent.mkdir(parents=True, exist_ok=True)
    results = {}
    if report.exists() and not options.rehearse:
        results = json.loads(report.read_text())["parts"]
    print(", ".join(f"{name} {value}" for name, value in about_machine.items()))

    # A busy machine may rehearse slowly: then no limit is what is measured.
    minutes, patience = (60.0, 6) if options.rehearse else (options.minutes, 1)
    end = start + 60 * minutes
    for name in parts_left(results, options.only):
        left, limit = end - time.monotonic(), PARTS[name].limit
        if left < limit:
            print(f"{name}\n  not reached: it may take {limit:.0f} s, and {left:.0f} s are left")
            results.setdefault(name, {"status": "not reached"})
        else:
            file = report.with_name(report.stem + "-running.json")
            longest = min(patience * limit, left)
            results[name] = run_part(name, options.rehearse, longest, file)
            results[name]["machine"] = about_machine
            file.unlink(missing_ok=True)
        write(report, {"parts": results})

    print(f"figures: {report}")
    wrong = []
    for name in PARTS:
        status = status_of(results, name)
        asked = not options.only or name in parts_left({}, options.only)
        if asked and status not in DONE:
            wrong.append(f"{name} ({status})")
    if wrong:
        print("not done:", ", ".join(wrong))
    return int(bool(wrong))


def arguments(argv: list[str] | None) -> argparse.Namespace:
    """Parses the options of a call, or of the process of a part."""
    parser = argparse.ArgumentParser(prog="benchmarks/gpu.py")
    parser.add_argument("--rehearse", action="store_true", help="in small on the CPU")
    parser.add_argument("--only", nargs="+", metavar="WORD", help="only parts with such a name")
    parser.add_argument("--minutes", type=float, default=9.0, help="of this call at most")
    parser.add_argument(
        "--out", type=Path, default=ROOT / "runs", metavar="DIR", help="results (default: runs/)"
    )
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--file", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def machine(rehearse: bool) -> dict[str, str]:
    """Describes the libraries, the card and its driver; empty if there is no card.

    This process asks nvidia-smi: with torch it would hold memory of the card beside its parts.
    """
    description = {"python": platform.python_version()}
    for name in ("torch", "triton", "numpy"):
        description[name] = version(name)
    if rehearse:
        return description | {"card": "cpu"}
    query = "--query-gpu=name,memory.total,driver_version,clocks.max.sm"
    command = ["nvidia-smi", query, "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return {}
    fields = answer.strip().splitlines()[0].split(", ")
    return description | dict(zip(("card", "memory", "driver", "clock"), fields, strict=True))


def parts_left(results: dict[str, Any], only: list[str] | None) -> list[str]:
    """Returns the parts whose name contains a word of `only`, or all that are not done.

    Those that failed come last.
    """
    if only:
        return [name for name in PARTS if any(word in name for word in only)]
    left, failed = [], []
    for name in PARTS:
        status = status_of(results, name)
        if status == "not reached":
            left.append(name)
        elif status not in DONE:
            failed.append(name)
    return left + failed


def status_of(results: dict[str, Any], name: str) -> str:
    """Returns "done", "not here", "failed" or "not reached"."""
    return results.get(name, {}).get("status", "not reached")


def run_part(name: str, rehearse: bool, limit: float, file: Path) -> dict[str, Any]:
    """Runs a part in a process group of its own. Returns its status, seconds and figures."""
    file.unlink(missing_ok=True)
    command = [sys.executable, str(Path(__file__).resolve()), "--part", name, "--file", str(file)]
    environment = dict(os.environ)
    if rehearse:
        command.append("--rehearse")
        environment |= {"TRITON_INTERPRET": "1", "OPENBLAS_NUM_THREADS": "1"}
    print(f"{name}", flush=True)
    start = time.monotonic()
    process = subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True
    )
    try:
        _, errors = process.communicate(timeout=limit)
        status = {0: "done", 3: "not here"}.get(process.returncode, "failed")
        reason = errors.strip().splitlines()[-1][:500] if errors.strip() else ""
    except subprocess.TimeoutExpired:
        status, reason, errors = "failed", f"it ran longer than {limit:.0f} s", ""
    finally:  # also when this process is interrupted
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    result: dict[str, Any] = {"status": status, "seconds": round(time.monotonic() - start, 1)}
    result["date"] = time.strftime("%Y-%m-%d %H:%M")
    if status != "done":
        result["reason"] = reason or f"exit status {process.returncode}"
        print(f"  {status.upper()}: {result['reason']}", flush=True)
    if status == "failed":
        result["traceback"] = errors[-3000:]
    result["figures"] = json.loads(file.read_text()) if file.exists() else {}
    return result


def child(name: str, rehearse: bool, file: Path) -> int:
    """Runs one part here. Returns the exit status of its process."""
    work = PARTS[name]
    try:
        if rehearse:
            import_module("benchmarks.gpu_parts.interpreter")
        module = import_module(f"benchmarks.gpu_parts.{work.module}")
        getattr(module, work.function)(Part(rehearse, file))
    except NotHereError as error:
        print(error, file=sys.stderr)
        return 3
    except Exception:
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
