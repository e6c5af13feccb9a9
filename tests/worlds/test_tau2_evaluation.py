"""evaluate.py plays tau2-bench's own tasks: the golden calls score 1, and nothing done scores 0."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
from openai_server import openai_server, said
from test_toolscale_rows import DATA, NOTES, domain, real

import evaluate
from nanorchestra.config import TaskSection
from nanorchestra.report.comparison import recorded_attempts
from nanorchestra.tools.spending import Spending
from worlds.load import open_world
from worlds.toolscale.dataset import load_world
from worlds.toolscale.environment import Models
from worlds.toolscale.score import Scorer, attempt

LIMITS = ":turns=40:context_tokens=1000000:turn_tokens=4000"


@real
@pytest.mark.parametrize(
    "name, known, unchanged",
    [("mock", 6, 1), pytest.param("retail", 74, 6, marks=pytest.mark.slow)],
)
def test_golden_calls_score_1_and_nothing_done_0(
    tmp_path, monkeypatch, sandbox, name, known, unchanged
):
    """`mock` has a toolkit of ours; the tools of `retail` are those of the package.

    `known` tasks need no judge. Nothing done is right in those `unchanged`, whose golden calls
    change no data and make no hand-over that counts, and wrong in all others.
    """
    if name == "retail" and not importlib.util.find_spec("tau2"):
        pytest.skip("tau2-bench is not installed")
    monkeypatch.chdir(tmp_path)
    path = DATA / "tau2" / name
    if name == "mock":
        path = domain(tmp_path / name, path, NOTES)
    options = ["--world", str(path), "--all"]
    options_read = evaluate.read_options(options)
    world = open_world(TaskSection(str(path), preference=""), 0, sandbox, Spending())
    tasks = evaluate.tasks_of(world, options_read)

    def answer(body):
        criteria = tasks[body["seed"]].data["task"]["evaluation_criteria"]
        golden = criteria["actions"] if body["model"] == "golden" else []
        made = sum(len(m.get("tool_calls") or ()) for m in body["messages"])
        if made == len(golden):
            return said(
                f"This is done. {', '.join(criteria['communicate_info'] if golden else [])}"
            )
        call = golden[made]["name"], json.dumps(golden[made]["arguments"])
        return said(None, [call], "tool_calls")

    with openai_server() as server:
        server.answer = answer
        policies = [f"{model}@{server.url}{LIMITS}" for model in ("golden", "idle")]
        assert evaluate.main([*options, "--policy", *policies]) == 0
    outcomes, idle = {"golden": {}, "idle": {}}, {}
    for row in recorded_attempts(Path("runs/evaluation")):
        outcomes[row["policy"].partition("@")[0]][row["task_id"]] = row["outcome"]
    for task in tasks:
        kind = task.offers
        criteria = task.data["task"]["evaluation_criteria"]
        handed = ["handover"] * ("ACTION" in (criteria.get("reward_basis") or ()))
        counted = {kind[action["name"]] for action in criteria["actions"]} & {"write", *handed}
        idle[task.id] = float(not counted)
    assert outcomes["golden"] == dict.fromkeys(idle, 1.0) and len(idle) == known
    assert outcomes["idle"] == idle and sum(idle.values()) == unchanged


def test_golden_calls_of_telecom_score_1_and_nothing_done_0(tmp_path):
    """Both the agent and the user make golden calls; the package has the records."""
    utils = pytest.importorskip("tau2.utils.utils", reason="tau2-bench is not installed")
    (home := tmp_path / "telecom").mkdir()
    tasks = utils.DATA_DIR / "tau2" / "domains" / "telecom" / "tasks_small.json"
    (home / "tasks.json").symlink_to(tasks)
    world = load_world(home, models=Models(user=object()))
    played = [task for split in world.splits.values() for task in split]
    assert len(played) == 20
    for task in played:
        scorer = Scorer(world.domains["telecom"].started(task["initial_state"]), task)
        assert scorer.score(attempt(scorer.golden)) == 1 and scorer.score([]) == 0
