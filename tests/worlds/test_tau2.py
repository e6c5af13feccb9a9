"""evaluate.py --world tau2:DOMAIN: tau2-bench plays, scores and accepts what it wrote."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
from collections import Counter
from pathlib import Path

import pytest
from openai_server import openai_server, said

import evaluate
from nanorchestra.model.checkpoint import NANO
from worlds import tau2

needs_tau2 = pytest.mark.skipif(
    not (importlib.util.find_spec("tau2") and importlib.util.find_spec("litellm")),
    reason="tau2-bench is not installed",
)
TITLES = "Another meeting", "Important Meeting"  # of the tasks that the written policy creates


@pytest.fixture
def models(tmp_path, monkeypatch):
    """A written policy and a written user at one address; the arguments that name the user.

    The policy creates the task of `create_task_1`, and another one in trials whose seeds are even.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # before its first import

    def answer(body):
        about = {"id": "1", "object": "chat.completion", "created": 1, "model": body["model"]}
        messages = body["messages"]
        if body["model"] == "user":
            done = "created" in str(messages[-1]["content"]) or len(messages) > 4
            return said("###STOP###" if done else "Add a task called Meeting for user_1.") | about
        made = any(message["role"] == "tool" for message in messages)
        if not made and "seed" in body:
            arguments = {"user_id": "user_1", "title": TITLES[body["seed"] % 2]}
            return said(None, [("create_task", json.dumps(arguments))], "tool_calls") | about
        return said("It is created.") | about

    with openai_server() as server:
        server.answer = answer
        place = json.dumps({"api_base": server.url})
        yield server, ["--user", "openai/user", "--user-args", place]


@pytest.fixture
def retail(models, monkeypatch):
    """Tasks of `mock` as the domain retail: the leaderboard takes only its own domains.

    Two that begin with a conversation are left out: its times are those of loading, so that
    tau2-bench's validator refuses them from anybody.
    """
    from tau2.registry import registry

    load, open_mock = registry.get_tasks_loader("mock"), registry.get_env_constructor("mock")

    def tasks(task_split_name=None):
        history = "message_history", "update_task_with_history_and_env_assertions"
        return [t for t in load(task_split_name) if not t.id.endswith(history)]

    def environment(**settings):
        made = open_mock(**settings)
        made.domain_name = "retail"
        return made

    monkeypatch.setitem(registry._tasks, "retail", tasks)
    monkeypatch.setitem(registry._domains, "retail", environment)
    return models


@needs_tau2
def test_the_file_is_what_tau2_submit_accepts_and_the_figures_are_its_own(
    retail, monkeypatch, capsys
):
    from tau2.data_model.simulation import Results
    from tau2.metrics.agent_metrics import compute_metrics
    from tau2.scripts.leaderboard import prepare_submission as submit

    server, user = retail
    policy = f"golden@{server.url}:input=1:output=10"
    options = ["--world", "tau2:retail", "--policy", policy, *user]
    options += ["--trials", "4", "--parallel", "8", "--seed", "5"]
    assert evaluate.main(options) == 0
    shown = capsys.readouterr().out

    file = Path("runs/evaluation/policy-0/retail.json")
    results = Results.load(file)
    by_world = json.loads(Path("runs/evaluation/summary.json").read_text())["worlds"]
    (summary,) = by_world["tau2:retail"].values()
    theirs = compute_metrics(results)
    right, attempts = Counter(), Counter()
    for simulation in results.simulations:
        right[simulation.task_id] += simulation.reward_info.reward == 1
        attempts[simulation.task_id] += 1
    assert set(attempts.values()) == {4} and len(attempts) == 8
    seeds = {simulation.trial: simulation.seed for simulation in results.simulations}
    odd = sum(seed % 2 for seed in seeds.values())
    assert right["create_task_1"] == odd and 0 < odd < 4  # the seeds reach the policy
    for k in range(1, 5):
        mean, low, high = summary["pass_hat"][k - 1]
        ours = [math.comb(right[task], k) / math.comb(4, k) for task in attempts]
        assert mean == theirs.pass_hat_ks[k] == pytest.approx(sum(ours) / 8)
        assert 0 <= low <= mean <= high <= 1
    assert summary["pass_hat"][0][0] > summary["pass_hat"][3][0] and summary["failed"] == 0
    per_turn = (10 * 1 + 5 * 10) / 1e6  # the usage that the server states, at the given price
    assert summary["cost_usd"][0] == pytest.approx(2 * per_turn)
    info = results.info
    assert info.agent_info.llm == "hosted_vllm/golden" and info.seed == 5
    assert info.agent_info.llm_args == {}

    # tau2 submit prepare, and tau2 submit validate of what that wrote.
    def ask(question, default="", **_):
        return "a@example.org" if "email" in question else default

    monkeypatch.setattr(submit.Prompt, "ask", ask)
    monkeypatch.setattr(submit.Confirm, "ask", lambda question, default=False: False)
    submit.prepare_submission([str(file)], "board")
    (board,) = Path("board").iterdir()
    capsys.readouterr()
    submit.validate_submission(str(board))
    assert "Submission metrics validation successful" in capsys.readouterr().out

    # What was played is not played again; what is missing is, as after Ctrl-C.
    asked = len(server.bodies)
    assert evaluate.main(options) == 0 and len(server.bodies) == asked
    assert capsys.readouterr().out == shown and "pass^4" in shown
    content = json.loads(file.read_text())
    content["simulations"] = content["simulations"][:-3]
    file.write_text(json.dumps(content))
    assert evaluate.main(options) == 0 and asked < len(server.bodies) < asked + 32
    assert len(Results.load(file).simulations) == 32
    assert compute_metrics(Results.load(file)).pass_hat_ks == theirs.pass_hat_ks


