"""Question files of each style."""

from __future__ import annotations

import json

import pytest

from nanorchestra.errors import UserError
from nanorchestra.records import Preference
from worlds.questions import load_questions

ROWS = [
    {"id": "a", "question": "Q?", "image": "", "answer": "4", "answer_type": "exactMatch"},
    {"question": "picture", "image": "data:...", "answer": "no"},
    {"question_id": 5, "question": "G?", "reference_answer": "yes", "task": "Logic"},
    {"Prompt": "F?", "Answer": "Jane"},
    {"problem": "P?", "answer": 3},
]


def test_question_files_of_each_style(tmp_path):
    lines, whole = tmp_path / "q.jsonl", tmp_path / "q.json"
    lines.write_text("\n".join(map(json.dumps, ROWS)))
    whole.write_text(json.dumps(ROWS))
    tasks = load_questions(lines)
    assert [(task.id, task.question, task.data["answer"]) for task in tasks] == [
        ("a", "Q?", "4"),
        ("5", "G?", "yes"),
        ("4", "F?", "Jane"),
        ("5", "P?", "3"),
    ]
    assert tasks[0].data["answer_type"] == "exactMatch" and tasks[0].preference == Preference()
    assert load_questions(whole) == tasks and load_questions(whole, most=2) == tasks[:2]


def test_a_bad_row_is_named(tmp_path):
    path = tmp_path / "q.jsonl"
    for bad, says in (
        ('{"text": 1}', "no question and answer"),
        ('{"question": "", "answer": "x"}', "no question and answer"),
        ("[1]", "must be an object"),
        ('{"question": "a"', "not JSON"),
    ):
        path.write_text(bad)
        with pytest.raises(UserError, match=f"line 1: .*{says}"):
            load_questions(path)
