"""The command evaluate.py: a table beside the routers, figures as JSON, one line for a mistake."""

from __future__ import annotations

import json
from functools import partial
from types import SimpleNamespace

import pytest

import evaluate
from nanorchestra.agent.load import load_rollout
from nanorchestra.agent.loop import Limits
from nanorchestra.errors import UserError
from nanorchestra.model.saving import save_checkpoint
from nanorchestra.records import Trajectory
from worlds import evaluation
from worlds.miniature.world import World, environment


def oracle(environments, seeds, on_done=None):
    """A policy that knows the answer and spends nothing."""
    return [
        Trajectory(env.task.id, seed, 0, [], [], [], [], answer=env.task.data["answer"], outcome=1)
        for env, seed in zip(environments, seeds, strict=True)
    ]


def test_a_table_and_the_same_figures_as_json(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(evaluate, "load_rollout", lambda *_: SimpleNamespace(run=oracle))
    file = tmp_path / "figures.json"
    command = f"--model my/model --tasks 30 --seed 4 --json {file}"
    assert evaluate.main(command.split()) == 0
    lines = {line.split("  ")[0]: line for line in capsys.readouterr().out.splitlines()}
    assert " 100.0 " in lines["my/model"]
    assert {"common sense, one call", "always the cheapest"} <= set(lines)
    figures = json.loads(file.read_text())
    assert (figures["model"], figures["seed"], figures["tasks"]) == ("my/model", 4, 30)
    assert figures["policy"]["accuracy"] == pytest.approx(figures["policy"]["reward"]) == 1.0
    assert figures["routers"]["teacher"]["reward"] < figures["routers"]["perfect"]["reward"] < 1
    lead, low, high = figures["policy_minus"]["perfect"]
    assert 0 < low < lead < high


def test_a_mistake_is_one_line_and_status_2(capsys):
    for arguments, says in (
        ("--tasks 0", "--tasks is 0"),
        ("--temperature -1", "temperature"),
        ("--model /no/model", "/no/model"),
    ):
        assert evaluate.main(arguments.split()) == 2
        out, err = capsys.readouterr()
        assert err.startswith("evaluate.py: ") and says in err and (err.count("\n"), out) == (1, "")


def test_a_checkpoint_without_a_tokenizer_is_refused(tmp_path, nano_model):
    save_checkpoint(nano_model, None, tmp_path / "mute")
    with pytest.raises(UserError, match="no tokenizer.json"):
        load_rollout(tmp_path / "mute", Limits(), 1.0, 1)


def test_infrastructure_failures_are_repeated_and_then_left_out_of_the_means():
    tasks = World(0).tasks("held_out", 4)
    make = partial(environment, sandbox=None)
    failures = {task.id: count for task, count in zip(tasks, (0, 1, 9, 2), strict=True)}

    def run(environments, seeds, on_done=None):
        attempts = oracle(environments, seeds)
        for attempt in attempts:
            failures[attempt.task_id] -= 1
            if failures[attempt.task_id] >= 0:
                attempt.status, attempt.outcome = "infrastructure", 0.0
        return attempts

    attempts = evaluation.evaluate(SimpleNamespace(run=run), tasks, 0, make)
    assert [a.status for a in attempts] == ["answered", "answered", "infrastructure", "answered"]
    summary = evaluation.summarise(tasks, attempts)
    assert (summary["tasks"], summary["failed"], summary["accuracy"]) == (4, 1, 1.0)
    with pytest.raises(UserError, match="all 1 attempts failed"):
        evaluation.summarise(tasks[2:3], attempts[2:3])
