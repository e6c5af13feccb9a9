"""Turns attempts into rows of JSON and back."""

import dataclasses

from nanorchestra.records import Bounds, Preference, Task, ToolCall, ToolResult, Trajectory, Turn
from nanorchestra.schemas import Json


def to_row(task: Task, trajectory: Trajectory) -> Json:
    """Returns the task and the trajectory as one JSON object, which shares the lists of ids."""
    more = {
        "turns": list(map(dataclasses.asdict, trajectory.turns)),
        "task": dataclasses.asdict(task),
        "cost_usd": trajectory.cost_usd,
    }
    return vars(trajectory) | more


def from_row(row: Json) -> tuple[Task, Trajectory]:
    """Returns the arguments of the `to_row` that made `row`; ignores other keys."""
    task = row["task"] | {
        "preference": Preference(**row["task"]["preference"]),
        "bounds": Bounds(**row["task"]["bounds"]),
    }
    row = {"policy_usd": 0.0, "calls_usd": row["cost_usd"]} | row  # one that knows only the sum
    values = {field.name: row[field.name] for field in dataclasses.fields(Trajectory)}
    values["turns"] = []
    for turn in row["turns"]:
        calls = [ToolCall(**call) for call in turn["calls"]]
        results = [ToolResult(**result) for result in turn["results"]]
        values["turns"].append(Turn(**turn | {"calls": calls, "results": results}))
    return Task(**task), Trajectory(**values)
