"""The run directory of a training run, how far the run is, and what it prints and records.

Nothing here computes: train.py does. Rank 0 alone writes and prints.
"""

from __future__ import annotations

import dataclasses
import math
import resource
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from nanorchestra.config import Config
from nanorchestra.engine.engine import Engine
from nanorchestra.errors import require
from nanorchestra.files import read_text, write_whole
from nanorchestra.records import Task, Trajectory
from nanorchestra.report.page import write_report
from nanorchestra.report.run import Run, to_toml
from nanorchestra.report.tables import held_out_scores, table
from nanorchestra.schemas import Json
from nanorchestra.settings import is_dry_run
from nanorchestra.training.build import device_and_dtype
from nanorchestra.training.checkpoint import Checkpoints
from nanorchestra.training.costs import peak_flops
from nanorchestra.training.distributed import Ranks
from nanorchestra.training.rollout import Attempts
from nanorchestra.training.trainer import Trainer
from nanorchestra.training.trajectories import to_row

REPORT_SHARE = 0.02  # of a run's time, at most, that goes into the reports while it goes on
SKIP_LIMIT = 3  # steps in a row without an update end the run


def peak_memory_mb() -> float:
    """Returns the peak memory of this process so far, in MB of 2^20 bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


@dataclass
class Progress:
    """How far a run is: what a checkpoint holds besides tensors. JSON throughout."""

    phase: str = "warm_start"
    step: int = 0  # finished steps of the phase
    seconds: float = 0.0  # up to the last checkpoint
    before: Json | None = None  # held-out summary before GRPO
    lesson_tools: int = 1  # that the warm start's lessons offer,
    lesson_since: int = 0  # from this step on
    skipped: int = 0  # steps in a row that were not finite


class Laps:
    """Measures the parts of a step; `seconds` has them by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._start = time.monotonic()

    def end(self, name: str) -> None:
        """Ends a part, which began at the end of the part before."""
        now = time.monotonic()
        self.seconds[name] = now - self._start
        self._start = now


