"""Files in and out: tasks.jsonl, tau2 directories, rows of the ToolScale dataset, and question files (FRAMES, HLE, GeneralThought, any JSONL).

tasks.jsonl has one task a line: tau2's fields, and `domain`, `level`, `tools` (names of those offered; all if it is missing) and `template`.
"""

from __future__ import annotations

import datetime
import json
import re
from pathlib import Path
from typing import Any, Iterator

from nanorchestra.errors import UserError
from nanorchestra.files import read_json, write_whole
from nanorchestra.records import Preference, Task
from worlds.toolscale.verify import check_format
from worlds.toolscale.world import World

TAU2_FIELDS = (
    "id",
    "description",
    "user_scenario",
    "ticket",
    "initial_state",
    "evaluation_criteria",
)
# Style -> the fields that hold (question, answer); "jsonl" is tried last.
QUESTION_FIELDS = {
    "general_thought": ("question", "reference_answer"),
    "frames_original": ("Prompt", "Answer"),
    "jsonl": ("question", "answer"),
    "problem": ("problem", "answer"),
}
_MIDNIGHT = re.compile(r"(\d{4}-\d\d-\d\d)[T ]00:00:00(\.0+)?(Z|[+-]00:?00)?")


def _lines(path: str | Path) -> Iterator[tuple[int, Any]]:
    """(line number, JSON value) of a JSONL file. Raises UserError that names the line that is not whole."""
    try:
        text = Path(path).read_text()
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise UserError(f"{path}: not UTF-8 text; give JSON lines") from None
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                yield number, json.loads(line)
            except ValueError as error:
                raise UserError(
                    f"{path}: line {number} is not JSON ({error}); is the file whole?"
                ) from None


def load_tasks(path: str | Path) -> list[dict[str, Any]]:
    """The tasks of a tasks.jsonl. Raises UserError that names the line, and the field, that is wrong."""
    tasks, seen = [], set()
    for number, task in _lines(path):
        try:
            check_format(task)
        except UserError as error:
            raise UserError(f"{path}: line {number}: {error}") from None
        if task["id"] in seen:
            raise UserError(
                f"{path}: line {number}: id {task['id']!r} is there already; each task needs its own"
            )
        seen.add(task["id"])
        tasks.append(task)
    if not tasks:
        raise UserError(f"{path}: holds no task")
    return tasks


# --- tau2 --------------------------------------------------------------------------------------------------------------------------------


def import_tau2(directory: str | Path) -> tuple[World, list[dict[str, Any]]]:
    """A tau2 domain directory: db.json, policy.md and, if it is there, tasks.json; the world has no tools unless there is a tools.json."""
    directory = Path(directory)
    world = World.load(directory)
    raw = read_json(directory / "tasks.json") if (directory / "tasks.json").exists() else []
    if not isinstance(raw, list):
        raise UserError(f"{directory / 'tasks.json'}: must be a list of tasks")
    return world, [normalised(task, world.domain) for task in raw]


def export_tau2(world: World, tasks: list[dict[str, Any]], directory: str | Path) -> None:
    """Writes db.json, policy.md and tasks.json as tau2 reads them, and tools.json and schema.json beside them."""
    directory = Path(directory)
    world.save(directory)
    plain = [
        {field: task.get(field) for field in TAU2_FIELDS}
        for task in tasks
        if task["domain"] == world.domain
    ]
    write_whole(
        directory / "tasks.json", (json.dumps(plain, indent=1, ensure_ascii=False) + "\n").encode()
    )


