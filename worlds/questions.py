"""Question answering tasks from the user's own files: FRAMES, HLE, GeneralThought, any JSONL."""

from __future__ import annotations

from pathlib import Path

from nanorchestra.errors import require
from nanorchestra.files import read_json, read_json_lines
from nanorchestra.records import Preference, Task

# The fields that hold (question, answer), in the order in which they are tried.
FIELDS = (
    ("question", "reference_answer"),
    ("Prompt", "Answer"),
    ("question", "answer"),
    ("problem", "answer"),
)


def load_questions(path: str | Path, most: int | None = None) -> list[Task]:
    """Returns the tasks of a JSONL file, or of a JSON list, of objects with question and answer.

    Rows with an image are left out. task.data: kind "qa", answer, answer_type, category. Raises
    UserError that names the line without a question or an answer.
    """
    rows = enumerate(read_json(path), 1) if Path(path).suffix == ".json" else read_json_lines(path)
    tasks = []
    for number, row in rows:
        where = f"{path}, line {number}"
        require(isinstance(row, dict), f"{where}: must be an object")
        if row.get("image"):
            continue
        found = [(row[q], row[a]) for q, a in FIELDS if row.get(q) and row.get(a) not in (None, "")]
        require(found, f"{where}: no question and answer; one of {FIELDS} is needed")
        question, answer = map(str, found[0])
        data = {
            "kind": "qa",
            "answer": answer,
            "answer_type": row.get("answer_type"),
            "category": row.get("category") or row.get("task"),
        }
        name = str(row.get("id", row.get("question_id", number)))
        tasks.append(Task(name, question.strip(), Preference(), data))
    return tasks[:most]