class TrainingRun:
    """A run on this rank: its directory, progress, records and checkpoints.

    Makes the directory, or opens it if the run is `resumed`; a dry run replaces that of an earlier
    one. `stop.asked` says whether to stop after the present step, and `stop.says` becomes what
    stops then. UserError if the directory is taken.
    """

    def __init__(
        self, config: Config, path: Path, ranks: Ranks, stop: Any, *, resumed: bool = False
    ):
        # After a restart a slow rank may find the directory that rank 0 has just made.
        self.resumed = ranks.broadcast(resumed)
        self.config, self.folder, self.ranks, self.stop = config, Run(path), ranks, stop
        self.progress = Progress()
        if ranks.first:
            if not self.resumed:
                if is_dry_run(config) and (path / "config.toml").exists():
                    self.folder.lock()  # UserError if it is under way
                    self.folder.unlock()
                    shutil.rmtree(path)
                Run.create(path, to_toml(config))
            self.folder.lock()
        ranks.barrier()  # the others find the directory made
        self._unused = not self.resumed  # nothing is in the directory yet
        self._started = time.monotonic()
        self._bar: tqdm | None = None
        self._report_due = 0.0  # when the next report may be written, by the monotonic clock
        self.checkpoints = Checkpoints(path / "checkpoints", ranks)
        self.peak_flops = peak_flops(ranks.device, device_and_dtype(config)[1])

    # Beginning and end.

    def with_steps(self, tasks: int | None) -> Config:
        """Returns the config with grpo.epochs as grpo.steps; config.toml then states them.

        tasks: how many training tasks the world has, None without end. UserError for epochs of a
        world without end.
        """
        grpo = self.config.grpo
        if grpo.epochs:
            require(
                tasks,
                f"grpo.epochs: {self.config.task.world} has tasks without end; set grpo.steps, and "
                "epochs to 0",
            )
            steps = math.ceil(grpo.epochs * tasks / grpo.prompts)
            self.config = self.config.replace({"grpo.steps": steps, "grpo.epochs": 0})
            self._write_config()
        return self.config

    def with_model(self, word: str) -> Config:
        """Returns the config with a word for the same model, which config.toml then states."""
        if word != self.config.model.path:
            self.config = self.config.replace({"model.path": word})
            self._write_config()
        return self.config

    def keep_source(self, name: str, text: str, origin: str) -> None:
        """Keeps a file of the user's code in the directory, and says so.

        UserError if the run was resumed and began with another one; `origin` names it.
        """
        kept = self.folder.path / name
        if self.resumed:
            same = kept.is_file() and read_text(kept) == text
            right = f"it is not the file that the run began with, which is {kept}; put that back"
            require(same, f"{origin}: {right}, or start another run")
        elif self.ranks.first:
            write_whole(kept, text)
            self.say(f"reward: {origin}, kept as {kept}")

    def _write_config(self) -> None:
        if self.ranks.first:
            write_whole(self.folder.path / "config.toml", to_toml(self.config))

    def discard_if_unused(self) -> None:
        """Removes the directory if the set-up has failed on this rank; its name is free again."""
        if self._unused:
            shutil.rmtree(self.folder.path, ignore_errors=True)

    def finish(self, results: Json) -> None:
        """Writes summary.json and the report, and prints the results."""
        self.checkpoints.wait()
        if self.ranks.first:
            if is_dry_run(self.config):
                print(
                    "dry run: the miniature's model after a few steps in small; the table shows "
                    "that a run works, and its figures mean nothing"
                )
            tasks = self.config.evaluation.tasks
            print(table(held_out_scores(results), f"on {tasks} held-out tasks"))
            summary = {
                "seconds": self.elapsed,
                "steps": self.progress.step,
                "seed": self.config.run.seed,
                "peak_memory_mb": peak_memory_mb(),
            }
            self.folder.write_json("summary.json", summary | results)
            write_report(self.folder.path)

    def close(self, finished: bool) -> None:
        """Waits for the last checkpoint, and says how the run can go on.

        Of a run that was stopped, writes the report.
        """
        self.checkpoints.wait()
        if self.ranks.first:
            if not finished:
                write_report(self.folder.path)
            self.folder.unlock()
        path = self.folder.path
        if finished:
            self.say(f"finished: {path} has report.html, summary.json and more")
        else:
            self.say(f"stopped; go on with: python train.py --resume {path}")

    @property
    def elapsed(self) -> float:
        """Seconds of the run, those before it was resumed included."""
        return self.progress.seconds + time.monotonic() - self._started

    # Printing.

    def say(self, text: str) -> None:
        """Prints a line beside the progress bar."""
        if self.ranks.first:
            tqdm.write(text)

    def bar(self, total: int, label: str, done: int = 0, unit: str = "step") -> tqdm:
        """Returns a progress bar; it is shown on a terminal only."""
        disable = None if self.ranks.first else True
        return tqdm(total=total, initial=done, desc=label, unit=unit, disable=disable)

    def held_out_bar(self, tasks: int, phase: str) -> tqdm:
        """Returns the progress bar of the held-out tasks "before" or "after" GRPO."""
        self.stop.says = "stopping after these held-out tasks"
        if phase == "after":
            self.stop.says = "no step is left: the run ends with these held-out tasks"
        return self.bar(tasks, f"held-out tasks, {phase}", unit="task")

    def start_bar(self, steps: int) -> None:
        """Shows the progress of the present phase, which goes to `steps`, if any are left."""
        self.stop.says = "stopping after this step"
        if self.progress.step >= steps:
            return
        self._bar = self.bar(steps, self.progress.phase.replace("_", " "), self.progress.step)

    # Records.

    def record_step(self, row: Json, update: dict[str, float], times: dict[str, float]) -> None:
        """Records a step that `progress` counts already, and prints a line.

        row: what is known of its attempts. update: the metrics of its update, {} without one.
        times: its seconds by phase. `mfu` is the share of the peak FLOPs that the update used, None
        where that is not known. UserError after SKIP_LIMIT steps in a row without a finite update.
        """
        progress = self.progress
        mfu = None
        if update and self.peak_flops:
            mfu = update["flops"] / times["train"] / self.peak_flops / self.ranks.world_size
        if self.ranks.device.type == "cuda":
            memory_mb = torch.cuda.max_memory_allocated() / 2**20
        else:
            memory_mb = peak_memory_mb()
        shown = {name: value for name, value in update.items() if name not in ("flops", "tokens")}
        if self.ranks.first:
            whole = {
                "phase": progress.phase,
                "step": progress.step,
                "seconds": sum(times.values()),
                **row,
                **shown,
                "phase_seconds": times,
                "mfu": mfu,
                "memory_mb": memory_mb,
            }
            self.folder.append("metrics", whole)
            self._print_step(row, update)
        if update:  # a step without an update neither counts nor ends the row
            progress.skipped = progress.skipped + 1 if update["skipped"] == 1 else 0
        require(
            progress.skipped < SKIP_LIMIT,
            f"{progress.phase} step {progress.step}: the loss or its gradient is not finite, "
            f"{progress.skipped} steps in a row; {self.folder.path} has them in metrics.jsonl",
        )

    def _print_step(self, row, update) -> None:
        phase, step = self.progress.phase, self.progress.step
        steps = getattr(self.config, phase).steps
        if phase == "warm_start":
            if step % 20 == 0:
                self.say(
                    f"warm start step {step:4d}/{steps}  loss {update['loss']:.3f}  "
                    f"{row['tokens_per_s']:,.0f} tokens/s"
                )
            return
        line = (
            f"step {step:4d}/{steps}  reward {row['reward']:.3f}  "
            f"accuracy {row['accuracy']:.2f}  cost {row['cost_usd'] * 1e3:.2f} m$  "
            f"latency {row['latency_s']:.1f} s  preference {row['preference']:.2f}  "
            f"{row['tokens_per_s']:,.0f} tokens/s"
        )
        if not update:
            reasons = ", ".join(row["filtered"]) or "nothing was sampled"
            line += f"  no update: no group has an advantage ({reasons})"
        self.say(line)

    def record_first_group(self, attempts: Attempts, *, skipped: bool) -> None:
        """Records the attempts of a step's first group, or all of them if the step is skipped."""
        count = len(attempts.tasks) if skipped else self.config.grpo.group_size
        phase = "skipped" if skipped else "grpo"
        self.record_attempts(phase, attempts.tasks[:count], attempts.trajectories[:count])

    def record_attempts(self, phase: str, tasks: list[Task], attempts: list[Trajectory]) -> None:
        """Appends attempts with their tasks to trajectories.jsonl, also as readable text."""
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

    # Checkpoints.

    def restore_or_begin(self, trainer: Trainer, engine: Engine) -> None:
        """Begins the run with these parts, or continues it at its newest checkpoint.

        The number of ranks may differ from that of the run so far.
        """
        self.trainer, self.engine = trainer, engine
        if self.resumed:
            notes = self.checkpoints.restore(self._prepare_for)
            if self.ranks.first:
                self.folder.truncate(notes["offsets"] if notes else {})
                self._write_config()
                (self.folder.path / "summary.json").unlink(missing_ok=True)  # the run is extended
            phase, step = self.progress.phase, self.progress.step
            if not self.config.warm_start.steps:
                phase = "grpo"  # it has no other one
            self.say(f"resuming {self.folder.path} at {phase} step {step}")
        self._unused = False
        if not self.resumed:  # not before: a set-up that fails removes the directory
            self.say(
                f"writing to {self.folder.path}: config.toml, metrics.jsonl, report.html, model/ "
                "and more"
            )

    def begin_grpo(self) -> None:
        """Goes from the warm start to GRPO: its optimizer, and the weights of now as reference."""
        self.progress.phase, self.progress.step = "grpo", 0
        self._prepare_trainer()

    def _prepare_trainer(self) -> dict[str, Tensor]:
        """Gives the trainer the optimizer and reference of the phase; returns all its tensors."""
        grpo = self.config.grpo
        if self.progress.phase == "warm_start":
            return self.trainer.prepare(self.config.warm_start.optimizer, False)
        return self.trainer.prepare(
            grpo.optimizer,
            grpo.kl_coef > 0,
            beta2=grpo.beta2,
            weight_decay=grpo.weight_decay,
        )

    def asked_to_stop(self) -> bool:
        """Returns whether any rank was asked to stop; all ranks call it together."""
        return any(self.ranks.all_gather(self.stop.asked))

    def checkpoint_or_stop(self, steps: int) -> bool:
        """Ends a step: reports and saves if it is time; returns whether to stop here.

        steps: of the phase, after whose last one a checkpoint is written too.
        """
        self._bar.update()
        self._report()
        stopping = self.asked_to_stop()
        step = self.progress.step
        if stopping or step == steps or step % self.config.run.checkpoint_every == 0:
            self.save()
        if stopping or step == steps:
            self._bar.close()
        return stopping

    def _report(self) -> None:
        """Writes the report after the first step, and then as often as REPORT_SHARE allows."""
        started = time.monotonic()
        if self.ranks.first and started >= self._report_due:
            write_report(self.folder.path, live=True)
            now = time.monotonic()
            self._report_due = now + (now - started) / REPORT_SHARE

    def save(self) -> None:
        """Begins a checkpoint of this moment, as `Checkpoints.save` does."""
        progress = dataclasses.replace(self.progress, seconds=self.elapsed)
        notes = {
            "progress": dataclasses.asdict(progress),
            "offsets": self.folder.offsets() if self.ranks.first else {},
            "weight_version": self.engine.weight_version,
        }
        order = int(progress.phase != "warm_start")  # names sort by age
        name = f"{order}-{progress.phase}-{progress.step:06d}"
        self.checkpoints.save(name, self.trainer.tensors(), notes)

    def _prepare_for(self, notes) -> dict[str, Tensor]:
        """Takes what a checkpoint holds besides tensors; returns the tensors of its phase."""
        self.progress = Progress(**notes["progress"])
        self.engine.weight_version = notes["weight_version"] - 1  # the next publishing adds 1
        return self._prepare_trainer()
