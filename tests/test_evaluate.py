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
from nanorchestra.records import Preference
from nanorchestra.report.comparison import recorded_attempts
from nanorchestra.settings import load_config
from nanorchestra.tools.spending import Spending
from nanorchestra.training.run import to_toml
from worlds import metrics
from worlds.load import open_world
from worlds.policies import checkpoint_settings, parse
from worlds.routers import routers_of
from worlds.toolscale.environment import HAND_OVER

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


def test_an_evaluation_that_is_interrupted_goes_on_to_the_same_record(home, monkeypatch, capsys):
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
    capsys.readouterr()
    for more in ([], ["--run", "straight"]):
        assert evaluate.main(command + more) == 0
    out, err = capsys.readouterr()
    assert "tools=all, turns=1, calls_per_turn=4, " in err and "(from generation_config" in err
    assert all(len(line) <= 80 for line in out.splitlines()) and "\nperfect  " in out
    whole = records("evaluation", "report.html")  # which has the name of its run
    assert whole == records("straight", "report.html")
    files = sorted(name for name in whole if name.endswith("jsonl"))
    assert files[0] == "00-desk-mine-model-turns=1-turn_tokens=8-0000.jsonl"
    assert len(files) == 18 and files[-1] == "02-desk-perfect-0005.jsonl"
    rows = list(recorded_attempts(Path("runs/evaluation")))
    assert Counter(row["trial"] for row in rows) == {0: 30, 1: 30}
    monkeypatch.setattr(evaluate, "play_block", None)  # nothing is left to play
    assert evaluate.main(command) == 0 and records("evaluation", "report.html") == whole
    assert [*summaries()] == [f"mine/model{SHORT}", "program", "perfect"]
    perfect = summaries()["perfect"]
    assert perfect["tasks"] == 10 and len(perfect["pass_hat"]) == 2
    low, high = perfect["intervals"]["accuracy"]
    assert 0 < low < perfect["accuracy"] < high <= 1
    mean, _, _, p = perfect["behind"]["reward"]
    assert mean == pytest.approx(-perfect["reward"]) and p < 0.05


def test_the_bar_moves_by_attempts(home, monkeypatch):
    moves = []

    class Bar(evaluate.tqdm):
        def update(self, count=1):
            moves.append(count)
            self.n += count  # it is shown on a terminal only

    monkeypatch.setattr(evaluate, "tqdm", Bar)
    options = [*questions(home, NOWHERE), "--all", "--parallel", "4", "--tasks", "6", "--policy"]
    assert evaluate.main([*options, "cheapest", f"mine/model{SHORT}"]) == 0
    assert moves == [1, 1, 1, 1, 0, 1, 1, 0] * 2, "0: at the end of a block"


def test_without_run_another_evaluation_takes_the_next_free_name(home, capsys):
    for policy, number in (("router", ""), ("program", "-2"), ("router", ""), ("perfect", "-4")):
        Path("runs/evaluation-3").mkdir(parents=True, exist_ok=True)  # somebody else's
        assert evaluate.main(["--policy", policy, "--tasks", "2"]) == 0
        assert f"\nruns/evaluation{number}: report.html" in capsys.readouterr().out


def test_a_router_that_a_world_does_not_have_is_named(home, capsys):
    """The policies of several worlds are those of all; one line a world says what it lacks."""
    options = [*questions(home, NOWHERE), "desk", "--policy", "router", "program", "cheapest"]
    options[options.index("desk")] = "--tasks=2"
    options[1:2] = ["questions:rows.jsonl", "desk"]
    assert evaluate.main(options) == 0
    err = capsys.readouterr().err
    assert "questions:rows.jsonl: not played by router, program: it has no such router" in err
    assert "desk: not played by cheapest: it has no such router" in err
    worlds = read_json("runs/evaluation/summary.json")["worlds"]
    assert [*worlds["desk"]] == ["router", "program"]


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


GRADED = """
class Guess:
    def reset(self, seed):
        self.number = seed % 10
        return {"question": f"Which number? {seed}", "preference": "Be cheap. cost=1",
                "bounds": (1, 0)}
    def look(self) -> str:
        '''Looks.'''
        return "nothing"
    def reward(self, answer):
        return 1 - abs(self.number - int(answer)) / 10
"""


def test_partial_credit_is_an_outcome_and_a_policy_that_has_collapsed_is_seen(home, capsys):
    """It calls the same tool and says 4 whatever it is asked."""
    (home / "guess.py").write_text(GRADED)
    called = {}

    def answer(body):
        question = body["messages"][0]["content"]
        called[question] = called.get(question, 0) + 1
        if called[question] == 1:
            return said(None, [("look", "{}")], "tool_calls")
        return said("4")

    with openai_server() as server:
        server.answer = answer
        boss = f"boss@{server.url}:input=0:output=0"
        assert evaluate.main(["--world", "guess.py", "--tasks", "30", "--policy", boss]) == 0
    (scores,) = summaries().values()
    outcomes = [row["outcome"] for row in recorded_attempts(Path("runs/evaluation"))]
    assert (
        scores["accuracy"] == pytest.approx(sum(outcomes) / 30) and 0.5 < scores["accuracy"] < 0.9
    )
    assert scores["exact"] == outcomes.count(1.0) / 30 == scores["pass_hat"][0] < 0.3
    assert scores["most_frequent_answer"] == {"answer": "4", "share": 1.0}
    assert scores["calls_by_preference"] == {"cheap": {"look": 1.0}}
    out = capsys.readouterr().out
    assert "outcome" in out and "exact" in out and "right" not in out
    assert re.search(r"most frequent answer +of the attempts\n.* 4 +100.0%\n", out)
    assert re.search(r"by preference +look\ncheap +1.00\n", out)


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


