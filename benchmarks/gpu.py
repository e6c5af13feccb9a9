"""The first day on a GPU in one command: every kernel, the engine and a GRPO step, on one card.

    python benchmarks/gpu.py                      every part that is not done yet
    python benchmarks/gpu.py --only decode grpo   parts whose name contains one of these, again
    python benchmarks/gpu.py --rehearse           all parts in small on the CPU, figures in runs/

A part runs in a process of its own with a limit on its time, so that a fault of the driver or too
little memory ends that part alone. Figures are written after every part and within the long ones: a
second call goes on where the first one stopped, unless the code has changed. `--minutes` ends the
call early (8 by default). Figures go to benchmarks/gpu-CARD.json, plots beside them. Exit status 1
if a part has failed or was not reached.
"""

from __future__ import annotations

import argparse
import hashlib
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
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.gpu_parts import NotHereError, Part, write  # noqa: E402

PARTS = {  # name -> (module of gpu_parts, its function, seconds at most on a GPU)
    "pointwise": ("kernels", "pointwise", 100),
    "attention": ("kernels", "attention_kernels", 80),
    "training attention": ("kernels", "training_attention", 80),
    "output matrix": ("kernels", "outputs", 80),
    "quantised products": ("kernels", "quantised", 60),
    "tokens as on the CPU": ("equality", "tokens", 60),
    "steps": ("engine", "steps", 70),
    "decode": ("engine", "decode", 80),
    "serving": ("engine", "serving", 90),
    "vllm": ("engine", "vllm", 120),
    "grpo 0.6b": ("training", "small", 70),
    "grpo 4b": ("training", "large", 90),
    "nccl": ("training", "nccl", 40),
}


def machine(rehearse: bool) -> dict[str, str]:
    """The card, the driver and the libraries."""
    import torch
    import triton

    found = {"torch": torch.__version__, "triton": triton.__version__}
    found |= {"python": platform.python_version(), "card": "cpu"}
    if not rehearse:
        memory = torch.cuda.get_device_properties(0).total_memory / 1e9
        found |= {"card": torch.cuda.get_device_name(), "memory": f"{memory:.1f} GB"}
        query = ["nvidia-smi", "--query-gpu=driver_version,clocks.max.sm", "--format=csv,noheader"]
        try:
            found["driver"] = subprocess.run(query, capture_output=True, text=True).stdout.strip()
        except OSError:
            found["driver"] = "not known"
    return found


def code() -> str:
    """A hash of the code that is measured: a part done with other code is done again."""
    files = [*ROOT.glob("kernels/*.py"), *ROOT.glob("nanorchestra/*/*.py"), *HERE.glob("*.py")]
    digest = hashlib.sha256(b"".join(file.read_bytes() for file in sorted(files)))
    return digest.hexdigest()[:12]


HERE = Path(__file__).resolve().parent / "gpu_parts"


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
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        status, reason, errors = "failed", f"it ran longer than {limit:.0f} s", ""
    seconds = round(time.monotonic() - start, 1)
    figures = json.loads(file.read_text()) if file.exists() else {}
    result = {"status": status, "seconds": seconds, "figures": figures}
    if status != "done":
        result["reason"] = reason or f"exit status {process.returncode}"
        print(f"  {status.upper()}: {result['reason']}", flush=True)
    if status == "failed":
        result["traceback"] = errors[-3000:]
    return result


def child(name: str, rehearse: bool, file: Path) -> int:
    """Runs one part here. Returns the exit status of its process."""
    module, function, _ = PARTS[name]
    try:
        getattr(import_module(f"benchmarks.gpu_parts.{module}"), function)(Part(rehearse, file))
    except NotHereError as error:
        print(error, file=sys.stderr)
        return 3
    except Exception:
        traceback.print_exc()
        return 1
    return 0


def main(argv: list[str] | None = None) -> int:
    """Runs the parts that are left, then draws the plots."""
    parser = argparse.ArgumentParser(prog="benchmarks/gpu.py")
    parser.add_argument("--rehearse", action="store_true", help="in small on the CPU")
    parser.add_argument("--only", nargs="+", metavar="WORD", help="only parts with such a name")
    parser.add_argument("--minutes", type=float, default=8.0, help="of this call at most")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--file", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.part:
        return child(options.part, options.rehearse, options.file)
    import torch

    if not (options.rehearse or torch.cuda.is_available()):
        print("gpu.py: there is no GPU here; --rehearse runs in small on the CPU", file=sys.stderr)
        return 2
    # A busy machine may rehearse slowly: then no limit is what is measured.
    minutes, patience = (60.0, 6) if options.rehearse else (options.minutes, 1)
    end, found = time.monotonic() + 60 * minutes, machine(options.rehearse)
    place = ROOT / ("runs" if options.rehearse else "benchmarks")
    place.mkdir(exist_ok=True)
    card = re.sub(r"nvidia|[^a-z0-9]+", "-", found["card"].lower()).strip("-")
    report = place / f"gpu-{'rehearsal' if options.rehearse else card}.json"
    old = json.loads(report.read_text()) if report.exists() else {}
    results = old.get("parts", {}) if old.get("code") == code() and not options.rehearse else {}
    figures = {"machine": found, "code": code(), "date": time.strftime("%Y-%m-%d"), "parts": {}}
    figures["parts"] = results
    print(", ".join(f"{name} {value}" for name, value in found.items()))
    for name, (_, _, limit) in PARTS.items():
        wanted = any(word in name for word in options.only or [""])
        done = results.get(name, {}).get("status") in ("done", "not here")
        if not wanted or (done and not options.only):
            continue
        left = end - time.monotonic()
        if left < 5:
            print(f"{name}\n  not reached: {minutes:g} minutes are over; call again")
            results.setdefault(name, {"status": "not reached"})
        else:
            file = report.with_name(report.stem + "-running.json")
            results[name] = run_part(name, options.rehearse, min(patience * limit, left), file)
            file.unlink(missing_ok=True)
        write(report, figures)
    from benchmarks.gpu_parts.plots import draw

    drawn = draw(results, report.with_suffix(""))
    print(f"figures: {report}", *(f"plot: {path}" for path in drawn), sep="\n")
    fine = [name for name in PARTS if results.get(name, {}).get("status") in ("done", "not here")]
    left = [name for name in PARTS if name not in fine and (name in results or not options.only)]
    if left:
        print(f"not done: {', '.join(left)}")
    return int(bool(left))


if __name__ == "__main__":
    sys.exit(main())
