"""Checkpoints of a run: one directory each, tensors by torch.distributed.checkpoint, notes.json.

Every rank writes its shards in a thread while training goes on, from a copy taken at once. A
checkpoint is written aside and renamed when all of it is on disk, so a directory with a
checkpoint's name is whole. Any number of ranks reads it, each the parts that it holds.
"""

import json
import os
import shutil
import sys
import warnings
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from nanorchestra.errors import require
from nanorchestra.files import sync, write_whole
from nanorchestra.schemas import Json
from nanorchestra.training.ranks import Ranks

NOTES = "notes.json"
KEPT = 2
warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # one process


class Checkpoints:
    """The last KEPT checkpoints in a directory that all ranks see; names sort by age."""

    def __init__(self, folder: Path, ranks: Ranks):
        self.folder, self.ranks = folder, ranks
        self._saving: tuple[str, Future[None]] | None = None
        self._group = ranks.beside().group  # of the thread that writes
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        if ranks.first:
            folder.mkdir(exist_ok=True)
            for unfinished in folder.glob(".*.part"):  # of a run that was killed
                shutil.rmtree(unfinished)
        ranks.gather(None)

    def save(self, name: str, tensors: dict[str, Tensor], notes: Json) -> None:
        """Begins to save; the tensors may change once it returns. Waits for the save before it."""
        self.wait()
        aside = self.folder / f".{name}.part"
        written = dcp.async_save(
            tensors,
            checkpoint_id=aside,
            process_group=self._group,
            no_dist=self.ranks.world == 1,
        )
        self._saving = name, self._thread.submit(self._finish, name, aside, notes, written)

    def wait(self) -> None:
        """Returns when the last save is on disk. UserError on every rank if it failed on one."""
        if self._saving is None:
            return
        (name, saving), self._saving = self._saving, None
        failures = self.ranks.gather(_failure(saving.exception()))
        failure = next(filter(None, failures), None)
        require(
            not failure,
            f"{self.folder / name}: the checkpoint cannot be written: {failure}; "
            "the ones before it are whole: free the space, then resume",
        )

    def _finish(self, name, aside, notes, written):
        """When all shards are on disk, rank 0 adds the notes, renames, and removes the oldest."""
        try:
            written.result()
            if not self.ranks.first:
                return
            files = {file.name: file.stat().st_size for file in aside.iterdir()}
            write_whole(aside / NOTES, json.dumps({"files": files, "notes": notes}))
            shutil.rmtree(self.folder / name, ignore_errors=True)  # one that could not be read
            os.replace(aside, self.folder / name)
            sync(self.folder)
            for old in self._names()[:-KEPT]:
                shutil.rmtree(self.folder / old)
        finally:
            if self.ranks.first:
                shutil.rmtree(aside, ignore_errors=True)

    def restore(self, prepare: Callable[[Json], dict[str, Tensor]]) -> Json | None:
        """Reads the newest whole checkpoint in place into prepare(notes); returns its notes.

        A damaged one is named on stderr, and the one before it is read. None if there is no
        checkpoint; UserError if none can be read.
        """
        names = self.ranks.gather(self._names())[0]
        for name in reversed(names):
            path, problem = self.folder / name, None
            try:
                notes = _verified(path)
                dcp.load(prepare(notes), checkpoint_id=path, no_dist=True)
            except (CheckpointException, OSError, ValueError, KeyError, RuntimeError) as error:
                problem = _failure(error)
            problems = self.ranks.gather(problem)
            if not any(problems):
                return notes
            if self.ranks.first:
                reason = next(filter(None, problems))
                print(f"{path}: damaged ({reason}); trying the one before", file=sys.stderr)
        require(
            not names,
            f"{self.folder}: none of its {len(names)} checkpoints can be read; "
            "remove the directory to start the run from its beginning",
        )
        return None

    def _names(self) -> list[str]:
        return sorted(path.name for path in self.folder.glob("[!.]*"))


def _verified(path) -> Json:
    """The notes of a checkpoint. ValueError if a file is not what was written."""
    data = json.loads((path / NOTES).read_bytes())
    for file, size in data["files"].items():
        if (path / file).stat().st_size != size:
            raise ValueError(f"{file} is not the {size} bytes that were written")
    return data["notes"]


def _failure(error) -> str | None:
    """An error in one line; of a CheckpointException the first rank's."""
    if isinstance(error, CheckpointException):
        error = next(iter(error.failures.values()))[0]
    return None if error is None else f"{type(error).__name__}: {error}".strip().splitlines()[0]
