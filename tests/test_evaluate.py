"""The command evaluate.py: what it records and resumes, whom it compares, how it stops."""

from __future__ import annotations

import json
import random
import re
import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from openai_server import openai_server, said

import evaluate
from nanorchestra.config import RolloutSection, TaskSection
from nanorchestra.errors import UserError
from nanorchestra.files import read_json
from nanorchestra.formats.rollout import load_rollout
from nanorchestra.model.checkpoint import NANO, save_checkpoint
from nanorchestra.records import Preference
from nanorchestra.report.comparison import recorded_attempts
from nanorchestra.settings import load_config
from nanorchestra.tools import http
from nanorchestra.tools.spending import Spending
from nanorchestra.training.run import to_toml
from worlds.load import open_world
from worlds.policies import checkpoint_settings, parse
from worlds.routers import PRACTISED, routers_of
from worlds.toolscale.environment import HAND_OVER

SHORT = ":turns=1:turn_tokens=8"


@pytest.fixture
def home(tmp_path, monkeypatch, nano_model, nano_tokenizer):
    """A directory of its own, in which the run `mine` has trained a model that babbles."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    save_checkpoint(nano_model, nano_tokenizer, tmp_path / "mine" / "model", dtype=torch.float32)
    return tmp_path


def questions(home, url, rows=40):
    """Options for a file of questions with three experts, that are at `url`."""
    usd = {"strong": [1.0, 10.0], "middle": [0.5, 2.0], "quick": [0.1, 0.4]}
    (home / "tools.json").write_text(
        json.dumps(
            {
                "endpoints": {"here": {"base_url": url}},
                "experts": {
                    n: {"endpoint": "here", "model": n, "usd": usd[n], "max_tokens": 2000}
                    for n in usd
                },
                "tools": [
                    {"name": n, "kind": "expert", "description": n, "expert": n} for n in usd
                ],
            }
        )
    )
    asked = [{"question": f"What is {n} plus {n}?", "answer": str(2 * n)} for n in range(rows)]
    (home / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in asked))
    return ["--world", "questions:rows.jsonl", "--tools", "tools.json"]


def records(run):
    return {file.name: file.read_bytes() for file in sorted(Path("runs", run).iterdir())}


def test_an_evaluation_that_was_killed_goes_on_to_the_same_record(home, monkeypatch, capsys):
    command = ["--policy", f"mine/model{SHORT}", "program", "perfect", "--tasks", "10"]
    command += ["--parallel", "4", "--trials", "2", "--seed", "3"]
    assert evaluate.main(command) == 0
    out, err = capsys.readouterr()
    assert "tools=all, turns=1, calls_per_turn=4, " in err and "(from generation_config" in err
    assert "\nperfect  " in out
    whole = records("evaluation")
    files = sorted(name for name in whole if name.endswith("jsonl"))
    assert files[0] == "00-desk-mine-model-turns=1-turn_tokens=8-0000.jsonl"
    assert len(files) == 18 and files[-1] == "02-desk-perfect-0005.jsonl"
    assert all(len(line) <= 80 for line in out.splitlines())
    for name in (files[3], files[4], files[16], "report.html"):
        Path("runs/evaluation", name).unlink()
    assert evaluate.main(command) == 0 and records("evaluation") == whole
    monkeypatch.setattr(evaluate, "play_block", None)  # nothing is left to play
    assert evaluate.main(command) == 0 and records("evaluation") == whole
    summaries = read_json("runs/evaluation/summary.json")["worlds"]["desk"]
    assert [*summaries] == [f"mine/model{SHORT}", "program", "perfect"]
    assert summaries["perfect"]["tasks"] == 10 and len(summaries["perfect"]["pass_hat"]) == 2
    low, high = summaries["perfect"]["intervals"]["accuracy"]
    assert 0 < low < summaries["perfect"]["accuracy"] < high <= 1
    mean, _, _, p = summaries["perfect"]["behind"]["reward"]
    assert mean == pytest.approx(-summaries["perfect"]["reward"]) and p < 0.05


def test_without_run_another_evaluation_takes_the_next_free_name(home, capsys):
    for policy, number in (("router", ""), ("program", "-2"), ("router", ""), ("program", "-2")):
        Path("runs/evaluation-3").mkdir(parents=True, exist_ok=True)  # somebody else's
        assert evaluate.main(["--policy", policy, "--tasks", "2"]) == 0
        assert f"\nruns/evaluation{number}: report.html" in capsys.readouterr().out
    assert evaluate.main(["--policy", "perfect", "--tasks", "2"]) == 0
    assert "\nruns/evaluation-4: report.html" in capsys.readouterr().out


def test_a_mistake_is_one_line_and_status_2(home, capsys, monkeypatch):
    monkeypatch.setattr(http.random, "uniform", lambda *_: 0.0)  # no wait between the tries
    evaluate.main(["--policy", "router", "--tasks", "2"])
    capsys.readouterr()
    asked = questions(home, "http://127.0.0.1:9/v1")
    real = ["--experts", "real", "--policy", "strongest", "--tasks", "4", "--run", "silent"]
    for arguments, says in (
        (["--tasks", "0"], "at least 1, not 0"),
        (["--run", "../../x"], "--run is '../../x'; it must be the name of a directory"),
        (["--policy", "mine"], f"linear-{PRACTISED}, routers; did you mean mine/model?"),
        (["--world", "nowhere"], "no world 'nowhere'"),
        ([*asked, "--judge", "nobody"], "task.judge"),
        ([*asked, *real], "4 of 4 attempts failed: Error: strong did not answer: no connection"),
        (["--policy", "router", "--tasks", "3", "--run", "evaluation"], "another evaluation"),
        (["compare", "runs/evaluation", "runs/none"], "runs/none"),
    ):
        assert evaluate.main(arguments) == 2
        out, err = capsys.readouterr()
        last = err.splitlines()[-1]
        assert last.startswith("evaluate.py: ") and says in last and "Traceback" not in err, says


def test_a_router_that_a_world_does_not_have_is_named(home, capsys):
    """The policies of several worlds are those of all; one line a world says what it lacks."""
    options = [*questions(home, "http://127.0.0.1:9/v1"), "--world", "questions:rows.jsonl"]
    options += ["desk", "--policy", "router", "program", "cheapest"]
    assert evaluate.main([*options, "--tasks", "2"]) == 0
    err = capsys.readouterr().err
    assert "questions:rows.jsonl: not played by router, program: it has no such router" in err
    assert "desk: not played by cheapest: it has no such router" in err
    worlds = read_json("runs/evaluation/summary.json")["worlds"]
    assert [*worlds["desk"]] == ["router", "program"]


def test_two_evaluations_are_compared_on_the_same_tasks_alone(home, capsys):
    common = ["--policy", "program", "--parallel", "9"]
    for name, more in (("a", "--tasks=9"), ("b", "--tasks=18"), ("c", "--seed=1")):
        assert (
            evaluate.main([*common, more, "--tasks=9" if name == "c" else more, "--run", name]) == 0
        )
    capsys.readouterr()
    assert evaluate.main(["compare", "runs/a", "runs/b"]) == 0
    text = capsys.readouterr().out
    assert "on the 9 attempts" in text and re.search(r"reward +\+0.000 \[\+0.000, \+0.000\]", text)
    assert evaluate.main(["compare", "runs/a", "runs/c"]) == 2
    assert "no task in common" in capsys.readouterr().err


def test_a_model_behind_an_endpoint_and_real_experts_run_once_and_are_repeated_from_replies(
    home, capsys
):
    def answer(body):
        text = body["messages"][-1]["content"]
        if body.get("tools") and body["messages"][-1]["role"] == "user":
            return said(None, [("strong", "{}")], "tool_calls")
        numbers = re.findall(r"is (\d+) plus", text)
        return said(str(2 * int(numbers[0]))) if numbers else said(text)

    with openai_server() as server:
        server.answer = answer
        options = [*questions(home, server.url), "--experts", "real", "--all"]
        options += ["--policy", f"boss@{server.url}:input=1:output=2", "strongest", "--tasks", "6"]
        assert evaluate.main([*options, "--run", "one"]) == 0
        asked = len(server.bodies)
        assert Counter(body["model"] for body in server.bodies) == {"boss": 12, "strong": 6}
        assert evaluate.main([*options, "--run", "two"]) == 0 and len(server.bodies) == asked
    one, two = records("one"), records("two")
    spent = json.loads(one.pop("spent.json"))["spent_usd"]  # the second has paid nothing
    assert spent == pytest.approx(12 * 20e-6 + 6 * 60e-6)
    assert {n: one[n] for n in one if n != "report.html"} == {
        n: two[n] for n in two if n != "report.html"
    }
    (summaries,) = read_json("runs/one/summary.json")["worlds"].values()
    assert [scores["accuracy"] for scores in summaries.values()] == [1.0, 1.0]
    boss = summaries[f"boss@{server.url}:input=1:output=2"]
    assert (
        boss["calls"] == {"strong": 1.0} and boss["cost_usd"] > summaries["strongest"]["cost_usd"]
    )


def test_an_evaluation_is_replayed_without_its_endpoints_for_nothing(home, capsys):
    def answer(body):
        if body.get("tools") and body["messages"][-1]["role"] == "user":
            return said(None, [("strong", "{}")], "tool_calls")
        threading.Event().wait(random.random() * 0.02)
        return said(str(random.randrange(100)))

    with openai_server() as server:
        server.answer = answer
        options = [*questions(home, server.url), "--all", "--tasks", "6", "--trials", "2"]
        options += ["--policy", f"boss@{server.url}:input=1:output=2", "strongest", "cascade"]
        assert evaluate.main([*options, "--experts", "record:kept", "--run", "one"]) == 0
        assert "paid to endpoints: $0.00" in (out := capsys.readouterr().out) and "(" in out
    replay = [*options, "--experts", "replay:kept", "--max-usd", "0"]
    assert evaluate.main([*replay, "--run", "two"]) == 0
    assert "paid to endpoints" not in capsys.readouterr().out
    one, two = records("one"), records("two")
    assert "spent.json" in one and "spent.json" not in two
    other = {"report.html", "config.toml", "spent.json"}  # they name the run, the word and the bill
    assert {n: one[n] for n in one.keys() - other} == {n: two[n] for n in two.keys() - other}
    assert not Path("runs/replies").exists()
    assert evaluate.main([*replay, "--run", "three", "--tasks", "7"]) == 2
    assert "no reply is recorded to boss at" in capsys.readouterr().err


@pytest.mark.parametrize("why", ["cap", "dead"])
def test_what_was_measured_is_kept_when_dollars_or_an_endpoint_end(home, why, capsys, monkeypatch):
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # between the tries
    with openai_server() as server:

        def answer(body):
            server.status = 500 if why == "dead" and len(server.bodies) > 4 else 200
            if why == "cap":  # four calls are open together, each at its most
                threading.Event().wait(0.5)
            return said("4", usage=(100, 10))

        server.answer = answer
        boss = f"boss@{server.url}:input=0:output=10000:turn_tokens=50"  # $0.5 at most, $0.1 it is
        options = questions(home, "http://127.0.0.1:9/v1")
        options += ["--policy", "strongest", boss, "--all", "--tasks", "8", "--parallel", "4"]
        assert evaluate.main([*options, "--max-usd", "2.2" if why == "cap" else "99"]) == 2
        err = capsys.readouterr().err.splitlines()[-1]
        assert ("--max-usd 2.2 is reached" if why == "cap" else "4 of 4 attempts failed") in err
        summary = read_json("runs/evaluation/summary.json")
        assert summary["partial"] in err and b"Partial" in records("evaluation")["report.html"]
        (summaries,) = summary["worlds"].values()
        assert [scores["tasks"] for scores in summaries.values()] == [8, 4]
        why = ""
        assert evaluate.main([*options, "--max-usd", "99"]) == 0
        (summaries,) = read_json("runs/evaluation/summary.json")["worlds"].values()
        assert [scores["tasks"] for scores in summaries.values()] == [8, 8]


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
    (summaries,) = read_json("runs/evaluation/summary.json")["worlds"].values()
    scores = summaries["strongest"]
    assert (scores["failed"], scores["attempts"], scores["accuracy"]) == (lost, 40, 1.0)
    rows = [
        row
        for row in recorded_attempts(Path("runs/evaluation"))
        if row["status"] == "infrastructure"
    ]
    assert len(rows) == lost and b"not JSON" in records("evaluation")["report.html"]


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
    (summaries,) = read_json("runs/one/summary.json")["worlds"].values()
    known = json.dumps(summaries[boss])
    assert summaries[boss]["cost_usd"] is None and '"cost_usd": 0' not in known
    assert "cost_usd" not in summaries[free]["behind"] and "latency_s" in summaries[free]["behind"]
    (summaries,) = read_json("runs/two/summary.json")["worlds"].values()
    assert "cost_usd" in summaries[paid]["behind"] and "cost_usd" not in summaries[boss]["behind"]
    assert summaries[paid]["published"] is None  # its base has no price
    capsys.readouterr()
    assert evaluate.main(["compare", "runs/two", "runs/one"]) == 0
    _, first, second = re.split(r"^(?=boss)", capsys.readouterr().out, flags=re.MULTILINE)
    assert first.startswith(paid) and " cost " in first
    assert second.startswith(boss) and " cost " not in second and " time " in second
    assert evaluate.main([*options, f"{boss}:input=1"]) == 2
    assert "input and output must both be US dollars" in capsys.readouterr().err


def test_questions_are_asked_as_they_are_unless_preferences_are_wanted(home, sandbox):
    """By default no task has a preference; "drawn" gives most one; a text is that of every task."""
    options = [*questions(home, "http://127.0.0.1:9/v1"), "--all", "--tasks", "40"]
    preferences = {}
    for text in (None, "drawn", "Be quick. latency=1 usd=0.5"):
        given = evaluate.read_options(options + ([] if text is None else ["--preference", text]))
        (world,) = evaluate.open_worlds(given, sandbox, Spending()).values()
        tasks = evaluate.tasks_of(world, given)
        preferences[text] = [task.preference for task in tasks]
        if text is None:
            for task in tasks:
                (message,) = world.environment(task, 0).messages
                assert message["content"] == task.question
    assert preferences.pop(None) == [Preference()] * 40
    assert sum(bool(preference.text) for preference in preferences.pop("drawn")) > 30
    assert preferences.popitem()[1] == [Preference("Be quick.", latency=1, usd=0.5)] * 40


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
    assert policy.settings["tools"] == "basic"
    assert (
        policy.settings["temperature"] == 0.3
        and policy.load(Spending(), 2).settings.context == "rebuild"
    )


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
    """A task's limit of $0.0005 became the policy's of $1; $0 became none; seconds were ignored."""
    world = open_world(TaskSection("desk"), 0, sandbox, None)
    routers = routers_of(world)
    for usd, seconds in ((0.0005, 9.0), (0.0, 9.0)):
        tasks = []
        for index in range(40):
            task = world.task("held_out", index)
            strict = replace(task.preference, usd=usd, seconds=seconds)
            tasks.append(replace(task, preference=strict))
        for text in ("program:usd=1", "oracle-router"):
            policy = parse(text, routers)
            player = routers[policy.base]
            for attempt in evaluate.play_block(player, policy, world, tasks, 0, 0):
                assert attempt.cost_usd <= usd and attempt.latency_s <= seconds, text


def test_a_number_out_of_its_range_is_refused(home):
    for text, right in (
        ("program:usd=nan", "usd must be US dollars, 0 or more"),
        ("program:turns=3", "turns=3 must be basic, none, or a number of usd"),
        ("mine/model:turns=-5:calls_per_turn=0", "turns, calls_per_turn must be 1 or more"),
    ):
        with pytest.raises(UserError, match=right):
            parse(text, ["program"])


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


def test_a_checkpoint_without_a_tokenizer_is_refused(tmp_path, nano_model):
    save_checkpoint(nano_model, None, tmp_path / "mute")
    with pytest.raises(UserError, match="no tokenizer.json"):
        load_rollout(tmp_path / "mute", RolloutSection(), {}, 1)
