"""The run as a user has it: what it writes, how it stops, resumes, and what ends it."""

from __future__ import annotations

import gc
import math
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from run_rows import steps_of

import train as program
from nanorchestra.errors import UserError
from nanorchestra.model.checkpoint import NANO_BASE
from nanorchestra.records import Trajectory
from nanorchestra.settings import load_config
from nanorchestra.training.command import Stop, choose_run, parse
from nanorchestra.training.distributed import Ranks
from nanorchestra.training.rollout import play_on_ranks, require_most_worked
from nanorchestra.training.run import RunFolder
from worlds.desk import Desk

ROOT = Path(__file__).parent.parent
SETTINGS = {
    "run.threads": 1,
    "model.path": NANO_BASE,
    "task.world": "desk",
    "warm_start.steps": 1,
    "warm_start.prompts": 2,
    "grpo.prompts": 2,
    "grpo.group_size": 3,
    "evaluation.tasks": 2,
    "rollout.turns": 2,
    "rollout.turn_tokens": 32,
}
SMALL = [str(word) for name, value in SETTINGS.items() for word in (f"--{name}", value)]


def start(program, arguments, **variables):
    """Starts a Python program with these variables of the environment."""
    env = os.environ | {"OMP_NUM_THREADS": "1"} | variables
    out = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen([sys.executable, "-u", *program, *arguments], cwd=ROOT, env=env, **out)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def wait_for(process, run, step):
    log, row = run / "metrics.jsonl", f'"grpo", "step": {step},'
    deadline = time.monotonic() + 200
    while time.monotonic() < deadline and not (log.exists() and row in log.read_text()):
        assert process.poll() is None, process.stdout.read()
        time.sleep(0.02)


def results(run):
    """What equal runs have in common: rows, weights, and the versions of them that drew."""
    path, attempts = run.folder.path, []
    for row in run.folder.rows("trajectories"):
        attempts.append((row["phase"], row["step"], row["ids"], row["weight_versions"]))
    weights = [(path / part / "model.safetensors").read_bytes() for part in ("draft", "model")]
    held_out = run.folder.summary()["held_out"]
    return steps_of(run), attempts, weights, held_out


@pytest.mark.parametrize(
    "function, call", [("draft", 1), ("supervised_update", 3), ("policy_update", 2)]
)
def test_a_run_from_a_draft_that_is_killed_ends_the_same(
    make_training, monkeypatch, function, call
):
    """KeyboardInterrupt stands for the kill: like SIGKILL it leaves the directory as it is."""
    monkeypatch.setattr("nanorchestra.training.draft.LESSONS", 20)
    small = {"model.path": "draft", "warm_start.steps": 3, "warm_start.prompts": 1}
    small["grpo.steps"] = 2
    straight = make_training("straight", small)
    assert straight.train()
    expected = results(straight)
    for phase, step, _, versions in expected[1]:
        assert phase != "grpo" or set(versions) == {-1, step}, "drawn by the weights of its step"

    work, calls = getattr(program, function), []

    def killed(*args):
        calls.append(args)
        if len(calls) == call:
            raise KeyboardInterrupt
        return work(*args)

    run = make_training("cut", small)
    with monkeypatch.context() as patch:
        patch.setattr(program, function, killed)
        with pytest.raises(KeyboardInterrupt):
            run.train()
    assert (run.folder.path / "draft").exists() == (function != "draft")
    with monkeypatch.context() as patch:
        if function != "draft":  # it is not written twice
            patch.delattr(program, "draft")
        again = make_training("cut", resume=True)
        assert again.train()
    assert load_config(run.folder.path / "config.toml").model.path == "draft"
    assert results(again) == expected


def test_a_used_name_and_a_dry_run_are_told_of_in_one_line(tmp_path, capsys):
    RunFolder.create(tmp_path / "mine", "")
    words = ["--run.root", str(tmp_path), "--run.name", "mine"]
    with pytest.raises(UserError, match="--resume .*mine, or choose another --run.name$"):
        choose_run(parse(words))
    choose_run(parse([*words, "--config", "qwen3-8b", "--dry-run"]))
    assert capsys.readouterr().out == "dry run: assets/base in place of Qwen/Qwen3-8B\n"


def test_only_a_second_sigint_ends_a_run_that_has_begun_at_once():
    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    with Stop() as stop, pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGTERM)
    with Stop() as stop:
        stop.at_once = False
        for _ in range(2):  # a scheduler's, to torchrun and to the ranks
            signal.raise_signal(signal.SIGTERM)
        assert stop.asked
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert kept == {number: signal.getsignal(number) for number in kept}, "given back"


