"""The command evaluate.py: what it records and resumes, whom it compares, what it tells.

Its mistakes are in the table of tests/test_errors.py.
"""

from __future__ import annotations

import json
import random
import re
import signal
import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from openai_server import openai_server, said

import evaluate
from nanorchestra.config import TaskSection
from nanorchestra.errors import INTERRUPTED
from nanorchestra.files import read_json
from nanorchestra.model.checkpoint import NANO, save_checkpoint
from nanorchestra.report.comparison import recorded_attempts
from nanorchestra.settings import load_config
from nanorchestra.tools.spending import Spending
from nanorchestra.training.run import to_toml
from worlds import metrics
from worlds.load import open_world
from worlds.policies import checkpoint_settings, parse
from worlds.routers import routers_of

SHORT = ":turns=1:turn_tokens=8"
NOWHERE = "http://127.0.0.1:9/v1"
USD = {"strong": [1.0, 10.0], "middle": [0.5, 2.0], "quick": [0.1, 0.4], "judge1": [1.0, 1.0]}


@pytest.fixture
def home(tmp_path, monkeypatch, nano_model, nano_tokenizer):
    """A directory of its own, in which the run `mine` has trained a model that babbles."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("nanorchestra.tools.http.random.uniform", lambda *_: 0.0)  # no waiting
    (tmp_path / "mine").mkdir()
    save_checkpoint(nano_model, nano_tokenizer, tmp_path / "mine" / "model", dtype=torch.float32)
    return tmp_path


def questions(home, url, rows=40):
    """Options for a file of questions with three experts, that are at `url`; a judge is no tool."""
    experts = {
        name: {"endpoint": "here", "model": name, "usd": usd, "max_tokens": 2000}
        for name, usd in USD.items()
    }
    tools = [
        {"name": name, "kind": "expert", "description": name, "expert": name}
        for name in list(USD)[:3]
    ]
    tables = {"endpoints": {"here": {"base_url": url}}, "experts": experts, "tools": tools}
    (home / "tools.json").write_text(json.dumps(tables))
    asked = [{"question": f"What is {n} plus {n}?", "answer": str(2 * n)} for n in range(rows)]
    (home / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in asked))
    return ["--world", "questions:rows.jsonl", "--tools", "tools.json"]


def records(run, *others):
    """The files of a run by name, without those that are named."""
    files = sorted(Path("runs", run).iterdir())
    return {file.name: file.read_bytes() for file in files if file.name not in others}


def summaries(run="evaluation"):
    """The summary of each policy in the one world of a run."""
    (found,) = read_json(f"runs/{run}/summary.json")["worlds"].values()
    return found


def test_an_evaluation_that_is_interrupted_goes_on_to_the_same_record(home, monkeypatch):
    command = ["--policy", f"mine/model{SHORT}", "program", "perfect", "--tasks", "10"]
    command += ["--parallel", "4", "--trials", "2", "--seed", "3"]
    score, scored = metrics.score, []

    def interrupt(*arguments):
        scored.append(arguments)
        if len(scored) == 31:
            signal.raise_signal(signal.SIGINT)
        return score(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(metrics, "score", interrupt)
        assert evaluate.main(command) == INTERRUPTED
    assert 0 < len(records("evaluation", "config.toml")) < 18
    for more in ([], ["--run", "straight"]):
        assert evaluate.main(command + more) == 0
    whole = records("evaluation", "report.html")  # which has the name of its run
    assert whole == records("straight", "report.html")
    assert len([name for name in whole if name.endswith("jsonl")]) == 18
    rows = list(recorded_attempts(Path("runs/evaluation")))
    assert Counter(row["trial"] for row in rows) == {0: 30, 1: 30}
    monkeypatch.setattr(evaluate, "play_block", None)  # nothing is left to play
    assert evaluate.main(command) == 0 and records("evaluation", "report.html") == whole
    perfect = summaries()["perfect"]
    assert perfect["tasks"] == 10 and len(perfect["pass_hat"]) == 2
    mean, _, _, p = perfect["behind"]["reward"]
    assert mean == pytest.approx(-perfect["reward"]) and p < 0.05


def test_two_evaluations_are_compared_on_the_same_tasks_alone(home, capsys):
    for name, more in (("a", ["9"]), ("b", ["18"]), ("c", ["9", "--seed", "1"])):
        options = ["--policy", "program", "--parallel", "9", "--run", name, "--tasks", *more]
        assert evaluate.main(options) == 0
    capsys.readouterr()
    assert evaluate.main(["compare", "runs/a", "runs/b"]) == 0
    text = capsys.readouterr().out
    assert "on the 9 attempts" in text and re.search(r"reward +\+0.000 \[\+0.000, \+0.000\]", text)
    assert re.search(r"\n  right +\+0.0% ", text) and "exact" not in text
    assert evaluate.main(["compare", "runs/a", "runs/c"]) == 2
    assert "no task in common" in capsys.readouterr().err


def test_a_model_and_real_experts_are_asked_once_and_replayed_without_their_endpoints(home, capsys):
    """A judge is an expert of the catalogue, a tool or not; a set without split is played by --all.

    What was recorded is played again for nothing.
    """

    def answer(body):
        text = body["messages"][-1]["content"]
        if body["model"] == "judge1":
            return said("<correct>True</correct>")
        if body.get("tools") and body["messages"][-1]["role"] == "user":
            return said(None, [("strong", "{}")], "tool_calls")
        threading.Event().wait(random.random() * 0.02)
        numbers = re.findall(r"is (\d+) plus", text)
        return said(f"about {2 * int(numbers[0])}" if numbers else text)

    with openai_server() as server:
        server.answer = answer
        boss = f"boss@{server.url}:input=1:output=2"
        options = [*questions(home, server.url, rows=3), "--all", "--trials", "2"]
        options += ["--judge", "judge1", "--policy", boss, "strongest", "cascade"]
        real = [*options, "--experts", "real"]
        assert evaluate.main([*real, "--run", "one"]) == 0
        asked = Counter(body["model"] for body in server.bodies)
        assert asked["boss"] == 12 and asked["judge1"] == 6  # what was judged is not again
        assert evaluate.main([*real, "--run", "again"]) == 0
        assert Counter(body["model"] for body in server.bodies) == asked
        assert "paid to endpoints: $0" in capsys.readouterr().out
        assert evaluate.main([*options, "--experts", "record:kept", "--run", "two"]) == 0
    found = summaries("one")
    assert [scores["accuracy"] for scores in found.values()] == [1.0] * 3
    assert found[boss]["calls"] == {"strong": 1.0} and found[boss]["verdicts"] == {"model": 1.0}
    assert found[boss]["cost_usd"] > found["strongest"]["cost_usd"] > 0
    spent = read_json("runs/one/spent.json")["spent_usd"]  # the second has paid nothing
    assert spent > 12 * 20e-6 + 6 * 60e-6  # boss and strong, and what cascade and judge cost
    assert records("one", "report.html", "spent.json") == records("again", "report.html")
    capsys.readouterr()
    replay = [*options, "--experts", "replay:kept", "--max-usd", "0"]
    assert evaluate.main([*replay, "--run", "three"]) == 0
    assert "paid to endpoints" not in capsys.readouterr().out
    other = ("report.html", "config.toml", "spent.json")  # they name the run, the word and the bill
    assert records("two", *other) == records("three", *other)
    assert "spent.json" not in records("three")
    assert evaluate.main([*replay, "--run", "four", "--seed", "1"]) == 2
    assert "no reply is recorded to" in capsys.readouterr().err


@pytest.mark.parametrize("why", ["cap", "dead"])
def test_what_was_measured_is_kept_when_dollars_or_an_endpoint_end(home, why, capsys):
    with openai_server() as server:

        def answer(body):
            server.status = 500 if why == "dead" and len(server.bodies) > 4 else 200
            if why == "cap":  # four calls are open together, each at its most
                threading.Event().wait(0.5)
            return said("4", usage=(100, 10))

        server.answer = answer
        boss = f"boss@{server.url}:input=0:output=10000:turn_tokens=50"  # $0.5 at most, $0.1 it is
        options = [*questions(home, NOWHERE), "--policy", "strongest", boss]
        options += ["--all", "--tasks", "8", "--parallel", "4", "--max-usd"]
        assert evaluate.main([*options, "2.2" if why == "cap" else "99"]) == 2
        err = capsys.readouterr().err.splitlines()[-1]
        assert ("--max-usd 2.2 is reached" if why == "cap" else "4 of 4 attempts failed") in err
        assert read_json("runs/evaluation/summary.json")["partial"] in err
        assert b"Partial" in records("evaluation")["report.html"]
        assert [scores["tasks"] for scores in summaries().values()] == [8, 4]
        why = ""
        assert evaluate.main([*options, "99"]) == 0
        assert [scores["tasks"] for scores in summaries().values()] == [8, 8]


def test_a_model_without_a_price_is_said_aloud_and_has_no_cost(home, capsys):
    with openai_server() as server:
        server.answer = lambda body: said("4", usage=(1000, 500))
        boss = f"boss@{server.url}:turn_tokens=600"
        free, paid = f"{boss}:input=0:output=0", f"{boss}:input=1:output=2"
        options = [*questions(home, server.url), "--all", "--tasks", "4", "--policy"]
        assert evaluate.main([*options, boss, free, paid]) == 0
    out, err = capsys.readouterr()
    assert f"{boss}: no price is known for this model" in err
    titles, *lines = (re.split(r"  +", line) for line in out.splitlines()[:4])
    assert titles[3] == "cost" and [line[3] for line in lines] == ["-", "$0", "$0.002"]
    assert summaries()[boss]["cost_usd"] is None
    assert "cost_usd" not in summaries()[free]["behind"]


def test_limits_are_those_of_the_models_run_or_generation_config(home):
    assert checkpoint_settings(NANO)["turns"] == load_config("nano").rollout.turns
    path = home / "mine" / "model"
    generation = json.loads((path / "generation_config.json").read_text())
    generation |= {"do_sample": True, "temperature": 0.6, "top_k": 20}
    (path / "generation_config.json").write_text(json.dumps(generation))
    settings = checkpoint_settings(path)
    assert (settings["temperature"], settings["top_k"]) == (0.6, 20)
    assert settings["context_tokens"] == 2048
    changes = {"rollout.turns": 7, "evaluation.temperature": 0.3}
    (home / "mine" / "config.toml").write_text(to_toml(load_config(None, changes)))
    policy = parse("mine/model:turns=3:basic", [])
    assert (policy.settings["turns"], policy.base) == (3, "mine/model")
    assert (policy.settings["tools"], policy.settings["temperature"]) == ("basic", 0.3)


def test_a_policy_with_fewer_tools_can_call_no_others(home, sandbox):
    world = open_world(TaskSection("desk"), 0, sandbox, None)
    task, kinds = world.task("held_out", 0), {}
    for tools in ("all", "basic", "none"):
        policy = parse(f"mine/model:{tools}" if tools != "all" else "mine/model:usd=0.5", [])
        env = policy.environment(world, task, 0)
        kinds[tools] = set(env.kinds.values())
        offered = {tool["function"]["name"] for tool in env.tools}
        assert offered | set(env.task.preference.never) == {"records", "python", "ask"}
        assert env.task.preference.usd == (0.5 if tools == "all" else None)
    assert kinds["none"] == set() < kinds["basic"] < kinds["all"] and "expert" not in kinds["basic"]


def test_a_limit_of_a_policy_never_loosens_that_of_the_user(home, sandbox):
    world = open_world(TaskSection("desk"), 0, sandbox, None)
    routers = routers_of(world)
    for usd, seconds in ((0.0005, 9.0), (0.0, 9.0)):
        tasks = []
        for index in range(40):
            task = world.task("held_out", index)
            strict = replace(task.preference, usd=usd, seconds=seconds)
            tasks.append(replace(task, preference=strict))
        policy = parse("program:usd=1", routers)
        for attempt in evaluate.play_block(routers["program"], policy, world, tasks, 0, 0):
            assert attempt.cost_usd <= usd and attempt.latency_s <= seconds


def test_the_seeds_of_a_block_are_those_of_its_tasks(home, sandbox):
    """Two blocks of a world are played as one would be."""
    options = evaluate.read_options(["--tasks", "6"])
    (world,) = evaluate.open_worlds(options, sandbox, Spending()).values()
    tasks = evaluate.tasks_of(world, options)
    router, policy = routers_of(world)["program"], parse("program", ["program"])
    whole = evaluate.play_block(router, policy, world, tasks, 3, 0)
    halves = evaluate.play_block(router, policy, world, tasks[:3], 3, 0)
    halves += evaluate.play_block(router, policy, world, tasks[3:], 3, 3)
    assert whole == halves and len({attempt.seed for attempt in whole}) == 6
