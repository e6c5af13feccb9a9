"""Shows a run while it goes on: its report, written again and again, and TensorBoard or wandb."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from nanorchestra.errors import UserError, require
from nanorchestra.report.run import Run, scalars

ROOT = Path(__file__).resolve().parents[2]
# what run.log_to may name, and the module it needs
LOGS = {"tensorboard": "torch.utils.tensorboard", "wandb": "wandb"}
Log = Callable[[dict[str, Any]], None]


class Watch:
    """On the rank that writes. `every`: seconds between two reports, 0 for none during the run."""

    def __init__(self, run: Run, log_to: str = "", every: float = 0.0) -> None:
        self.run, self.every = run, every
        start = {"tensorboard": _tensorboard, "wandb": _wandb}
        self.logs = [start[name](module, run.path) for name, module in needed(log_to).items()]
        self._begun = time.monotonic()
        self._writer: subprocess.Popen | None = None

    def log(self, row: dict[str, Any]) -> None:
        """Send a row of metrics.jsonl to TensorBoard and wandb."""
        for log in self.logs:
            log(row)

    def report(self) -> None:
        """Begin to write the report if it is time; called at every step.

        A process of the lowest priority writes it, one at a time: a thread would take seconds of
        Python from the rollouts.
        """
        waited = time.monotonic() - self._begun
        writing = self._writer and self._writer.poll() is None
        if not self.every or waited < self.every or writing:
            return
        self._begun = time.monotonic()
        module = "nanorchestra.report.page"
        self._writer = subprocess.Popen(
            ["nice", "-n", "19", sys.executable, "-m", module, self.run.path.resolve()],
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for the run
        )

    def close(self) -> None:
        """End a report that is being written, before the last one is."""
        if self._writer:
            self._writer.terminate()
            self._writer.wait()


def needed(log_to: str) -> dict[str, Any]:
    """Return {name: module} for `log_to`: "", "tensorboard", "wandb" or "tensorboard,wandb".

    UserError for another name, or if one is not installed.
    """
    modules = {}
    for name in filter(None, log_to.split(",")):
        require(name in LOGS, f"run.log_to is {log_to!r}; it must be empty or of {list(LOGS)}")
        try:
            modules[name] = import_module(LOGS[name])
        except ImportError:
            message = f"run.log_to is {log_to!r}, but {name} is not installed: pip install {name}"
            raise UserError(message) from None
    return modules


def _tensorboard(module: Any, path: Path) -> Log:
    """Write events to path/tensorboard/PHASE; repeated steps of a resumed run replace the old."""
    writers: dict[str, Any] = {}

    def log(row: dict[str, Any]) -> None:
        phase, step = row["phase"], row["step"]
        if phase not in writers:
            folder = str(path / "tensorboard" / phase)
            writers[phase] = module.SummaryWriter(folder, purge_step=step)
        for name, value in scalars(row).items():
            writers[phase].add_scalar(name, value, step)
        writers[phase].flush()

    return log


def _wandb(module: Any, path: Path) -> Log:
    """Log to the project "nanorchestra"; name and age of a run make its id, for resuming."""
    config = path / "config.toml"
    module.init(
        project="nanorchestra",
        name=path.name,
        id=f"{path.name}-{config.stat().st_mtime_ns}",
        resume="allow",
        dir=str(path),
        config=tomllib.loads(config.read_text(encoding="utf-8")),
    )
    for phase in ("warm_start", "grpo", "evaluation"):
        module.define_metric(f"{phase}/*", step_metric=f"{phase}/step")

    def log(row: dict[str, Any]) -> None:
        values = scalars(row) | {"step": row["step"]}
        module.log({f"{row['phase']}/{name}": value for name, value in values.items()})

    return log


def peak_memory_mb(cuda: bool) -> float:
    """Return the peak memory so far in MB of 2^20 bytes, of this process or of its GPU."""
    if cuda:
        return import_module("torch").cuda.max_memory_allocated() / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
