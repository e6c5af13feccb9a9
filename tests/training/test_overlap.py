"""The next step's rollout beside the update: by weights one update old, whatever is faster."""

from __future__ import annotations

import json
import time
from concurrent.futures import Future

import pytest
import torch
from forked import fork, statuses
from run_rows import steps_of

import train as program
from nanorchestra.errors import UserError
from nanorchestra.model.weights import named_hf_tensors
from nanorchestra.records import ToolResult
from nanorchestra.training.distributed import Ranks, ending_together
from nanorchestra.training.overlap import in_background, running
from nanorchestra.training.packing import samples_in

STALE = {
    "rollout.staleness": 1,
    "grpo.importance_cap": 2.0,
    "grpo.learning_rate": 3e-3,
    "grpo.warmup_steps": 1,
    "grpo.steps": 4,
}


def at_once(device, function, *arguments):
    """Does what `in_background` does before the trainer begins, without a thread."""
    future = Future()
    future.set_result(function(*arguments))
    return future


def late(device, function, *arguments):
    """Does it long after the trainer is done."""
    return in_background(device, lambda: time.sleep(0.3) or function(*arguments))


def test_it_does_not_matter_which_of_the_two_is_faster(make_training, monkeypatch):
    monkeypatch.setattr(program, "in_background", at_once)
    settings = STALE | {"grpo.kl_coef": 0.05}
    serial = make_training("serial", settings)
    assert serial.train()
    monkeypatch.setattr(program, "in_background", late)
    slow = make_training("slow", settings)
    publish = program.publish

    def checked(*arguments):
        assert not running()
        return publish(*arguments)

    monkeypatch.setattr(program, "publish", checked)
    assert slow.train()
    assert steps_of(slow) == steps_of(serial) and len(steps_of(slow)) == 4
    for row in slow.folder.rows("metrics"):
        assert row["grad_norm"] > 0 and row["tokens_per_s"] < 1e5


def test_a_rollout_is_one_update_old_and_weighed_by_it(make_training, monkeypatch):
    run = make_training("old", STALE | {"grpo.steps": 3})
    weights, updates = [], []  # before each step, and the samples it learns from
    update = program.policy_update

    def watched(trainer, groups, *arguments, **options):
        tensors = named_hf_tensors(trainer.model)
        weights.append({name: tensor.clone() for name, tensor in tensors})
        updates.append(samples_in(groups))
        return update(trainer, groups, *arguments, **options)

    monkeypatch.setattr(program, "policy_update", watched)
    assert run.train()

    def gap(samples, by):
        """The largest difference between the sampler's log-probabilities and those of weights."""
        run.engine.update_weights(by.items())
        gaps = []
        for sample, scores in zip(
            samples, run.engine.score([sample.ids for sample in samples]), strict=True
        ):
            for i, score in enumerate(scores, 1):
                if sample.in_loss[i]:
                    gaps.append(abs(sample.sampler_logprobs[i] - score))
        return max(gaps)

    assert gap(updates[0], weights[0]) < 1e-4
    for n in (1, 2):
        assert gap(updates[n], weights[n - 1]) < 1e-4 < 1e-2 < gap(updates[n], weights[n])
    first, *others = steps_of(run)
    assert first["importance"] == pytest.approx(1, abs=1e-5) and first["logprob_gap"] < 1e-5
    assert first["staleness"] == 0
    for row in others:
        assert row["importance"] != 1 and row["logprob_gap"] > 1e-3 and row["staleness"] == 1


def test_stopped_or_killed_and_resumed_it_ends_the_same(make_training, monkeypatch):
    whole = make_training("whole", STALE)
    assert whole.train()
    stopped = make_training("stopped", STALE, steps=3)
    assert not stopped.train()  # saves after step 3
    killed = make_training("killed", STALE)
    update = program.policy_update

    def killing(*arguments, **options):
        if killed.progress.step == 3:
            raise IndexError
        return update(*arguments, **options)

    monkeypatch.setattr(program, "policy_update", killing)
    with pytest.raises(IndexError):  # in step 4; the last checkpoint is of step 2
        killed.train()
    killed.checkpoints.wait()
    monkeypatch.setattr(program, "policy_update", update)
    for name, at in (("stopped", 3), ("killed", 2)):
        newest = sorted((stopped.folder.path.parent / name).glob("checkpoints/*"))[-1]
        notes = json.loads((newest / "notes.json").read_text())["notes"]
        assert newest.name == f"1-grpo-{at:06d}" and notes["ahead"]["rows"]
        again = make_training(name, resume=True)
        assert again.train()
        assert steps_of(again) == steps_of(whole)
        ours, theirs = (list(run.folder.rows("trajectories")) for run in (again, whole))
        for row, same in zip(ours, theirs, strict=True):
            assert row["weight_versions"] == same["weight_versions"]
        models = [named_hf_tensors(run.trainer.model) for run in (again, whole)]
        for (_, ours), (_, theirs) in zip(*models, strict=True):
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    "error, status, line",
    [
        (KeyboardInterrupt(), 130, "KeyboardInterrupt"),
        (UserError("x" * 900), 2, "x" * 900),
    ],
)
def test_a_process_ends_at_once_under_a_rollout(tmp_path, error, status, line):
    """An orderly end of the interpreter would abort: the thread computes without its lock."""

    def rollout():
        x = torch.ones(400, 400)
        with ending_together(Ranks()):
            in_background(x.device, lambda: [x @ x for _ in range(10**9)])
            raise error

    printed = tmp_path / "printed"
    assert statuses(fork(rollout, printed)) == [status]
    assert printed.read_text() == f"train.py: {line}; go on with --resume\n"


def test_attempts_ahead_that_mostly_failed_are_played_again_after_a_resume(
    make_training, monkeypatch
):
    play = program.play_on_ranks

    def failing(player, world, split, indices, **options):
        attempts = play(player, world, split, indices, **options)
        if split == "train" and indices[0] == 2 * len(set(indices)):  # those of the third step
            for attempt in attempts.trajectories:
                attempt.status = "infrastructure"
                attempt.turns[-1].results = [ToolResult("down", error=True, infrastructure=True)]
        return attempts

    settings = STALE | {"run.checkpoint_every": 1}
    run = make_training("down", settings)
    monkeypatch.setattr(program, "play_on_ranks", failing)
    with pytest.raises(UserError, match="step 3: 4 of 4 attempts failed"):
        run.train()
    monkeypatch.setattr(program, "play_on_ranks", play)
    assert make_training("down", resume=True).train()
