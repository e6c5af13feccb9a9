"""A run goes on to the bit from its newest whole checkpoint, whatever happened to the others."""

from __future__ import annotations

import os

import pytest
from test_ranks import ONE, agree, first_half, make_trainer, second_half

from nanorchestra.errors import UserError
from nanorchestra.training.checkpoint import Checkpoints


def test_a_checkpoint_holds_what_was_and_training_goes_on_to_the_bit(tmp_path):
    straight = first_half(ONE, str(tmp_path))
    agree(second_half(ONE, str(tmp_path)), straight, 0.0)


def truncated(folder):
    file = next(folder.glob("*.distcp"))
    file.write_bytes(file.read_bytes()[:-7])


@pytest.mark.parametrize(
    "damage",
    [
        truncated,
        lambda folder: (folder / "notes.json").unlink(),
        lambda folder: (folder / "notes.json").write_text("{"),
        lambda folder: (folder / ".metadata").write_bytes(b""),
    ],
)
def test_a_damaged_checkpoint_is_named_and_the_one_before_read(tmp_path, capfd, damage):
    trainer, checkpoints = make_trainer(ONE), Checkpoints(tmp_path, ONE)
    for name in "abc":
        checkpoints.save(name, trainer.tensors(), {"name": name})
    checkpoints.wait()
    assert sorted(os.listdir(tmp_path)) == ["b", "c"]
    damage(tmp_path / "c")
    restored = Checkpoints(tmp_path, ONE).restore(lambda notes: trainer.tensors())
    assert restored == {"name": "b"}
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith(f"{tmp_path / 'c'}: damaged (") and line.endswith(
        "trying the one before"
    )
    damage(tmp_path / "b")
    with pytest.raises(UserError, match="none of its 2 checkpoints can be read"):
        checkpoints.restore(lambda notes: trainer.tensors())


def test_a_full_disk_leaves_the_checkpoints_before(tmp_path, monkeypatch):
    trainer, checkpoints = make_trainer(ONE), Checkpoints(tmp_path, ONE)
    checkpoints.save("a", trainer.tensors(), {})
    checkpoints.wait()

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    checkpoints.save("b", trainer.tensors(), {})
    with pytest.raises(UserError, match="b: the checkpoint cannot be written: OSError: .*No space"):
        checkpoints.wait()
    assert os.listdir(tmp_path) == ["a"]
    monkeypatch.undo()
    (tmp_path / ".c.part").mkdir()  # of a process that was killed
    assert Checkpoints(tmp_path, ONE).restore(lambda notes: trainer.tensors()) == {}
    assert os.listdir(tmp_path) == ["a"]
