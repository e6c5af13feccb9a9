"""The next step's rollout beside the update: by weights one update old, whatever is faster."""

from __future__ import annotations

import subprocess
import sys
import time
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch
from run_rows import steps_of

from nanorchestra.model.weights import named_hf_tensors
from nanorchestra.training import grpo as program
from nanorchestra.training.overlap import beside, running

OVERLAP = {
    "rollout.overlap": True,
    "grpo.importance_cap": 2.0,
    "grpo.learning_rate": 3e-3,
    "grpo.warmup_steps": 1,
    "grpo.steps": 4,
}


def at_once(function, device):
    """Does what `beside` does before the trainer begins, without a thread."""
    future = Future()
    future.set_result(function())
    return future


def late(function, device):
    """Does it long after the trainer is done."""
    return beside(lambda: time.sleep(0.3) or function(), device)


def test_it_does_not_matter_which_of_the_two_is_faster(make_training, monkeypatch):
    monkeypatch.setattr(program, "beside", at_once)
    settings = OVERLAP | {"grpo.kl_coef": 0.05}  # the thread makes the reference's pass, too
    serial = make_training("serial", settings)
    serial.prepare("grpo")
    assert program.grpo(serial)
    monkeypatch.setattr(program, "beside", late)
    slow = make_training("slow", settings)
    slow.prepare("grpo")
    update = slow.engine.update_weights

    def checked(*arguments):
        assert not running()
        return update(*arguments)

    slow.engine.update_weights = checked
    assert program.grpo(slow)
    assert steps_of(slow) == steps_of(serial) and len(steps_of(slow)) == 4
    for row in slow.folder.rows("metrics"):
        assert row["grad_norm"] > 0 and row["tokens_per_s"] < 1e5


def test_a_rollout_is_one_update_old_and_weighed_by_it(make_training):
    run = make_training("old", OVERLAP | {"grpo.steps": 3})
    before, seen = [], []  # the weights before each step, and the groups it learns from
    step = run.trainer.policy_step

    def watched(groups, *arguments, **options):
        before.append(
            {name: tensor.clone() for name, tensor in named_hf_tensors(run.trainer.model)}
        )
        seen.append(groups)
        return step(groups, *arguments, **options)

    run.trainer.policy_step = watched
    assert program.grpo(run)

    def gap(groups, weights):
        """The largest difference between the sampler's log-probabilities and those of `weights`."""
        run.engine.update_weights(weights.items())
        found = []
        for group in groups:
            whole = [sample.ids for sample in group.samples]
            for sample, scores in zip(group.samples, run.engine.score(whole), strict=True):
                pairs = zip(sample.logprobs[1:], scores, sample.sampled[1:], strict=True)
                found += [abs(a - b) for a, b, sampled in pairs if sampled]
        return max(found)

    assert gap(seen[0], before[0]) < 1e-4
    for n in (1, 2):
        assert gap(seen[n], before[n - 1]) < 1e-4 < 1e-2 < gap(seen[n], before[n])
    first, *others = steps_of(run)
    assert first["importance"] == pytest.approx(1, abs=1e-5) and first["logprob_gap"] < 1e-5
    assert all(row["importance"] != 1 and row["logprob_gap"] > 1e-3 for row in others)


def test_stopped_or_killed_and_resumed_it_ends_the_same(make_training):
    whole = make_training("whole", OVERLAP)
    assert program.grpo(whole)
    stopped = make_training("stopped", OVERLAP, steps=3)
    assert not program.grpo(stopped)  # saves after step 3
    stopped.checkpoints.wait()
    killed = make_training("killed", OVERLAP)
    step = killed.trainer.policy_step

    def killing(*arguments, **options):
        if killed.progress.step == 3:
            raise IndexError
        return step(*arguments, **options)

    killed.trainer.policy_step = killing
    with pytest.raises(IndexError):  # in step 4; the last checkpoint is of step 2
        program.grpo(killed)
    killed.checkpoints.wait()
    for name, at in (("stopped", 3), ("killed", 2)):
        again = make_training(name, resume=True)
        assert again.progress.step == at and program.grpo(again)
        assert steps_of(again) == steps_of(whole)
        ours, theirs = (list(run.folder.rows("trajectories")) for run in (again, whole))
        for row, same in zip(ours, theirs, strict=True):
            assert row["weight_versions"] == same["weight_versions"]
        models = [named_hf_tensors(run.trainer.model) for run in (again, whole)]
        for (_, ours), (_, theirs) in zip(*models, strict=True):
            assert torch.equal(ours, theirs)


def test_a_process_ends_at_once_under_a_rollout():
    """An orderly end of the interpreter would abort: the thread computes without its lock."""
    code = (
        "import torch, train; from nanorchestra.training.ranks import Ranks\n"
        "from nanorchestra.training.overlap import beside; x = torch.ones(400, 400)\n"
        "with train.ending_together(Ranks()):\n"
        "    beside(lambda: [x @ x for _ in range(10**9)], x.device)\n"
        "    raise KeyboardInterrupt"
    )
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=200)
    assert done.returncode == 130
    assert done.stderr == "train.py: KeyboardInterrupt; go on with --resume\n"
