"""Counted faults, as SQLite has them: the n-th write, fsync or rename fails, for every n.

The disk is full from then on, or one operation fails, or the process is killed there. Of a write
half is done. Whatever n is, nothing is lost, nothing is half-written, and the same command goes on
to the result of an unbroken one, to the bit.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import json
import os
import shutil
import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from run_rows import TIMINGS

import evaluate
import train
from nanorchestra.errors import UserError
from nanorchestra.files import read_json, write_whole
from nanorchestra.model.checkpoint import load_checkpoint, named_hf_tensors
from nanorchestra.training import checkpoint
from nanorchestra.training.checkpoint import Checkpoints, notes_of, whole_checkpoints
from nanorchestra.training.distributed import Ranks

FULL, ONCE, KILLED = "full disk", "one failure", "kill"
every_fault = pytest.mark.parametrize("fault", [FULL, ONCE, KILLED])


class Disk:
    """Counts the writes, fsyncs, renames and truncations in a folder.

    From number `fails_at` on a full disk refuses them; of one failure it refuses that number alone.
    For kills nothing fails: a copy of the folder is made before each, in `copies`.
    """

    def __init__(self, folder: Path, fault: str, fails_at: int, copies: Path):
        self.folder, self.fault, self.fails_at, self.copies = folder, fault, fails_at, copies
        self.count = 0
        self._lock = threading.Lock()  # a checkpoint may be written in a thread

    def install(self, patch: pytest.MonkeyPatch) -> None:
        """Takes the place of the system's functions."""
        for name in ("replace", "rename", "truncate"):
            patch.setattr(os, name, self._counted(getattr(os, name)))
        patch.setattr(os, "fsync", self._counted(lambda _: None))  # no power fails here
        plain = io.open

        def opened(file, mode="r", buffering=-1, encoding=None, errors=None, newline=None, **more):
            if isinstance(file, int) or set(mode).isdisjoint("wax") or not self._holds(file):
                return plain(file, mode, buffering, encoding, errors, newline, **more)
            raw = CountedFile(file, mode.replace("b", "").replace("t", ""))
            raw.disk = self
            file = io.BufferedWriter(raw)
            return file if "b" in mode else io.TextIOWrapper(file, encoding, errors, newline)

        patch.setattr("io.open", opened)
        patch.setattr("builtins.open", opened)

    def operation(self) -> None:
        """Counts an operation. OSError if it fails."""
        with self._lock:
            self.count += 1
            number = self.count
            if self.fault == KILLED:
                shutil.copytree(self.folder, self.copies / f"{number:03}")
        if number == self.fails_at or self.fault == FULL and number > self.fails_at > 0:
            raise OSError(28, "No space left on device")

    def _holds(self, path) -> bool:
        return Path(os.path.abspath(path)).is_relative_to(self.folder)

    def _counted(self, function: Callable) -> Callable:
        def called(first, *others):
            path = os.readlink(f"/proc/self/fd/{first}") if isinstance(first, int) else first
            if self._holds(path):
                self.operation()
            return function(first, *others)

        return called


