"""Records a run: rows of metrics.jsonl and trajectories.jsonl, and lines on the terminal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tqdm import tqdm

from nanorchestra.config import RunSection
from nanorchestra.model.tokenizer import Tokenizer
from nanorchestra.records import Task, Trajectory
from nanorchestra.report.run import Run
from nanorchestra.report.watch import Watch
from nanorchestra.training.ranks import Ranks
from nanorchestra.training.trajectories import to_row


class Recorder:
    """Writes and prints on rank 0; does nothing on other ranks.

    describe(task) returns the tools on offer as trajectories.jsonl shows them.
    """

    def __init__(
        self,
        run: Run,
        settings: RunSection,
        ranks: Ranks,
        tokenizer: Tokenizer,
        describe: Callable[[Task], list[dict[str, Any]]],
    ):
        self.run, self.ranks, self.tokenizer, self.describe = run, ranks, tokenizer, describe
        watched = (settings.log_to, settings.report_every) if ranks.first else ()
        self.watch = Watch(run, *watched)

    def metrics(self, row: dict[str, Any]) -> None:
        """Appends a row to metrics.jsonl, and logs it to TensorBoard or wandb."""
        if self.ranks.first:
            self.run.append("metrics", row)
            self.watch.log(row)

    def trajectory(self, phase: str, step: int, task: Task, trajectory: Trajectory) -> None:
        """Appends a trajectory with its task to trajectories.jsonl, also as readable text."""
        if not self.ranks.first:
            return
        text = []
        for turn in trajectory.turns:
            ids = trajectory.ids[turn.start : turn.end]
            said = self.tokenizer.decode(ids, skip_special=True)
            text.append({"role": "assistant", "text": said})
            text += [{"role": "tool", "text": result.content} for result in turn.results]
        row = to_row(task, trajectory) | {
            "step": step,
            "phase": phase,
            "question": task.question,
            "preference_text": task.preference.text,
            "kind": task.data["kind"],
            "tools": self.describe(task),
            "text": text,
        }
        self.run.append("trajectories", row)

    def say(self, text: str) -> None:
        """Prints a line beside the progress bar."""
        if self.ranks.first:
            tqdm.write(text)

    def bar(self, total: int, what: str, done: int = 0, unit: str = "step") -> tqdm:
        """Returns a progress bar; it is shown on a terminal only."""
        hidden = None if self.ranks.first else True
        return tqdm(
            total=total, initial=done, desc=what, unit=unit, dynamic_ncols=True, disable=hidden
        )


def in_words(row: dict[str, Any]) -> str:
    """Returns the means of a row of metrics as a line for the terminal."""
    return (
        f"reward {row['reward']:.3f}  accuracy {row['accuracy']:.2f}  "
        f"cost {row['cost_usd'] * 1e3:.2f} m$  latency {row['latency_s']:.1f} s  "
        f"preference {row['preference']:.2f}  {row['tokens_per_s']:,.0f} tokens/s"
    )


def without_counts(metrics: dict[str, float]) -> dict[str, float]:
    """Returns metrics of a trainer's step as they are recorded."""
    return {name: value for name, value in metrics.items() if name not in ("tokens", "flops")}
