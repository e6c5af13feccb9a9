"""A run goes on to the bit from its newest whole checkpoint, whatever happened to the others."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from test_distributed import ONE, agree, first_half, make_groups, make_trainer, second_half

from nanorchestra.errors import UserError
from nanorchestra.files import sha256, write_sums
from nanorchestra.model.sharded import local
from nanorchestra.model.tensor_files import write_tensors
from nanorchestra.training import checkpoint
from nanorchestra.training.checkpoint import Checkpoints
from train import supervised_update


def test_a_checkpoint_holds_what_was_and_training_goes_on_to_the_bit(tmp_path):
    straight = first_half(ONE, str(tmp_path))
    agree(second_half(ONE, str(tmp_path)), straight, 0.0)


def flipped(file):
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def from_the_one_before(file):
    shutil.copy(file.parents[1] / "b" / file.name, file)


def without_its_last_line(file):
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join(lines[:-1]))


def a_pipe(file):
    file.unlink()
    os.mkfifo(file)


DAMAGES = {
    "flipped": flipped,
    "cut": lambda file: os.truncate(file, file.stat().st_size - 7),
    "longer": lambda file: os.truncate(file, file.stat().st_size + 7),
    "empty": lambda file: os.truncate(file, 0),
    "without its last line": without_its_last_line,
    "missing": Path.unlink,
    "from the one before": from_the_one_before,
    "a pipe": a_pipe,
}
FILES = ("rank-00000.safetensors", "notes.json", "SHA256SUMS")


def three_checkpoints(folder):
    """Returns a trainer, its checkpoints in `folder`, of which two are left, and its state by name.

    Each has other numbers.
    """
    trainer, checkpoints, states = make_trainer(ONE), Checkpoints(folder, ONE), {}
    for name in "abc":
        supervised_update(trainer, make_groups(ord(name)), 1e-2)
        states[name] = {key: x.clone() for key, x in trainer.tensors().items()}
        checkpoints.save(name, trainer.tensors(), {"name": name})
    checkpoints.wait()
    assert sorted(os.listdir(folder)) == ["b", "c"]
    return trainer, checkpoints, states


def is_state(trainer, state):
    now = trainer.tensors()
    return now.keys() == state.keys() and all(torch.equal(now[key], state[key]) for key in now)


def test_each_damage_is_a_line_that_names_the_file_and_the_one_before_is_read(tmp_path, capfd):
    trainer, _, states = three_checkpoints(tmp_path / "whole")
    assert sorted(os.listdir(tmp_path / "whole" / "c")) == sorted(FILES)
    for kind, damage in DAMAGES.items():
        for name in FILES:
            folder = tmp_path / f"{kind}-{name}"
            shutil.copytree(tmp_path / "whole", folder)
            damage(folder / "c" / name)
            checkpoints = Checkpoints(folder, ONE)
            restored = checkpoints.restore(lambda notes: trainer.tensors())
            assert restored == {"name": "b"} and is_state(trainer, states["b"]), (kind, name)
            (line,) = capfd.readouterr().err.splitlines()
            assert line.startswith(f"{folder / 'c'}/") and name in line, line
            assert line.endswith(f"; resuming from {folder / 'b'}, which is whole"), line
            (folder / "b" / "notes.json").unlink()
            with pytest.raises(UserError) as refusal:
                checkpoints.restore(lambda notes: trainer.tensors())
            for file in (folder / "c", folder / "b" / "notes.json"):
                assert f"{file}" in str(refusal.value) and "\n" not in str(refusal.value)


class Attack:
    """Runs code when it is unpickled."""

    def __init__(self, target):
        self.target = target

    def __reduce__(self):
        return os.mkdir, (str(self.target),)


@pytest.mark.parametrize("name", [".metadata", *FILES])
@pytest.mark.parametrize("signed", [True, False], ids=["digests agree", "digests differ"])
def test_a_pickle_in_a_checkpoint_is_not_read(tmp_path, name, signed):
    trainer, checkpoints, _ = three_checkpoints(tmp_path / "run")
    folder = tmp_path / "run" / "c"
    with (folder / name).open("wb") as file:
        pickle.dump(Attack(tmp_path / "attacked"), file)
    if signed:
        names = {file.name for file in folder.iterdir()} - {"SHA256SUMS"}
        write_sums(folder, {name: sha256(folder / name) for name in names})
    checkpoints.restore(lambda notes: trainer.tensors())
    assert not (tmp_path / "attacked").exists()


def test_a_checkpoint_of_another_model_is_refused_in_one_line(tmp_path):
    trainer, checkpoints, _ = three_checkpoints(tmp_path)
    tensors = trainer.tensors()
    name = "model.layers.0.down_proj.weight"
    others = (
        {**tensors, "model.more": torch.zeros(3)},
        {key: x for key, x in tensors.items() if key != name},
        tensors | {name: torch.zeros(7, 50)},
        tensors | {name: torch.zeros(40, 50)},
        tensors | {name: tensors[name].double()},
    )
    for wanted in others:
        with pytest.raises(UserError, match="none of its 2 checkpoints can be read") as refusal:
            checkpoints.restore(lambda notes, wanted=wanted: wanted)
        assert "\n" not in str(refusal.value)


def test_notes_of_another_version_are_refused_in_one_line(make_training):
    run = make_training("run", {"grpo.steps": 0})
    assert run.train()
    (folder,) = run.checkpoints.folder.iterdir()
    written = json.loads((folder / "notes.json").read_text())
    written["notes"]["progress"]["colour"] = "red"
    (folder / "notes.json").write_text(json.dumps(written))
    write_sums(folder, {name: sha256(folder / name) for name in FILES[:2]})
    again = make_training("run", resume=True)
    with pytest.raises(UserError, match="none of its 1 checkpoints .*colour") as refusal:
        again.train()
    assert "\n" not in str(refusal.value)


def test_what_lies_in_a_cpus_memory_is_written_without_a_copy(tmp_path, monkeypatch):
    trainer, checkpoints = make_trainer(ONE), Checkpoints(tmp_path, ONE)
    written = {}

    def write(file, tensors):
        written.update({name: tensor.data_ptr() for name, tensor in tensors.items()})
        return write_tensors(file, tensors)

    monkeypatch.setattr(checkpoint, "write_tensors", write)
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
