"""The run as a user has it: killed and resumed it ends the same; an error gets one line."""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest
import torch
from run_rows import TIMINGS

import train as program
from nanorchestra.agent.load import NANO
from nanorchestra.config import Config
from nanorchestra.errors import UserError
from nanorchestra.records import Trajectory, Turn
from nanorchestra.report.run import Run
from nanorchestra.settings import load_config
from nanorchestra.training import grpo, sampling
from nanorchestra.training.bill import Bill
from nanorchestra.training.ranks import Ranks
from nanorchestra.training.warm_start import warm_start

ROOT = Path(__file__).parent.parent
SETTINGS = {
    "run.threads": 1,
    "run.checkpoint_every": 2,
    "model.path": NANO,
    "rollout.temperature": 1.5,  # attempts differ in their rewards, so that GRPO learns
    "task.world": "miniature",
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


def start(*arguments, ranks=0, node=0, port=0, restarts=0):
    """Starts train.py, by torchrun if there are ranks; on the first of two nodes with a port."""
    command = [sys.executable]
    if ranks:
        nodes = ["--nnodes=2", f"--node-rank={node}"] if port else []
        command += ["-m", "torch.distributed.run", *nodes, f"--nproc-per-node={ranks}"]
        command += ["--master-addr=127.0.0.1", f"--master-port={port or free_port()}"]
        command += [f"--max-restarts={restarts}", "--monitor-interval=0.2"]
    command += ["train.py", *map(str, arguments)]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    out = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, cwd=ROOT, env=env, **out)


def train(*arguments, **options):
    process = start(*arguments, **options)
    out, _ = process.communicate(timeout=300)
    return process.returncode, out


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


def final(run):
    summary = json.loads((run / "summary.json").read_text())
    return summary["steps"], summary["held_out"]


@pytest.mark.slow
def test_a_killed_run_ends_the_same_and_can_be_extended(tmp_path):
    small = [*SMALL, "--run.root", tmp_path]
    code, out = train(*small, "--run.name", "straight")
    assert code == 0 and "before" in out and "after" in out and "strongest" in out, out
    run, cut = tmp_path / "straight", tmp_path / "cut"
    files = {"config.toml", "metrics.jsonl", "trajectories.jsonl", "report.html", "summary.json"}
    assert files | {"checkpoints", "model"} <= set(os.listdir(run))
    process = start(*small, "--run.name", "cut")
    wait_for(process, cut, "warm_start", 3)
    process.kill()
    process.communicate(timeout=100)
    code, out = train("--resume", cut)
    assert code == 0 and "resuming" in out, out
    assert rows(cut) == rows(run) and final(cut) == final(run)
    models = [(path / "model" / "model.safetensors").read_bytes() for path in (cut, run)]
    assert models[0] == models[1]
    more = program.parse(["--resume", str(run), "--grpo.steps", "4"])
    assert program.choose_run(more)[0].grpo.steps == 4
    with pytest.raises(UserError, match="finished; --grpo.steps above 3 extends it"):
        program.choose_run(program.parse(["--resume", str(run)]))


@pytest.mark.parametrize(
    "arguments, says",
    [
        (["--gpus", "abc", "--plan"], "--gpus: invalid int"),
        (["--gpus", "2"], "only for --plan"),
        (["--gpu", "b1", "--plan"], "--gpu: invalid choice"),
        (["--grpo.stepz", "3"], "unrecognized arguments: --grpo.stepz"),
        (["--config", "qwen4"], "qwen4: no such file"),
        (["--resume", "nowhere"], "nowhere"),
        (["--resume", "x", "--run.seed", "1"], "cannot change run.seed, only run.checkpoint_every"),
        (["--run.root", "/proc/nothing"], "/proc/nothing"),
        (["--model.path", ".", "--run.threads", "1"], "config.json"),
        (["--task.world", "nowhere", "--run.threads", "1"], "there is no world 'nowhere'"),
    ],
)
def test_a_bad_argument_is_one_line_and_makes_nothing(
    tmp_path, monkeypatch, capsys, arguments, says
):
    monkeypatch.chdir(tmp_path)
    assert program.main(arguments) == 2
    said = capsys.readouterr().err
    assert said.startswith("train.py: ") and says in said and said.count("\n") == 1
    assert not list(tmp_path.glob("runs/*"))


def test_only_a_second_sigint_ends_the_run_at_once():
    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    with program.Stop() as stop:
        for _ in range(2):  # a scheduler's, to torchrun and to the ranks
            signal.raise_signal(signal.SIGTERM)
        assert stop.asked
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert kept == {number: signal.getsignal(number) for number in kept}, "given back"


