"""The command line of train.py: its options, which run they mean, and the signals that stop it."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from argparse import Namespace, RawDescriptionHelpFormatter
from pathlib import Path

import torch
from tqdm import tqdm

from nanorchestra import settings
from nanorchestra.agent.load import NANO
from nanorchestra.config import Config
from nanorchestra.errors import ArgumentParser, require
from nanorchestra.report.run import Run
from nanorchestra.training.costs import GPUS


def parse(arguments: list[str], description: str | None = None) -> Namespace:
    """Returns the options. UserError."""
    parser = ArgumentParser(
        prog="train.py",
        usage="train.py [options]",
        description=description,
        formatter_class=RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    changes = ", ".join(settings.RESUMABLE)
    add("--config", help="a TOML file, or the name of one in configs/ (default: nano)")
    add("--resume", metavar="RUN", help=f"a run directory to continue; may change {changes}")
    add("--dry-run", action="store_true", help="the run in small, on CPUs, in run.name-dry-run")
    add("--plan", action="store_true", help="print memory by part and time by phase; no training")
    add("--gpus", type=int, help="for --plan: how many GPUs (default: 1)")
    add("--gpu", choices=GPUS, help="for --plan (default: h100)")
    add("--memory", type=float, metavar="GB", help="for --plan: of one GPU (default: as sold)")
    text = "for --plan: estimate the bill of paid calls by playing so many tasks"
    add("--probe", type=int, metavar="TASKS", help=text)
    settings.add_settings(parser)
    options = parser.parse_args(arguments)
    planned = ("gpus", "gpu", "memory", "probe")
    planning = [name for name in planned if getattr(options, name) is not None]
    require(options.plan or not planning, f"--{' --'.join(planning)}: only for --plan; add --plan")
    fixed = [name for name in settings.given_settings(options) if name not in settings.RESUMABLE]
    fixed += [name for name in ("config", "dry_run") if getattr(options, name)]
    require(
        not (options.resume and fixed),
        f"--resume continues with the run's own config.toml; it cannot change {', '.join(fixed)}, "
        f"only {changes}",
    )
    return options


def choose_run(options: Namespace) -> tuple[Config, Path, bool]:
    """Returns the config, the run's directory, and whether to continue what is in it. UserError."""
    given = settings.given_settings(options)
    if options.resume:
        folder = Run.open(options.resume)
        config, summary = settings.load_config(folder.path / "config.toml", given), folder.summary()
        require(
            not summary or config.grpo.steps > summary.get("steps", 0),
            f"{folder.path}: this run is finished; --grpo.steps above {summary.get('steps')} "
            "extends it",
        )
        return config, folder.path, True
    config = settings.load_config(options.config or "nano", given)
    if options.dry_run:
        config = settings.scaled_down(config, str(NANO))
    name = config.run.name
    require(
        name not in ("", ".", "..") and "/" not in name,
        f"run.name is {name!r}; it must be the name of a directory, which {config.run.root} gets",
    )
    path = Path(config.run.root) / name
    # torchrun starts the same command again after a failure. The run's own config.toml has the
    # commit of its model, too.
    again = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) > 0
    if again and (path / "config.toml").exists():
        return settings.load_config(path / "config.toml"), path, True
    return config, path, False


def prepare_process(config: Config) -> None:
    """Chooses the CPU threads of this process, and what memory it keeps.

    Memory that glibc returns to the system costs a tenth of a step on a CPU in new pages. oneDNN
    keeps the code of 1,024 products in bfloat16, one for each shape. Packs differ in length, so few
    are used again, and they grow to gigabytes.
    """
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "32")  # read at the first product
    cores = len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    torch.set_num_threads(config.run.threads or max(1, cores))
    mallopt = ctypes.CDLL(None).mallopt
    mallopt(-3, 32 << 20)  # M_MMAP_THRESHOLD, at its maximum
    mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD


class Stop:
    """Turns SIGINT and SIGTERM into a flag that is read between steps.

    A second SIGINT ends the process at once. SIGTERM may come twice: by way of torchrun too.
    As a context manager it gives the signals back at its end.
    """

    def __init__(self) -> None:
        self.asked = False
        self._before = {}
        for number in (signal.SIGINT, signal.SIGTERM):
            if signal.getsignal(number) != signal.SIG_IGN:  # as a shell starts a job in background
                self._before[number] = signal.signal(number, self._ask)

    def __enter__(self) -> Stop:
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _ask(self, number, frame):
        if self.asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        if not self.asked:
            self.asked = True
            text = "stopping after this step; Ctrl-C again: at once"
            if int(os.environ.get("WORLD_SIZE", 1)) > 1:
                text += "; torchrun kills what has not ended after its --shutdown-timeout"
            tqdm.write(text, file=sys.stderr)
