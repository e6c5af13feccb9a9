"""A run goes on to the bit from its newest checkpoint, also after a full disk or a kill."""

from __future__ import annotations

import os
import shutil

import pytest
import torch
from safetensors.torch import load_file
from test_distributed import ONE, agree, first_half, make_groups, make_trainer, second_half

from nanorchestra.errors import UserError
from nanorchestra.training import checkpoint
from nanorchestra.training.checkpoint import FILE_TENSORS, Checkpoints, notes_of
from train import supervised_update


def learn(trainer, seed):
    """Takes a step; returns a copy of all tensors."""
    supervised_update(trainer, make_groups(seed), 1e-2)
    return {key: x.clone() for key, x in trainer.tensors().items()}


@pytest.mark.parametrize("lora", [0, 3])
def test_a_checkpoint_holds_what_was_and_training_goes_on_to_the_bit(tmp_path, lora):
    straight = first_half(ONE, str(tmp_path), lora=lora)
    agree(second_half(ONE, str(tmp_path), lora=lora), straight, 0.0)


def test_the_newest_checkpoint_is_read_and_the_one_before_is_kept(tmp_path):
    trainer, checkpoints, states = make_trainer(ONE), Checkpoints(tmp_path, ONE), {}
    for name in "abc":
        states[name] = learn(trainer, ord(name))
        checkpoints.save(name, trainer.tensors(), {"name": name})
    assert sorted(os.listdir(tmp_path)) == ["b", "c"]
    # a file is put together in memory
    assert all(len(load_file(file)) <= FILE_TENSORS for file in tmp_path.glob("*/*.safetensors"))
    for newest in "cb":
        path = checkpoints.newest()
        assert path == tmp_path / newest and notes_of(path) == {"name": newest}
        checkpoints.load(path, trainer.tensors())
        now = trainer.tensors()
        assert all(torch.equal(now[key], states[newest][key]) for key in states[newest])
        shutil.rmtree(tmp_path / newest)  # by hand, as of a disk that has lost a part of it


def test_what_a_gpu_holds_is_written_as_it_was_while_training_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "local", lambda tensor: tensor.to("meta"))  # not of a CPU
    trainer, checkpoints = make_trainer(ONE), Checkpoints(tmp_path, ONE)
    state = learn(trainer, 1)
    checkpoints.save("a", trainer.tensors(), {})
    for seed in range(5):
        learn(trainer, seed)
    checkpoints.wait()
    checkpoints.load(tmp_path / "a", trainer.tensors())
    assert all(torch.equal(now, state[key]) for key, now in trainer.tensors().items())


@pytest.mark.parametrize(
    "name, value, message",
    [
        ("model.more", torch.zeros(3), "Missing key .* model.more"),
        ("model.norm", torch.zeros(40, 50), "Size mismatch .* model.norm"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused_in_one_line(tmp_path, name, value, message):
    trainer, checkpoints = make_trainer(ONE), Checkpoints(tmp_path, ONE)
    checkpoints.save("a", trainer.tensors(), {})
    wanted = trainer.tensors() | {name: value}
    with pytest.raises(UserError, match=f"a: cannot be read into this run: .*{message}") as refusal:
        checkpoints.load(tmp_path / "a", wanted)
    assert "\n" not in str(refusal.value)