class CountedFile(io.FileIO):
    """A file that takes the first half of what it is given, and then counts an operation."""

    disk: Disk
    half_is_done = False

    def write(self, data) -> int:
        if not self.half_is_done and len(data) > 1:
            self.half_is_done = True
            return super().write(data[: len(data) // 2])
        self.half_is_done = False
        self.disk.operation()
        return super().write(data)


def each_fault(
    folder: Path, before: Path, fault: str, work: Callable, check: Callable, every: int = 1
) -> int:
    """Lets each operation of `work` in `folder` fail in its turn; returns how many there are.

    The folder is a copy of `before` each time. After each, `check(done)` is called; done: whether
    the work went to its end in spite of the fault. It may end by a UserError of one line. Kills
    cost one run of the work; other faults a run each, so that `every` may leave some out.
    """

    def lay(copy: Path) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(copy, folder)

    copies = folder.with_name("copies")
    for number in itertools.count(0 if fault == KILLED else 1, every):
        lay(before)
        disk, problem = Disk(folder, fault, number, copies), ""
        with pytest.MonkeyPatch.context() as patch:
            disk.install(patch)
            try:
                work()
            except UserError as error:
                problem = str(error)  # not the error, whose frames hold the run's lock
        if disk.count < number or fault == KILLED:
            break
        assert "\n" not in problem
        check(not problem)
    assert not problem, problem
    for copy in sorted(copies.glob("*")):
        lay(copy)
        check(False)
    return disk.count


@every_fault
@pytest.mark.parametrize("at_once", [True, False])
def test_a_checkpoint_is_whole_or_the_one_before_is_the_newest(
    tmp_path, monkeypatch, fault, at_once
):
    """It is written at once, as from a CPU's memory, or in a thread, as from a GPU's."""
    if not at_once:
        monkeypatch.setattr(checkpoint, "local", lambda tensor: tensor.to("meta"))
    before, folder = tmp_path / "before", tmp_path / "folder"
    states = {}
    for number, name in enumerate("abc"):
        states[name] = {f"t{i}": torch.full((3, 2), 10.0 * number + i) for i in range(40)}
        if name != "c":
            checkpoints = Checkpoints(before, Ranks())
            checkpoints.save(name, states[name], {"name": name})
            checkpoints.wait()

    def work():
        checkpoints = Checkpoints(folder, Ranks())
        checkpoints.save("c", states["c"], {"name": "c"})
        checkpoints.wait()

    def check(done):
        checkpoints = Checkpoints(folder, Ranks())
        newest = checkpoints.newest()
        assert newest.name in ("b", "c") and (newest.name == "c" or not done)
        assert notes_of(newest) == {"name": newest.name}
        read = {name: torch.zeros(3, 2) for name in states["c"]}
        checkpoints.load(newest, read)
        assert all(torch.equal(read[name], x) for name, x in states[newest.name].items())

    assert each_fault(folder, before, fault, work, check) >= 8


def rows(text: bytes) -> str:
    """The rows of a log without what differs between equal runs."""
    kept = []
    for row in map(json.loads, text.splitlines()):
        kept.append({key: value for key, value in row.items() if key not in TIMINGS})
    return json.dumps(kept)


def resumed_from(run: Path) -> tuple:
    """What a resumed run reads: its newest checkpoint and the logs up to there."""
    whole = whole_checkpoints(run / "checkpoints")
    if not whole or (run / "summary.json").exists():
        return ((run / "config.toml").exists(), (run / "summary.json").exists())
    state = [whole[-1].name]
    for name, size in notes_of(whole[-1])["offsets"].items():
        state.append(rows((run / f"{name}.jsonl").read_bytes()[:size]))
    for file in sorted(whole[-1].glob("*.safetensors")):
        state.append(hashlib.sha256(file.read_bytes()).hexdigest())
    return tuple(state)


@every_fault
def test_a_run_goes_on_to_the_same_end(tmp_path, monkeypatch, fault, make_training):
    """Held-out tasks, two steps of GRPO with a checkpoint each, results.

    A run goes on from the first of the faults that leave the same for it to read. Errors, which
    leave what a kill leaves or less, are tried at every thirteenth operation.
    """
    monkeypatch.setattr(train, "evaluate_routers", lambda *_: {})
    monkeypatch.setattr("nanorchestra.training.progress.peak_flops", lambda *_: None)
    before, folder = tmp_path / "before", tmp_path / "runs"
    before.mkdir()
    run = folder / "one"
    settings = {
        "run.checkpoint_every": 1,
        "grpo.steps": 2,
        "grpo.prompts": 1,
        "grpo.optimizer": "adamw",
        "rollout.turn_tokens": 4,
        "rollout.turns": 1,
    }

    def work():
        if not (run / "summary.json").exists():
            begun = (run / "config.toml").exists()
            make_training("runs/one", None if begun else settings, resume=begun).train()

    def results():
        summary = read_json(run / "summary.json")
        weights = dict(named_hf_tensors(load_checkpoint(run / "model")[0]))
        return (
            {name: tensor.tolist() for name, tensor in weights.items()},
            rows((run / "metrics.jsonl").read_bytes()),
            rows((run / "trajectories.jsonl").read_bytes()),
            (summary["steps"], summary["held_out"]),
        )

    work()
    straight, seen = results(), set()
    assert straight[1].count('"skipped": 0.0') == 2

    def check(done):
        state = resumed_from(run)
        if state not in seen or done:
            work()
            assert results() == straight
            seen.add(state)

    every = 1 if fault == KILLED else 13
    assert each_fault(folder, before, fault, work, check, every) > 60
    assert fault != KILLED or len(seen) <= 6, "nothing, a directory, three checkpoints, results"


@every_fault
def test_an_evaluation_goes_on_to_the_same_record(tmp_path, monkeypatch, fault, sandbox):
    before, folder = tmp_path / "before", tmp_path / "runs"
    before.mkdir()
    monkeypatch.setattr(evaluate, "RUNS", folder)
    monkeypatch.setattr(evaluate, "Sandbox", lambda: nullcontext(sandbox))
    page = "report.html"
    monkeypatch.setattr(evaluate, "write_comparison", lambda path: write_whole(path / page, "r"))

    def work():
        options = ["--policy", "program", "--tasks", "2", "--parallel", "1", "--run", "one"]
        evaluate.main.__wrapped__(options)

    def results():
        return {file.name: file.read_bytes() for file in (folder / "one").iterdir()}

    work()
    straight = results()

    def check(done):
        assert not done or results() == straight
        work()
        assert results() == straight

    assert each_fault(folder, before, fault, work, check) > 16
