"""Trains a tool orchestrator: warm start on demonstrations, GRPO, evaluation on held-out tasks.

    python train.py                                 the miniature on a CPU (configs/nano.toml)
    python train.py --config qwen3-8b --grpo.steps 50 --run.name short
    python train.py --resume runs/nano              continues exactly where a run stopped
    python train.py --resume runs/nano --grpo.steps 120          extends a finished run
    torchrun --nproc-per-node 8 train.py --config qwen3-8b       the same on several ranks
    python train.py --config qwen3-8b --dry-run     any run in small, on CPUs
    python train.py --config qwen3-8b --plan --gpus 8            memory and time, no training
    python train.py --warm_start.steps 50 --warm_start.trajectories runs/nano     imitates its best

nanorchestra/training/phases.py has the order of a run, grpo.py a step of GRPO. What is drawn at
random is a function of run.seed, step and place: resuming and more ranks change nothing.
"""

from __future__ import annotations

if __name__ == "__main__":
    from nanorchestra.errors import end_on_interrupt

    end_on_interrupt("train.py")

import ctypes
import os
import shutil
import signal
import sys
import traceback
from argparse import Namespace, RawDescriptionHelpFormatter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from tqdm import tqdm

from nanorchestra import settings
from nanorchestra.agent.load import NANO
from nanorchestra.config import Config
from nanorchestra.errors import INTERRUPTED, ArgumentParser, UserError, command, require
from nanorchestra.files import refuse_links
from nanorchestra.report.run import Run, to_toml
from nanorchestra.tools.sandbox import Sandbox
from nanorchestra.training.bill import Bill
from nanorchestra.training.build import device_and_dtype
from nanorchestra.training.costs import GPUS
from nanorchestra.training.overlap import running
from nanorchestra.training.phases import train
from nanorchestra.training.plan import plan
from nanorchestra.training.ranks import Ranks
from nanorchestra.training.run import TrainingRun
from worlds.api_bill import api_bill
from worlds.mixture import Worlds


class Stop:
    """Turns SIGINT and SIGTERM into a flag that is read between steps.

    A second SIGINT ends the process at once. SIGTERM may come twice: by way of torchrun too.
    As a context manager it gives the signals back at its end.
    """

    def __init__(self) -> None:
        self.asked = False
        numbers = signal.SIGINT, signal.SIGTERM
        self._before = {number: signal.signal(number, self._ask) for number in numbers}

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
            tqdm.write("stopping after this step; Ctrl-C again: at once", file=sys.stderr)


def parse(arguments: list[str]) -> Namespace:
    """Returns the options. UserError."""
    parser = ArgumentParser(
        prog="train.py",
        usage="train.py [options]",
        description=__doc__,
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
    # torchrun starts the same command again after a failure.
    again = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) > 0
    return config, path, again and (path / "config.toml").exists()


def keep_freed_memory() -> None:
    """Makes glibc keep freed memory; returning it costs a tenth of a step on a CPU in new pages."""
    mallopt = ctypes.CDLL(None).mallopt
    mallopt(-3, 32 << 20)  # M_MMAP_THRESHOLD, at its maximum
    mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD


@contextmanager
def ending_together(ranks: Ranks) -> Iterator[None]:
    """Ends the process at once on an error, where an orderly end would wait forever.

    That is with other ranks, which may wait in a collective, or beside a rollout's thread. The
    other ranks are told why.
    """
    try:
        yield
    except BaseException as error:
        if ranks.world == 1 and not running():
            raise
        expected = isinstance(error, UserError | KeyboardInterrupt)
        reason = str(error).split("\n")[0] or type(error).__name__
        if not expected and "peer" not in reason:  # else another rank has gone, and says why
            traceback.print_exc()
        if ranks.first or not expected:
            print(f"train.py: {reason}; go on with --resume", file=sys.stderr, flush=True)
        ranks.fail(reason)
        sys.stdout.flush()
        os._exit(2 if isinstance(error, UserError) else INTERRUPTED if expected else 1)


@command("train.py")
def main(arguments: list[str]) -> int:
    """Runs the command; returns its exit status."""
    options = parse(arguments)
    config, path, resumed = choose_run(options)
    if options.plan:
        gpus = 1 if options.gpus is None else options.gpus
        text, fits = plan(config, gpus, options.memory, options.gpu or "h100")
        print(text)
        if options.probe is not None:
            with Sandbox() as sandbox:
                print("\n" + api_bill(config, options.probe, sandbox))
        return 0 if fits else 1
    device, _ = device_and_dtype(config)
    keep_freed_memory()
    cores = len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    torch.set_num_threads(config.run.threads or max(1, cores))
    # A base in 4 bits is not sharded; it and the adapters choose their dtypes themselves.
    sharded = device == "cuda" and config.lora.base != "int4"
    ranks = Ranks.start(device, shard=config.parallel.shard, sharded=sharded)
    with Stop() as stop, ending_together(ranks), Sandbox() as sandbox:
        # After a restart a slow rank may find the directory that rank 0 has just made.
        resumed = ranks.gather(resumed)[0]
        dry_run = options.dry_run
        run = open_run(config, path, ranks, sandbox, stop, resumed=resumed, dry_run=dry_run)
        finished = train(run)
        run.checkpoints.wait()
        run.watch.close()
        if finished:
            run.say(f"finished: {path} has report.html, summary.json and more")
        else:
            run.say(f"stopped; go on with: python train.py --resume {path}")
        ranks.close()
    # torchrun would start again what ends with another status than 0.
    return 0 if finished or ranks.world > 1 else INTERRUPTED


def open_run(
    config: Config,
    path: Path,
    ranks: Ranks,
    sandbox: Sandbox,
    stop: Stop,
    *,
    resumed: bool,
    dry_run: bool,
) -> TrainingRun:
    """Makes the run's directory and builds the run, or restores it if it is `resumed`. UserError.

    dry_run: the directory of an earlier dry run is replaced.
    """
    folder, new = Run(path), ranks.first and not resumed

    def claim():
        if new:
            if dry_run and (path / "config.toml").exists():
                shutil.rmtree(path)
            Run.create(path, to_toml(config))
            print(f"writing to {path}: config.toml, metrics.jsonl, report.html, model/ and more")
        if ranks.first:
            folder.lock()
        elif resumed:
            refuse_links(path)  # a node may have a directory of its own

    def build():
        worlds = Worlds(config.task, config.run.seed, sandbox, bill.spending)
        return TrainingRun(config, folder, ranks, worlds, stop, bill)

    ranks.together(claim)
    bill = Bill.open(path / "spent", ranks)
    try:
        run = ranks.together(build)
    except UserError:
        if new:
            shutil.rmtree(path)  # frees the name for a corrected command
        raise
    if resumed:
        run.restore()
    return run


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
