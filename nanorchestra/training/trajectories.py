"""Turns trajectories into samples for the trainer and into rows of JSON, and reads rows back.

`load_kept` is rejection sampling (RFT: Yuan et al. 2023, arXiv 2308.01825): of recorded attempts it
keeps those that were right and well formed, and of each task the best paid.
"""

from __future__ import annotations

import dataclasses
import json
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from nanorchestra.config import Config
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
    config: Config, tokenizer: Tokenizer, say: Callable[[str], Any]
) -> list[list[Trajectory]]:
    """Returns the recorded trajectories that the warm start imitates, by task; [] without them.

    Kept are attempts at training tasks that are right and well formed, in contexts that fit: of
    each task the BEST by reward, no two alike. Says how many are not, by reason. UserError names
    the line of a row that train.py did not record with this tokenizer; or none is kept.
    """
    settings, longest = config.warm_start, config.rollout.context_tokens
    if not (settings.steps and settings.trajectories):
        return []
    tasks: dict[tuple[str, tuple[int, ...]], dict[tuple[int, ...], Trajectory]] = {}
    reasons: Counter[str] = Counter()
    for source in settings.trajectories.split(","):
        path = Path(source.strip())
        path = path / "trajectories.jsonl" if path.is_dir() else path
        for phase, trajectory in _read(path, tokenizer):
            ids = tuple(trajectory.ids)
            task = tasks.setdefault((trajectory.task_id, ids[: trajectory.prompt_length]), {})
            faults = {
                "of an evaluation or a skipped step": phase not in PHASES,
                "cut or badly formed": not trajectory.well_formed,
                "wrong": trajectory.outcome < 1,
                "too long": any(end - begin > longest for begin, _, end in contexts(trajectory)),
                "the same again": ids in task,
            }
            why = [fault for fault, holds in faults.items() if holds][:1]
            reasons.update(why)
            if not why:
                task[ids] = trajectory
    ranked = [sorted(task.values(), key=lambda t: -t.reward) for task in tasks.values() if task]
    kept = [members[:BEST] for members in ranked]
    reasons["not of the best of their task"] = sum(len(members[BEST:]) for members in ranked)
    tally = ", ".join(f"{count} {why}" for why, count in reasons.most_common() if count) or "none"
    require(kept, f"warm_start.trajectories: no trajectory is kept ({tally})")
    count = sum(map(len, kept))
    say(f"warm start on {count} recorded trajectories of {len(kept)} tasks; not kept: {tally}")
    return kept


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