def test_ctrl_c_during_held_out_tasks_ends_at_once_and_the_run_resumes(
    make_training, monkeypatch, capsys
):
    run = make_training("cut", {"grpo.steps": 1, "evaluation.tasks": 6})
    play, done, reports = program.play_held_out, [], []
    run.report = lambda path, *how: reports.append(how)

    def interrupted(config, world, player, *more):
        def ask(attempt):
            done.append(attempt)
            if len(done) == 2:
                signal.raise_signal(signal.SIGINT)

        player.on_done = ask
        return play(config, world, player, *more)

    with monkeypatch.context() as patch, Stop() as run.stop:
        patch.setattr(program, "play_held_out", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run.train()
    gc.collect()  # asyncio would say here that no one retrieved the exception of a task
    told = capsys.readouterr().err
    assert f"stopped; go on with: python train.py --resume {run.folder.path}\n" in told
    assert "never retrieved" not in told
    assert len(done) == 2 and reports == [(False, "held-out tasks, before")]
    assert make_training("cut", resume=True).train()


def test_steps_that_are_not_finite_are_recorded_and_end_the_run(make_training, monkeypatch):
    bad = {"loss": math.nan, "skipped": 1.0, "flops": 0.0}
    monkeypatch.setattr(program, "policy_update", lambda *args: bad)
    run = make_training("grpo")
    with pytest.raises(UserError, match="grpo step 3: .* 3 steps in a row"):
        run.train()
    phases = [row["phase"] for row in run.folder.rows("trajectories")]
    assert phases == ["before"] + ["skipped"] * 3 * 2 * 2


def test_what_is_logged_is_what_is_trained_on(make_training, monkeypatch):
    """The reward of a step's row is the mean of the rewards that its advantages are made of."""
    seen, advantages = [], program.group_advantages

    def watched(rewards, *arguments):
        seen.append(rewards)
        return advantages(rewards, *arguments)

    monkeypatch.setattr(program, "group_advantages", watched)
    run = make_training("paid", {"grpo.steps": 1})
    assert run.train()
    (row,) = run.folder.rows("metrics")
    rewards = [reward for group in seen for reward in group]
    assert row["reward"] == pytest.approx(sum(rewards) / len(rewards))
    recorded = [t["reward"] for t in run.folder.rows("trajectories") if t["phase"] == "grpo"]
    assert recorded == seen[0]


class FailingPlayer:
    """Plays nothing; an attempt fails as often as `failures` says for its seed."""

    def __init__(self, failures):
        self.failures = failures

    def run(self, environments, seeds):
        attempts = []
        for environment, seed in zip(environments, seeds, strict=True):
            self.failures[seed] -= 1
            status = "infrastructure" if self.failures[seed] >= 0 else "answered"
            attempts.append(Trajectory(environment.task.id, seed, status=status))
        return attempts


def test_failed_attempts_are_repeated_then_left_out_then_end_the_run(sandbox):
    seeds = list(range(5))
    attempts = play_on_ranks(
        FailingPlayer(dict(enumerate((0, 1, 0, 2, 9)))),
        Desk(0, sandbox),
        "train",
        seeds,
        seeds=seeds,
        environment_seeds=seeds,
        ranks=Ranks(),
        problem=lambda: "",
    )
    statuses = [t.status for t in attempts.trajectories]
    assert statuses == ["answered"] * 4 + ["infrastructure"]
    assert attempts.repeated == 5 and [t.seed for t in attempts.trajectories] == seeds
    require_most_worked(attempts.trajectories, 0)
    failed = [Trajectory("t", 0, status="infrastructure")] * 3
    with pytest.raises(UserError, match="step 1: 3 of 5 attempts failed"):
        require_most_worked(attempts.trajectories[:2] + failed, 0)


@pytest.mark.slow
def test_one_of_two_ranks_is_killed_or_asked_to_stop_and_the_run_goes_on(tmp_path):
    def second_rank(process):
        pids = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        return int(pids[1])

    run = tmp_path / "nano"
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node=2", "--max-restarts=1"]
    torchrun += ["--master-addr=127.0.0.1", f"--master-port={free_port()}"]
    torchrun += ["--monitor-interval=0.2", "train.py"]
    settings = [*SMALL, "--run.checkpoint_every", "1", "--grpo.steps", "6", "--grpo.kl_coef", "0.1"]
    process = start(torchrun, [*settings, "--run.root", str(tmp_path)])
    wait_for(process, run, 2)
    os.kill(second_rank(process), signal.SIGKILL)  # torchrun starts the same command again
    wait_for(process, run, 3)
    os.kill(second_rank(process), signal.SIGTERM)  # it alone is asked
    out, _ = process.communicate(timeout=300)
    assert process.returncode == 0 and out.count("resuming") == 1 and "stopped" in out, out
    rows = list(RunFolder(run).rows("metrics"))
    steps = [row["step"] for row in rows]
    assert steps == [1, *range(1, len(steps))] and 4 <= len(steps) < 7
    assert rows[0]["phase"] == "warm_start" and rows[0]["grad_norm"] > 0


@pytest.mark.slow
def test_a_dry_run_of_a_big_config_passes_on_two_nodes(tmp_path):
    run = tmp_path / "qwen3-8b-multinode-dry-run"
    RunFolder.create(run, "an earlier one")
    here = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    here |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}  # as torchrun
    dry = ["--config", "qwen3-8b-multinode", "--dry-run", "--run.root", str(tmp_path)]
    dry += ["--lora.rank", "4"]
    nodes = [start(["train.py"], dry, **here, RANK=node) for node in "01"]
    outs = [node.communicate(timeout=300)[0] for node in nodes]
    assert all(node.returncode == 0 for node in nodes), outs
    assert outs[0].splitlines()[-1].startswith(f"finished: {run} has "), "nothing is said after it"
    rows = RunFolder(run).rows("metrics")
    assert any(row.get("grad_norm", 0) > 0 for row in rows)
    files = {"config.toml", "metrics.jsonl", "trajectories.jsonl", "report.html", "summary.json"}
    assert files | {"checkpoints", "model", "adapter"} <= set(os.listdir(run))
