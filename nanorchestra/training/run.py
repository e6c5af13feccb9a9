"""One run on one rank: its parts, how far it is, its checkpoints."""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from nanorchestra.agent.loop import Limits, Rollout
from nanorchestra.agent.policy import EndpointRollout
from nanorchestra.config import Config
from nanorchestra.engine.request import SamplingParams
from nanorchestra.errors import require
from nanorchestra.model.saving import save_checkpoint
from nanorchestra.model.weights import named_hf_tensors
from nanorchestra.records import Trajectory
from nanorchestra.report.run import Run
from nanorchestra.report.watch import peak_memory_mb
from nanorchestra.settings import to_toml
from nanorchestra.training import build
from nanorchestra.training.checkpoint import Checkpoints
from nanorchestra.training.costs import peak_flops
from nanorchestra.training.practice import Practice
from nanorchestra.training.ranks import Ranks
from nanorchestra.training.recorder import Recorder
from nanorchestra.training.sampling import Batch
from nanorchestra.training.trajectories import load_kept, tally

KEEP_CHECKPOINTS = 2
SKIP_LIMIT = 3  # steps in a row without an update end the run


class Stop(Protocol):
    """Whether the run was asked to stop after the step it is in."""

    asked: bool


@dataclass
class Progress:
    """How far a run is: what a checkpoint holds besides tensors. JSON throughout."""

    phase: str = "warm_start"
    step: int = 0  # finished steps of the phase
    seconds: float = 0.0  # up to the last checkpoint
    before: dict[str, Any] | None = None  # held-out summary before GRPO
    lesson_tools: int = 1  # that the warm start's lessons offer,
    lesson_since: int = 0  # from this step on
    skipped: int = 0  # steps in a row that were not finite
    best: dict[str, Any] | None = None  # measure, step and value of model-best/