def test_steps_that_are_not_finite_are_recorded_and_end_the_run(make_training):
    bad = {"loss": math.nan, "skipped": 1.0, "tokens": 9.0}
    run = make_training("bad", {"warm_start.steps": 5, "warm_start.prompts": 2})
    run.trainer.supervised_step = lambda *args: dict(bad)
    run.trainer.policy_step = lambda *args, **options: types.SimpleNamespace(
        metrics=dict(bad), logprobs=[[0.0] * s.count for g in args[0] for s in g.samples]
    )
    run.progress.phase = "warm_start"
    with pytest.raises(UserError, match="warm_start step 3: .* 3 steps in a row"):
        warm_start(run)
    run.progress.phase, run.progress.step, run.progress.skipped = "grpo", 0, 0
    with pytest.raises(UserError, match="grpo step 3: .* 3 steps in a row"):
        grpo.grpo(run)
    recorded = list(run.folder.rows("trajectories"))
    assert {row["phase"] for row in recorded} == {"skipped"} and len(recorded) == 3 * 2 * 2


def test_epochs_become_steps_in_the_config_of_the_run(make_training):
    changes = {"grpo.epochs": 2, "grpo.prompts": 64}
    run = make_training("epochs", changes | {"task.world": "domains"})
    assert run.config.grpo.steps == math.ceil(2 * run.worlds.epoch() / 64) > 2
    assert load_config(run.folder.path / "config.toml") == run.config
    with pytest.raises(UserError, match="grpo.epochs: the miniature has tasks without end"):
        make_training("endless", changes)


def test_every_mini_batch_is_an_update_and_their_metrics_are_one_row(make_training):
    changes = {"grpo.steps": 1, "grpo.min_std": 0.0, "rollout.context": "rebuild"}
    run, sizes = make_training("mini", changes | {"grpo.mini_batch": 3}), []
    step = run.trainer.policy_step

    def counted(groups, *arguments, **options):
        sizes.append(sum(len(group.samples) for group in groups))
        assert all(sample.old_logprobs for group in groups for sample in group.samples)
        return step(groups, *arguments, **options)

    run.trainer.policy_step = counted
    assert grpo.grpo(run)
    (row,), recorded = run.folder.rows("metrics"), list(run.folder.rows("trajectories"))
    assert len(sizes) > 1 and max(sizes) <= 3 and row["grad_norm"] > 0
    assert row["learning_rate"] == pytest.approx(Config().grpo.learning_rate / 5)
    drawn = [sum(t["sampled"]) for t in recorded]
    assert [len(t["trainer_logprobs"]) for t in recorded] == drawn


def test_a_step_without_advantages_says_so_and_changes_nothing(make_training, capsys):
    run = make_training("same", {"grpo.steps": 2, "grpo.min_std": 9.0})
    before = {name: tensor.clone() for name, tensor in run.trainer.tensors().items()}
    assert grpo.grpo(run)
    assert capsys.readouterr().out.count("no group has an advantage (homogeneous)") == 2
    for name, tensor in run.trainer.tensors().items():
        assert torch.equal(tensor, before[name])


def test_failed_attempts_are_repeated_then_left_out_then_end_the_run(make_training):
    run, failures = make_training("fails"), {}
    tasks = run.worlds.tasks(5, 0)

    class Rollout:
        def run(self, environments, seeds):
            made = []
            for seed in seeds:
                failures[seed] -= 1
                status = "infrastructure" if failures[seed] >= 0 else "answered"
                made.append(Trajectory(f"t{seed}", seed, status=status))
            return made

    failures.update(enumerate((0, 1, 0, 2, 9)))
    trajectories, retried = run.worlds.attempt(Rollout(), tasks, range(5))
    assert [t.status for t in trajectories] == ["answered"] * 4 + ["infrastructure"]
    assert retried == 5 and [t.seed for t in trajectories] == list(range(5))
    sampler = sampling.Sampler(run.config, run.worlds, Rollout(), Ranks(), Bill())
    seeds = sampler._draw(0, 0)[1]
    failures.update(zip(seeds, (9, 0, 9, 9), strict=True))
    with pytest.raises(UserError, match="step 1: 3 of 4 attempts failed"):
        sampler.batch(0)
    failures.update(zip(seeds, (9, 0, 0, 9), strict=True))
    batch = sampler.batch(0)
    assert batch.retried == 4 and batch.filtered["infrastructure"] == 0.5


