"""The command line of train.py: its options, which run they mean, and the signals that stop it."""

from __future__ import annotations

import atexit
import ctypes
import gc
import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import torch
from tqdm import tqdm
from tyro.conf import FlagCreatePairsOff, arg

from nanorchestra import settings
from nanorchestra.config import Config, check
from nanorchestra.errors import nearest, require
from nanorchestra.model.checkpoint import NANO_BASE
from nanorchestra.settings import Settings
from nanorchestra.training.costs import GPUS
from nanorchestra.training.run import RunFolder, path_of_run

RESUMABLE = ("run.checkpoint_every", "grpo.steps")  # may change when a run is resumed


@dataclass(frozen=True)
class Options:
    """The options of train.py; comments are the help."""

    config: str = "nano"  # a TOML file, or the name of one in configs/; sets the defaults below
    # a run to continue: its directory, or its name in runs/; may change grpo.steps and
    # run.checkpoint_every
    resume: str = ""
    # the run in small, of two steps, on CPUs, in run.name-dry-run
    dry_run: FlagCreatePairsOff[bool] = False
    plan: FlagCreatePairsOff[bool] = False  # print the memory of a GPU by part; no training
    gpus: int = 1  # for --plan: how many GPUs
    gpu: Literal[tuple(GPUS)] = "h100"  # for --plan
    memory: float = 0.0  # for --plan: GB of one GPU; 0: as sold
    settings: Annotated[Settings, arg(name="")] = Config()


def parse(words: list[str], description: str | None = None) -> Options:
    """Returns the options, with all settings. UserError."""
    names = Options.__annotations__  # for nearest names, beside the settings
    # They are read once for the config that they name, and again with its values as defaults.
    first, _ = settings.read(Options, words, names, add_help=False, return_unknown_args=True)
    run = RunFolder.open(_run_named(first.resume)).path / "config.toml" if first.resume else None
    preset = settings.load_config(run or first.config)
    options = settings.read(
        Options,
        words,
        names,
        prog="train.py",
        description=description,
        default=Options(settings=preset),
    )
    check(options.settings)
    planning = (options.gpus, options.gpu, options.memory) != (1, "h100", 0)
    require(options.plan or not planning, "--gpus, --gpu and --memory are only for --plan; add it")
    if options.resume:
        before, now = preset.values(), options.settings.values()
        fixed = [name for name in now if now[name] != before[name] and name not in RESUMABLE]
        if options.config != "nano":
            fixed.append("--config")
        if options.dry_run:
            fixed.append("--dry-run")
        require(
            not fixed,
            "--resume continues with the run's own config.toml; it cannot change "
            f"{', '.join(fixed)}, only {', '.join(RESUMABLE)}",
        )
    return options


def choose_run(options: Options) -> tuple[Config, Path, bool]:
    """Returns the config, the run's directory, and whether to continue what is in it. UserError."""
    config = options.settings
    if options.resume:
        folder = RunFolder.open(_run_named(options.resume))
        summary = folder.summary()
        require(
            not summary or config.grpo.steps > summary.get("steps", 0),
            f"{folder.path}: this run is finished; --grpo.steps above {summary.get('steps')} "
            "extends it",
        )
        return config, folder.path, True
    require(
        not settings.is_dry_run(config),
        f"run.name is {config.run.name!r}; names of dry runs end so, --dry-run gives them",
    )
    first = int(os.environ.get("RANK", 0)) == 0  # which alone makes the directory, and says so
    if options.dry_run:
        named = config.model.path
        if first and named and Path(named).resolve() != NANO_BASE:
            print(f"dry run: assets/base in place of {named}", flush=True)
        config = settings.scaled_down(config, str(NANO_BASE))
    path = path_of_run(config.run.root, config.run.name, "run.name")
    # torchrun starts the same command again after a failure. The run's own config.toml has the
    # commit of its model, too.
    again = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) > 0
    if again and (path / "config.toml").exists():
        return settings.load_config(path / "config.toml"), path, True
    if first and not options.dry_run and not options.plan:  # before the ranks wait for each other
        taken = (path / "config.toml").is_file()
        right = f"go on with --resume {path}, or choose another --run.name"
        require(not taken, f"{path}: there is such a run; {right}")
    return config, path, False


def _run_named(word: str) -> Path:
    """Returns the directory that `word` names: a path, or the name of a run in runs/. UserError."""
    path, root = Path(word), Path(Config().run.root)
    if path.exists():
        return path
    near = nearest(
        word.removeprefix(f"{root}/"), [run.parent.name for run in root.glob("*/*.toml")]
    )
    known = (root / word).is_dir()
    require(known, f"{word}: no such run; give its directory, or its name in {root}/{near}")
    return root / word


def prepare_process(config: Config) -> None:
    """Chooses the CPU threads of this process, and what memory it keeps.

    Memory that glibc returns to the system, or takes from it for one tensor alone, costs a tenth of
    a step on a CPU in new pages. oneDNN keeps the code of 1,024 products in bfloat16, one for each
    shape. Packs differ in length, so few are used again, and they grow to gigabytes. To look for
    garbage in all that has been imported takes 0.2 s, in every second to fourth step.
    """
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "32")  # read at the first product
    cores = len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    torch.set_num_threads(config.run.threads or max(1, cores))
    mallopt = ctypes.CDLL(None).mallopt
    mallopt(-4, 0)  # M_MMAP_MAX: no tensor has pages of its own
    mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD
    gc.freeze()
    atexit.register(gc.unfreeze)  # nanobind would report at the end what is not collected


class Stop:
    """Turns SIGINT and SIGTERM into a flag that is read between steps.

    A second SIGINT ends the process at once, and so does the first signal while `at_once` is true,
    as it is until the run begins. SIGTERM may come twice: by way of torchrun too. `says` is what is
    printed at the first signal, as the run gets on. As a context manager it gives the signals back
    at its end.
    """

    def __init__(self) -> None:
        self.asked, self.at_once, self.says = False, True, "stopped before the first step"
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
        if self.asked:
            return
        self.asked = True
        if self.at_once:
            tqdm.write(self.says, file=sys.stderr)
            raise KeyboardInterrupt
        text = f"{self.says}; Ctrl-C again: at once"
        if int(os.environ.get("WORLD_SIZE", 1)) > 1:
            text += "; torchrun kills what has not ended after its --shutdown-timeout"
        tqdm.write(text, file=sys.stderr)
