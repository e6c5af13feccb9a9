"""A run on two ranks whose expert fails, whose second is slow and whose search is dead.

Attempts that the infrastructure failed are sampled again, then left out of their groups, and the
run goes on.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from openai_server import openai_server, said
from scripted import call

from nanorchestra.model.checkpoint import NANO

ROOT = Path(__file__).parent.parent
SLOW_S = 0.3
SETTINGS = {
    "run.threads": 1,
    "model.path": NANO,
    "rollout.temperature": 4.0,  # each turn of the menu is drawn
    "rollout.turns": 3,
    "rollout.turn_tokens": 64,
    "task.experts": "real",
    "task.preference": "",
    "warm_start.steps": 0,
    "grpo.prompts": 6,
    "grpo.group_size": 4,
    "grpo.min_std": 0,
    "grpo.bounds": "task",
    "evaluation.tasks": 2,
    "evaluation.temperature": 4.0,
}


@contextmanager
def experts():
    """(Server, models that were asked): "failing" sends a page, "slow" is late, others answer.

    "good-0", "good-2", ... are right.
    """
    asked = set()

    def answer(body):
        model = body["model"]
        asked.add(model)
        if model == "failing":
            return b"<html>502"
        if model == "slow":
            time.sleep(SLOW_S)
        parity = "odd" if model[-1] in "13579" else "even"
        return said(f"<answer>{parity}</answer><query>a query of some words</query>")

    with openai_server() as server:
        server.answer = answer
        yield server, asked


def closed_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def write_world(folder, url, answering):
    """Questions with a catalogue in which the experts `answering` have the role `answer`.

    A good expert writes queries for a search whose server is gone. The menu has each turn once.
    """
    rows = [{"question": f"What is {n} plus {n}?", "answer": "even"} for n in range(60)]
    (folder / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    models = {
        name: {"endpoint": "here", "model": name, "usd": [0.1, 0.1], "latency_s": 20}
        for name in (*answering, "writer")
    }
    roles = {"answer": answering, "search": ["writer"]}
    tools = [
        {"name": name, "kind": "role", "description": "d", "models": models}
        for name, models in roles.items()
    ]
    web = {"name": "web", "kind": "web", "description": "d"}
    tools.append(web | {"base_url": f"http://127.0.0.1:{closed_port()}", "timeout_s": 1.0})
    here = {"base_url": url, "timeout_s": 1.0}  # too short to ask a second time
    catalogue = {"endpoints": {"here": here}, "experts": models, "tools": tools}
    (folder / "tools.json").write_text(json.dumps(catalogue))
    turns = []
    for role, models in roles.items():
        for model in models:
            thought = "abcdefghijklm"[len(turns)]  # at which the turns part, each as probable
            turn = call(model, role).replace('"text"', '"model"')
            turns.append(turn.replace("\nt\n", f"\n{thought}\n"))
    (folder / "menu.json").write_text(json.dumps(turns))


def train(folder, name, steps):
    """Runs train.py on two ranks; returns whether one failed, and what they have printed."""
    settings = SETTINGS | {
        "run.root": folder,
        "run.name": name,
        "grpo.steps": steps,
        "task.world": f"questions:{folder / 'questions.jsonl'}",
        "task.tools": folder / "tools.json",
    }
    command = [sys.executable, "tests/menu_policy.py"]
    command += [str(word) for name, value in settings.items() for word in (f"--{name}", value)]
    env = os.environ | {"OMP_NUM_THREADS": "1", "TAVILY_API_KEY": "none"}
    env |= {"PYTHONPATH": str(ROOT), "MENU": str(folder / "menu.json")}
    env |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}  # as torchrun
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(closed_port())}
    with (folder / "printed").open("w") as printed:
        out = {"stdout": printed, "stderr": subprocess.STDOUT}
        ranks = [
            subprocess.Popen(command, cwd=ROOT, env=env | {"RANK": n, "LOCAL_RANK": n}, **out)
            for n in "01"
        ]
        try:
            statuses = [rank.wait(timeout=300) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
    return any(statuses), (folder / "printed").read_text()


def rows(folder, file):
    return [json.loads(line) for line in (folder / file).read_text().splitlines()]


@pytest.mark.slow
def test_a_run_leaves_out_what_the_infrastructure_failed_and_goes_on(tmp_path):
    with experts() as (server, asked):
        write_world(tmp_path, server.url, ["failing", "slow", *(f"good-{n}" for n in range(6))])
        failed, printed = train(tmp_path, "run", steps=3)
    assert not failed and "finished" in printed, printed
    assert {"failing", "slow", "writer"} <= asked
    steps = [row for row in rows(tmp_path / "run", "metrics.jsonl") if row["phase"] == "grpo"]
    assert [row["step"] for row in steps] == [1, 2, 3] and any("loss" in row for row in steps)
    assert sum(row["retried"] for row in steps) > 0
    for row in steps:
        left_out = round(24 * row["filtered"].get("infrastructure", 0.0))
        assert left_out == round(24 * row["statuses"].get("infrastructure", 0.0)) <= 12
        # Each was played three times; others may have failed and then not.
        assert row["retried"] >= 2 * left_out
    assert any("infrastructure" in row["filtered"] for row in steps)
    for row in rows(tmp_path / "run", "trajectories.jsonl"):
        failed = [
            made for turn in row["turns"] for made in turn["results"] if made["infrastructure"]
        ]
        assert bool(failed) == (row["status"] == "infrastructure")
        if failed:
            assert row["advantage"] == 0.0
