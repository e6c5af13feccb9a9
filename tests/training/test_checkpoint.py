"""A run goes on to the bit from its newest checkpoint, also after a full disk or a kill."""

from __future__ import annotations

import os
import shutil

import pytest
import torch
from safetensors.torch import save_file
from test_distributed import ONE, agree, first_half, make_groups, make_trainer, second_half

from nanorchestra.errors import UserError
from nanorchestra.model.sharded import local
from nanorchestra.training import checkpoint
from nanorchestra.training.checkpoint import Checkpoints
from train import supervised_update


def test_a_checkpoint_holds_what_was_and_training_goes_on_to_the_bit(tmp_path):
    straight = first_half(ONE, str(tmp_path))
    agree(second_half(ONE, str(tmp_path)), straight, 0.0)


def test_the_newest_checkpoint_is_read_and_the_one_before_is_kept(tmp_path):
    trainer, checkpoints, states = make_trainer(ONE), Checkpoints(tmp_path, ONE), {}
    for name in "abc":
        supervised_update(trainer, make_groups(ord(name)), 1e-2)
        states[name] = {key: x.clone() for key, x in trainer.tensors().items()}
        checkpoints.save(name, trainer.tensors(), {"name": name})
    assert sorted(os.listdir(tmp_path)) == ["b", "c"]
    for newest in "cb":
        assert checkpoints.restore(lambda notes: trainer.tensors()) == {"name": newest}
        now = trainer.tensors()
        assert all(torch.equal(now[key], states[newest][key]) for key in states[newest])
        shutil.rmtree(tmp_path / newest)  # by hand, as of a disk that has lost a part of it


def test_a_checkpoint_of_another_model_is_refused_in_one_line(tmp_path):
    trainer, checkpoints = make_trainer(ONE), Checkpoints(tmp_path, ONE)
    tensors = trainer.tensors()
    checkpoints.save("a", tensors, {})
    name = "model.layers.0.down_proj.weight"
    others = (
        {**tensors, "model.more": torch.zeros(3)},
        {key: x for key, x in tensors.items() if key != name},
        tensors | {name: torch.zeros(40, 50)},
    )
    for wanted in others:
        with pytest.raises(UserError, match=r"a: .*(other tensors|of the 2000 numbers)") as refusal:
            checkpoints.restore(lambda notes, wanted=wanted: wanted)
        assert "\n" not in str(refusal.value)


def test_what_lies_in_a_cpus_memory_is_written_without_a_copy(tmp_path, monkeypatch):
    trainer, checkpoints = make_trainer(ONE), Checkpoints(tmp_path, ONE)
    written = {}

    def write(tensors, file):
        written.update({name: tensor.data_ptr() for name, tensor in tensors.items()})
        return save_file(tensors, file)

    monkeypatch.setattr(checkpoint, "save_file", write)
    checkpoints.save("a", trainer.tensors(), {})
    held = {name: local(tensor) for name, tensor in trainer.tensors().items()}
    assert written == {name: t.data_ptr() for name, t in held.items() if t.numel()}


def test_a_full_disk_leaves_the_checkpoints_before(tmp_path, monkeypatch):
    trainer, checkpoints = make_trainer(ONE), Checkpoints(tmp_path, ONE)
    checkpoints.save("a", trainer.tensors(), {})
    checkpoints.wait()

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match="b: the checkpoint cannot be written: OSError: .*No space"):
        checkpoints.save("b", trainer.tensors(), {})
    assert os.listdir(tmp_path) == ["a"]
    monkeypatch.undo()
    (tmp_path / ".c.part").mkdir()  # of a process that was killed
    assert Checkpoints(tmp_path, ONE).restore(lambda notes: trainer.tensors()) == {}
    assert os.listdir(tmp_path) == ["a"]