class TrainingRun:
    """The parts of a run on this rank, and its progress. The phases change it step by step.

    `ahead` is the next step's batch if it has been sampled already.
    """

    def __init__(self, config: Config, folder: Run, ranks: Ranks, practice: Practice, stop: Stop):
        self.folder, self.ranks, self.practice, self.stop = folder, ranks, practice, stop
        self.dtype = build.device_and_dtype(config)[1]
        model, self.tokenizer = build.build_model(config, ranks, self.dtype, practice, folder.path)
        shape = model.config
        self.config = config = build.choose_attention(config, shape, ranks, self.dtype)
        if ranks.first and ranks.device.type == "cuda":  # a resumed run has the same kernels
            folder.write_text("config.toml", to_toml(config))
        build.check_room(config, shape, self.tokenizer, practice)
        self.trainer = build.build_trainer(config, model, self.tokenizer, ranks, self.dtype)
        self.engine = build.build_engine(config, shape, self.tokenizer, ranks, self.dtype)
        self.recorder = Recorder(folder, config.run, ranks, self.tokenizer, practice.tools)
        self.examples = self._recorded_examples()
        self.checkpoints = Checkpoints(folder.path / "checkpoints", KEEP_CHECKPOINTS, ranks)
        self.peak_flops = peak_flops(ranks.device, self.dtype)
        self.progress, self.ahead = Progress(), None
        self.started = time.monotonic()

    def _recorded_examples(self) -> list[list[Trajectory]]:
        """What the warm start imitates in place of the teacher, by task. UserError."""
        settings = self.config.warm_start
        if not (settings.steps and settings.trajectories):
            return []
        paths = [Path(name.strip()) for name in settings.trajectories.split(",")]
        kept, reasons = load_kept(paths, self.tokenizer, self.config.rollout.context_tokens)
        self.recorder.say(
            f"warm start on {sum(map(len, kept))} recorded trajectories of {len(kept)} tasks; "
            f"not kept: {tally(reasons) or 'none'}"
        )
        return kept

    @property
    def on_gpu(self) -> bool:
        """Whether this rank computes on a GPU."""
        return self.ranks.device.type == "cuda"

    @property
    def elapsed(self) -> float:
        """Seconds of the run, those before it was resumed included."""
        return self.progress.seconds + time.monotonic() - self.started

    def rollout(self, temperature: float) -> Rollout:
        """Returns what makes attempts: the engine, or the model behind rollout.endpoint."""
        settings = self.config.rollout
        limits = Limits(settings.turns, settings.turn_tokens, settings.context_tokens)
        if settings.endpoint:
            return EndpointRollout(settings, self.tokenizer, limits)

        def params(seed: int, budget: int) -> SamplingParams:
            return SamplingParams(max_tokens=budget, temperature=temperature, seed=seed)

        return Rollout(
            self.engine,
            self.tokenizer,
            params,
            limits,
            self.practice.price,
            lockstep=settings.lockstep,
            rebuild=settings.context == "rebuild",
        )

    def publish(self) -> None:
        """Copies the trainer's weights into the engine."""
        self.engine.update_weights(named_hf_tensors(self.trainer.model, self.dtype))

    def usage(self, metrics: dict[str, float], seconds: float) -> dict[str, float | None]:
        """Returns `mfu`, the share of the peak FLOPs that an update used, and peak memory in MB.

        `mfu` is None where no update was made, or the machine's peak is not known.
        """
        known = self.peak_flops and "flops" in metrics
        peak = seconds * self.ranks.world * (self.peak_flops or 0.0)
        mfu = metrics["flops"] / peak if known else None
        return {"mfu": mfu, "memory_mb": peak_memory_mb(self.on_gpu)}

    def count_skipped(self, metrics: dict[str, float], where: str) -> None:
        """Counts steps in a row whose loss or gradient was not finite. UserError at SKIP_LIMIT."""
        progress = self.progress
        progress.skipped = progress.skipped + 1 if "skipped" in metrics else 0
        require(
            progress.skipped < SKIP_LIMIT,
            f"{progress.phase} step {progress.step}: the loss or its gradient is not finite, "
            f"{progress.skipped} steps in a row; it was computed on {self.folder.path / where}",
        )

    def end_step(self) -> bool:
        """Saves and reports if it is time; returns whether to stop. All ranks stop together."""
        self.recorder.watch.report()
        stopped = self.ranks.any(self.stop.asked)
        step, total = self.progress.step, getattr(self.config, self.progress.phase).steps
        if stopped or step % self.config.run.checkpoint_every == 0 or step == total:
            self.save()
        return stopped

    def save(self) -> None:
        """Begins a checkpoint of this moment, which is written while training goes on."""
        progress = dataclasses.replace(self.progress, seconds=self.elapsed)
        notes = {
            "progress": dataclasses.asdict(progress),
            "offsets": self.folder.offsets() if self.ranks.first else {},
            "optimizer": self.trainer.optimizer_kind,
            "reference": self.trainer.reference is not None,
            "ahead": self.ahead.to_notes() if self.ahead else None,
        }
        order = 0 if progress.phase == "warm_start" else 1
        name = f"{order}-{progress.phase}-{progress.step:06d}"
        tensors = {} if self.config.rollout.only else self.trainer.tensors()
        self.checkpoints.save(name, tensors, notes)

    def restore(self) -> None:
        """Continues at the newest checkpoint that can be read, else at the run's beginning.

        The number of ranks may differ from that of the run so far.
        """

        def prepare(notes: dict[str, Any]) -> dict[str, Any]:
            if self.config.rollout.only:
                return {}
            return self.trainer.prepare(notes["optimizer"], notes["reference"])

        notes = self.checkpoints.restore(prepare)
        where = "from its beginning: it has no checkpoint yet"
        offsets = {"metrics": 0, "trajectories": 0}
        if notes:
            self.progress = Progress(**notes["progress"])
            self.ahead = Batch.from_notes(notes["ahead"]) if notes["ahead"] else None
            where = f"at {self.progress.phase} step {self.progress.step}"
            offsets = notes["offsets"]
        if self.ranks.first:
            self.folder.truncate(offsets)
            print(f"resuming {self.folder.path} {where}", flush=True)

    def export(self, path: Path) -> None:
        """Writes the model in Hugging Face layout; the other ranks send their shards to rank 0."""
        model, first = self.trainer.model, self.ranks.first
        save_checkpoint(model, self.tokenizer, path, dtype=self.dtype, write=first)