def test_groups_without_advantages_are_sampled_again_from_other_tasks(make_training):
    run = make_training("dapo", {"grpo.objective": "dapo", "grpo.min_std": 0.4})
    sampler = grpo.Sampler(run.config, run.worlds, run.rollout(1.0), Ranks(), Bill())
    batches = [sampler.batch(step) for step in range(4)]
    sizes = [len(batch.tasks) // 4 for batch in batches]
    assert min(sizes) < max(sizes) <= 4
    for batch, size in zip(batches, sizes, strict=True):
        assert len(batch.kept) == 2 or (size == 4 and len(batch.kept) < 2)
        assert len({task.id for task in batch.tasks}) == 2 * size
        again = sampling.Batch.from_notes(json.loads(json.dumps(batch.to_notes())))
        sampler.judge(again)
        assert again == batch


def test_the_trainers_log_probabilities_reach_the_trajectories():
    def trajectory(*contexts):
        turns = [Turn(start, start + 1, "", context=begin) for begin, start in contexts]
        drawn = [False, True, len(turns) == 1, True]
        return Trajectory("t", 0, 1, [5, 6, 7, 8], drawn, [0.0] * 4, [], turns)

    whole, turns = trajectory((0, 1)), trajectory((0, 1), (2, 3))
    grpo.note_logprobs([[whole, turns]], [[-1.5, -2.5, -0.5], [-3.0], [-3.5]], False)
    assert [t.trainer_logprobs for t in (whole, turns)] == [[-1.5, -2.5, -0.5], [-3.0, -3.5]]


@pytest.mark.slow
def test_one_of_two_ranks_is_killed_or_asked_to_stop_and_the_run_goes_on(tmp_path):
    def child(process, rank):
        pids = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        return int(pids[rank])

    run = tmp_path / "nano"
    command = [*SMALL, "--run.root", tmp_path, "--grpo.optimizer", "muon", "--grpo.kl_coef", 0.1]
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
    Run.create(run, "an earlier one")
    port = free_port()
    dry = ["--config", "qwen3-8b-multinode", "--dry-run", "--run.root", tmp_path]
    dry += ["--lora.rank", 4, "--rollout.overlap", "true", "--grpo.importance_cap", 2]
    nodes = [start(*dry, ranks=1, node=node, port=port) for node in (0, 1)]
    outs = [node.communicate(timeout=300)[0] for node in nodes]
    assert all(node.returncode == 0 for node in nodes), outs
    assert any(row.get("grad_norm", 0) > 0 for row in rows(run)) and (run / "adapter").is_dir()


@pytest.mark.slow
def test_a_dry_run_over_a_base_in_4_bits_passes_and_two_ranks_are_refused(tmp_path):
    dry = ["--config", "qwen3-8b-qlora", "--dry-run", "--run.root", tmp_path]
    status, out = train(*dry, ranks=2)
    run = tmp_path / "qwen3-8b-qlora-dry-run"
    assert status and out.count("lora.base is int4 on 2 processes") and not run.exists(), out
    assert "UserError" not in out  # the traceback is torchrun's own
    status, out = train(*dry)
    assert status == 0 and "finished" in out, out
    assert all(row["logprob_gap_max"] < 1e-4 for row in rows(run))
    assert (run / "adapter").is_dir() and (run / "model").is_dir()


def test_notes_of_a_checkpoint_with_wrong_types_are_one_line(make_training):
    run = make_training("notes")
    run.save()
    run.checkpoints.wait()
    (folder,) = run.checkpoints.folder.glob("[!.]*")
    notes = json.loads((folder / "notes.json").read_text())["notes"]
    progress = notes["progress"]
    run._prepare_for(notes)
    for changed in (
        {"progress": progress | {"phase": ["a"]}},
        {"progress": progress | {"phase": "model"}},
        {"progress": progress | {"step": "a"}},
        {"progress": progress | {"step": -5}},
        {"progress": progress | {"before": 5}},
        {"progress": progress | {"seconds": math.nan}},
        {"offsets": None},
        {"offsets": {"metrics": -1}},
        {"ahead": 5},
        {"ahead": {"rows": [[1]], "retried": 0, "seconds": 0}},
        {"ahead": {"rows": [{"task": 3}], "retried": 0, "seconds": 0}},
        {"weight_version": "x"},
    ):
        with pytest.raises(UserError, match="the notes of a checkpoint") as refusal:
            run._prepare_for(notes | changed)
        assert "\n" not in str(refusal.value)