@needs_tau2
@pytest.mark.slow
def test_a_checkpoint_plays_through_an_endpoint_of_its_own(models, capsys):
    """nano knows none of these tools, so nothing is right; equal seeds say the same.

    A turn without content or call is no turn for tau2-bench, which leaves such an attempt out.
    """
    _, user = models
    said_by = {}
    for run in ("one", "two"):
        policy = f"{NANO}:context_tokens=2048:temperature=1"
        options = ["--world", "tau2:mock", "--policy", policy, *user, "--run", run]
        status = evaluate.main([*options, "--tasks", "1", "--trials", "2", "--parallel", "1"])
        content = json.loads(Path(f"runs/{run}/policy-0/mock.json").read_text())
        said_by[run] = [
            [(message["role"], message["content"]) for message in each["messages"]]
            for each in content["simulations"]
        ]
    shown = capsys.readouterr()
    assert said_by["one"] == said_by["two"]
    info = content["info"]["agent_info"]
    assert info["implementation"] == "llm_agent" and info["llm"] == "hosted_vllm/nano"
    assert info["llm_args"] == {"temperature": 1.0, "top_p": 1.0, "max_tokens": 160}
    (summary,) = json.loads(Path("runs/two/summary.json").read_text())["worlds"][
        "tau2:mock"
    ].values()
    reasons = [each["termination_reason"] for each in content["simulations"]]
    assert summary["failed"] == reasons.count("infrastructure_error") == said_by["two"].count([])
    if summary["failed"] < 2:
        assert summary["pass_hat"][0][0] == 0 < summary["cost_usd"][0]
        assert max(len(messages) for messages in said_by["two"]) > 2
    else:  # it was asked, and thought until its tokens were spent
        assert "AssistantMessage must have either content or tool_calls" in summary["failure"]
    assert summary["pass_1_with_failed"] == 0
    assert status == 2 * (summary["failed"] > 0)  # one of two is more than one of four
    assert ("which tau2-bench leaves out" in shown.out) == (summary["failed"] > 0)


@needs_tau2
@pytest.mark.parametrize(
    "options, says",
    [
        (["--world", "tau2:shop"], "--world tau2:shop: tau2-bench has no such domain, but"),
        (["--max-usd", "1"], "--max-usd: tau2-bench does not know it"),
        (["--user", ""], "--user: tau2-bench's users need a model"),
        (["--user-args", '{"api_key": "secret"}'], "--user-args: api_key would be recorded"),
        (["--user", "nobody/none"], "--user nobody/none: litellm cannot ask it: BadRequestError"),
    ],
)
def test_bad_input_is_one_line(models, capsys, options, says):
    _, user = models
    arguments = ["--world", "tau2:mock", "--policy", str(NANO), *user]
    if options[0] == "--world":
        options = ["--world", "tau2:mock", options[1]]
    assert evaluate.main([*arguments, *options]) == 2
    problem = capsys.readouterr().err.splitlines()[-1]
    assert says in problem and "secret" not in problem


def test_a_missing_package_is_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "litellm", None)
    assert evaluate.main(["--world", "tau2:mock", "--user", "a", "--policy", str(NANO)]) == 2
    assert tau2.INSTALL in capsys.readouterr().err