def test_attempts_that_an_endpoint_fails_are_left_out_counted_and_explained(home, capsys):
    """Every second request fails; three attempts at a task then fail once in eight times."""
    asked, fails = Counter(), {n: random.Random(n).choices((True, False), k=3) for n in range(40)}

    def answer(body):
        (number,) = re.findall(r"is (\d+) plus", body["messages"][0]["content"])
        asked[number] += 1
        failed = fails[int(number)][asked[number] - 1]
        return b"<html>502" if failed else said(str(2 * int(number)))

    with openai_server() as server:
        server.answer = answer
        options = [*questions(home, server.url), "--experts", "real", "--all", "--tasks", "40"]
        assert evaluate.main([*options, "--policy", "strongest"]) == 0
    lost = sum(all(tries) for tries in fails.values())
    assert lost == 6 and sum(asked.values()) > 60
    says = f"{lost} of 40 attempts failed, and are in no mean: Error"
    assert f"{says}: strong did not answer: not JSON: <html>502" in capsys.readouterr().out
    scores = summaries()["strongest"]
    assert (scores["failed"], scores["attempts"], scores["accuracy"]) == (lost, 40, 1.0)
    rows = recorded_attempts(Path("runs/evaluation"))
    assert sum(row["status"] == "infrastructure" for row in rows) == lost
    assert b"not JSON" in records("evaluation")["report.html"]


def test_a_model_without_a_price_is_said_aloud_and_has_no_cost(home, capsys):
    with openai_server() as server:
        server.answer = lambda body: said("4", usage=(1000, 500))
        boss = f"boss@{server.url}:turn_tokens=600"
        free, paid = f"{boss}:input=0:output=0", f"{boss}:input=1:output=2"
        options = [*questions(home, server.url), "--all", "--tasks", "4", "--policy"]
        assert evaluate.main([*options, boss, free, paid, "--run", "one"]) == 0
        out, err = capsys.readouterr()
        assert evaluate.main([*options, paid, boss, "--run", "two"]) == 0
    assert f"{boss}: no price is known for this model" in err
    assert "add :input=X:output=X, US dollars per million tokens" in err
    titles, *lines = (re.split(r"  +", line) for line in out.splitlines()[:4])
    assert titles[3] == "cost" and [line[3] for line in lines] == ["-", "$0", "$0.002"]
    one, two = summaries("one"), summaries("two")
    assert one[boss]["cost_usd"] is None and '"cost_usd": 0' not in json.dumps(one[boss])
    assert "cost_usd" not in one[free]["behind"] and "latency_s" in one[free]["behind"]
    assert "cost_usd" in two[paid]["behind"] and "cost_usd" not in two[boss]["behind"]
    assert two[paid]["published"] is None  # its base has no price
    capsys.readouterr()
    assert evaluate.main(["compare", "runs/two", "runs/one"]) == 0
    _, first, second = re.split(r"^(?=boss)", capsys.readouterr().out, flags=re.MULTILINE)
    assert first.startswith(paid) and " cost " in first
    assert second.startswith(boss) and " cost " not in second and " time " in second


def test_questions_are_asked_as_they_are_unless_preferences_are_wanted(home, sandbox):
    """By default no task has a preference; "drawn" gives most one; a text is that of every task."""
    options = [*questions(home, NOWHERE), "--all", "--tasks", "40"]
    preferences = {}
    for text in ("", "drawn", "Be quick. latency=1 usd=0.5"):
        given = evaluate.read_options([*options, *(["--preference", text] if text else [])])
        (world,) = evaluate.open_worlds(given, sandbox, Spending()).values()
        tasks = evaluate.tasks_of(world, given)
        preferences[text] = [task.preference for task in tasks]
        if not text:
            (message,) = world.environment(tasks[0], 0).messages
            assert message["content"] == tasks[0].question
    assert preferences[""] == [Preference()] * 40
    assert sum(bool(preference.text) for preference in preferences["drawn"]) > 30
    assert preferences[text] == [Preference("Be quick.", latency=1, usd=0.5)] * 40


def test_limits_are_those_of_the_models_run_or_generation_config(home):
    assert checkpoint_settings(NANO)["turns"] == load_config("nano").rollout.turns
    path = home / "mine" / "model"
    generation = json.loads((path / "generation_config.json").read_text())
    generation |= {"do_sample": True, "temperature": 0.6, "top_k": 20}
    (path / "generation_config.json").write_text(json.dumps(generation))
    settings = checkpoint_settings(path)
    assert (settings["temperature"], settings["top_k"]) == (0.6, 20)
    assert settings["context_tokens"] == 2048
    changes = {"rollout.turns": 7, "evaluation.temperature": 0.3, "rollout.context": "rebuild"}
    (home / "mine" / "config.toml").write_text(to_toml(load_config(None, changes)))
    policy = parse("mine/model:turns=3:basic", [])
    assert (policy.settings["turns"], policy.base) == (3, "mine/model")
    assert (policy.settings["tools"], policy.settings["temperature"]) == ("basic", 0.3)
    assert policy.load(Spending(), 2).settings.context == "rebuild"


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
    domains = open_world(TaskSection("domains"), 0, sandbox, None)
    env = parse("mine/model:basic", []).environment(domains, domains.task("held_out", 0), 0)
    assert HAND_OVER not in env.messages[0]["content"] and "call_expert" not in str(env.tools)


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


def test_a_checkpoint_without_a_tokenizer_is_refused(home, capsys):
    (home / "mine" / "model" / "tokenizer.json").unlink()
    assert evaluate.main(["--policy", "mine/model", "--tasks", "1"]) == 2
    assert "mine/model: no tokenizer.json" in capsys.readouterr().err
