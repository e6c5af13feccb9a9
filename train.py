"""Trains a tool orchestrator: warm start on demonstrations, GRPO, evaluation on held-out tasks.

    python train.py                                 the miniature on a CPU (configs/nano.toml)
    python train.py --config qwen3-8b --grpo.steps 50 --run.name short
    python train.py --resume runs/nano              continues exactly where a run stopped
    python train.py --resume runs/nano --grpo.steps 120          extends a finished run
    torchrun --nproc-per-node 8 train.py --config qwen3-8b       the same on several ranks
    python train.py --config qwen3-8b --dry-run     any run in small, on CPUs
    python train.py --config qwen3-8b --plan --gpus 8            memory and time, no training
    python train.py --rollouts 4 --run.name seen --model.path runs/nano/model     records rollouts
    python train.py --warm_start.trajectories runs/seen          imitates the best of them

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
from argparse import SUPPRESS, Namespace, RawDescriptionHelpFormatter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from nanorchestra import settings
from nanorchestra.agent.load import NANO
from nanorchestra.agent.policy import check_endpoint
from nanorchestra.config import Config
from nanorchestra.errors import INTERRUPTED, ArgumentParser, UserError, command, require
from nanorchestra.report.run import Run
from nanorchestra.report.watch import needed
from nanorchestra.tools.sandbox import Sandbox
from nanorchestra.training.build import device_and_dtype
from nanorchestra.training.costs import GB
from nanorchestra.training.overlap import running
from nanorchestra.training.phases import record_rollouts, train
from nanorchestra.training.plan import plan
from nanorchestra.training.ranks import Ranks
from nanorchestra.training.run import TrainingRun
from worlds.mixture import Worlds

FIRST = int(os.environ.get("RANK", 0)) == 0  # this process writes the records


class Stop:
    """Turns SIGINT and SIGTERM into a flag that is read between steps.

    A second SIGINT ends the process at once. SIGTERM may come twice: by way of torchrun too.
    """

    def __init__(self) -> None:
        self.asked = False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._ask)

    def _ask(self, number: int, frame: Any) -> None:
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
    add(
        "--rollouts",
        type=int,
        default=SUPPRESS,
        dest="rollout.only",
        metavar="N",
        help="record N steps of rollouts, train nothing",
    )
    add("--plan", action="store_true", help="print memory by part and time by phase; no training")
    add("--gpus", type=int, help="for --plan: how many GPUs (default: 1)")
    add("--gpu", help="for --plan: h100, h200, a100 or 4090 (default: h100)")
    add("--memory", type=float, metavar="GB", help="for --plan: of one GPU (default: as sold)")
    settings.add_settings(parser)
    options = parser.parse_args(arguments)
    for name in ("gpus", "gpu", "memory"):
        missing = options.plan or getattr(options, name) is None
        require(missing, f"--{name} is for --plan; add --plan")
    fixed = [name for name in settings.given_settings(options) if name not in settings.RESUMABLE]
    fixed += [name for name in ("config", "dry_run") if getattr(options, name)]
    require(
        not (options.resume and fixed),
        f"--resume continues with the run's own config.toml; it cannot change {', '.join(fixed)}, "
        f"only {changes}",
    )
    return options


def open_run(options: Namespace) -> tuple[Config, Run, bool]:
    """Returns the config, the run's directory, and whether to continue what is in it. UserError."""
    given = settings.given_settings(options)
    if options.resume:
        folder = Run.open(options.resume)
        config, summary = settings.load_config(folder.path / "config.toml", given), folder.summary()
        require(
            not summary or (config.grpo.steps > summary["steps"] and not config.rollout.only),
            f"{folder.path}: this run is finished; --grpo.steps above {summary.get('steps')} "
            "extends it",
        )
        return config, folder, True
    config = settings.load_config(settings.find_config(options.config or "nano"), given)
    if config.rollout.only:  # there is no update to overlap with
        config = config.replace({"rollout.overlap": False})
    needed(config.run.log_to)
    check_endpoint(config.rollout)
    if options.dry_run:
        config = settings.scaled_down(config, str(NANO))
    device_and_dtype(config)  # says now what is wrong with it
    path = Path(config.run.root) / config.run.name
    begun = (path / "config.toml").exists()
    if begun and int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)):
        # torchrun starts the same command again after a failure
        return settings.load_config(path / "config.toml"), Run.open(path), True
    if not FIRST:
        return config, Run(path), False
    if begun and options.dry_run:
        shutil.rmtree(path)  # an earlier dry run
    return config, Run.create(path, settings.to_toml(config)), False


def keep_freed_memory() -> None:
    """Makes glibc keep freed memory; returning it costs a tenth of a step on a CPU in new pages."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt:
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
    if options.plan:
        config = settings.load_config(
            settings.find_config(options.config or "nano"), settings.given_settings(options)
        )
        gpus = 1 if options.gpus is None else options.gpus
        memory = options.memory and options.memory * GB
        text, fits = plan(config, gpus, memory, options.gpu or "h100")
        print(text)
        return 0 if fits else 1
    config, folder, resumed = open_run(options)
    if FIRST:
        folder.lock()
    keep_freed_memory()
    cores = len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    torch.set_num_threads(config.run.threads or max(1, cores))
    stop = Stop()
    device, dtype = device_and_dtype(config)
    sharded = device == "cuda" or dtype != torch.float32
    ranks = Ranks.start(device, shard=config.parallel.shard, sharded=sharded)
    with ending_together(ranks), Sandbox() as sandbox:
        # After a restart a slow rank may find the directory that rank 0 has just made.
        resumed = ranks.gather(resumed)[0]
        finished = run_phases(config, folder, ranks, sandbox, stop, resumed=resumed)
        ranks.close()
    # torchrun would start again what ends with another status than 0.
    return 0 if finished or ranks.world > 1 else 130


def run_phases(
    config: Config, folder: Run, ranks: Ranks, sandbox: Sandbox, stop: Stop, *, resumed: bool
) -> bool:
    """Builds the run and trains; returns whether it came to its end. UserError."""

    def build() -> TrainingRun:
        worlds = Worlds(config.task.world, config.run.seed, sandbox)
        return TrainingRun(config, folder, ranks, worlds, stop)

    try:
        run = ranks.together(build)
    except UserError:
        if ranks.first and not resumed:
            shutil.rmtree(folder.path, ignore_errors=True)  # frees the name for a corrected command
        raise
    if resumed and ranks.first:
        folder.write_text("config.toml", settings.to_toml(run.config))
        (folder.path / "summary.json").unlink(missing_ok=True)  # of a run that is extended
    if resumed:
        run.restore()
    elif ranks.first:
        print(f"writing to {folder.path}: config.toml, metrics.jsonl, report.html, model/ and more")
    finished = record_rollouts(run) if config.rollout.only else train(run)
    run.checkpoints.wait()
    run.watch.close()
    if ranks.first and finished:
        made = folder.path / ("trajectories.jsonl" if config.rollout.only else "model")
        report, summary = folder.path / "report.html", folder.path / "summary.json"
        print(f"report: {report}   {made.stem}: {made}   summary: {summary}", flush=True)
    elif ranks.first:
        where = f"{run.progress.phase} step {run.progress.step}"
        print(f"stopped at {where}; go on with: python train.py --resume {folder.path}", flush=True)
    return finished


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
