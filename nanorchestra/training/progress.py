"""A training run on one rank: how far it is, the steps that are left, its records and checkpoints.

Nothing here computes with a model: train.py does. Rank 0 alone writes and prints.
"""

from __future__ import annotations

import dataclasses
import resource
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from nanorchestra.config import Config
from nanorchestra.engine.engine import Engine
from nanorchestra.errors import require
from nanorchestra.records import Task, Trajectory
from nanorchestra.schemas import Json
from nanorchestra.settings import is_dry_run
from nanorchestra.training.build import device_and_dtype
from nanorchestra.training.checkpoint import Checkpoints, notes_of
from nanorchestra.training.costs import peak_flops
from nanorchestra.training.distributed import Ranks
from nanorchestra.training.printing import progress_bar, say, step_line
from nanorchestra.training.run import RunFolder, to_toml, training_command
from nanorchestra.training.trainer import Trainer
from nanorchestra.training.trajectories import to_row

REPORT_SHARE = 0.02  # of a run's time, at most, that goes into the reports while it goes on
SKIP_LIMIT = 3  # steps in a row without an update end the run


@dataclass
class Progress:
    """How far a run is: what a checkpoint holds besides tensors. JSON throughout."""

    phase: str = "warm_start"  # to the end of the held-out tasks before GRPO; then "grpo"
    step: int = 0  # of the phase: finished ones, and the one under way
    seconds: float = 0.0  # before this process; of the whole run in a checkpoint
    before: Json | None = None  # held-out summary before GRPO
    lesson_tools: int = 1  # that the warm start's lessons offer,
    lesson_since: int = 0  # from this step on
    teacher_kl: float = 0.0  # nats per id between teacher and policy, over the latest steps
    skipped: int = 0  # steps in a row that were not finite


