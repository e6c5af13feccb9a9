"""evaluate.py --world tau2:DOMAIN: tau2-bench plays, scores and accepts what it wrote."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from collections import Counter
from pathlib import Path

import pytest
from openai_server import openai_server, said

import evaluate
from nanorchestra.errors import UserError
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
        assert 0 <= low <= mean == theirs.pass_hat_ks[k] <= high <= 1
    assert summary["pass_hat"][0][0] > summary["pass_hat"][3][0] and summary["failed"] == 0
    per_turn = (10 * 1 + 5 * 10) / 1e6  # the usage that the server states, at the given price
    assert summary["cost_usd"][0] == pytest.approx(2 * per_turn)

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


def test_a_secret_of_the_user_would_be_recorded_and_is_refused():
    with pytest.raises(UserError, match="--user-args: api_key would be recorded") as refused:
        tau2.user_of("openai/user", '{"api_key": "secret"}')
    assert "secret" not in str(refused.value)


def test_a_missing_package_is_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "litellm", None)
    with pytest.raises(UserError, match=re.escape(tau2.INSTALL)):
        tau2.open_domain("tau2:mock", 1)
