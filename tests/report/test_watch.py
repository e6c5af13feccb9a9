"""Watching a run: the live report in a process beside it, rows to TensorBoard and wandb, and one line for what is missing."""

from __future__ import annotations

import os
import sys
import time
import types

import pytest

from nanorchestra.errors import UserError
from nanorchestra.report.run import Run
from nanorchestra.report.watch import Watch, needed, peak_memory_mb, scalars

ROW = {
    "phase": "grpo",
    "step": 7,
    "reward": 0.5,
    "skipped": None,
    "name": "text",
    "filtered": {"homogeneous": 0.25},
    "turns": 2,
}


@pytest.fixture
def run(tmp_path):
    return Run.create(tmp_path / "one", '[run]\nname = "one"\n')


@pytest.fixture
def fakes(monkeypatch):
    """Modules in the place of tensorboard and wandb that write down what they are told."""
    told = {"tensorboard": [], "wandb": []}

    class SummaryWriter:
        def __init__(self, log_dir, purge_step=None):
            told["tensorboard"].append((log_dir.rsplit("/", 2)[-2:], purge_step))

        def add_scalar(self, name, value, step):
            told["tensorboard"].append((name, value, step))

        def flush(self):
            pass

    tensorboard = types.ModuleType("torch.utils.tensorboard")
    tensorboard.SummaryWriter = SummaryWriter
    wandb = types.ModuleType("wandb")
    wandb.init = lambda **given: told["wandb"].append(given)
    wandb.define_metric = lambda name, step_metric: told["wandb"].append((name, step_metric))
    wandb.log = lambda values: told["wandb"].append(values)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", tensorboard)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    return told, wandb


def test_the_scalars_of_a_row_are_its_numbers():
    assert scalars(ROW) == {"reward": 0.5, "filtered/homogeneous": 0.25, "turns": 2.0}


def test_rows_go_to_tensorboard_and_wandb(run, fakes):
    told, _ = fakes
    watch = Watch(run, "tensorboard,wandb")
    watch.log(ROW)
    watch.log(ROW | {"phase": "evaluation", "step": 8})
    assert told["tensorboard"][:4] == [
        (["tensorboard", "grpo"], 7),
        ("reward", 0.5, 7),
        ("filtered/homogeneous", 0.25, 7),
        ("turns", 2.0, 7),
    ]
    assert told["tensorboard"][4] == (
        ["tensorboard", "evaluation"],
        8,
    )  # steps from the first row on replace what a killed run had written
    begun = told["wandb"][0]
    assert (
        begun["config"] == {"run": {"name": "one"}}
        and begun["resume"] == "allow"
        and begun["dir"] == str(run.path)
    )
    assert ("grpo/*", "grpo/step") in told["wandb"] and told["wandb"][-2] == {
        "grpo/reward": 0.5,
        "grpo/filtered/homogeneous": 0.25,
        "grpo/turns": 2.0,
        "grpo/step": 7,
    }
    Watch(Run.open(run.path), "wandb")
    assert [
        given["id"] for given in told["wandb"] if isinstance(given, dict) and "id" in given
    ] == [begun["id"]] * 2  # resumed, it is the same run


def test_what_is_missing_or_does_not_start_gets_one_line(run, fakes, monkeypatch):
    assert needed("") == {}
    with pytest.raises(UserError, match="run.log_to is 'tensorbord'; it must be"):
        needed("tensorbord")

    def no_key(**given):
        raise RuntimeError("api_key not configured\n(no tty)")

    monkeypatch.setattr(fakes[1], "init", no_key)
    with pytest.raises(
        UserError, match=r"wandb does not start \(api_key not configured \(no tty\)\)"
    ):
        Watch(run, "wandb")
    for name, module in (("tensorboard", "torch.utils.tensorboard"), ("wandb", "wandb")):
        monkeypatch.setitem(sys.modules, module, None)  # as if it were not installed
        with pytest.raises(UserError, match=f"{name} is not installed; pip install {name}"):
            needed("wandb,tensorboard" if name == "wandb" else name)


def test_the_report_is_written_beside_the_run_again_and_again(run):
    watch = Watch(run, every=0.01)
    run.append("metrics", {"phase": "grpo", "step": 1, "reward": 0.5, "seconds": 1.0})
    watch.report()
    assert not (run.path / "report.html").exists()  # not yet time
    time.sleep(0.02)
    watch.report()
    writer = watch._writer
    assert os.getpriority(os.PRIO_PROCESS, writer.pid) == 19 and os.getsid(writer.pid) != os.getsid(
        0
    )
    time.sleep(0.02)
    watch.report()
    assert watch._writer is writer  # one at a time
    assert writer.wait() == 0 and "location.reload()" in (run.path / "report.html").read_text()
    watch.report()
    assert watch._writer is not writer
    watch.close()
    assert watch._writer.poll() is not None and not [
        name for name in os.listdir(run.path) if name.startswith(".report")
    ]
    quiet = Watch(run, every=0.0)
    quiet.begun -= 10**6
    quiet.report()
    assert quiet._writer is None


def test_peak_memory_is_that_of_the_process():
    before = peak_memory_mb(False)
    block = bytearray(64 << 20)
    block[::4096] = b"x" * len(block[::4096])
    assert before <= peak_memory_mb(False) < 10**6 and peak_memory_mb(False) > 64
