"""The command data_gen.py: its bytes are those of the seed, and no task is lost."""

from __future__ import annotations

import pytest

from data_gen import main
from worlds.toolscale.dataset import load_tasks

OPTIONS = ["--tasks", "60", "--seed", "3", "--domains", "bank,university"]


def run(out, *more):
    return main([*OPTIONS, "--out", str(out), *more])


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    out = tmp_path_factory.mktemp("made")
    assert run(out) == 0
    return out


def test_the_bytes_are_a_function_of_the_seed(made, tmp_path):
    assert run(tmp_path) == 0
    for path in (path for path in made.rglob("*.*") if path.is_file()):
        assert path.read_bytes() == (tmp_path / path.relative_to(made)).read_bytes()
    tasks = load_tasks(made / "tasks.jsonl")
    assert [task["domain"] for task in tasks] == ["bank", "university"] * 30
    assert {task["level"] for task in tasks} == {1, 2, 3, 4, 5}
    for task in tasks:
        assert task["split"] == ("held_out" if task["domain"] == "university" else "train")


def test_tasks_are_never_replaced(made, capsys):
    before = (made / "tasks.jsonl").read_bytes()
    assert run(made, "--seed", "4") == 2
    error = capsys.readouterr().err
    assert "has tasks already" in error and error.count("\n") == 1
    assert (made / "tasks.jsonl").read_bytes() == before
