"""The run as a user has it: killed and resumed it ends the same, and what is wrong gets one line."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SMALL = ["--run.threads", "1", "--run.checkpoint_every", "2", "--model.vocab_size", "700", "--model.tokenizer_tasks", "40", "--warm_start.steps", "5", "--warm_start.few_steps", "2",
         "--warm_start.prompts", "3", "--grpo.steps", "5", "--grpo.prompts", "2", "--grpo.group_size", "4", "--grpo.min_std", "0",
         "--evaluation.tasks", "6", "--evaluation.domain_tasks", "3", "--task.world", "miniature=0.7, domains=0.3", "--task.curriculum", "0.2",
         "--rollout.turns", "2", "--rollout.turn_tokens", "24", "--rollout.context_tokens", "900"]


def train(*arguments, wait=True, **options):
    command = [sys.executable, "train.py", *map(str, arguments)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options)
    if not wait:
        return process
    out, _ = process.communicate(timeout=240)
    return process.returncode, out


def rows(run):
    timings = {"seconds", "tokens_per_s", "phase_seconds"}
    return [{k: v for k, v in json.loads(line).items() if k not in timings} for line in (run / "metrics.jsonl").read_text().splitlines()]


def final(run):
    summary = json.loads((run / "summary.json").read_text())
    return summary["steps"], summary["held_out"]


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    code, out = train(*SMALL, "--run.root", root, "--run.name", "straight")
    assert code == 0, out
    return root / "straight", out


@pytest.mark.slow
def test_a_run_leaves_what_the_readme_promises(straight):
    run, out = straight
    assert {"config.toml", "metrics.jsonl", "trajectories.jsonl", "report.html", "summary.json", "checkpoints", "model"} <= set(os.listdir(run))
    held_out = final(run)[1]
    for summary in (held_out["before"], held_out["after"], *(held_out["routers"][r] for r in ("strongest", "cheapest", "cascade", "random", "rule"))):
        assert {"reward", "accuracy", "cost_usd", "latency_s", "preference"} <= set(summary)
    assert "before" in out and "after" in out and "strongest" in out
    from nanorchestra import load_model
    model, tokenizer = load_model(run / "model", device="cpu", dtype="float32")
    assert tokenizer is not None and model.config.eos_token_ids


@pytest.mark.slow
@pytest.mark.parametrize("phase, how", [("warm_start", signal.SIGKILL), ("grpo", signal.SIGKILL), ("grpo", signal.SIGINT)])
def test_stopped_in_the_middle_and_resumed_it_ends_the_same(straight, tmp_path, phase, how):
    process = train(*SMALL, "--run.root", tmp_path, "--run.name", "cut", wait=False)
    log = tmp_path / "cut" / "metrics.jsonl"
    deadline = time.monotonic() + 200
    while time.monotonic() < deadline and not (log.exists() and any(f'"{phase}"' in line and '"step": 3' in line for line in log.read_text().splitlines())):
        assert process.poll() is None, process.stdout.read()
        time.sleep(0.02)
    process.send_signal(how)
    out, _ = process.communicate(timeout=100)
    if how == signal.SIGINT and process.returncode != 0:
        assert process.returncode == 130 and "--resume" in out
    code, out = train("--resume", tmp_path / "cut")
    assert code == 0, out
    assert rows(tmp_path / "cut") == rows(straight[0])
    assert final(tmp_path / "cut") == final(straight[0])
    code, out = train("--resume", tmp_path / "cut")
    assert code == 2 and "finished" in out


@pytest.mark.slow
def test_what_is_wrong_gets_one_line_and_touches_nothing(straight, tmp_path):
    run = straight[0]
    before = (run / "metrics.jsonl").read_bytes()
    cases = [
        ([*SMALL, "--run.root", run.parent, "--run.name", "straight"], "straight"),
        (["--grpo.stepz", "3"], "unknown key grpo.stepz"),
        (["--resume", tmp_path / "nowhere"], "nowhere"),
        (["--model.path", tmp_path, "--run.root", tmp_path / "r"], "config.json"),
        (["--run.root", "/proc/nothing"], "/proc/nothing"),
    ]
    for arguments, words in cases:
        code, out = train(*arguments)
        lines = [line for line in out.splitlines() if line.startswith("train.py:")]
        assert code == 2 and len(lines) == 1 and words in lines[0] and "Traceback" not in out, (arguments, out)
    assert (run / "metrics.jsonl").read_bytes() == before


@pytest.mark.slow
def test_a_damaged_checkpoint_falls_back_to_the_one_before(straight, tmp_path):
    import shutil
    run = tmp_path / "copy"
    shutil.copytree(straight[0], run)
    (run / "summary.json").unlink()
    newest = next(sorted((run / "checkpoints").iterdir())[-1].glob("*.distcp"))
    newest.write_bytes(newest.read_bytes()[:1000])
    code, out = train("--resume", run)
    assert code == 0 and "damaged" in out
    assert rows(run) == rows(straight[0]) and final(run) == final(straight[0])


def test_attempts_that_the_infrastructure_failed_are_made_again_then_left_out_then_end_the_run(monkeypatch):
    import types

    import train as program
    from nanorchestra.config import load_config
    from nanorchestra.distributed import Ranks
    from nanorchestra.types import Trajectory, UserError

    monkeypatch.setattr(program, "environment", lambda task, seed, sandbox: (task, seed))
    failures: dict[int, int] = {}

    class Rollout:
        def run(self, environments, seeds):
            made = []
            for task, seed in environments:
                failures[task] -= 1
                made.append(Trajectory(str(task), seed, 0, [], [], [], [], status="infrastructure" if failures[task] >= 0 else "answered"))
            return made

    def attempts(*counts):
        failures.update(enumerate(counts))
        house = types.SimpleNamespace(ranks=Ranks(), config=load_config(None, ["--rollout.retries", "2", "--rollout.failed_share", "0.4"]), sandbox=None, step=0,
                                      _environment=lambda task, seed, sandbox: program.environment(task, seed, sandbox))
        return program.Training._attempts(house, Rollout(), range(len(counts)), [7] * len(counts))

    trajectories, retried = attempts(0, 1, 0, 2, 9)
    assert [t.status for t in trajectories] == ["answered"] * 4 + ["infrastructure"] and retried == 5
    assert [t.task_id for t in trajectories] == list("01234")
    with pytest.raises(UserError, match="3 of 5 attempts failed"):
        attempts(0, 9, 9, 9, 0)


# Several ranks. They start from the bundled model, whose attempts differ in their rewards, so that GRPO has something to do.

REAL = ["--model.path", "assets/nano", "--run.threads", "1", "--run.checkpoint_every", "2", "--warm_start.steps", "1", "--warm_start.prompts", "3",
        "--grpo.steps", "5", "--grpo.prompts", "3", "--grpo.group_size", "4", "--grpo.bounds", "task", "--grpo.optimizer", "muon", "--grpo.kl_coef", "0.1",
        "--evaluation.tasks", "3", "--rollout.turns", "2", "--rollout.turn_tokens", "64"]


def torchrun(*arguments, nodes=1, node=0, port=0, ranks=2, restarts=0):
    command = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={nodes}", f"--node-rank={node}", f"--nproc-per-node={ranks}", "--master-addr=127.0.0.1",
               f"--master-port={port or free_port()}", f"--max-restarts={restarts}", "--monitor-interval=0.2", "train.py", *map(str, arguments)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def children(pid):
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def wait_for(process, log, phase, step):
    deadline = time.monotonic() + 400
    while time.monotonic() < deadline and not (log.exists() and any(f'"{phase}", "step": {step},' in line for line in log.read_text().splitlines())):
        assert process.poll() is None, process.stdout.read()
        time.sleep(0.02)


@pytest.mark.slow
def test_one_of_two_ranks_is_killed_or_asked_to_stop_and_the_run_ends_the_same(tmp_path):
    straight = torchrun(*REAL, "--run.root", tmp_path, "--run.name", "straight")
    out, _ = straight.communicate(timeout=500)
    assert straight.returncode == 0, out
    run = tmp_path / "straight"
    assert any(row.get("grad_norm", 0) > 0 for row in rows(run) if row["phase"] == "grpo")

    log = tmp_path / "cut" / "metrics.jsonl"
    cut = torchrun(*REAL, "--run.root", tmp_path, "--run.name", "cut")
    wait_for(cut, log, "grpo", 2)
    os.kill(children(cut.pid)[1], signal.SIGTERM)                                         # rank 1 alone is asked
    out, _ = cut.communicate(timeout=500)
    assert cut.returncode == 0 and ("stopped at grpo step" in out or (tmp_path / "cut" / "summary.json").exists()), out
    again = torchrun("--resume", tmp_path / "cut", restarts=1)                            # torchrun starts it again by itself
    while len(children(again.pid)) < 2:
        time.sleep(0.02)
    wait_for(again, log, "grpo", 4)
    os.kill(children(again.pid)[1], signal.SIGKILL)
    out, _ = again.communicate(timeout=500)
    assert again.returncode == 0 and out.count("resuming") == 2, out
    assert rows(tmp_path / "cut") == rows(run) and final(tmp_path / "cut") == final(run)


@pytest.mark.slow
def test_the_configs_of_big_runs_pass_a_dry_run_on_two_nodes_of_one_rank(tmp_path):
    for config in ("qwen3-8b", "qwen3-8b-multinode"):
        port = free_port()
        nodes = [torchrun("--config", f"configs/{config}.toml", "--dry-run", "--run.root", tmp_path, nodes=2, node=node, port=port, ranks=1) for node in (0, 1)]
        outs = [node.communicate(timeout=500)[0] for node in nodes]
        assert all(node.returncode == 0 for node in nodes), outs
        run = tmp_path / f"{config}-dry-run"
        assert any(row.get("grad_norm", 0) > 0 for row in rows(run)) and (run / "model" / "model.safetensors").exists()
