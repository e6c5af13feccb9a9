"""One run on one rank: its parts, how far it is, its records and its checkpoints."""

import dataclasses
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from nanorchestra.agent.loop import AttemptLimits, Rollout
from nanorchestra.config import Config
from nanorchestra.engine.sequence import SamplingParams
from nanorchestra.errors import UserError, require
from nanorchestra.files import write_whole
from nanorchestra.records import Task, Trajectory
from nanorchestra.report.run import Run, to_toml
from nanorchestra.report.watch import Watch, peak_memory_mb
from nanorchestra.schemas import Json, check
from nanorchestra.training import build
from nanorchestra.training.bill import Bill
from nanorchestra.training.checkpoint import Checkpoints
from nanorchestra.training.costs import peak_flops
from nanorchestra.training.ranks import Ranks
from nanorchestra.training.sampling import Batch
from nanorchestra.training.trajectories import check_row, load_kept, to_row

REPORT_EVERY = 120.0  # seconds between live reports
SKIP_LIMIT = 3  # steps in a row without an update end the run


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


class TrainingRun:
    """The parts of a run on this rank, and its progress. The phases change it step by step.

    `worlds` are worlds.mixture.Worlds: tasks, environments, demonstrations and rewards. `stop` has
    an attribute `asked`: whether to stop after the present step. `bill` is what endpoints cost.
    `ahead` is the next step's batch if it has been sampled already. Rank 0 alone records and
    prints.
    """

    def __init__(
        self,
        config: Config,
        folder: Run,
        ranks: Ranks,
        worlds: Any,
        stop: Any,
        bill: Bill | None = None,
    ):
        self.folder, self.ranks, self.worlds, self.stop = folder, ranks, worlds, stop
        self.bill = bill or Bill()
        self.dtype = build.device_and_dtype(config)[1]
        if config.grpo.epochs:
            steps = math.ceil(config.grpo.epochs * worlds.epoch() / config.grpo.prompts)
            config = config.replace({"grpo.steps": steps, "grpo.epochs": 0})
            if ranks.first:
                write_whole(folder.path / "config.toml", to_toml(config))
        self.config = config
        self.watch = Watch(folder, REPORT_EVERY if ranks.first else 0.0)
        model, self.tokenizer = build.build_model(config, ranks, self.dtype, worlds, folder.path)
        self.examples = load_kept(config, self.tokenizer, self.say)
        self.trainer = build.build_trainer(config, model, self.tokenizer, ranks, self.dtype)
        self.engine = build.build_engine(
            config, model.config, self.tokenizer, ranks, self.dtype, model
        )
        self.checkpoints = Checkpoints(folder.path / "checkpoints", ranks)
        self.peak_flops = peak_flops(ranks.device, self.dtype)
        self.progress, self.ahead, self.started = Progress(), None, time.monotonic()

    @property
    def on_gpu(self) -> bool:
        """Whether this rank computes on a GPU."""
        return self.ranks.device.type == "cuda"

    @property
    def steps(self) -> int:
        """Steps of the present phase."""
        return getattr(self.config, self.progress.phase).steps

    @property
    def elapsed(self) -> float:
        """Seconds of the run, those before it was resumed included."""
        return self.progress.seconds + time.monotonic() - self.started

    def rollout(self, temperature: float) -> Rollout:
        """Returns what makes attempts on the engine."""
        settings = self.config.rollout

        def params(seed, budget):
            return SamplingParams(budget, temperature, seed=seed)

        return Rollout(
            self.engine,
            self.tokenizer,
            params,
            AttemptLimits.of(settings),
            self.worlds.price,
            lockstep=settings.lockstep,
            rebuild=settings.context == "rebuild",
        )

    def prepare(self, phase: str) -> dict[str, Tensor]:
        """Gives the trainer the optimizer and reference of a phase; returns all its tensors."""
        grpo = self.config.grpo
        if phase == "warm_start":
            return self.trainer.prepare(build.WARM_START_OPTIMIZER, False)
        adamw = {"beta2": grpo.beta2, "weight_decay": grpo.weight_decay}
        return self.trainer.prepare(grpo.optimizer, grpo.kl_coef > 0, **adamw)

    def publish(self) -> None:
        """Copies the trainer's weights into the engine."""
        build.publish(self.config, self.trainer.model, self.engine, self.dtype)

    # Records.

    def say(self, text: str) -> None:
        """Prints a line beside the progress bar."""
        if self.ranks.first:
            tqdm.write(text)

    def bar(self, total: int, what: str, done: int = 0, unit: str = "step") -> tqdm:
        """Returns a progress bar; it is shown on a terminal only."""
        disable = None if self.ranks.first else True
        return tqdm(total=total, initial=done, desc=what, unit=unit, disable=disable)

    def record_update(self, row: Json, metrics: dict[str, float], times: dict[str, float]) -> None:
        """Records a step: `row`, the metrics of its update, and its seconds by phase.

        `mfu` is the share of the peak FLOPs that the update used, None where that is not known.
        UserError after SKIP_LIMIT steps in a row whose loss or gradient was not finite.
        """
        progress, flops = self.progress, metrics.get("flops")
        known = flops and self.peak_flops
        mfu = flops / times["train"] / self.peak_flops / self.ranks.world if known else None
        shown = {name: value for name, value in metrics.items() if name not in ("flops", "tokens")}
        memory = torch.cuda.max_memory_allocated() / 2**20 if self.on_gpu else peak_memory_mb()
        whole = {
            "phase": progress.phase,
            "step": progress.step,
            "seconds": sum(times.values()),
            **row,
            **shown,
            "phase_seconds": times,
            "mfu": mfu,
            "memory_mb": memory,
        }
        if self.ranks.first:
            self.folder.append("metrics", whole)
        progress.skipped = progress.skipped + 1 if "skipped" in metrics else 0
        require(
            progress.skipped < SKIP_LIMIT,
            f"{progress.phase} step {progress.step}: the loss or its gradient is not finite, "
            f"{progress.skipped} steps in a row; {self.folder.path} has them in metrics.jsonl",
        )

    def record_trajectory(self, phase: str, task: Task, trajectory: Trajectory) -> None:
        """Appends a trajectory with its task to trajectories.jsonl, also as readable text."""
        if not self.ranks.first:
            return
        text = []
        for turn in trajectory.turns:
            ids = trajectory.ids[turn.start : turn.end]
            said = self.tokenizer.decode(ids, skip_special=True)
            text.append({"role": "assistant", "text": said})
            text += [{"role": "tool", "text": result.content} for result in turn.results]
        row = {"step": self.progress.step, "phase": phase, "text": text}
        self.folder.append("trajectories", to_row(task, trajectory) | row)

    # Steps and checkpoints.

    def repeat(self, step: Callable[[], None]) -> bool:
        """Calls `step` to the end of the phase; returns False if the run is asked to stop before.

        A step counts itself in `progress.step`. Between two of them the run saves and reports if
        it is time. All ranks stop together.
        """
        progress, every, stopped = self.progress, self.config.run.checkpoint_every, False
        with self.bar(self.steps, progress.phase.replace("_", " "), progress.step) as bar:
            while progress.step < self.steps and not stopped:
                step()
                bar.update()
                self.watch.report()
                stopped = any(self.ranks.gather(self.stop.asked))
                if stopped or progress.step % every == 0 or progress.step == self.steps:
                    self.save()
        return not stopped

    def save(self) -> None:
        """Begins a checkpoint of this moment, which is written while training goes on."""
        progress = dataclasses.replace(self.progress, seconds=self.elapsed)
        notes = {
            "progress": dataclasses.asdict(progress),
            "offsets": self.folder.offsets() if self.ranks.first else {},
            "ahead": self.ahead.to_notes() if self.ahead else None,
            "weight_version": self.engine.weight_version,
        }
        order = int(progress.phase != "warm_start")
        name = f"{order}-{progress.phase}-{progress.step:06d}"
        self.checkpoints.save(name, self.trainer.tensors(), notes)

    def restore(self) -> None:
        """Continues at the newest checkpoint that can be read, else at the run's beginning.

        The number of ranks may differ from that of the run so far.
        """
        notes = self.checkpoints.restore(self._prepare_for)
        if notes:
            self.publish()
        offsets = notes["offsets"] if notes else {}
        if self.ranks.first:
            self.folder.truncate(offsets)
            write_whole(self.folder.path / "config.toml", to_toml(self.config))
            (self.folder.path / "summary.json").unlink(missing_ok=True)  # the run is extended
        self.say(f"resuming {self.folder.path} at {self.progress.phase} step {self.progress.step}")

    def _prepare_for(self, notes) -> dict[str, Tensor]:
        """Takes what a checkpoint holds besides tensors; returns the tensors of its phase.

        UserError for notes that another version of the code has written.
        """
        where = f"{self.checkpoints.folder}: the notes of a checkpoint"
        check(notes, "notes", where)
        finite = math.isfinite(notes["progress"]["seconds"])
        require(finite, f"{where}: progress.seconds: expected a finite number")
        for row in notes["ahead"]["rows"] if notes["ahead"] else []:
            check_row(row, f"{where}: ahead")
        try:
            self.progress = Progress(**notes["progress"])
            self.ahead = Batch.from_notes(notes["ahead"]) if notes["ahead"] else None
            self.engine.weight_version = notes["weight_version"] - 1
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            reason = f"{type(error).__name__}: {error}"
            raise UserError(
                f"{self.checkpoints.folder}: the notes of a checkpoint are not those of this "
                f"version ({reason}); resume with the version that wrote them"
            ) from None
        return self.prepare(self.progress.phase)
