"""Turns attempts into rows of JSON and back, and replays them."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

from nanorchestra.engine.stream import TurnStream
from nanorchestra.errors import require
from nanorchestra.model import chat
from nanorchestra.model.tokenizer import Tokenizer
from nanorchestra.records import Bounds, Preference, Task, ToolCall, ToolResult, Trajectory, Turn
from nanorchestra.schemas import MOST_DEPTH, Json, check, levels


def to_row(task: Task, trajectory: Trajectory) -> Json:
    """Returns the task and the trajectory as one JSON object, which shares the lists of ids."""
    turns = list(map(dataclasses.asdict, trajectory.turns))
    return vars(trajectory) | {"turns": turns, "task": dataclasses.asdict(task)}


def check_row(row: Any, where: str) -> None:
    """UserError, which begins with `where`, unless `row` is what `to_row` makes of an attempt."""
    for depth, level in enumerate(levels(row), 1):
        require(depth <= MOST_DEPTH, f"{where}: nested deeper than {MOST_DEPTH} levels")
        finite = all(math.isfinite(value) for value in level if isinstance(value, float))
        require(finite, f"{where}: has a number that is not finite")
    check(row, "attempt", where)
    ids = row["ids"]  # too long for a schema, which takes microseconds for each
    known = all(type(number) is int and number >= 0 for number in ids)
    require(known, f"{where}: ids: expected integers from 0")
    for name in ("sampled", "logprobs", "weight_versions"):
        same = len(row.get(name, ())) == len(ids)
        require(same, f"{where}: {name}: expected one for each of the {len(ids)} ids")
    for turn in row["turns"]:
        inside = turn.get("context", 0) <= turn["start"] <= turn["end"] <= len(ids)
        require(inside, f"{where}: a turn is not within the {len(ids)} ids")
        # A judge, a user or an engine that failed is the one result of a turn without calls.
        fitting = (0, len(turn["calls"]) or 1)
        require(len(turn["results"]) in fitting, f"{where}: a turn has other results than calls")


def from_row(row: Json) -> tuple[Task, Trajectory]:
    """Returns the arguments of the `to_row` that made `row`; ignores other keys."""
    task = row["task"] | {
        "preference": Preference(**row["task"]["preference"]),
        "bounds": Bounds(**row["task"]["bounds"]),
    }
    values = {field.name: row[field.name] for field in dataclasses.fields(Trajectory)}
    values["turns"] = []
    for turn in row["turns"]:
        calls = [ToolCall(**call) for call in turn["calls"]]
        results = [ToolResult(**result) for result in turn["results"]]
        values["turns"].append(Turn(**turn | {"calls": calls, "results": results}))
    return Task(**task), Trajectory(**values)


def replay(
    trajectory: Trajectory, tokenizer: Tokenizer, on_event: Callable[[str, Any], None]
) -> None:
    """Repeats the events of `Rollout.run` from the record; nothing is sampled or called."""
    on_event("start", trajectory)
    for turn in trajectory.turns:
        thinks = chat.opens_thinking(tokenizer, trajectory.ids[: turn.start])
        stream = TurnStream(tokenizer, calls=tokenizer.markers, thinks=thinks)
        on_event("text", stream.feed(*trajectory.ids[turn.start : turn.end]))
        on_event("turn", stream.finish())
        if turn.results:
            on_event("results", turn)


def contexts(trajectory: Trajectory) -> list[tuple[int, int, int]]:
    """Returns (begin, start, end) of each context: one, or one per turn.

    ids[begin:start] is its prompt, ids[start:end] all that follows.
    """
    starts = {}
    for turn in trajectory.turns:
        starts.setdefault(turn.context, turn.start)
    starts = starts or {0: trajectory.prompt_length}
    ends = [*list(starts)[1:], len(trajectory.ids)]
    return [(begin, start, end) for (begin, start), end in zip(starts.items(), ends, strict=True)]
