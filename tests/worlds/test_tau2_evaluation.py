"""evaluate.py plays tau2-bench's own tasks: the golden calls score 1, and nothing done scores 0."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
from openai_server import openai_server, said
from test_toolscale_rows import DATA, NOTES, domain, real

import evaluate
from nanorchestra.files import read_json
from nanorchestra.report import plots
from nanorchestra.tools.models import Spending

LIMITS = ":turns=40:context_tokens=1000000:turn_tokens=4000"


@real
@pytest.mark.parametrize(
    "name, unchanged", [("mock", 1), pytest.param("retail", 6, marks=pytest.mark.slow)]
)
def test_golden_calls_score_1_and_nothing_done_0(tmp_path, monkeypatch, sandbox, name, unchanged):
    """`mock` has a toolkit of ours; the tools of `retail` are those of the package.

    Nothing done is right in the `unchanged` tasks, whose golden calls change no data.
    """
    if name == "retail" and not importlib.util.find_spec("tau2"):
        pytest.skip("tau2-bench is not installed")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(plots, "figure", lambda *panels, **size: b"a plot")  # it takes seconds
    path = DATA / "tau2" / name
    if name == "mock":
        path = domain(tmp_path / name, path, NOTES)
    options = ["--world", str(path), "--all"]
    _, tasks, _ = evaluate._open_world(str(path), evaluate._read(options), sandbox, Spending())

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
    (found,) = read_json(Path("runs/evaluation/summary.json"))["worlds"].values()
    scores = [(s["accuracy"] * len(tasks), s["failed"]) for s in found.values()]
    assert scores == [(len(tasks), 0), (pytest.approx(unchanged), 0)] and unchanged < len(tasks)
