"""The run as a user has it: killed and resumed it ends the same; an error gets one line."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from run_rows import TIMINGS

import train as program
from nanorchestra.config import Config
from nanorchestra.errors import UserError
from nanorchestra.model.checkpoint import NANO_BASE
from nanorchestra.records import Trajectory, Turn
from nanorchestra.report.page import write_report
from nanorchestra.settings import load_config
from nanorchestra.training.command import Stop
from nanorchestra.training.distributed import Ranks
from nanorchestra.training.packing import samples_in
from nanorchestra.training.rollout import play_on_ranks, require_begun, require_most_worked
from nanorchestra.training.run import RunFolder, to_toml
from worlds.desk import Desk

ROOT = Path(__file__).parent.parent
SETTINGS = {
    "run.threads": 1,
    "run.checkpoint_every": 2,
    "model.path": NANO_BASE,
    "rollout.temperature": 1.5,  # attempts differ in their rewards, so that GRPO learns
    "task.world": "desk",
    "warm_start.steps": 3,
    "warm_start.prompts": 2,
    "grpo.steps": 3,
    "grpo.prompts": 2,
    "grpo.group_size": 3,
    "grpo.min_std": 0,
    "grpo.bounds": "task",
    "evaluation.tasks": 2,
    "rollout.turns": 2,
    "rollout.turn_tokens": 64,
}
SMALL = [word for name, value in SETTINGS.items() for word in (f"--{name}", value)]


def start(*arguments, ranks=0, restarts=0, **variables):
    """Starts train.py, by torchrun if there are ranks, with these variables of the environment."""
    command = [sys.executable, "-u"]
    if ranks:
        command += ["-m", "torch.distributed.run", f"--nproc-per-node={ranks}"]
        command += ["--master-addr=127.0.0.1", f"--master-port={free_port()}"]
        command += [f"--max-restarts={restarts}", "--monitor-interval=0.2"]
    command += ["train.py", *map(str, arguments)]
    env = os.environ | {"OMP_NUM_THREADS": "1"} | variables
    out = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, cwd=ROOT, env=env, **out)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_for(process, run, phase, step):
    log, row = run / "metrics.jsonl", f'"{phase}", "step": {step},'
    deadline = time.monotonic() + 200
    while time.monotonic() < deadline and not (log.exists() and row in log.read_text()):
        assert process.poll() is None, process.stdout.read()
        time.sleep(0.02)


def rows(run):
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k not in TIMINGS} for line in lines]


def versions(run):
    """The phase and step of each recorded attempt, and the versions of the weights that drew it."""
    attempts = map(json.loads, (run / "trajectories.jsonl").read_text().splitlines())
    return [(a["phase"], a["step"], set(a["weight_versions"]) - {-1}) for a in attempts]


def final(run):
    summary = json.loads((run / "summary.json").read_text())
    return summary["steps"], summary["held_out"]


@pytest.mark.slow
def test_a_killed_run_ends_the_same_and_can_be_extended(tmp_path, monkeypatch, capsys):
    small = [*map(str, SMALL), "--run.root", str(tmp_path)]
    assert program.main([*small, "--run.name", "straight"]) == 0
    out = capsys.readouterr().out
    assert "before" in out and "after" in out and "perfect" in out, out
    run, cut = tmp_path / "straight", tmp_path / "cut"
    files = {"config.toml", "metrics.jsonl", "trajectories.jsonl", "report.html", "summary.json"}
    assert files | {"checkpoints", "model"} <= set(os.listdir(run))
    process = start(*small, "--run.name", "cut")
    wait_for(process, cut, "warm_start", 3)
    process.kill()
    process.communicate(timeout=100)
    monkeypatch.setattr(program, "write_report", lambda path, live: None)
    assert program.main(["--resume", str(cut)]) == 0
    assert "resuming" in capsys.readouterr().out
    assert rows(cut) == rows(run) and final(cut) == final(run)
    assert versions(cut) == versions(run)
    assert all(drawn == {step} for phase, step, drawn in versions(run) if phase == "grpo")
    models = [(path / "model" / "model.safetensors").read_bytes() for path in (cut, run)]
    assert models[0] == models[1]
    more = program.parse(["--resume", str(run), "--grpo.steps", "4"])
    assert program.choose_run(more, [])[0].grpo.steps == 4


@pytest.mark.slow
def test_a_base_is_made_by_one_command_and_again_with_the_same_bytes(
    tmp_path, capsys, without_report
):
    cut = ["--config", "base", "--warm_start.steps", "2", "--warm_start.prompts", "2"]
    cut += ["--evaluation.tasks", "1", "--run.threads", "1", "--run.root"]
    models = []
    for root in (tmp_path / "a", tmp_path / "b"):
        assert program.main([*cut, str(root)]) == 0
        model = root / "base" / "model"
        models.append({file.name: file.read_bytes() for file in model.iterdir()})
    assert models[0] == models[1]
    draft = (tmp_path / "a" / "base" / "draft" / "model.safetensors").read_bytes()
    assert draft != models[0]["model.safetensors"], "the warm start has trained it"
    capsys.readouterr()
    assert program.main(["--plan", "--config", "base"]) == 0
    assert "fits" in capsys.readouterr().out
    assert program.main(["--config", "base", "--dry-run", "--run.root", str(tmp_path)]) == 0
    assert (tmp_path / "base-dry-run" / "model").is_dir()


@pytest.mark.slow
def test_a_run_killed_after_its_draft_resumes_with_it(make_training, monkeypatch):
    """KeyboardInterrupt stands for the kill: like SIGKILL it leaves the directory as it is."""
    monkeypatch.setattr("nanorchestra.training.draft.LESSONS", 20)
    small = {"model.path": "draft", "warm_start.steps": 2, "warm_start.prompts": 1}
    small["grpo.steps"] = 0
    straight = make_training("straight", small)
    assert straight.train()

    def killed(*args):
        raise KeyboardInterrupt

    for function in ("draft", "load_policy"):  # while it is written, and after that
        run = make_training(function, small)
        with monkeypatch.context() as patch:
            patch.setattr(program, function, killed)
            with pytest.raises(KeyboardInterrupt):
                run.train()
        assert (run.folder.path / "draft").exists() == (function == "load_policy")
        with monkeypatch.context() as patch:
            if function == "load_policy":  # it is not written twice
                patch.setattr(program, "draft", killed)
            assert make_training(function, resume=True).train()
        assert load_config(run.folder.path / "config.toml").model.path == "draft"
        for part in ("draft", "model"):
            weights = [r.folder.path / part / "model.safetensors" for r in (straight, run)]
            assert weights[0].read_bytes() == weights[1].read_bytes()
        assert rows(run.folder.path) == rows(straight.folder.path)


@pytest.mark.slow
def test_two_ranks_begin_with_one_draft(tmp_path):
    cut = ["--config", "base", "--warm_start.steps", 1, "--warm_start.prompts", 2]
    cut += ["--evaluation.tasks", 2, "--run.threads", 1, "--run.root", tmp_path]
    process = start(*cut, ranks=2)
    out, _ = process.communicate(timeout=300)
    assert process.returncode == 0 and "finished" in out, out
    assert (tmp_path / "base" / "draft" / "model.safetensors").exists()


def test_a_run_that_is_there_is_resumed_by_its_name_or_told_by_two_commands(
    tmp_path, monkeypatch, capsys
):
    """A second `python train.py`, or by torchrun; of a finished run the first extends it."""
    monkeypatch.chdir(tmp_path)
    run = RunFolder.create("runs/nano", to_toml(load_config("nano")))
    for word in ("nano", "runs/nano"):
        words = ["--resume", word]
        chosen = program.choose_run(program.parse(words), words)
        assert chosen[1:] == (Path("runs/nano"), True)
    RunFolder.create("runs/nano-2", "")
    assert not program.choose_run(program.parse(["--plan"]), ["--plan"])[2], "it makes no run"
    for ranks, begin in (("", "python train.py"), ("2", "torchrun --nproc-per-node 2 train.py")):
        if ranks:
            monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
            run.write_json("summary.json", {"steps": 50})
        assert program.main(["--run.seed", "3"]) == 2
        out, line = capsys.readouterr()
        first, second = re.findall(rf"(?<=: ){begin} ([^;\n]+)", line)
        assert not out and line.startswith("train.py: runs/nano: ") and line.count("\n") == 1
        for words in (first.split(), second.split()):
            config, path, resumed = program.choose_run(program.parse(words), words)
            assert resumed == (words == first.split())
            assert path == Path("runs", "nano" if resumed else "nano-3")
            assert config.grpo.steps == (
                100 if resumed and ranks else load_config("nano").grpo.steps
            )
        assert config.run.seed == 3


def test_a_run_without_a_warm_start_is_resumed_at_grpo(make_training, capsys):
    make_training("cold").folder.unlock()  # it failed before its first step
    assert not make_training("cold", resume=True, steps=0).train()
    assert "cold at grpo step 0\n" in capsys.readouterr().out


@pytest.mark.parametrize("steps, played", [(-1, False), (1, True)])  # -1: before held-out tasks
def test_a_run_that_is_stopped_has_a_report(make_training, monkeypatch, steps, played):
    monkeypatch.setattr(program, "write_report", write_report)
    run = make_training("stopped", steps=steps)
    assert not run.train()
    run.close(finished=False)
    assert (run.folder.path / "report.html").exists()
    assert any(run.folder.rows("trajectories")) == played


@pytest.mark.parametrize("share, live", [(1e-9, 1), (1e9, 3)])
def test_a_report_is_there_after_the_first_step_and_takes_a_share_of_the_time(
    make_training, monkeypatch, share, live
):
    written = []  # the steps so far, and whether the run goes on

    def write_report(path, live):
        written.append((len(rows(path)), live))

    monkeypatch.setattr("nanorchestra.training.progress.REPORT_SHARE", share)
    monkeypatch.setattr(program, "write_report", write_report)
    run = make_training("one", steps=3)
    assert not run.train()
    run.close(finished=False)
    assert written == [(1, True), (2, True), (3, True)][:live] + [(3, False)]


def test_only_a_second_sigint_ends_the_run_at_once():
    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    with Stop() as stop:
        for _ in range(2):  # a scheduler's, to torchrun and to the ranks
            signal.raise_signal(signal.SIGTERM)
        assert stop.asked
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert kept == {number: signal.getsignal(number) for number in kept}, "given back"


@pytest.mark.parametrize("when", ["before", "after"])
def test_ctrl_c_during_held_out_tasks_ends_at_once_and_the_run_resumes(
    make_training, monkeypatch, capsys, when
):
    """Their bar and that of the steps move by attempts."""
    settings = {"grpo.steps": 2, "evaluation.tasks": 6}
    straight, run = make_training("straight", settings), make_training("cut", settings)
    bars = []
    monkeypatch.setattr("nanorchestra.training.progress.progress_bar", lambda *_, **__: bars[0])
    played = program.play_held_out

    def interrupted(config, world, player, *more):
        on_done, ended = player.on_done, []

        def ask(attempt):
            on_done(attempt)
            ended.append(time.monotonic())
            if len(ended) == 2:
                signal.raise_signal(signal.SIGINT)

        player.on_done = ask if label() == when else on_done
        return played(config, world, player, *more)

    def label():
        return "before" if run.progress.phase == "warm_start" else "after"

    bars.append(Bar())
    assert straight.train()
    held_out, step = [1.0] * 6, [1 / 4] * 4
    assert bars.pop().moves == [*held_out, *[*step, 0.0] * 2, *held_out]
    bars.append(Bar())
    with monkeypatch.context() as patch, Stop() as run.stop:
        patch.setattr(program, "play_held_out", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run.train()
        assert not run.stop.at_once
    told = capsys.readouterr().err
    assert told.endswith(f"stopped; go on with: python train.py --resume {run.folder.path}\n")
    again = make_training("cut", resume=True)
    assert again.train()
    assert rows(again.folder.path) == rows(straight.folder.path)
    assert final(again.folder.path) == final(straight.folder.path)


class Bar:
    """A progress bar that remembers how it was moved."""

    def __init__(self):
        self.n, self.moves = 0.0, []

    def __enter__(self):
        self.n = 0.0
        return self

    def __exit__(self, *error):
        pass

    def update(self, count=1.0):
        self.n += count
        self.moves.append(count)


@pytest.mark.slow
def test_a_process_ends_within_a_second_of_ctrl_c_during_held_out_tasks(tmp_path):
    many = ["--warm_start.steps", 0, "--evaluation.tasks", 480, "--run.root", tmp_path]
    process = start(*SMALL, *many)
    while "writing to" not in process.stdout.readline():
        assert process.poll() is None
    time.sleep(1)  # of a minute
    process.send_signal(signal.SIGINT)
    asked = time.monotonic()
    out, _ = process.communicate(timeout=60)
    assert time.monotonic() - asked < 3, "a second on an idle core"
    assert process.returncode == 130 and "stopped; go on with: python train.py --resume" in out


def test_steps_that_are_not_finite_are_recorded_and_end_the_run(make_training, monkeypatch):
    bad = {"loss": math.nan, "skipped": 1.0, "flops": 0.0}
    monkeypatch.setattr(program, "supervised_update", lambda *args: bad)

    monkeypatch.setattr(program, "policy_update", lambda *args: bad)
    run = make_training("lessons", {"warm_start.steps": 5, "warm_start.prompts": 2})
    with pytest.raises(UserError, match="warm_start step 3: .* 3 steps in a row"):
        run.train()
    run = make_training("grpo")
    with pytest.raises(UserError, match="grpo step 3: .* 3 steps in a row"):
        run.train()
    phases = [row["phase"] for row in run.folder.rows("trajectories")]
    assert phases == ["before"] + ["skipped"] * 3 * 2 * 2


def test_epochs_become_steps_in_the_config_of_the_run(make_training):
    run = make_training("epochs", {"grpo.epochs": 2, "grpo.prompts": 64})
    assert program.settled(run, SimpleNamespace(size=lambda split: 100)) == run.config
    assert (run.config.grpo.steps, run.config.grpo.epochs) == (math.ceil(2 * 100 / 64), 0)
    assert load_config(run.folder.path / "config.toml") == run.config


def test_every_mini_batch_is_an_update_and_their_metrics_are_one_row(make_training, monkeypatch):
    """One that is not finite neither skips the step nor ends the run."""
    changes = {"grpo.steps": 4, "rollout.context": "rebuild", "grpo.mini_batch": 3}
    run, sizes = make_training("mini", changes), []
    update = program.policy_update

    def every_second_is_bad(trainer, groups, *arguments, **options):
        samples = samples_in(groups)
        sizes.append(len(samples))
        assert all(sample.first_logprobs for sample in samples)
        metrics = update(trainer, groups, *arguments, **options)
        if len(sizes) % 2 == 0:
            metrics |= {"loss": math.nan, "skipped": 1.0}
        return metrics

    monkeypatch.setattr(program, "policy_update", every_second_is_bad)
    assert run.train()
    updated = list(run.folder.rows("metrics"))
    assert len(updated) == 4 < len(sizes) and max(sizes) <= 3
    assert sum(row["skipped"] for row in updated) > 0
    for row in updated:
        assert 0 <= row["skipped"] < 1 and row["loss"] is not None and row["grad_norm"] > 0
    assert updated[0]["learning_rate"] == pytest.approx(Config().grpo.learning_rate / 5)
    assert {row["phase"] for row in run.folder.rows("trajectories")} == {"before", "grpo", "after"}


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


def test_a_step_without_advantages_says_so_and_changes_nothing(make_training, capsys):
    run = make_training("same", {"grpo.steps": 2, "grpo.min_std": 9.0})
    assert run.train()
    assert capsys.readouterr().out.count("no group has an advantage (homogeneous)") == 2
    names = ("model.safetensors", "config.json")
    for name in names:
        trained = (run.folder.path / "model" / name).read_bytes()
        assert trained == (Path(run.config.model.path) / name).read_bytes()


class FailingPlayer:
    """Plays nothing; an attempt fails as often as `failures` says for its seed."""

    def __init__(self, failures):
        self.failures = failures
        self.played = []

    def run(self, environments, seeds):
        attempts = []
        for environment, seed in zip(environments, seeds, strict=True):
            self.failures[seed] -= 1
            status = "infrastructure" if self.failures[seed] >= 0 else "answered"
            attempts.append(Trajectory(environment.task.id, seed, status=status))
        self.played += seeds
        return attempts


def test_failed_attempts_are_repeated_then_left_out_then_end_the_run(sandbox):
    world, seeds = Desk(0, sandbox), list(range(5))
    player = FailingPlayer(dict(enumerate((0, 1, 0, 2, 9))))
    attempts = play_on_ranks(
        player,
        world,
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


def test_prompts_that_leave_no_room_for_a_turn_end_the_run(make_training):
    run = make_training("narrow", {"rollout.context_tokens": 64})
    says = "rollout.context_tokens is 64: no attempt of the held-out tasks can begin; the longest"
    with pytest.raises(UserError, match=f"{says} prompt has [0-9]+ ids and a turn up to 12"):
        run.train()
    unable = Trajectory("t", 0, prompt_length=70, status="token_limit")
    begun = Trajectory("t", 0, prompt_length=50, status="token_limit", turns=[Turn(50, 62, "stop")])
    with pytest.raises(UserError, match="of step 1 can begin; .* so it should be at least 82"):
        require_begun([unable, unable], "step 1", run.config)
    require_begun([unable, begun], "step 1", run.config)


def test_a_rank_makes_the_environments_of_its_own_share_alone(sandbox):
    made = []

    class Counting(Desk):
        def environment(self, task, seed):
            made.append(task.id)
            return super().environment(task, seed)

    class SecondOfThree(Ranks):
        def all_gather(self, value):
            return [value]

    indices = [i // 4 for i in range(5 * 4)]  # five tasks
    attempts = play_on_ranks(
        FailingPlayer(dict.fromkeys(range(20), 0)),
        Counting(0, sandbox),
        "train",
        indices,
        seeds=list(range(20)),
        environment_seeds=list(range(20)),
        ranks=SecondOfThree(1, 3),
        problem=lambda: "",
        together=4,
    )
    assert [t.seed for t in attempts.trajectories] == list(range(8, 16))
    assert made == [task.id for task in attempts.tasks] and len(set(made)) == 2


@pytest.mark.slow
def test_one_of_two_ranks_is_killed_or_asked_to_stop_and_the_run_goes_on(tmp_path):
    def child(process, rank):
        pids = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        return int(pids[rank])

    run = tmp_path / "nano"
    command = [*SMALL, "--run.root", tmp_path, "--grpo.optimizer", "muon", "--grpo.kl_coef", 0.1]
    command += ["--rollout.turns", 6]  # enough for a right answer
    process = start(*command, "--warm_start.steps", 0, "--grpo.steps", 9, ranks=2, restarts=1)
    wait_for(process, run, "grpo", 2)
    os.kill(child(process, 1), signal.SIGKILL)  # torchrun starts the same command again
    wait_for(process, run, "grpo", 3)
    os.kill(child(process, 1), signal.SIGTERM)  # rank 1 alone is asked
    out, _ = process.communicate(timeout=300)
    assert process.returncode == 0 and out.count("resuming") == 1 and "stopped" in out, out
    steps = [row["step"] for row in rows(run)]
    assert steps == list(range(1, len(steps) + 1)) and 3 <= len(steps) < 9
    assert any(row.get("grad_norm", 0) > 0 for row in rows(run))


@pytest.mark.slow
def test_a_dry_run_of_a_big_config_passes_on_two_nodes(tmp_path):
    run = tmp_path / "qwen3-8b-multinode-dry-run"
    RunFolder.create(run, "an earlier one")
    here = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    here |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}  # as torchrun
    dry = ["--config", "qwen3-8b-multinode", "--dry-run", "--run.root", tmp_path]
    dry += ["--lora.rank", 4]
    nodes = [start(*dry, **here, RANK=node) for node in "01"]
    outs = [node.communicate(timeout=300)[0] for node in nodes]
    assert all(node.returncode == 0 for node in nodes), outs
    assert any(row.get("grad_norm", 0) > 0 for row in rows(run)) and (run / "adapter").is_dir()


@pytest.mark.slow
def test_a_dry_run_over_a_base_in_4_bits_passes(tmp_path, capsys, without_report):
    dry = ["--config", "qwen3-8b-qlora", "--dry-run", "--run.root", str(tmp_path)]
    assert program.main(dry) == 0 and "finished" in capsys.readouterr().out
    run = tmp_path / "qwen3-8b-qlora-dry-run"
    assert all(row["logprob_gap_max"] < 1e-4 for row in rows(run))
    assert (run / "adapter").is_dir() and (run / "model").is_dir()
