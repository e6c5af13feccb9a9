"""The command data_gen.py: figures, byte identity, bad input, the LLM author."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from openai_server import openai_server, said

from data_gen import main
from nanorchestra.errors import UserError
from nanorchestra.tools.http import Reply
from worlds.toolscale import author, pipeline
from worlds.toolscale.blueprint import BUILT_IN, HOME
from worlds.toolscale.dataset import load_tasks
from worlds.toolscale.domain import Domain

ROOT = Path(__file__).parents[2]
OPTIONS = ["--tasks", "60", "--seed", "3", "--domains", "bank,university"]


def run(out, *more):
    return main([*OPTIONS, "--out", str(out), *more])


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    out = tmp_path_factory.mktemp("made")
    assert run(out, "--workers", "1") == 0
    return out


def test_the_bytes_do_not_depend_on_the_workers_and_figures_are_printed(made, tmp_path, capsys):
    assert run(tmp_path, "--workers", "3") == 0
    printed = capsys.readouterr().out
    for figure in ("60 tasks in ", "thrown away: "):
        assert figure in printed
    assert {path.name for path in made.iterdir()} == {"settings.json", "tasks.jsonl", "worlds"}
    tasks = load_tasks(made / "tasks.jsonl")
    for task in tasks:
        assert task["split"] == ("held_out" if task["domain"] == "university" else "train")
        names = {expert["alias"] for expert in task["experts"]}
        assert {*task["pref_vec"]} == names | {"accuracy", "cost", "latency"}
        assert all(0 <= weight <= 1 for weight in task["pref_vec"].values())
        assert all(len(expert["usd"]) == 2 for expert in task["experts"])
        for name in task["preference"].keys() & names:
            assert name in task["preference_text"] and task["pref_vec"][name] != 0.5
    domains = [task["domain"] for task in tasks]
    assert domains == ["bank", "university"] * 30
    for path in made.rglob("*.*"):
        assert path.read_bytes() == (tmp_path / path.relative_to(made)).read_bytes()


def test_the_workers_of_a_killed_run_end(tmp_path):
    command = [sys.executable, "data_gen.py", *OPTIONS, "--out", str(tmp_path), "--workers", "1"]
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


def test_the_tasks_of_another_run_are_never_replaced(made, tmp_path, capsys):
    before = (made / "tasks.jsonl").read_bytes()
    assert main([*OPTIONS, "--seed", "4", "--out", str(made)]) == 2
    error = capsys.readouterr().err
    assert "holds tasks of another run" in error and '"seed": 3' in error and error.count("\n") == 1
    assert run(made, "--workers", "1") == 0  # the same options: the same bytes again
    assert (made / "tasks.jsonl").read_bytes() == before
    (tmp_path / "tasks.jsonl").write_bytes(before)
    assert run(tmp_path) == 2 and "settings.json: cannot be read" in capsys.readouterr().err


def test_show_prints_tasks_to_read_and_writes_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["--show", "2", "--domains", "clinic,telecom"]) == 0
    printed = capsys.readouterr().out
    for title in ("reason_for_call: ", "tools: ", "golden calls:"):
        assert printed.count(title) == 2
    assert not list(tmp_path.iterdir())


def test_a_bad_option_gets_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for options, says in (
        ("--tasks 0 --out x", "--tasks is 0; it must be at least 1"),
        ("", "--out is missing"),
        ("--domains ferry --out x", "domain 'ferry'"),
        ("--difficulty 6 --out x", "--difficulty is '6'"),
        (f"--out {__file__}", "is a file"),
    ):
        assert main(options.split()) == 2
        error = capsys.readouterr().err
        assert says in error and error.count("\n") == 1 and error.startswith("data_gen.py: ")


# --- the language model author


def test_the_author_is_asked_again_with_what_was_wrong(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(pipeline, "BATCH", 12)
    good = json.loads((HOME / "railway.json").read_text()) | {"domain": "car_repair"}
    wish = good["wishes"]["refund"] | {"do": ["refund_booking(it.booking_id, 'gift')"]}
    bad = good | {"wishes": good["wishes"] | {"refund": wish}}
    options = ["--tasks", "20", "--workers", "1", "--domains", "Car repair"]
    with openai_server() as server:
        options += ["--endpoint", server.url, "--out"]
        answers = iter(["Sorry.", json.dumps(bad), f"Here: {json.dumps(good)}"])
        server.answer = lambda body: said(next(answers))
        for _ in range(2):  # the second time nothing is asked
            assert main([*options, str(tmp_path)]) == 0
        server.answer = lambda body: said("no")
        assert main([*options, str(tmp_path / "more")]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("data_gen.py: domain 'Car repair': 'gpt-5' at http://")
    questions = [body["messages"][-1]["content"] for body in server.bodies]
    assert 'the domain "Car repair"' in questions[0] and "must have 1 arguments" in questions[2]
    assert len(questions) == 6
    tasks = load_tasks(tmp_path / "tasks.jsonl")
    assert len(tasks) == 20 and {task["domain"] for task in tasks} == {"car_repair"}
    Domain.load(tmp_path / "worlds" / "car_repair")


def test_garbage_of_an_author_gets_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(pipeline, "BATCH", 1)
    name = BUILT_IN[0]
    for answer in (None, "", "[]", '{"domain": 5}', "[" * 5000):
        reply = Reply({"content": answer})
        monkeypatch.setattr(author.Endpoint, "complete", lambda *_, said=reply: said)
        with pytest.raises(UserError, match=f"domain '{name}': 'm' at "):
            author.write_blueprint(name, tmp_path / "drafts", "http://host", "m", 0)
