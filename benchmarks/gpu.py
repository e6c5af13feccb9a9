"""A GPU in one command: every kernel, the engine and a GRPO step, in four minutes of an H200.

    python benchmarks/gpu.py --first              two minutes: what can crash, smallest first
    python benchmarks/gpu.py --out DIR            every part
    python benchmarks/gpu.py --only decode grpo   parts whose name contains one of these
    python benchmarks/gpu.py --rehearse           all parts in small on the CPU

It needs torch, triton, safetensors, tokenizers, tqdm, jsonschema, pydantic and tyro, no network and
no world, server or index of the project. A part runs in a process of its own with a limit on its
time, so that a fault of the driver or too little memory ends that part alone.

The results are in DIR/gpu-CARD.json (DIR is runs/ by default), written after every part; those of
parts that are not run again stay. Exit status 1 if a part has failed.
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
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.gpu_parts import NotHereError, Part, write  # noqa: E402

# Each part is a function in a module of gpu_parts. What all else rests on comes first.
FIRST = {
    "environment": "first.environment",
    "wide products": "first.wide_products",
    "log-probabilities": "first.log_probabilities",
    "checkpointed attention": "first.checkpointed_attention",
    "tokens as on the CPU": "engine.tokens_as_on_cpu",
    "grpo in small": "training.in_small",
    "profile": "first.decode_profile",
}
PARTS = {
    "pointwise": "kernels.pointwise",
    "attention": "kernels.paged_attention",
    "training attention": "kernels.training_attention",
    "quantised products": "kernels.quantised_products",
    "tokens as on the CPU": "engine.tokens_as_on_cpu",
    "grpo 0.6b": "training.small",
    "grpo 4b": "training.large",
    "decode": "engine.decode",
    "steps": "engine.steps",
    "early launches": "engine.early_launches",
    "serving": "engine.serving",
    "vllm": "engine.vllm",
}
LIMIT_S = 180.0  # of a part: the longest took 42 on an H200, to compile all kernels takes 40 more
PATIENCE = 6  # a busy machine may rehearse slowly


def main(argv: list[str] | None = None) -> int:
    """Runs the parts that are asked for."""
    options = arguments(argv)
    if options.part:
        return child(options.part, options.rehearse, options.file)
    about_machine = machine(options.rehearse)
    if not about_machine:
        print("gpu.py: there is no GPU here; --rehearse runs in small on the CPU", file=sys.stderr)
        return 2
    print(", ".join(f"{name} {value}" for name, value in about_machine.items()))

    card = re.sub(r"nvidia|[^a-z0-9]+", "-", about_machine["card"].lower()).strip("-")
    report = options.out / f"gpu-{'rehearsal' if options.rehearse else card}.json"
    report.parent.mkdir(parents=True, exist_ok=True)
    results = json.loads(report.read_text()) if report.exists() else {}
    wrong = []
    for name in FIRST if options.first else PARTS:
        if options.only and not any(word in name for word in options.only):
            continue
        file = report.with_name(report.stem + "-running.json")
        result = run_part(name, options.rehearse, LIMIT_S, file)
        file.unlink(missing_ok=True)
        results[name] = {"machine": about_machine, **result}
        write(report, results)
        if result["status"] == "failed":
            wrong.append(name)
    print(f"figures: {report}")
    if wrong:
        print("failed:", ", ".join(wrong))
    return int(bool(wrong))


def arguments(argv: list[str] | None) -> argparse.Namespace:
    """Parses the options of a call, or of the process of a part."""
    parser = argparse.ArgumentParser(prog="benchmarks/gpu.py")
    parser.add_argument("--first", action="store_true", help="what can crash, in two minutes")
    parser.add_argument("--rehearse", action="store_true", help="in small on the CPU")
    parser.add_argument("--only", nargs="+", metavar="WORD", help="only parts with such a name")
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


def run_part(name: str, rehearse: bool, limit: float, file: Path) -> dict[str, Any]:
    """Runs a part in a process group of its own. Returns its status, seconds and figures."""
    file.unlink(missing_ok=True)
    command = [sys.executable, str(Path(__file__).resolve()), "--part", name, "--file", str(file)]
    environment = dict(os.environ)
    if rehearse:
        limit *= PATIENCE
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
    module, function = (FIRST | PARTS)[name].split(".")
    try:
        if rehearse:
            import_module("benchmarks.gpu_parts.interpreter")
        work = getattr(import_module(f"benchmarks.gpu_parts.{module}"), function)
        work(Part(rehearse, file))
    except NotHereError as error:
        print(error, file=sys.stderr)
        return 3
    except Exception:
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
