"""Rollouts that are kept: the attempts in a run's trajectories.jsonl, or in a checkpoint, as they were, to be trained on.

A row is self-contained: ids, log-probabilities, calls, reward, and the task, so that advantages are computed as they were. JSON keeps a
float to the bit.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

from nanorchestra.config import Config, load_config
from nanorchestra.errors import UserError
from nanorchestra.model.tokenizer import Tokenizer
from nanorchestra.records import Preference, Task, ToolCall, ToolResult, Trajectory, Turn
from nanorchestra.report.run import Run

PHASES = ("rollouts", "grpo")  # whose rows are attempts at training tasks
SAME = (
    ("grpo", "prompts"),
    ("grpo", "group_size"),
    ("rollout", "temperature"),
)  # settings that make what the rows are
Batch = tuple[
    list[Task], list[Trajectory], int
]  # attempts, each beside its task, members of a group together; and how many were made again


def to_row(task: Task, trajectory: Trajectory) -> dict[str, Any]:
    """All of both, for JSON."""
    return dataclasses.asdict(trajectory) | {"task": dataclasses.asdict(task)}


def from_row(row: dict[str, Any]) -> tuple[Task, Trajectory]:
    """What `to_row` was given; other keys are left aside. KeyError or TypeError if something is missing."""
    task, values = (
        row["task"],
        {field.name: row[field.name] for field in dataclasses.fields(Trajectory)},
    )
    values["turns"] = [
        Turn(
            **turn
            | {
                "calls": [ToolCall(**call) for call in turn["calls"]],
                "results": [ToolResult(**result) for result in turn["results"]],
            }
        )
        for turn in row["turns"]
    ]
    return Task(**task | {"preference": Preference(**task["preference"])}), Trajectory(**values)


def batches(pairs: list[tuple[Task, Trajectory]], size: int, retried: int = 0) -> Iterator[Batch]:
    """A step's attempts in the portions of `size` in which they were made: a step that sampled again had several."""
    for start in range(0, len(pairs), size):
        tasks, trajectories = map(list, zip(*pairs[start : start + size]))
        yield tasks, trajectories, 0 if start else retried


class SavedRollouts:
    """The steps of the run in `path`, made by `train.py --rollouts` or recorded in full by a run that trained (run.record_groups).

    All rows are checked at once, and read again, step by step, when they are needed. max_length: ids that the model has positions for.
    UserError if something does not fit the config, the tokenizer or the model, with the line of trajectories.jsonl.
    """

    def __init__(self, path: str | Path, config: Config, tokenizer: Tokenizer, max_length: int):
        self.run, self.config, self.tokenizer, self.max_length = (
            Run.open(path),
            config,
            tokenizer,
            max_length,
        )
        self.log = self.run.path / "trajectories.jsonl"
        made = load_config(self.run.path / "config.toml")
        for section, key in SAME:
            was, now = (getattr(getattr(c, section), key) for c in (made, config))
            if was != now:
                raise UserError(
                    f"{self.run.path}: its rollouts were made with {section}.{key} {was}; here it is {now}, and must be the same"
                )
        self.count = sum(1 for _ in self)
        if not self.count:
            raise UserError(
                f"{self.log}: holds no rollouts; make some with: python train.py --rollouts 4 --run.name NAME"
            )

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Iterator[Batch]]:
        """The batches of each step, in order."""
        grpo = self.config.grpo
        numbered = (
            (line, row)
            for line, row in enumerate(self.run.rows("trajectories"), 1)
            if row.get("phase") in PHASES
        )
        for step, rows in groupby(numbered, key=lambda pair: pair[1].get("step")):
            pairs = [self._checked(f"{self.log}, line {line}", row) for line, row in rows]
            groups = [
                {task.id for task, _ in pairs[i : i + grpo.group_size]}
                for i in range(0, len(pairs), grpo.group_size)
            ]
            if len(pairs) % (grpo.prompts * grpo.group_size) or any(len(ids) > 1 for ids in groups):
                raise UserError(
                    f"{self.log}: step {step} has {len(pairs)} attempts at {len(set().union(*groups))} tasks; a step is {grpo.prompts} whole groups of {grpo.group_size}"
                )
            yield batches(pairs, grpo.prompts * grpo.group_size)

    def _checked(self, where: str, row: dict[str, Any]) -> tuple[Task, Trajectory]:
        try:
            task, trajectory = from_row(row)
            ids, text = (
                trajectory.ids,
                [part["text"] for part in row["text"] if part["role"] == "assistant"],
            )
        except (KeyError, TypeError) as error:
            raise UserError(
                f"{where}: not a whole trajectory ({error}); it must be one that train.py has recorded"
            ) from None
        if not (
            len(ids) == len(trajectory.sampled) == len(trajectory.logprobs)
            and 0 < trajectory.prompt_length <= len(ids) <= self.max_length
        ):
            raise UserError(
                f"{where}: {len(ids)} ids, {len(trajectory.sampled)} marks, {len(trajectory.logprobs)} log-probabilities, a prompt of "
                f"{trajectory.prompt_length}; they must be equally many, at least the prompt and at most {self.max_length}"
            )
        for token, sampled, logprob in zip(ids, trajectory.sampled, trajectory.logprobs):
            if type(token) is not int or not 0 <= token < self.tokenizer.vocab_size:
                raise UserError(
                    f"{where}: token id {token!r}; the tokenizer has 0 to {self.tokenizer.vocab_size - 1}"
                )
            if sampled and (type(logprob) is not float or not math.isfinite(logprob)):
                raise UserError(
                    f"{where}: a sampled id has the log-probability {logprob!r}; GRPO needs the sampler's for each (without: warm_start.trajectories)"
                )
        if text != [
            self.tokenizer.decode(ids[turn.start : turn.end], skip_special=True)
            for turn in trajectory.turns
        ]:
            raise UserError(
                f"{where}: its ids do not spell its text; another tokenizer has made it"
            )
        return task, trajectory
