"""Watching a run: a live report beside it, and rows to TensorBoard and wandb."""

import os
import sys
import time
import types

import pytest

from nanorchestra.report.run import Run
from nanorchestra.report.watch import Watch

ROW = {"phase": "grpo", "step": 7, "reward": 0.5, "skipped": None, "filtered": {"short": 0.25}}


@pytest.fixture
def run(tmp_path):
    return Run.create(tmp_path / "one", '[run]\nname = "one"\n')


def test_rows_go_to_tensorboard_and_wandb(run, monkeypatch):
    told = {"tensorboard": [], "wandb": []}

    class SummaryWriter:
        def __init__(self, log_dir, purge_step=None):
            told["tensorboard"].append((log_dir.rsplit("/", 1)[1], purge_step))

        def add_scalar(self, name, value, step):
            told["tensorboard"].append((name, value, step))

        def flush(self):
            pass

    tensorboard, wandb = types.ModuleType("tensorboard"), types.ModuleType("wandb")
    tensorboard.SummaryWriter = SummaryWriter
    wandb.init = lambda **given: told["wandb"].append(given)
    wandb.define_metric = lambda name, step_metric: told["wandb"].append((name, step_metric))
    wandb.log = told["wandb"].append
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", tensorboard)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    watch = Watch(run, "tensorboard,wandb")
    watch.log(ROW)
    watch.log({"phase": "evaluation", "step": 8})
    rows = [("grpo", 7), ("reward", 0.5, 7), ("filtered/short", 0.25, 7), ("evaluation", 8)]
    assert told["tensorboard"] == rows
    assert told["wandb"][0]["config"] == {"run": {"name": "one"}}
    assert ("grpo/*", "grpo/step") in told["wandb"]
    logged = {"grpo/reward": 0.5, "grpo/filtered/short": 0.25, "grpo/step": 7}
    assert told["wandb"][-2] == logged


def test_the_report_is_written_beside_the_run_again_and_again(run):
    watch = Watch(run, every=0.01)
    run.append("metrics", {"phase": "grpo", "step": 1, "reward": 0.5, "seconds": 1.0})
    time.sleep(0.02)
    watch.report()
    writer = watch._writer
    time.sleep(0.02)
    watch.report()
    assert watch._writer is writer, "one at a time"
    assert os.getsid(writer.pid) != os.getsid(0)
    assert writer.wait() == 0 and "location.reload()" in (run.path / "report.html").read_text()
    watch.report()
    assert watch._writer is not writer
    watch.close()
    assert watch._writer.poll() is not None
