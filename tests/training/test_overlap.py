"""The next step's rollout beside the trainer: by weights exactly one update old, the same whatever runs faster, and resumed it goes on with it."""

from __future__ import annotations

import subprocess
import sys
import time
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch
from conftest import Stop, steps_of

import train as program
from nanorchestra.config import load_config
from nanorchestra.errors import UserError
from nanorchestra.model.weights import named_hf_tensors
from nanorchestra.training.overlap import beside, running

OVERLAP = [
    "--rollout.overlap",
    "true",
    "--grpo.importance_cap",
    "2",
    "--grpo.learning_rate",
    "3e-3",
    "--grpo.warmup_steps",
    "1",
]
FOUR = [*OVERLAP, "--grpo.steps", "4"]


def at_once(function, device):
    """What `beside` does, without a thread: before the trainer begins."""
    future = Future()
    future.set_result(function())
    return future


def test_it_does_not_matter_which_of_the_two_is_faster(make_training, monkeypatch):
    monkeypatch.setattr(program, "beside", at_once)
    serial = make_training("serial", *FOUR)
    assert serial.grpo(Stop())

    def late(function, device):
        return beside(lambda: time.sleep(0.3) or function(), device)

    monkeypatch.setattr(program, "beside", late)  # the trainer is done long before
    slow = make_training("slow", *FOUR)
    update = slow.engine.update_weights

    def checked(*arguments):
        assert not running()
        return update(*arguments)

    slow.engine.update_weights = checked
    assert slow.grpo(Stop())
    assert (
        steps_of(slow) == steps_of(serial)
        and len(steps_of(slow)) == 4
        and all(row["grad_norm"] > 0 for row in steps_of(slow))
    )


def test_a_rollout_is_one_update_old_and_weighed_by_it(make_training):
    training = make_training("old", *OVERLAP, "--grpo.steps", "3")
    before, seen = [], []  # the weights before each step, and the groups it learns from
    step = training.trainer.policy_step

    def watched(groups, rate, objective, **options):
        assert objective.importance_cap == 2
        before.append(
            {name: tensor.clone() for name, tensor in named_hf_tensors(training.trainer.model)}
        )
        seen.append(groups)
        return step(groups, rate, objective, **options)

    training.trainer.policy_step = watched
    assert training.grpo(Stop())

    def gap(groups, weights):
        """The largest difference between the sampler's log-probabilities and those of `weights`."""
        training.engine.update_weights(weights.items())
        found = []
        for group in groups:
            for sample, scores in zip(
                group.samples,
                training.engine.score([group.prompt + sample.ids for sample in group.samples]),
            ):
                scored = scores[len(group.prompt) - 1 :]
                found += [
                    abs(a - b)
                    for a, b, sampled in zip(sample.logprobs, scored, sample.sampled)
                    if sampled
                ]
        return max(found)

    assert gap(seen[0], before[0]) < 1e-4
    for n in (1, 2):
        assert gap(seen[n], before[n - 1]) < 1e-4 < 1e-2 < gap(seen[n], before[n])
    rows = steps_of(training)
    assert rows[0]["importance"] == pytest.approx(1, abs=1e-5) and rows[0]["logprob_gap"] < 1e-5
    assert all(abs(row["importance"] - 1) > 1e-4 and row["logprob_gap"] > 1e-3 for row in rows[1:])


def test_stopped_or_killed_and_resumed_it_ends_the_same(make_training):
    whole = make_training("whole", *FOUR)
    assert whole.grpo(Stop())
    stopped = make_training("stopped", *FOUR)
    assert not stopped.grpo(Stop(3))  # saves after step 3
    stopped.checkpoints.wait()
    killed = make_training("killed", *FOUR)
    step, killed.trainer.policy_step = (
        killed.trainer.policy_step,
        lambda *args, **options: step(*args, **options) if killed.step < 3 else [][0],
    )
    with pytest.raises(IndexError):  # in step 4; the last checkpoint is of step 2
        killed.grpo(Stop())
    killed.checkpoints.wait()
    for name in ("stopped", "killed"):
        again = make_training(name, resume=True)
        assert (
            again.step == (3 if name == "stopped" else 2)
            and again.grpo(Stop())
            and steps_of(again) == steps_of(whole)
        )
        assert all(
            torch.equal(a, b)
            for (_, a), (_, b) in zip(
                named_hf_tensors(again.trainer.model), named_hf_tensors(whole.trainer.model)
            )
        )


def test_what_fails_in_the_rollout_fails_the_step(make_training):
    training = make_training("failing", *FOUR)
    attempts, program_attempts = [], program.Training._attempts

    def failing(self, *arguments):
        attempts.append(self.step)
        if self.step == 2:
            raise UserError("step 3: 4 of 4 attempts failed")
        return program_attempts(self, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(program.Training, "_attempts", failing)
        with pytest.raises(UserError, match="step 3: 4 of 4"):
            training.grpo(Stop())
    assert attempts == [0, 1, 2] and len(steps_of(training)) == 1


@pytest.mark.parametrize(
    "given",
    [["--rollout.overlap", "true"], ["--rollout.overlap", "true", "--grpo.objective", "dr_grpo"]],
)
def test_overlap_without_the_correction_is_refused(given):
    with pytest.raises(
        UserError, match="rollout.overlap is true.*grpo.importance_cap is 0, it must be at least 1"
    ) as caught:
        load_config(None, given)
    assert "\n" not in str(caught.value)
    load_config(None, [*given, "--grpo.importance_cap", "2"])


def test_a_process_ends_at_once_under_a_rollout():
    """An orderly end of the interpreter would abort: the thread computes without its lock."""
    code = (
        "import torch, train; from nanorchestra.training.ranks import Ranks; from nanorchestra.training.overlap import beside; x = torch.ones(400, 400)\n"
        "beside(lambda: [x @ x for _ in range(10**9)], x.device); raise SystemExit(train._give_up(Ranks(), 130, 'stopped at once', ''))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(program.__file__).parent,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert (done.returncode, done.stderr) == (130, "stopped at once\n")
