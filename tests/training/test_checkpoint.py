"""Checkpoints: the newest two are kept; full disks and kills are in test_counted_faults.py."""

from __future__ import annotations

import os

import pytest
import torch
from safetensors.torch import load_file
from test_distributed import ONE, make_groups, make_trainer

from nanorchestra.training import checkpoint
from nanorchestra.training.checkpoint import FILE_TENSORS, Checkpoints
from train import supervised_update


def learn(trainer, seed):
    """Takes a step; returns a copy of all tensors."""
    supervised_update(trainer, make_groups(seed), 1e-2)
    return {key: x.clone() for key, x in trainer.tensors().items()}


@pytest.mark.parametrize("in_a_thread", [False, True])
def test_the_newest_two_are_kept_as_they_were_while_training_went_on(
    tmp_path, monkeypatch, in_a_thread
):
    """What a GPU holds is written in a thread."""
    if in_a_thread:
        monkeypatch.setattr(checkpoint, "local", lambda tensor: tensor.to("meta"))
    trainer, checkpoints, states = make_trainer(ONE), Checkpoints(tmp_path, ONE), {}
    for name in "abc":
        states[name] = learn(trainer, ord(name))
        checkpoints.save(name, trainer.tensors(), {"name": name})
        learn(trainer, 0)
    checkpoints.wait()
    assert sorted(os.listdir(tmp_path)) == ["b", "c"]
    assert checkpoints.newest() == tmp_path / "c"
    # a file is put together in memory
    assert all(len(load_file(file)) <= FILE_TENSORS for file in tmp_path.glob("*/*.safetensors"))
    for name in "bc":
        checkpoints.load(tmp_path / name, trainer.tensors())
        assert all(torch.equal(x, states[name][key]) for key, x in trainer.tensors().items())
