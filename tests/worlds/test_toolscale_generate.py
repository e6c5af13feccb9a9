"""The command data_gen.py: figures, byte identity, bad input."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from data_gen import main
from nanorchestra.model import chat
from nanorchestra.model.checkpoint import NANO
from nanorchestra.model.tokenizer import Tokenizer
from nanorchestra.settings import SMALL
from worlds.toolscale.dataset import load_tasks, load_world

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
    assert [task["domain"] for task in tasks] == ["bank", "university"] * 30
    assert {task["level"] for task in tasks} == {1, 2, 3, 4, 5}
    for path in (path for path in made.rglob("*.*") if path.is_file()):
        assert path.read_bytes() == (tmp_path / path.relative_to(made)).read_bytes()


def test_a_dry_run_has_room_for_the_prompts_and_a_turn(made):
    """Those of "bank" are the longest."""
    world, tokenizer = load_world(made), Tokenizer.from_dir(NANO)
    room = SMALL["rollout.context_tokens"] - SMALL["rollout.turn_tokens"]
    for index in range(20):
        env = world.environment(world.task("train", index), 0)
        assert len(chat.encode(tokenizer, env.messages, env.tools)) <= room


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
    assert main(["--show", "2", "--domains", "clinic,railway"]) == 0
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
        ("--domains ferry.py --out x", "ferry.py: no such file"),
        ("--difficulty 6 --out x", "--difficulty is '6'"),
        ("--wish cost --out x", "--wish is of --show N"),
        ("--wish cost --show 1 --domains bank", "--wish cost: bank has move, waive, dispute,"),
        ("--endpoint gpt --out x", "--endpoint is 'gpt'; it must be MODEL@ and a base URL"),
        ("--domain ferry", "--domain needs the --endpoint"),
        ("--user m@http://h --out x", "--user plays the users of --solver"),
        ("--domain x --endpoint m@http://h --out x", "a domain is a file NAME.py"),
        (f"--out {__file__}", "is a file"),
    ):
        assert main(options.split()) == 2
        error = capsys.readouterr().err
        assert says in error and error.count("\n") == 1 and error.startswith("data_gen.py: ")
