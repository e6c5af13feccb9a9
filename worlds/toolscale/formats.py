"""Reads and writes tasks: tasks.jsonl, tau2 directories, rows of the ToolScale dataset.

tasks.jsonl has one task a line: tau2's fields, and `domain`, `level`, `tools` (names of those
offered; all if it is missing) and `template`.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nanorchestra.errors import UserError, require
from nanorchestra.files import read_json, read_json_lines
from worlds.toolscale.shapes import Json, check_shape
from worlds.toolscale.tasks import actions
from worlds.toolscale.world import World, write_json

TAU2_FIELDS = ("id", "description", "user_scenario", "ticket", "initial_state")
CRITERIA = {
    "actions": [],
    "env_assertions": [],
    "communicate_info": [],
    "nl_assertions": None,
    "reward_basis": ["DB", "COMMUNICATE"],
}
_MIDNIGHT = re.compile(r'"(\d{4}-\d\d-\d\d)[T ]00:00:00(\.0+)?(Z|[+-]00:?00)?"')


def load_tasks(path: str | Path) -> list[Json]:
    """Returns the tasks of a tasks.jsonl. Raises UserError that names the line and the field."""
    tasks = _read_lines(path, lambda task: normalised(task, None))
    require(tasks, f"{path}: holds no task")
    counts = Counter(task["id"] for task in tasks)
    name, count = counts.most_common(1)[0]
    require(count == 1, f"{path}: id {name!r} stands {count} times; each task needs its own")
    return tasks


def import_tau2(directory: str | Path) -> tuple[World, list[Json]]:
    """Returns the world and the tasks of a tau2 domain: db.json, policy.md, perhaps tasks.json.

    The world has no tools unless there is a tools.json too.
    """
    world, path = World.load(Path(directory)), Path(directory) / "tasks.json"
    raw = read_json(path) if path.exists() else []
    require(isinstance(raw, list), f"{path}: must be a list of tasks")
    return world, [normalised(task, world.domain) for task in raw]


def export_tau2(world: World, tasks: list[Json], directory: str | Path) -> None:
    """Writes db.json, policy.md and tasks.json as tau2 reads them, tools and schema beside them."""
    world.save(Path(directory))
    fields = (*TAU2_FIELDS, "evaluation_criteria")
    own = [task for task in tasks if task["domain"] == world.domain]
    plain = [{field: task.get(field) for field in fields} for task in own]
    write_json(Path(directory) / "tasks.json", plain)


def normalised(task: Any, domain: str | None) -> Json:
    """Returns a tau2 task with every field of the format. Raises UserError for a wrong one.

    `domain` is that of a task that does not name its own.
    """
    check_shape("row", task, "task")
    given = task.get("evaluation_criteria") or {}
    criteria = CRITERIA | {field: value for field, value in given.items() if value is not None}
    criteria["actions"] = actions(task["id"], criteria["actions"])
    whole = dict.fromkeys(TAU2_FIELDS) | {"domain": domain} | task
    whole |= {"id": str(task["id"]), "evaluation_criteria": criteria}
    check_shape("task", whole, f"task {whole['id']}")
    return whole


def load_rows(path: str | Path) -> list[Json]:
    """Returns the tasks of a JSON Lines export of the ToolScale dataset, repaired."""
    return _read_lines(path, repaired)


def repaired(row: Any) -> Json:
    """Returns a task from a row of the ToolScale dataset.

    Its columns hold the union of all tools' arguments, so nulls among the arguments are dropped.
    Dates that were read as times are text again; a midnight is a date. The domain is that of the
    instructions.
    """
    check_shape("row", row, "task")
    row = json.loads(_MIDNIGHT.sub(r'"\1"', json.dumps(row, default=str)))
    for action in (row.get("evaluation_criteria") or {}).get("actions") or ():
        arguments = json.dumps(action.get("arguments") or {})
        action["arguments"] = json.loads(arguments, object_hook=_without_nulls)
    instructions = (row.get("user_scenario") or {}).get("instructions")
    domain = instructions.get("domain") if isinstance(instructions, dict) else None
    return normalised(row, domain)


def _without_nulls(value: Json) -> Json:
    return {key: inner for key, inner in value.items() if inner is not None}


def _read_lines(path: str | Path, read: Callable[[Any], Json]) -> list[Json]:
    tasks = []
    for number, value in read_json_lines(path):
        try:
            tasks.append(read(value))
        except UserError as error:
            raise UserError(f"{path}, line {number}: {error}") from None
    return tasks
