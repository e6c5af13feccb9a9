"""The same training by one process and by two: seconds of a warm-start step and of a GRPO step.

    python benchmarks/ranks.py [--steps 10] [--json FILE]

Three runs from the bundled checkpoint on the same tasks, one after the other: one rank on one core,
one rank on two cores with rollouts beside its updates, two ranks on a core each. The seconds of the
whole preset are computed from them. For cores that do nothing else.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import tomllib
from importlib.metadata import version
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parent.parent
RUNS = {
    "one rank on one core": (1, 1),
    "one rank on two cores": (1, 2),
    "two ranks on a core each": (2, 1),
}  # ranks, threads of each: as many cores


def measure(root: Path, ranks: int, threads: int, steps: int) -> dict[str, float]:
    """Returns median seconds of a step of each phase, and the seconds outside of steps."""
    name = f"{ranks}x{threads}"
    start = (
        [sys.executable]
        if ranks == 1
        else [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    )
    options = {
        "run.root": root,
        "run.name": name,
        "run.threads": threads,
        "model.path": ROOT / "assets" / "nano",
        "warm_start.steps": 2 * steps + 4,
        "grpo.steps": steps + 2,
        "evaluation.tasks": 120,
    }
    cores = sorted(os.sched_getaffinity(0))[: ranks * threads]
    done = subprocess.run(
        [
            *start,
            ROOT / "train.py",
            *(str(part) for key, value in options.items() for part in (f"--{key}", value)),
        ],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": str(threads)},
        preexec_fn=lambda: os.sched_setaffinity(0, cores),
    )
    if done.returncode:
        raise SystemExit(f"{name}: train.py ended with {done.returncode}:\n{done.stderr[-2000:]}")
    rows = [json.loads(line) for line in (root / name / "metrics.jsonl").read_text().splitlines()]
    seconds = {
        phase: [row["seconds"] for row in rows if row["phase"] == phase]
        for phase in ("warm_start", "grpo")
    }
    summary = json.loads((root / name / "summary.json").read_text())
    return {
        "warm_start": median(seconds["warm_start"][4:]),
        "grpo": median(seconds["grpo"][1:-1]),  # the last one has no rollout beside it
        "rest": summary["seconds"] - sum(map(sum, seconds.values())),
        "peak_memory_mb": summary["peak_memory_mb"],
    }


def main() -> int:
    """Makes the three runs and prints their times."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--steps", type=int, default=10, help="measured steps of GRPO (default: 10)"
    )
    parser.add_argument("--json", type=Path, help="write the figures there too")
    options = parser.parse_args()
    preset = tomllib.loads((ROOT / "configs" / "nano.toml").read_text())
    steps = {phase: preset[phase]["steps"] for phase in ("warm_start", "grpo")}
    with tempfile.TemporaryDirectory() as root:
        figures = {name: measure(Path(root), *shape, options.steps) for name, shape in RUNS.items()}
    print(f"{'':28}{'warm start s/step':>19}{'GRPO s/step':>13}{'the preset s':>14}{'faster':>8}")
    for name, row in figures.items():
        row["preset"] = sum(steps[phase] * row[phase] for phase in steps) + row["rest"]
        faster = figures["one rank on one core"]["preset"] / row["preset"]
        print(
            f"{name:28}{row['warm_start']:>19.2f}{row['grpo']:>13.2f}{row['preset']:>14.0f}{faster:>8.2f}"
        )
    if options.json:
        sys.path.insert(0, str(ROOT))
        from benchmarks.engine import cpu_name

        machine = {
            "machine": cpu_name(),
            "torch": version("torch"),
            "date": time.strftime("%Y-%m-%d"),
        }
        options.json.write_text(json.dumps(machine | {"figures": figures}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
