"""From trajectories to what the trainer takes: those just made, turn by turn where each has its own prompt, and recorded ones worth imitating.

`load_kept` is rejection sampling (as in RFT: Yuan et al. 2023, arXiv 2308.01825): of trajectories.jsonl files it keeps what was right, well paid and
well formed, the best of each task. Only sampled ids are ever learnt from.
"""

from __future__ import annotations

import dataclasses
import json
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from nanorchestra.errors import UserError
from nanorchestra.model.tokenizer import Tokenizer
from nanorchestra.records import Preference, Task, ToolCall, ToolResult, Trajectory, Turn
from nanorchestra.training.packing import Sample

T = TypeVar("T")
PHASES = ("rollouts", "grpo")  # rows of trajectories.jsonl that are attempts at training tasks
# The attempts of one rollout, each beside its task, groups together; and how many were retried.
Batch = tuple[list[Task], list[Trajectory], int]
FIELDS = {
    "task_id": str,
    "phase": str,
    "prompt_length": int,
    "ids": list,
    "sampled": list,
    "turns": list,
    "text": list,
    "status": str,
    "well_formed": bool,
    "outcome": float,
    "reward": float,
}
NAMES = {
    str: "text",
    int: "a whole number",
    list: "a list",
    bool: "true or false",
    float: "a number",
}


def to_row(task: Task, trajectory: Trajectory) -> dict[str, Any]:
    """Returns the task and the trajectory as one JSON object."""
    return dataclasses.asdict(trajectory) | {"task": dataclasses.asdict(task)}


def from_row(row: dict[str, Any]) -> tuple[Task, Trajectory]:
    """Returns the arguments of the `to_row` that made `row`."""
    task = row["task"] | {"preference": Preference(**row["task"]["preference"])}
    values = {field.name: row[field.name] for field in dataclasses.fields(Trajectory)}
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
    return Task(**task), Trajectory(**values)


def batches(pairs: list[tuple[Task, Trajectory]], size: int, retried: int = 0) -> Iterator[Batch]:
    """Yields a step's attempts in rollouts of `size`; a step that sampled again had several."""
    for start in range(0, len(pairs), size):
        tasks, trajectories = map(list, zip(*pairs[start : start + size], strict=True))
        yield tasks, trajectories, 0 if start else retried


def contexts(trajectory: Trajectory) -> list[tuple[int, int, int]]:
    """(begin, start, end) of each context: ids[begin:start] is its prompt, ids[start:end] all that follows it. One, or one a turn."""
    starts: dict[int, int] = {}
    for turn in trajectory.turns:
        starts.setdefault(turn.context, turn.start)
    starts = starts or {0: trajectory.prompt_length}
    return [
        (begin, start, end)
        for (begin, start), end in zip(starts.items(), [*list(starts)[1:], len(trajectory.ids)])
    ]


def parts(trajectory: Trajectory) -> list[tuple[list[int], Sample]]:
    """Returns (prompt, sample) of each context; every id has the advantage of the attempt."""
    t = trajectory
    return [
        (
            t.ids[begin:start],
            Sample(
                t.ids[start:end],
                t.sampled[start:end],
                t.logprobs[start:end],
                t.advantage,
                sum(t.sampled),
            ),
        )
        for begin, start, end in contexts(t)
    ]


def load_kept(
    sources: Sequence[Path],
    tokenizer: Tokenizer,
    *,
    outcome: float,
    reward: float,
    best: int,
    longest: int,
) -> tuple[list[list[Trajectory]], Counter[str]]:
    """The trajectories of runs, or of files, that are worth imitating, those of one task together; and how many are not, for each reason.

    Kept are those of training tasks that were answered, well formed, with at least this outcome and reward, in contexts of at most `longest` ids,
    and of each task the `best` ones by reward (0: all), no two of them alike.
    UserError, with the line: a row that is no trajectory, or whose ids are another tokenizer's. UserError: none is kept.
    """
    tasks: dict[tuple[str, tuple[int, ...]], dict[tuple[int, ...], Trajectory]] = {}
    reasons: Counter[str] = Counter()
    for source in sources:
        for phase, trajectory in _rows(
            source / "trajectories.jsonl" if source.is_dir() else source, tokenizer
        ):
            task = tasks.setdefault(
                (trajectory.task_id, tuple(trajectory.ids[: trajectory.prompt_length])), {}
            )
            faults = {
                "of an evaluation or a skipped step": phase not in PHASES,
                "cut or badly formed": not trajectory.well_formed
                or trajectory.status != "answered",
                "wrong": trajectory.outcome < outcome,
                f"reward below {reward}": trajectory.reward < reward,
                f"longer than {longest} tokens": any(
                    end - begin > longest for begin, _, end in contexts(trajectory)
                ),
                "the same again": tuple(trajectory.ids) in task,
            }
            why = next((fault for fault, holds in faults.items() if holds), None)
            if why:
                reasons[why] += 1
            else:
                task[tuple(trajectory.ids)] = trajectory
    kept = []
    for task in tasks.values():
        ranked = sorted(task.values(), key=lambda trajectory: -trajectory.reward)
        kept.append(ranked[: best or None])
        reasons[f"not of the best {best} of their task"] += len(ranked) - len(kept[-1])
    kept, reasons = [members for members in kept if members], +reasons
    if not kept:
        raise UserError(
            f"warm_start.trajectories: none of {sum(reasons.values())} trajectories is kept ({tally(reasons)}); "
            "lower warm_start.keep_outcome or keep_reward, or record more of a run with run.record_groups"
        )
    return kept, reasons


