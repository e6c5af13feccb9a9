"""The run as a user has it: killed and resumed it ends the same; an error gets one line."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest
import torch
from conftest import TIMINGS, steps_of

import train as program
from nanorchestra.agent.load import NANO
from nanorchestra.config import Config
from nanorchestra.errors import UserError
from nanorchestra.records import Trajectory, Turn
from nanorchestra.report.run import Run
from nanorchestra.settings import load_config, to_toml
from nanorchestra.training import evaluation, grpo, sampling
from nanorchestra.training.ranks import Ranks
from nanorchestra.training.warm_start import warm_start

ROOT = Path(__file__).parent.parent
SETTINGS = {
    "run.threads": 1,
    "run.checkpoint_every": 2,
    "warm_start.prompts": 3,
    "grpo.prompts": 2,
    "grpo.group_size": 4,
    "grpo.min_std": 0,
    "evaluation.tasks": 4,
    "rollout.turns": 2,
    "rollout.turn_tokens": 64,
}
SMALL = [word for name, value in SETTINGS.items() for word in (f"--{name}", value)]
# Starts from the bundled model, whose attempts differ in their rewards, so that GRPO learns.
REAL = [*SMALL, "--model.path", NANO, "--warm_start.steps", 1, "--grpo.bounds", "task"]


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


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    mixed = ["--task.world", "miniature=0.7, domains=0.3", "--warm_start.steps", 5]
    code, out = train(*SMALL, *mixed, "--grpo.steps", 5, "--run.root", root, "--run.name", "a")
    assert code == 0, out
    return root / "a", out, [*SMALL, *mixed, "--grpo.steps", 5]


@pytest.mark.slow
def test_a_run_killed_in_either_phase_and_stopped_ends_the_same(straight, tmp_path):
    run, out, arguments = straight
    files = {"config.toml", "metrics.jsonl", "trajectories.jsonl", "report.html", "summary.json"}
    assert files | {"checkpoints", "model", "tokenizer"} <= set(os.listdir(run))
    assert "before" in out and "after" in out and "strongest" in out
    cut = tmp_path / "cut"
    command = [*arguments, "--run.root", tmp_path, "--run.name", "cut"]
    for phase, how in (("warm_start", "KILL"), ("grpo", "KILL"), ("grpo", "INT")):
        process = start(*command)
        wait_for(process, cut, phase, 4 if how == "INT" else 3)
        process.send_signal(signal.Signals[f"SIG{how}"])
        out, _ = process.communicate(timeout=100)
        command = ["--resume", cut]
    assert process.returncode == 0 or (process.returncode == 130 and "--resume" in out)
    code, out = train(*command)
    assert code == 0 or "finished" in out
    assert rows(cut) == rows(run) and final(cut) == final(run)
    assert (cut / "model" / "model.safetensors").read_bytes() == (
        run / "model" / "model.safetensors"
    ).read_bytes()


@pytest.mark.slow
def test_a_finished_run_is_extended(straight, tmp_path):
    run = tmp_path / "longer"
    shutil.copytree(straight[0], run)
    code, out = train("--resume", run, "--grpo.steps", 7, "--evaluation.every", 7)
    assert code == 0 and "resuming" in out and "at grpo step 5" in out
    assert rows(run)[:10] == rows(straight[0])
    assert [(row["phase"], row["step"]) for row in rows(run)[10:]] == [
        ("grpo", 6),
        ("grpo", 7),
        ("evaluation", 7),
    ]
    assert final(run)[0] == 7 and load_config(run / "config.toml").grpo.steps == 7
    for more in ([], ["--grpo.steps", "6"]):
        with pytest.raises(UserError, match="finished; --grpo.steps above 7 extends it"):
            program.open_run(program.parse(["--resume", str(run), *more]))


@pytest.mark.parametrize(
    "arguments, says",
    [
        (["--gpus", "abc", "--plan"], "--gpus: invalid int"),
        (["--gpus", "8"], "--gpus is for --plan; add --plan"),
        (["--gpu", "h200"], "--gpu is for --plan"),
        (["--rollouts", "x"], "--rollouts: invalid int value"),
        (["--run.name", ""], "run.name"),
        (["--run.device", "cuda"], "run.device is 'cuda'"),
        (["--grpo.stepz", "3"], "unrecognized arguments: --grpo.stepz"),
        (["--config", "qwen4"], "--config qwen4: there is no such file"),
        (["--resume", "nowhere"], "nowhere"),
        (["--resume", "x", "--run.seed", "1"], "cannot change run.seed, only run.checkpoint_every"),
        (["--run.root", "/proc/nothing"], "/proc/nothing"),
        (["--run.log_to", "tensorbord"], "run.log_to"),
        (["--model.path", ".", "--run.threads", "1"], "config.json"),
        (["--task.world", "nowhere", "--run.threads", "1"], "there is no world 'nowhere'"),
    ],
)
def test_a_bad_argument_is_one_line_and_makes_nothing(
    tmp_path, monkeypatch, capsys, arguments, says
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(program, "Stop", lambda: None)  # leaves the test's signal handlers alone
    monkeypatch.chdir(tmp_path)
    assert program.main(arguments) == 2
    said = capsys.readouterr().err
    assert said.startswith("train.py: ") and says in said and said.count("\n") == 1
    assert not list(tmp_path.glob("runs/*"))


def test_a_run_whose_small_files_are_damaged_does_not_go_on(tmp_path):
    run = Run.create(tmp_path / "run", to_toml(Config()))
    options = program.parse(["--resume", str(run.path)])
    assert program.open_run(options)[2]
    for content, says in (('{"steps": 3', "not JSON"), ('{"steps": 100}', "is finished")):
        (run.path / "summary.json").write_text(content)
        with pytest.raises(UserError, match=says):
            program.open_run(options)


def test_only_a_second_sigint_ends_the_run_at_once():
    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        stop = program.Stop()
        for _ in range(2):  # a scheduler's, to torchrun and to the ranks
            signal.raise_signal(signal.SIGTERM)
        assert stop.asked
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)


def test_steps_that_are_not_finite_are_recorded_and_end_the_run(make_training):
    bad = {"loss": math.nan, "skipped": 1.0, "tokens": 9.0}
    run = make_training("bad", {"warm_start.steps": 5, "warm_start.prompts": 2})
    run.trainer.supervised_step = lambda *args: dict(bad)
    run.trainer.policy_step = lambda *args, **options: types.SimpleNamespace(
        metrics=dict(bad), logprobs=[[[]] * len(group.samples) for group in args[0]]
    )
    run.progress.phase = "warm_start"
    with pytest.raises(UserError, match="warm_start step 3: .* 3 steps in a row; .*skipped.json"):
        warm_start(run)
    shown = json.loads((run.folder.path / "skipped.json").read_text())
    assert shown["step"] == 3 and len(shown["texts"]) == 2
    run.progress.phase, run.progress.step, run.progress.skipped = "grpo", 0, 0
    with pytest.raises(UserError, match='grpo step 3: .*trajectories.jsonl, phase "skipped"'):
        grpo.grpo(run)
    recorded = list(run.folder.rows("trajectories"))
    assert {row["phase"] for row in recorded} == {"skipped"} and len(recorded) == 3 * 2 * 2


def test_a_step_without_advantages_says_so_and_changes_nothing(make_training, capsys):
    run = make_training("same", {"grpo.steps": 2, "grpo.min_std": 9.0})
    before = {name: tensor.clone() for name, tensor in run.trainer.tensors().items()}
    assert grpo.grpo(run)
    assert (
        capsys.readouterr().out.count("no update: no group has an advantage (homogeneous 100%)")
        == 2
    )
    for name, tensor in run.trainer.tensors().items():
        assert torch.equal(tensor, before[name])


def test_evaluations_midway_change_nothing_and_the_first_best_model_stays(make_training):
    plain = make_training("plain", {"grpo.steps": 5})
    assert grpo.grpo(plain)
    every = {"evaluation.every": 2, "evaluation.every_tasks": 3, "evaluation.tasks": 5}
    run = make_training(
        "midway", {"grpo.steps": 5, "evaluation.best": "cost_per_correct_usd"} | every
    )
    values, asked, summarise = iter([0.3, 0.3, 0.1]), [], run.worlds.summarise

    def measured(tasks, trajectories):
        asked.append([task.id for task in tasks])
        return summarise(tasks, trajectories) | {"cost_per_correct_usd": next(values)}

    run.worlds.summarise = measured
    assert grpo.grpo(run)
    made = steps_of(run)
    assert [row for row in made if row["phase"] == "grpo"] == steps_of(plain)
    assert [row["step"] for row in made if row["phase"] == "evaluation"] == [2, 4, 5]
    assert asked[0] == [f"held_out-0-{i}" for i in (5, 6, 7)]  # not those of before and after
    best = {"measure": "cost_per_correct_usd", "step": 5, "value": 0.1}
    assert json.loads((run.folder.path / "model-best.json").read_text()) == best
    run.checkpoints.wait()
    again = make_training("midway", resume=True)
    assert again.progress.best == best and (again.folder.path / "model-best").is_dir()
    again.worlds.summarise = lambda *_: {"cost_per_correct_usd": 0.1}
    evaluation.evaluate_midway(again)
    assert again.progress.best == best


def test_failed_attempts_are_repeated_then_left_out_then_end_the_run(make_training):
    run, failures = make_training("fails"), {}
    tasks = run.worlds.tasks(5, 0)

    class Rollout:
        def run(self, environments, seeds, on_done=None):
            made = []
            for seed in seeds:
                failures[seed] -= 1
                status = "infrastructure" if failures[seed] >= 0 else "answered"
                made.append(Trajectory(f"t{seed}", seed, 0, [], [], [], [], status=status))
            return made

    failures.update(enumerate((0, 1, 0, 2, 9)))
    trajectories, retried = run.worlds.attempt(Rollout(), tasks, range(5))
    assert [t.status for t in trajectories] == ["answered"] * 4 + ["infrastructure"]
    assert retried == 5 and [t.seed for t in trajectories] == list(range(5))
    sampler = sampling.Sampler(run.config, run.worlds, Rollout(), Ranks())
    seeds = sampler._draw(0, 0)[1]
    failures.update(zip(seeds, (9, 0, 9, 9), strict=True))
    with pytest.raises(UserError, match="step 1: 3 of 4 attempts failed"):
        sampler.batch(0)
    failures.update(zip(seeds, (9, 0, 0, 9), strict=True))
    batch = sampler.batch(0)
    assert batch.retried == 4 and batch.filtered["infrastructure"] == 0.5


def test_groups_without_advantages_are_sampled_again_from_other_tasks(make_training):
    run = make_training("dapo", {"grpo.objective": "dapo", "grpo.min_std": 0.4})
    sampler = grpo.Sampler(run.config, run.worlds, run.rollout(1.0), Ranks())
    batches = [sampler.batch(step) for step in range(4)]
    sizes = [len(batch.tasks) // 4 for batch in batches]
    assert min(sizes) < max(sizes) <= 4
    for batch, size in zip(batches, sizes, strict=True):
        assert len(batch.kept) == 2 or (size == 4 and len(batch.kept) < 2)
        assert len({task.id for task in batch.tasks}) == 2 * size
        again = sampling.Batch.from_notes(json.loads(json.dumps(batch.to_notes())))
        sampler.judge(again)
        assert again == batch


def test_the_trainers_log_probabilities_reach_the_trajectories_from_all_ranks():
    def trajectory(*contexts):
        turns = [Turn(start, start + 1, "", context=begin) for begin, start in contexts]
        return Trajectory("t", 0, 1, [5, 6, 7], [False, True, True], [], [], turns)

    whole, turns, other = trajectory((0, 1)), trajectory((0, 1), (1, 2)), trajectory((0, 1))
    # A second rank has computed the second turn.
    ranks = types.SimpleNamespace(gather=lambda mine: [mine, [None, None, [-3.5]]])
    logprobs = [[[-1.5, -2.5], [-3.0], None], [[-4.0]]]
    grpo.note_logprobs(ranks, [[whole, turns], [other]], logprobs, [whole, turns])
    found = [t.trainer_logprobs for t in (whole, turns, other)]
    assert found == [[-1.5, -2.5], [-3.0, -3.5], []]


def test_a_context_longer_than_the_models_is_refused(make_training):
    with pytest.raises(UserError, match="rollout.context_tokens is 99999; it must be at most"):
        make_training("long", {"rollout.context_tokens": 99999})


@pytest.mark.slow
def test_one_of_two_ranks_is_killed_or_asked_to_stop_and_the_run_ends_the_same(tmp_path):
    def child(process, rank):
        pids = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        return int(pids[rank])

    command = [*REAL, "--grpo.optimizer", "muon", "--grpo.kl_coef", 0.1, "--grpo.steps", 5]
    command += ["--run.root", tmp_path, "--run.name"]
    code, out = train(*command, "straight", ranks=2)
    assert code == 0, out
    run, cut = tmp_path / "straight", tmp_path / "cut"
    assert any(row.get("grad_norm", 0) > 0 for row in rows(run) if row["phase"] == "grpo")
    process = start(*command, "cut", ranks=2, restarts=1)
    wait_for(process, cut, "grpo", 2)
    os.kill(child(process, 1), signal.SIGKILL)  # torchrun starts the same command again
    wait_for(process, cut, "grpo", 4)
    os.kill(child(process, 1), signal.SIGTERM)  # rank 1 alone is asked
    out, _ = process.communicate(timeout=300)
    assert process.returncode == 0 and out.count("resuming") == 1, out
    made = rows(cut)
    assert made == rows(run)[: len(made)] and any(row["step"] == 4 for row in made)
    assert "stopped at grpo step" in out or final(cut) == final(run)


@pytest.mark.slow
def test_a_dry_run_of_a_big_config_passes_on_two_nodes_and_can_be_repeated(tmp_path):
    dry = ["--config", "qwen3-8b-multinode", "--dry-run", "--run.root", tmp_path]
    port = free_port()
    nodes = [start(*dry, ranks=1, node=node, port=port) for node in (0, 1)]
    outs = [node.communicate(timeout=300)[0] for node in nodes]
    assert all(node.returncode == 0 for node in nodes), outs
    run = tmp_path / "qwen3-8b-multinode-dry-run"
    assert any(row.get("grad_norm", 0) > 0 for row in rows(run))
    lora = ["--lora.rank", 4, "--rollout.overlap", "true", "--grpo.importance_cap", 2]
    code, out = train(*dry, *lora)
    assert code == 0 and f"writing to {run}" in out, out
    assert (run / "adapter").is_dir() and len(rows(run)) == 2
