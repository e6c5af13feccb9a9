"""The command data_gen.py: byte identity, killed runs, and no task is lost."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from data_gen import main
from worlds.toolscale.dataset import load_tasks

ROOT = Path(__file__).parents[2]
OPTIONS = ["--tasks", "60", "--seed", "3", "--domains", "bank,university"]


def run(out, *more):
    return main([*OPTIONS, "--out", str(out), *more])


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    out = tmp_path_factory.mktemp("made")
    assert run(out, "--workers", "1") == 0
    return out


def test_the_bytes_do_not_depend_on_the_workers(made, tmp_path):
    assert run(tmp_path, "--workers", "3") == 0
    for path in (path for path in made.rglob("*.*") if path.is_file()):
        assert path.read_bytes() == (tmp_path / path.relative_to(made)).read_bytes()
    tasks = load_tasks(made / "tasks.jsonl")
    assert [task["domain"] for task in tasks] == ["bank", "university"] * 30
    assert {task["level"] for task in tasks} == {1, 2, 3, 4, 5}
    for task in tasks:
        assert task["split"] == ("held_out" if task["domain"] == "university" else "train")


def test_the_workers_of_a_killed_run_end(tmp_path):
    command = [sys.executable, "data_gen.py", *OPTIONS, "--tasks", "9000", "--workers", "1"]
    command += ["--out", str(tmp_path)]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL, start_new_session=True)
    deadline = time.monotonic() + 60
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    while not children.read_text() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert children.read_text()
    process.kill()
    process.wait()
    with pytest.raises(ProcessLookupError):
        while time.monotonic() < deadline:
            os.killpg(process.pid, 0)
            time.sleep(0.01)
    assert not (tmp_path / "tasks.jsonl").exists()


def test_the_tasks_of_another_run_are_never_replaced(made, capsys):
    before = (made / "tasks.jsonl").read_bytes()
    assert main([*OPTIONS, "--seed", "4", "--out", str(made)]) == 2
    error = capsys.readouterr().err
    assert "holds tasks of another run" in error and '"seed": 3' in error and error.count("\n") == 1
    assert (made / "tasks.jsonl").read_bytes() == before
