"""Turns trajectories into samples for the trainer and into rows of JSON, and reads rows back.

`load_kept` is rejection sampling (RFT: Yuan et al. 2023, arXiv 2308.01825): of recorded attempts it
keeps those that were right and well formed, and of each task the best paid.
"""

from __future__ import annotations

import dataclasses
import json
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from nanorchestra.errors import UserError, require
from nanorchestra.model.tokenizer import Tokenizer
from nanorchestra.records import Preference, Task, ToolCall, ToolResult, Trajectory, Turn
from nanorchestra.training.packing import Group, Sample

PHASES = ("rollouts", "grpo")  # rows of trajectories.jsonl that are attempts at training tasks
BEST = 4  # attempts at a task that are imitated, at most
T = TypeVar("T")


def to_row(task: Task, trajectory: Trajectory) -> dict[str, Any]:
    """Returns the task and the trajectory as one JSON object."""
    return dataclasses.asdict(trajectory) | {"task": dataclasses.asdict(task)}


def from_row(row: dict[str, Any]) -> tuple[Task, Trajectory]:
    """Returns the arguments of the `to_row` that made `row`; ignores other keys."""
    task = row["task"] | {"preference": Preference(**row["task"]["preference"])}
    values = {field.name: row[field.name] for field in dataclasses.fields(Trajectory)}
    values["turns"] = []
    for turn in row["turns"]:
        calls = [ToolCall(**call) for call in turn["calls"]]
        results = [ToolResult(**result) for result in turn["results"]]
        values["turns"].append(Turn(**turn | {"calls": calls, "results": results}))
    return Task(**task), Trajectory(**values)


def contexts(trajectory: Trajectory) -> list[tuple[int, int, int]]:
    """Returns (begin, start, end) of each context: one, or one per turn.

    ids[begin:start] is its prompt, ids[start:end] all that follows.
    """
    starts: dict[int, int] = {}
    for turn in trajectory.turns:
        starts.setdefault(turn.context, turn.start)
    starts = starts or {0: trajectory.prompt_length}
    ends = [*list(starts)[1:], len(trajectory.ids)]
    return [(begin, start, end) for (begin, start), end in zip(starts.items(), ends, strict=True)]


def as_group(members: Sequence[Trajectory]) -> Group:
    """Returns attempts at one task as the trainer takes them: a sample per context."""
    samples = []
    for t in members:
        total = sum(t.sampled)
        for begin, start, end in contexts(t):
            ids, sampled, logprobs = (x[start:end] for x in (t.ids, t.sampled, t.logprobs))
            samples.append((t.ids[begin:start], Sample(ids, sampled, logprobs, t.advantage, total)))
    return Group.of(samples)


def load_kept(
    sources: Sequence[Path], tokenizer: Tokenizer, longest: int
) -> tuple[list[list[Trajectory]], Counter[str]]:
    """Returns the recorded trajectories worth imitating by task, and how many are not, by reason.

    Kept are attempts at training tasks that are right and well formed, in contexts of at most
    `longest` ids: of each task the BEST by reward, no two alike. UserError names the line of a row
    that train.py did not record with this tokenizer; or none is kept.
    """
    tasks: dict[tuple[str, tuple[int, ...]], dict[tuple[int, ...], Trajectory]] = {}
    reasons: Counter[str] = Counter()
    for source in sources:
        path = source / "trajectories.jsonl" if source.is_dir() else source
        for phase, trajectory in _read(path, tokenizer):
            ids = tuple(trajectory.ids)
            task = tasks.setdefault((trajectory.task_id, ids[: trajectory.prompt_length]), {})
            lengths = [end - begin for begin, _, end in contexts(trajectory)]
            faults = {
                "of an evaluation or a skipped step": phase not in PHASES,
                "cut or badly formed": not trajectory.well_formed,
                "wrong": trajectory.outcome < 1,
                f"longer than {longest} tokens": max(lengths) > longest,
                "the same again": ids in task,
            }
            why = next((fault for fault, holds in faults.items() if holds), None)
            if why:
                reasons[why] += 1
            else:
                task[ids] = trajectory
    kept = []
    for task in tasks.values():
        ranked = sorted(task.values(), key=lambda trajectory: -trajectory.reward)
        kept.append(ranked[:BEST])
        reasons[f"not of the best {BEST} of their task"] += len(ranked[BEST:])
    kept, reasons = [members for members in kept if members], +reasons
    require(
        kept,
        f"warm_start.trajectories: none of {sum(reasons.values())} trajectories is kept "
        f"({tally(reasons)}); record more of a run with run.record_groups",
    )
    return kept, reasons


def tally(reasons: Counter[str]) -> str:
    """Returns the counts in words: "3 wrong, 2 the same again"."""
    return ", ".join(f"{count} {why}" for why, count in reasons.most_common())


def take(items: Sequence[T], start: int, count: int, seed: int) -> list[T]:
    """Returns items[start : start + count] of an endless sequence of shuffled epochs."""
    epochs = range(start // len(items), (start + count - 1) // len(items) + 1)
    shuffled: list[T] = []
    for epoch in epochs:
        rng = random.Random(f"{seed}/trajectories/{epoch}")
        shuffled += rng.sample(items, len(items))
    return shuffled[start % len(items) :][:count]


def _read(path: Path, tokenizer: Tokenizer) -> Iterator[tuple[str, Trajectory]]:
    """Yields phase and trajectory of each line. UserError."""
    require(
        path.is_file(),
        f"{path}: no such file; warm_start.trajectories takes runs or their trajectories.jsonl, "
        "separated by commas",
    )
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.endswith(b"\n"):  # else its writer was killed, or is at work
                yield _parse(line, f"{path}, line {number}", tokenizer)


def _parse(line: bytes, where: str, tokenizer: Tokenizer) -> tuple[str, Trajectory]:
    try:
        row = json.loads(line)
        _, trajectory = from_row(row)
        known = all(0 <= i < tokenizer.vocab_size for i in trajectory.ids)
        said = [part["text"] for part in row["text"] if part["role"] == "assistant"]
        phase = row["phase"]
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{where}: not a trajectory of train.py ({error!r})") from None
    spoken = [trajectory.ids[turn.start : turn.end] for turn in trajectory.turns]
    require(
        known and said == [tokenizer.decode(ids, skip_special=True) for ids in spoken],
        f"{where}: its ids do not spell its text, so another tokenizer has written it; start "
        "from the model that recorded it, model.path = RUN/model, or one with its tokenizer",
    )
    # The warm start needs no log-probabilities; those of an endpoint's ids are None.
    return phase, dataclasses.replace(trajectory, logprobs=[0.0] * len(trajectory.ids))
