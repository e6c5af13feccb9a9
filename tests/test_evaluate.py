"""The command line of evaluate.py: one line for a mistake, a table that compares the checkpoint with the routers, the same figures as JSON."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

import evaluate
from nanorchestra.agent.load import load_policy
from nanorchestra.errors import UserError
from nanorchestra.records import Trajectory
from worlds.evaluation import evaluate as attempt_all
from worlds.evaluation import summarise
from worlds.miniature.world import World
from worlds.routers import ROUTERS


def oracle(environments, seeds, on_done=None):
    """A policy that knows the answer and spends nothing."""
    return [
        Trajectory(
            env.task.id, seed, 0, [], [], [], [], answer=env.task.data["answer"], outcome=1.0
        )
        for env, seed in zip(environments, seeds)
    ]


@pytest.fixture
def with_oracle(monkeypatch):
    monkeypatch.setattr(
        evaluate,
        "load_rollout",
        lambda options: SimpleNamespace(run=oracle),
    )


def test_a_table_and_the_same_figures_as_json(with_oracle, tmp_path, capsys):
    assert (
        evaluate.main(
            [
                "--model",
                "my/model",
                "--tasks",
                "30",
                "--seed",
                "4",
                "--json",
                str(tmp_path / "figures.json"),
            ]
        )
        == 0
    )
    lines = {line.split("  ")[0]: line for line in capsys.readouterr().out.splitlines()}
    assert (
        " 100.0 " in lines["my/model"]
        and "hand-written rule" in lines
        and "always the cheapest" in lines
    )
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert (
        figures["seed"],
        figures["tasks"],
        figures["policy"]["accuracy"],
        figures["policy"]["reward"],
    ) == (4, 30, 1.0, 1.0)
    assert set(figures["routers"]) == set(ROUTERS) and figures["routers"]["rule"]["reward"] < 1


def test_one_task_is_enough(with_oracle, capsys):
    """Where no task offers the large expert at a price that matters, there is nothing to probe."""
    for seed in range(6):
        assert evaluate.main(["--model", "my/model", "--tasks", "1", "--seed", str(seed)]) == 0


@pytest.mark.parametrize(
    "arguments, says",
    [
        (["--tasks", "0"], "--tasks is 0"),
        (["--tasks", "many"], "--tasks"),
        (["--json", "/no/such/place/f.json"], "/no/such/place/f.json: cannot be written"),
        (["--json", "/tmp"], "/tmp: cannot be written"),
        (["--json", "/etc/passwd/x"], "/etc/passwd/x: cannot be written"),
        (["--model", "/no/model"], "/no/model"),
        (["extra"], "extra"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(arguments, says, capsys):
    assert evaluate.main(arguments) == 2
    out, err = capsys.readouterr()
    assert err.startswith("evaluate.py: ") and says in err and err.count("\n") == 1 and out == ""


def test_a_checkpoint_whose_context_is_shorter_than_a_prompt_is_refused(
    tmp_path, nano_model, nano_tokenizer, capsys
):
    from dataclasses import replace

    from nanorchestra.model.saving import save_checkpoint

    nano_model.config = replace(nano_model.config, max_position_embeddings=200)
    save_checkpoint(nano_model, nano_tokenizer, tmp_path / "m")
    assert evaluate.main(["--model", str(tmp_path / "m"), "--tasks", "1"]) == 2
    err = capsys.readouterr().err
    assert (
        err.count("\n") == 1
        and f"{tmp_path / 'm'}: prompts of" in err
        and "max_position_embeddings in its config.json is 200" in err
    )


def test_a_checkpoint_without_a_tokenizer_is_refused(tmp_path, nano_model):
    from nanorchestra.model.saving import save_checkpoint

    save_checkpoint(nano_model, None, tmp_path / "m")
    with pytest.raises(UserError, match="no tokenizer.json"):
        load_policy(tmp_path / "m")


def test_what_the_infrastructure_failed_is_made_again_and_then_left_out_of_the_means():
    tasks = World(0).tasks("held_out", 4)
    left = {task.id: failures for task, failures in zip(tasks, (0, 1, 9, 2))}

    def run(environments, seeds, on_done=None):
        trajectories = oracle(environments, seeds)
        for trajectory in trajectories:
            left[trajectory.task_id] -= 1
            if left[trajectory.task_id] >= 0:
                trajectory.status, trajectory.outcome = "infrastructure", 0.0
        return trajectories

    trajectories = attempt_all(SimpleNamespace(run=run), tasks, 0, sandbox=None)
    assert [t.status for t in trajectories] == [
        "answered",
        "answered",
        "infrastructure",
        "answered",
    ]
    summary = summarise(tasks, trajectories)
    assert (summary["tasks"], summary["failed"], summary["accuracy"], summary["reward"]) == (
        4,
        1,
        1.0,
        1.0,
    )
    with pytest.raises(UserError, match="all 1 attempts failed"):
        summarise(tasks[2:3], trajectories[2:3])