def tally(reasons: Counter[str]) -> str:
    """ "3 wrong, 2 the same again"."""
    return ", ".join(f"{count} {why}" for why, count in reasons.most_common())


def take(items: Sequence[T], start: int, count: int, seed: int) -> list[T]:
    """items[start: start + count] of an endless row in which all come once, in a new order, before any comes again."""
    epochs = range(start // len(items), (start + count - 1) // len(items) + 1)
    row = [
        item
        for epoch in epochs
        for item in random.Random(f"{seed}/trajectories/{epoch}").sample(items, len(items))
    ]
    return row[start % len(items) :][:count]


def _rows(path: Path, tokenizer: Tokenizer) -> Iterator[tuple[str, Trajectory]]:
    """(phase, trajectory) of each line; what a killed writer left of the last one is passed over."""
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                try:
                    row = json.loads(line)
                except ValueError:
                    if not line.endswith(b"\n"):
                        return
                    raise UserError(
                        f"{path}, line {number}: not JSON; a line must be a trajectory that train.py has recorded"
                    ) from None
                try:
                    trajectory = _trajectory(row, tokenizer)
                except ValueError as error:
                    raise UserError(f"{path}, line {number}: {error}") from None
                yield row["phase"], trajectory
    except OSError as error:
        raise UserError(
            f"{path}: cannot be read ({error.strerror}); warm_start.trajectories takes runs or their trajectories.jsonl, "
            "separated by commas"
        ) from None


def _trajectory(row: Any, tokenizer: Tokenizer) -> Trajectory:
    """A row as a trajectory. ValueError: what is wrong with it. Its turns are where its sampled ids are, or it is not to be trusted."""
    if not isinstance(row, dict):
        raise ValueError(f"{type(row).__name__}; a line must be the JSON object of a trajectory")
    for name, kind in FIELDS.items():
        value = row.get(name)
        if (
            not isinstance(value, (int, float) if kind is float else kind)
            or isinstance(value, bool)
            and kind is not bool
        ):
            raise ValueError(f"{name} is {json.dumps(value)[:40]}; it must be {NAMES[kind]}")
    ids, sampled = row["ids"], row["sampled"]
    strange = next(
        (i for i in ids if type(i) is not int or not 0 <= i < tokenizer.vocab_size), None
    )
    if strange is not None:
        raise ValueError(
            f"ids has {json.dumps(strange)}; this model's tokenizer has the ids 0 to {tokenizer.vocab_size - 1}"
        )
    inside, last, turns = [False] * len(ids), row["prompt_length"], []
    for k, turn in enumerate(row["turns"]):
        start, end, context = (
            turn.get(name, 0) if isinstance(turn, dict) else None
            for name in ("start", "end", "context")
        )
        if not all(type(place) is int for place in (start, end, context)) or not (
            0 <= context < start and last <= start <= end <= len(ids)
        ):
            raise ValueError(
                f"turns[{k}] is {json.dumps(turn)[:60]}; its start, end and context must be places in the {len(ids)} ids, in order"
            )
        inside[start:end], last = [True] * (end - start), end
        turns.append(Turn(start, end, "", context=context))
    if sampled != inside:
        raise ValueError(
            f"sampled has {len(sampled)} entries, {sum(map(bool, sampled))} true; it must be true for the {sum(inside)} ids "
            f"of the turns and false for all other of {len(ids)}"
        )
    said = [
        piece.get("text")
        for piece in row["text"]
        if isinstance(piece, dict) and piece.get("role") == "assistant"
    ]
    read = [tokenizer.decode(ids[turn.start : turn.end], skip_special=True) for turn in turns]
    if said != read:
        wrong = next(
            (k for k, (ours, theirs) in enumerate(zip(read, said)) if ours != theirs),
            min(len(said), len(read)),
        )
        ours, theirs = (json.dumps(str((texts + [""])[wrong])[:40]) for texts in (read, said))
        raise ValueError(
            f"turn {wrong} reads {ours} in this model's tokenizer and {theirs} in the file; "
            "start from the model that wrote it, model.path = RUN/model, or one with its tokenizer"
        )
    return Trajectory(
        row["task_id"],
        0,
        row["prompt_length"],
        ids,
        sampled,
        [0.0] * len(ids),
        [-1] * len(ids),
        turns,
        row["status"],
        well_formed=row["well_formed"],
        outcome=row["outcome"],
        reward=row["reward"],
    )
