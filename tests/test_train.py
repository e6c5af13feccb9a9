"""The run as a user has it: killed and resumed it ends the same, and what is wrong gets one line."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SMALL = ["--run.threads", "1", "--run.checkpoint_every", "2", "--model.vocab_size", "700", "--model.tokenizer_tasks", "40", "--warm_start.steps", "5", "--warm_start.few_steps", "2",
         "--warm_start.prompts", "3", "--grpo.steps", "5", "--grpo.prompts", "2", "--grpo.group_size", "4", "--grpo.min_std", "0",
         "--evaluation.tasks", "6", "--rollout.turns", "2", "--rollout.turn_tokens", "24", "--rollout.context_tokens", "640"]


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
    newest = sorted((run / "checkpoints").glob("*.pt"))[-1]
    newest.write_bytes(newest.read_bytes()[:1000])
    code, out = train("--resume", run)
    assert code == 0 and "damaged" in out
    assert rows(run) == rows(straight[0]) and final(run) == final(straight[0])