class TrainingRun:
    """The steps of a run, recorded and saved in its directory.

    Makes the directory, or opens it if the run is `resumed`; a dry run replaces that of an earlier
    one. `stop.asked` says whether to stop after the present step, and `stop.says` becomes what
    stops then. `report(path, live, phase)` writes the report of the directory so far; `live`: the
    run goes on; `phase`: in which it has stopped. UserError if the directory is taken.
    """

    def __init__(
        self,
        config: Config,
        path: Path,
        ranks: Ranks,
        stop: Any,
        report: Callable[..., None],
        *,
        resumed: bool = False,
    ):
        # After a restart a slow rank may find the directory that rank 0 has just made.
        self.resumed = ranks.broadcast(resumed)
        self.config, self.folder, self.ranks = config, RunFolder(path), ranks
        self.stop, self.report = stop, report
        self.progress, self.stopped = Progress(), False
        if ranks.first:
            if not self.resumed:
                if is_dry_run(config) and (path / "config.toml").exists():
                    self.folder.lock()  # UserError if it is under way
                    self.folder.unlock()
                    shutil.rmtree(path)
                RunFolder.create(path, to_toml(config))
            self.folder.lock()
        ranks.barrier()  # the others find the directory made
        self.begun = self.resumed  # there is something in the directory
        self.checkpoints = Checkpoints(path / "checkpoints", ranks)
        self._peak_flops = peak_flops(ranks.device, device_and_dtype(config)[1])
        self._started = self._step_started = time.monotonic()
        self._report_due = 0.0  # when the next report may be written, by the monotonic clock

    @property
    def elapsed(self) -> float:
        """Seconds of the run, those before it was resumed included."""
        return self.progress.seconds + time.monotonic() - self._started

    def say(self, text: str) -> None:
        """Prints a line, on one rank."""
        say(self.ranks, text)

    # Beginning and end.

    def change(self, settings: Mapping[str, Any]) -> None:
        """Changes settings, by "section.name"; config.toml then states them."""
        changed = self.config.replace(settings)
        if changed != self.config and self.ranks.first:
            self.folder.write_config(to_toml(changed))
        self.config = changed

    def begin(self, trainer: Trainer, engine: Engine) -> None:
        """Begins the run with these parts, or continues it at its newest checkpoint.

        The number of ranks may differ from that of the run so far.
        """
        self.trainer, self.engine, self.begun = trainer, engine, True
        self.stop.says, self.stop.at_once = "stopping before the first step", False
        if not self.resumed:  # not before: a set-up that fails removes the directory
            self.say(
                f"writing to {self.folder.path}: config.toml, metrics.jsonl, report.html, model/ "
                "and more"
            )
            return
        offsets = {}
        if newest := self.checkpoints.newest():
            notes = notes_of(newest)
            offsets = notes["offsets"]
            self.progress = Progress(**notes["progress"])
            if self.progress.phase == "grpo":
                trainer.begin_grpo(self.config.grpo)  # its optimizers and reference are read, too
                engine.weight_version = self.progress.step  # publishing makes it that of the next
            self.checkpoints.load(newest, trainer.tensors())
        if self.ranks.first:
            self.folder.truncate(offsets)
            self.folder.write_config(to_toml(self.config))
            (self.folder.path / "summary.json").unlink(missing_ok=True)  # the run is extended
        phase, step = self.progress.phase, self.progress.step
        if not self.config.warm_start.steps:
            phase = "grpo"  # it has no other one
        self.say(f"resuming {self.folder.path} at {phase} step {step}")

    def begin_grpo(self) -> None:
        """Goes from the warm start to GRPO: its optimizer, and the weights of now as reference.

        The engine has no KV pages then, as in a resumed run.
        """
        self.progress.phase, self.progress.step = "grpo", 0
        self.trainer.begin_grpo(self.config.grpo)
        self.engine.reset_prefix_cache()

    def close(self, finished: bool) -> None:
        """Waits for the last checkpoint, and says how the run can go on.

        Of a run that was stopped, writes the report.
        """
        self.checkpoints.wait()
        if self.ranks.first:
            if not finished:
                self.report(self.folder.path, False, self.progress.phase.replace("_", " "))
            self.folder.unlock()
        path = self.folder.path
        if finished:
            self.say(f"finished: {path} has report.html, summary.json and more")
        else:
            self.say(f"stopped; go on with: {training_command('--resume', str(path))}")

    # Steps.

    def steps(self, total: int, enough: Callable[[], bool] = lambda: False) -> Iterator[int]:
        """Yields the steps of the phase that are left of `total`, the first being 0.

        They end before that when `enough()` is true after one.

        After each one it writes the report and a checkpoint, if it is time, and ends if any rank is
        asked to stop: `stopped` is then True. A checkpoint follows the last step, too.
        """
        progress = self.progress
        self.stop.says = "stopping after this step"
        if progress.step >= total or enough():
            return
        label = progress.phase.replace("_", " ")
        with progress_bar(self.ranks, total, label, progress.step) as bar:
            self._bar = bar
            for step in range(progress.step, total):
                progress.step = step + 1
                self._step_started = time.monotonic()
                yield step
                bar.update(progress.step - bar.n)
                self._report_if_due()
                self.stopped = self.asked_to_stop()
                last = self.stopped or progress.step == total or enough()
                if last or progress.step % self.config.run.checkpoint_every == 0:
                    self.save()
                if last:
                    return

    def show_attempt(self, attempt: Trajectory) -> None:
        """Moves the bar of the steps by an attempt of the step under way, as its share of it."""
        grpo = self.config.grpo
        share = self.ranks.world_size / (grpo.prompts * grpo.group_size)
        self._bar.update(max(0.0, min(share, self.progress.step - self._bar.n)))

    @contextmanager
    def held_out_tasks(self, when: str, count: int) -> Iterator[Callable[[Trajectory], Any]]:
        """Shows a bar of the held-out tasks, "before" or "after" GRPO; yields what moves it.

        Without a terminal a line says a quarter of them is done.

        A stop ends the process at once, as a resumed run plays the tasks again. Of several ranks,
        which have to agree, it ends after these tasks.
        """
        stop, label = self.stop, f"held-out tasks, {when}"
        said = stop.says
        if self.ranks.world_size > 1:
            stop.says = "stopping after these held-out tasks"
            if when == "after":
                stop.says = "no step is left: the run ends with these held-out tasks"
        else:
            again = training_command("--resume", str(self.folder.path))
            stop.says, stop.at_once = f"stopped; go on with: {again}", True
        try:
            with progress_bar(self.ranks, count, label, unit="task") as bar:
                done = 0  # also where the bar, which is not shown, does not count

                def on_done(attempt):
                    nonlocal done
                    done += 1
                    bar.update()
                    if bar.disable and done % -(-count // 4) == 0:
                        self.say(f"{label}: {done} of {count}")

                yield on_done
        except KeyboardInterrupt:
            if self.ranks.first:
                self.report(self.folder.path, False, label)
            raise
        finally:
            stop.says, stop.at_once = said, False

    def asked_to_stop(self) -> bool:
        """Returns whether any rank was asked to stop; all ranks call it together."""
        return any(self.ranks.all_gather(self.stop.asked))

    def save(self) -> None:
        """Begins a checkpoint of this moment, as `Checkpoints.save` does."""
        progress = dataclasses.replace(self.progress, seconds=self.elapsed)
        notes = {
            "progress": dataclasses.asdict(progress),
            "offsets": self.folder.offsets() if self.ranks.first else {},
        }
        order = int(progress.phase != "warm_start")  # names sort by age
        name = f"{order}-{progress.phase}-{progress.step:06d}"
        self.checkpoints.save(name, self.trainer.tensors(), notes)

    def _report_if_due(self) -> None:
        """Writes the report after the first step, and then as often as REPORT_SHARE allows."""
        started = time.monotonic()
        if self.ranks.first and started >= self._report_due:
            self.report(self.folder.path, True)
            now = time.monotonic()
            self._report_due = now + (now - started) / REPORT_SHARE

    # Records.

    def record_step(self, row: Json, update: dict[str, float], seconds: dict[str, float]) -> None:
        """Records the step under way, which ends here, and prints a line.

        row: what is known of its attempts. update: the metrics of its update, {} without one.
        seconds: of its parts but "train", which had the others. `mfu` is the share of the peak
        FLOPs that the update used, None where that is not known. UserError after SKIP_LIMIT steps
        in a row without a finite update.
        """
        progress = self.progress
        whole = time.monotonic() - self._step_started
        train_s = whole - sum(seconds.values())
        mfu = None
        if update and self._peak_flops:
            mfu = update["flops"] / train_s / self._peak_flops / self.ranks.world_size
        memory_mb = peak_memory_mb()
        if self.ranks.device.type == "cuda":
            memory_mb = torch.cuda.max_memory_allocated() / 2**20
        shown = {name: value for name, value in update.items() if name != "flops"}
        row = {
            "phase": progress.phase,
            "step": progress.step,
            "seconds": whole,
            **row,
            **shown,
            "phase_seconds": seconds | {"train": train_s},
            "mfu": mfu,
            "memory_mb": memory_mb,
        }
        if self.ranks.first:
            self.folder.append("metrics", row)
        if line := step_line(row, getattr(self.config, progress.phase).steps):
            self.say(line)
        if update:  # a step without an update neither counts nor ends the row
            progress.skipped = progress.skipped + 1 if update["skipped"] == 1 else 0
        require(
            progress.skipped < SKIP_LIMIT,
            f"{progress.phase} step {progress.step}: the loss or its gradient is not finite, "
            f"{progress.skipped} steps in a row; {self.folder.path} has them in metrics.jsonl",
        )

    def record_attempts(self, phase: str, tasks: list[Task], attempts: list[Trajectory]) -> None:
        """Appends attempts with their tasks to trajectories.jsonl, also as readable text.

        phase: "before" or "after" of held-out tasks; "grpo" of a step, "skipped" of one whose
        update was.
        """
        if not self.ranks.first:
            return
        for task, attempt in zip(tasks, attempts, strict=True):
            text = []
            for turn in attempt.turns:
                ids = attempt.ids[turn.start : turn.end]
                decoded = self.engine.tokenizer.decode(ids, skip_special=True)
                text.append({"role": "assistant", "text": decoded})
                text += [{"role": "tool", "text": result.content} for result in turn.results]
            row = {"step": self.progress.step, "phase": phase, "text": text}
            self.folder.append("trajectories", to_row(task, attempt) | row)


def peak_memory_mb() -> float:
    """Returns the peak memory of this process so far, in MB of 2^20 bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