def normalised(task: Any, domain: str) -> dict[str, Any]:
    """A tau2 task with every field of the format there. Raises UserError that names what is wrong."""
    if not isinstance(task, dict):
        raise UserError(f"task: is a {type(task).__name__}; it must be an object")
    criteria = {
        "actions": [],
        "env_assertions": [],
        "communicate_info": [],
        "nl_assertions": None,
        "reward_basis": ["DB", "COMMUNICATE"],
    }
    criteria |= {
        field: value
        for field, value in (task.get("evaluation_criteria") or {}).items()
        if value is not None
    }
    actions = [
        {
            "action_id": f"{task.get('id')}_{n}",
            "requestor": "assistant",
            "info": None,
            "compare_args": None,
        }
        | action
        for n, action in enumerate(criteria["actions"])
    ]
    whole = (
        dict.fromkeys(TAU2_FIELDS)
        | {"domain": domain}
        | task
        | {"id": str(task.get("id")), "evaluation_criteria": criteria | {"actions": actions}}
    )
    check_format(whole)
    return whole


def repaired(row: dict[str, Any]) -> dict[str, Any]:
    """A task from a row of the ToolScale dataset, whose columns hold the union of all tools' arguments: nulls are dropped, and dates that were read as
    times are text again (midnights are dates). The domain is that of the instructions."""
    row = _dates(row)
    criteria = dict(row.get("evaluation_criteria") or {})
    criteria["actions"] = [
        action | {"arguments": _without_nulls(action.get("arguments") or {})}
        for action in criteria.get("actions") or ()
    ]
    instructions = (row.get("user_scenario") or {}).get("instructions")
    return normalised(
        row | {"evaluation_criteria": criteria},
        instructions.get("domain") if isinstance(instructions, dict) else "",
    )


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, (list, tuple)) else value


def _dates(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _dates(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_dates(inner) for inner in value]
    if isinstance(value, (datetime.datetime, datetime.date)):
        value = value.isoformat(*([" "] if isinstance(value, datetime.datetime) else []))
    match = _MIDNIGHT.fullmatch(value) if isinstance(value, str) else None
    return match[1] if match else value


def load_rows(path: str | Path) -> list[dict[str, Any]]:
    """Tasks of a JSONL export of the ToolScale dataset, repaired."""
    tasks = []
    for number, row in _lines(path):
        try:
            tasks.append(repaired(row))
        except (UserError, AttributeError, TypeError) as error:
            raise UserError(f"{path}: line {number}: {error}") from None
    return tasks


# --- questions ---------------------------------------------------------------------------------------------------------------------------


def load_questions(path: str | Path, most: int | None = None) -> list[Task]:
    """Question answering tasks of the user's own copy of a file: JSONL, or a JSON list, of objects with a question and an answer.

    FRAMES ("question", "answer", or "Prompt", "Answer"), HLE ("question", "answer", "answer_type"; rows with an image are left out), GeneralThought
    ("question", "reference_answer") and anything with question and answer. task.data: kind "qa", answer, answer_type, category.
    """
    path = Path(path)
    rows = enumerate(read_json(path), 1) if path.suffix == ".json" else _lines(path)
    tasks = []
    for number, row in rows:
        if not isinstance(row, dict):
            raise UserError(
                f"{path}: line {number} is a {type(row).__name__}; it must be an object"
            )
        if row.get("image"):
            continue
        fields = next(((q, a) for q, a in QUESTION_FIELDS.values() if q in row and a in row), None)
        if fields is None:
            raise UserError(
                f"{path}: line {number}: no question and answer; one of {', '.join(f'({q}, {a})' for q, a in QUESTION_FIELDS.values())} is needed"
            )
        question, answer = (row[field] for field in fields)
        if (
            not isinstance(question, str)
            or not question.strip()
            or isinstance(answer, (dict, list))
            or answer is None
            or not str(answer).strip()
        ):
            raise UserError(
                f"{path}: line {number}: {fields[0]} and {fields[1]} must be text that is not empty"
            )
        data = {
            "kind": "qa",
            "answer": str(answer),
            "answer_type": row.get("answer_type"),
            "category": row.get("category") or row.get("task"),
        }
        tasks.append(
            Task(
                str(row.get("id", row.get("question_id", number))),
                question.strip(),
                Preference(),
                data,
            )
        )
        if most is not None and len(tasks) == most:
            break
    if not tasks:
        raise UserError(f"{path}: holds no question (rows with an image are left out)")
    return tasks
