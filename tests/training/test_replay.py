"""Rollouts without training, and training on them: what they teach is what they would have taught when they were made, and what does not fit is said."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import Stop, steps_of

import train as program
from nanorchestra.errors import UserError
from nanorchestra.records import Preference, Task, ToolCall, ToolResult, Trajectory, Turn
from nanorchestra.training.replay import from_row, to_row

ROOT = Path(__file__).parents[2]


def test_a_row_holds_all_of_a_task_and_an_attempt_at_it():
    task = Task(
        "t-1",
        "How many?",
        Preference("be quick", 1.0, 0.1, 1 / 3, {"big": -1.0}),
        {"kind": "x", "tools": [{"name": "big"}], "bounds": {"cost": [0.1, 0.7]}},
    )
    turn = Turn(
        3,
        5,
        "stop",
        [ToolCall("big", {"q": "?"}, "raw", None)],
        [ToolResult("no", 0.1, 2.0, True, input_tokens=3)],
    )
    trajectory = Trajectory(
        "t-1",
        2**48 - 1,
        3,
        [1, 2, 3, 4, 5],
        [False] * 3 + [True] * 2,
        [0.0] * 3 + [-0.1, -1 / 3],
        [-1] * 3 + [4, 4],
        [turn, Turn(5, 5, "stop")],
        "turn_limit",
        "a",
        False,
        0.5,
        1e-7,
        3.3,
        {"big": 1},
        0.123,
        -0.7,
    )
    assert from_row(json.loads(json.dumps(to_row(task, trajectory) | {"phase": "rollouts"}))) == (
        task,
        trajectory,
    )


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["--grpo.bounds", "group", "--grpo.group_size", "4", "--grpo.credit", "turn"],
        ["--grpo.min_std", "0.3", "--grpo.resample", "2"],
    ],
)
def test_the_first_step_on_saved_rollouts_is_the_live_one(make_training, options):
    live = make_training("live", *options, "--grpo.steps", "3")
    assert live.grpo(Stop())
    made = make_training("made", *options, "--grpo.steps", "3", "--rollout.only", "2")
    assert made.rollouts(Stop())
    assert made.run.summary()["steps"] == 2
    rows, seen = list(made.run.rows("trajectories")), steps_of(made)
    assert [row["step"] for row in rows] == sorted(row["step"] for row in rows) and {
        row["phase"] for row in rows
    } == {"rollouts"}
    replayed = make_training(
        "replayed", *options, "--grpo.steps", "3", "--rollout.replay", str(made.run.path)
    )
    replayed._attempts = None  # nothing is to be sampled
    assert replayed.grpo(Stop())
    first, second = steps_of(replayed)  # as many steps as there are rollouts
    assert first == steps_of(live)[0] and first.get("grad_norm", 0) > 0
    assert {key: seen[1][key] for key in ("reward", "calls", "filtered", "cost_usd")} == {
        key: second[key] for key in ("reward", "calls", "filtered", "cost_usd")
    }
    if not options:
        assert (
            second["logprob_gap"] > 100 * first["logprob_gap"]
        )  # the weights have gone on, the rollouts have not


def test_a_replay_is_resumed_at_its_step(make_training):
    made = make_training("made", "--rollout.only", "3")
    made.rollouts(Stop())
    whole = make_training("whole", "--rollout.replay", str(made.run.path))
    assert whole.grpo(Stop())
    cut = make_training("cut", "--rollout.replay", str(made.run.path))
    assert not cut.grpo(Stop(2))
    cut.checkpoints.wait()
    again = make_training("cut", resume=True)
    assert (
        again.step == 2
        and again.grpo(Stop())
        and steps_of(again) == steps_of(whole)
        and len(steps_of(whole)) == 3
    )


def test_rollouts_that_were_cut_off_go_on(make_training, monkeypatch):
    whole, broken = (
        make_training(name, "--rollout.only", "3", "--task.curriculum", "0.5")
        for name in ("whole", "broken")
    )
    assert whole.rollouts(Stop())
    record, room = (
        broken._record,
        iter(range(6)),
    )  # the second step's third attempt is not written any more

    def fail(*arguments):
        if next(room, None) is None:
            raise UserError("the disk is full")
        record(*arguments)

    monkeypatch.setattr(broken, "_record", fail)
    with pytest.raises(UserError):
        broken.rollouts(Stop())
    broken.checkpoints.wait()
    broken.run.close()
    resumed = make_training("broken", resume=True)
    assert resumed.step == 1 and resumed.rollouts(Stop())
    assert steps_of(resumed) == steps_of(whole) and [row["step"] for row in steps_of(whole)] == [
        1,
        2,
        3,
    ]
    rows, again = (
        [row | {"weight_versions": []} for row in training.run.rows("trajectories")]
        for training in (whole, resumed)
    )
    assert rows == again and len(rows) == 12
    assert (
        resumed.run.summary()["steps"] == 3
        and resumed.run.summary()["rollouts"]["reward"] == whole.run.summary()["rollouts"]["reward"]
    )


def test_rollouts_that_do_not_fit_are_refused_in_one_line(make_training, tmp_path):
    made = make_training("made", "--rollout.only", "2")
    made.rollouts(Stop())
    log = made.run.path / "trajectories.jsonl"
    whole = log.read_text().splitlines(keepends=True)

    def refused(words, change=None, lines=None, options=()):
        """What is said when line 3 is changed, or the log is `lines`."""
        rows = list(lines or whole)
        if change:
            row = json.loads(rows[2])
            change(row)
            rows[2] = json.dumps(row) + "\n"
        log.write_text("".join(rows))
        with pytest.raises(UserError, match=words) as caught:
            make_training(
                f"replay-{len(os.listdir(tmp_path))}",
                "--rollout.replay",
                str(made.run.path),
                *options,
            )
        assert "\n" not in str(caught.value) and str(made.run.path) in str(caught.value)

    start = json.loads(whole[2])["prompt_length"]
    refused(
        "line 3: token id 99999; the tokenizer has 0 to",
        lambda row: row["ids"].__setitem__(1, 99999),
    )
    refused("line 3: token id '7'", lambda row: row["ids"].__setitem__(1, "7"))
    refused("line 3: .*log-probability None", lambda row: row["logprobs"].__setitem__(start, None))
    refused("line 3: .*equally many", lambda row: row["logprobs"].pop())
    refused(
        "line 3: .*another tokenizer",
        lambda row: row["ids"].__setitem__(start, (row["ids"][start] + 7) % 500),
    )
    refused("line 3: not a whole trajectory.*task", lambda row: row.pop("task"))
    refused(
        "step 1 has 3 attempts at 2 tasks; a step is 2 whole groups of 2",
        lines=whole[:3] + whole[4:],
    )
    refused("step 1 has 4 attempts at 2 tasks", lines=[whole[0], whole[2], whole[1], *whole[3:]])
    refused(
        "holds no rollouts; make some with",
        lines=[
            "\n".join(json.dumps(json.loads(line) | {"phase": "before"}) for line in whole) + "\n"
        ],
    )
    refused("line at byte 0 is not a JSON object", lines=["[]\n"])
    refused("made with grpo.group_size 2; here it is 4", options=["--grpo.group_size", "4"])
    refused(
        "made with rollout.temperature 1.0; here it is 0.7",
        options=["--rollout.temperature", "0.7"],
    )


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--rollouts", "0"], "--rollouts: 0; it must be"),
        (["--replay", "nowhere"], "nowhere: does not exist"),
        (["--rollouts", "2", "--resume", "x"], "--resume"),
        (
            ["--rollouts", "2", "--rollout.replay", "x"],
            "a run makes rollouts or trains on saved ones",
        ),
    ],
)
def test_commands_that_cannot_be_meant_are_refused(arguments, words, capsys):
    assert program.main(arguments) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and words in lines[0]


@pytest.mark.slow
def test_the_two_commands(tmp_path):
    small = [
        "--run.root",
        tmp_path,
        "--run.threads",
        "1",
        "--model.path",
        "assets/nano",
        "--warm_start.steps",
        "2",
        "--grpo.prompts",
        "2",
        "--grpo.group_size",
        "4",
        "--rollout.turns",
        "2",
        "--rollout.turn_tokens",
        "64",
        "--evaluation.tasks",
        "2",
    ]

    def train(*arguments):
        done = subprocess.run(
            [sys.executable, "train.py", *map(str, arguments)],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=240,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    out = train("--rollouts", 2, *small, "--run.name", "seen")
    assert (
        "means, of assets/nano: reward" in out
        and f"trajectories: {tmp_path / 'seen' / 'trajectories.jsonl'}" in out
    )
    assert (
        not (tmp_path / "seen" / "model").exists()
        and (tmp_path / "seen" / "report.html").exists()
        and len((tmp_path / "seen" / "trajectories.jsonl").read_text().splitlines()) == 16
    )
    out = train("--replay", tmp_path / "seen")
    rows = [
        json.loads(line)
        for line in (tmp_path / "seen-replay" / "metrics.jsonl").read_text().splitlines()
    ]
    assert [(row["phase"], row["step"]) for row in rows] == [("grpo", 1), ("grpo", 2)] and (
        tmp_path / "seen-replay" / "model"
    ).exists()
