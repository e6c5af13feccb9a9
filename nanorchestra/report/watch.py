"""What a run shows to those who watch it while it goes on: its report, written again and again, and TensorBoard or wandb if asked for.

None of this may slow the training down, change its numbers or end it.
"""

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

from nanorchestra.errors import UserError
from nanorchestra.report.run import Run

ROOT = Path(__file__).resolve().parents[2]
LOGS = {
    "tensorboard": "torch.utils.tensorboard",
    "wandb": "wandb",
}  # what run.log_to may name, and the module that it takes
Log = Callable[[dict[str, Any]], None]


class Watch:
    """On the rank that writes. `every`: seconds between two reports, 0 for none before the run's end; `log_to`: see `needed`."""

    def __init__(self, run: Run, log_to: str = "", every: float = 0.0):
        self.run, self.every = run, every
        self.logs: list[Log] = [
            {"tensorboard": _tensorboard, "wandb": _wandb}[name](module, run.path)
            for name, module in needed(log_to).items()
        ]
        self.begun, self._writer = time.monotonic(), None

    def log(self, row: dict[str, Any]) -> None:
        """A row of metrics.jsonl, for TensorBoard and wandb."""
        for log in self.logs:
            log(row)

    def report(self) -> None:
        """Begins to write the report anew, if it is time. To be called at every step.

        It takes seconds of Python, which in a thread the rollouts would miss: so a process of its own, of the lowest priority, one at a time.
        """
        if (
            not self.every
            or time.monotonic() - self.begun < self.every
            or (self._writer and self._writer.poll() is None)
        ):
            return
        self.begun = time.monotonic()
        try:
            self._writer = subprocess.Popen(
                [sys.executable, "-m", "nanorchestra.report.page", self.run.path.resolve()],
                cwd=ROOT,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
            )  # Ctrl-C is for the run
            os.setpriority(os.PRIO_PROCESS, self._writer.pid, 19)
        except OSError as error:
            print(f"the live report is not written this time: {error.strerror}", file=sys.stderr)

    def close(self) -> None:
        """Ends a report that is being written: what comes next knows more."""
        if self._writer:
            self._writer.terminate()
            self._writer.wait()


def needed(log_to: str) -> dict[str, Any]:
    """The modules for `log_to`, names with commas between: "", "tensorboard", "wandb", "tensorboard,wandb". UserError for another name, or if
    one is not installed."""
    modules = {}
    for name in filter(None, log_to.split(",")):
        if name not in LOGS:
            raise UserError(
                f"run.log_to is {log_to!r}; it must be empty, tensorboard, wandb, or both with a comma between"
            )
        try:
            modules[name] = import_module(LOGS[name])
        except ImportError:
            raise UserError(
                f"run.log_to is {log_to!r}, but {name} is not installed; pip install {name}, or leave run.log_to empty"
            ) from None
    return modules


def scalars(row: dict[str, Any], prefix: str = "") -> dict[str, float]:
    """The numbers of a row; those of a table inside it are called table/name."""
    found: dict[str, float] = {}
    for name, value in row.items():
        if isinstance(value, dict):
            found |= scalars(value, f"{prefix}{name}/")
        elif isinstance(value, (int, float)) and name not in ("step", "phase"):
            found[prefix + name] = float(value)
    return found


def _tensorboard(module: Any, path: Path) -> Log:
    """Events in path/tensorboard/PHASE, so that training and evaluation stand in one diagram. Steps that a resumed run makes again replace the old."""
    writers: dict[str, Any] = {}

    def log(row: dict[str, Any]) -> None:
        phase, step = row["phase"], row["step"]
        if phase not in writers:
            writers[phase] = module.SummaryWriter(
                str(path / "tensorboard" / phase), purge_step=step
            )
        for name, value in scalars(row).items():
            writers[phase].add_scalar(name, value, step)
        writers[phase].flush()

    return log


def _wandb(module: Any, path: Path) -> Log:
    """A run of the project "nanorchestra", whose name and age make its id: a resumed run goes on with it."""
    config = path / "config.toml"
    try:
        module.init(
            project="nanorchestra",
            name=path.name,
            id=f"{path.name}-{config.stat().st_mtime_ns}",
            resume="allow",
            dir=str(path),
            config=tomllib.loads(config.read_text()),
        )
    except Exception as error:  # without a key, without a network: its own kinds of error
        raise UserError(
            f"run.log_to: wandb does not start ({' '.join(str(error).split())}); run `wandb login`, or set WANDB_MODE=offline"
        ) from None
    for phase in ("warm_start", "grpo", "evaluation"):
        module.define_metric(f"{phase}/*", step_metric=f"{phase}/step")

    def log(row: dict[str, Any]) -> None:
        module.log(
            {
                f"{row['phase']}/{name}": value
                for name, value in (scalars(row) | {"step": row["step"]}).items()
            }
        )

    return log


def peak_memory_mb(cuda: bool) -> float:
    """MB of 2^20 bytes, the most so far: of this process's memory, or of the GPU's that this process had allocated."""
    if cuda:
        return import_module("torch").cuda.max_memory_allocated() / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
