"""Checkpoints of a run: one directory each, the tensors by torch.distributed.checkpoint, and what else there is in notes.json.

Every rank writes the shards it holds, in a thread, from a copy that is taken at once, while training goes on. A checkpoint is written aside
and renamed when all of it is on disk, so what bears a checkpoint's name is whole: a run killed at any time finds the last one that was.
It is read by any number of ranks, each taking the parts it holds now.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import threading
import warnings
import zlib
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from nanorchestra.errors import UserError
from nanorchestra.files import sync, write_whole
from nanorchestra.training.ranks import Ranks

NOTES = "notes.json"
PIECE, PIECES = (
    1 << 20,
    64,
)  # bytes of a shard that are read again, at a time, and how often, to know it for what was written
warnings.filterwarnings(
    "ignore", message="torch.distributed is disabled"
)  # one process is meant to be one


class Checkpoints:
    """The checkpoints in one directory that all ranks see. Their names sort by age; the last `keep` stay."""

    def __init__(self, folder: Path, keep: int, ranks: Ranks):
        self.folder, self.keep, self.ranks = folder, keep, ranks
        self._saving: tuple[str, Future, threading.Event] | None = None
        if ranks.first:
            try:
                folder.mkdir(exist_ok=True)
            except OSError as error:
                raise UserError(
                    f"{folder}: cannot be made ({error.strerror}); it must be a directory that can be written"
                ) from None
            for unfinished in folder.glob(".*.part"):  # of a run that was killed
                shutil.rmtree(unfinished, ignore_errors=True)
        ranks.gather(None)

    def save(self, name: str, tensors: dict[str, Tensor], notes: dict[str, Any]) -> None:
        """Begins to save; the tensors may change as soon as it returns. Waits for the save before, and raises what went wrong with it."""
        self.wait()
        aside = self.folder / f".{name}.part"
        future = dcp.async_save(
            tensors,
            checkpoint_id=aside,
            process_group=self.ranks.background,
            no_dist=self.ranks.world == 1,
        )
        settled = threading.Event()
        self._saving = name, future, settled
        future.add_done_callback(lambda done: self._settle(name, aside, notes, done, settled))

    def wait(self) -> None:
        """Returns when the last save is on disk, on every rank. UserError if it could not be written; the ones before it are untouched."""
        if self._saving is None:
            return
        (name, future, settled), self._saving = self._saving, None
        settled.wait()
        failure = getattr(future, "failure", None) or _first_failure(future)
        failure = next(filter(None, self.ranks.gather(failure)), None)
        if failure is not None:
            raise UserError(
                f"{self.folder / name}: the checkpoint cannot be written: {failure}; the ones before it are whole: free the space, then resume"
            )

    def _settle(
        self, name: str, aside: Path, notes: dict[str, Any], done: Future, settled: threading.Event
    ) -> None:
        """On rank 0, when the shards of all ranks are on disk: notes, name, and the oldest ones go."""
        try:
            if not self.ranks.first:
                return
            if done.exception() is not None:
                shutil.rmtree(aside, ignore_errors=True)
                return
            files = {file.name: _fingerprint(file) for file in aside.iterdir()}
            write_whole(
                aside / NOTES,
                json.dumps(
                    {"files": files, "notes": notes, "crc32": _crc32(files, notes)}
                ).encode(),
            )
            shutil.rmtree(
                self.folder / name, ignore_errors=True
            )  # one that was damaged, and came again
            os.replace(aside, self.folder / name)
            sync(self.folder)
            for old in self._names()[: -self.keep]:
                shutil.rmtree(self.folder / old)
        except (OSError, UserError) as error:
            done.failure = str(error)
            shutil.rmtree(aside, ignore_errors=True)
        finally:
            settled.set()

    def restore(
        self, prepare: Callable[[dict[str, Any]], dict[str, Tensor]]
    ) -> dict[str, Any] | None:
        """Reads the newest checkpoint that is whole into the tensors that prepare(notes) gives, in place; its notes, or None if there is none.

        One that is damaged is named on stderr, and the one before it is as good. UserError if all of them are.
        """
        names = self.ranks.gather(self._names() if self.ranks.first else [])[0]
        for name in reversed(names):
            path, problem, notes = self.folder / name, None, {}
            try:
                data = json.loads((path / NOTES).read_bytes())
                notes = data["notes"]
                if _crc32(data["files"], notes) != data["crc32"]:
                    raise ValueError(f"{NOTES} is not what was written")
                for file, fingerprint in data["files"].items():
                    if _fingerprint(path / file) != fingerprint:
                        raise ValueError(
                            f"{file} is not the {fingerprint[0]} bytes that were written"
                        )
            except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
                problem = f"{type(error).__name__}: {error}"
            problems = self.ranks.gather(problem)
            if not any(problems):
                try:
                    dcp.load(
                        prepare(notes), checkpoint_id=path, no_dist=True
                    )  # each rank reads what it needs
                except (CheckpointException, OSError, ValueError, KeyError, RuntimeError) as error:
                    problem = str(error).strip().splitlines()[-1]
                problems = self.ranks.gather(problem)
            if not any(problems):
                return notes
            if self.ranks.first:
                print(
                    f"{path}: damaged ({next(filter(None, problems))}); trying the one before",
                    file=sys.stderr,
                )
        if names:
            raise UserError(
                f"{self.folder}: none of its {len(names)} checkpoints can be read; remove the directory to start the run from its beginning"
            )
        return None

    def _names(self) -> list[str]:
        return (
            sorted(path.name for path in self.folder.glob("[!.]*") if path.is_dir())
            if self.folder.is_dir()
            else []
        )


def _crc32(files: dict[str, list[int]], notes: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps([files, notes]).encode())


def _fingerprint(path: Path) -> list[int]:
    """A file's size, and a checksum of all of it, or of so many pieces spread over one that is larger."""
    size, crc = path.stat().st_size, 0
    with path.open("rb") as file:
        for start in range(0, size, max(PIECE, size // PIECES)):
            file.seek(start)
            crc = zlib.crc32(file.read(PIECE), crc)
    return [size, crc]


def _first_failure(future: Future) -> str | None:
    error = future.exception()
    if isinstance(error, CheckpointException):
        error = next(iter(error.failures.values()))[0]
    return None if error is None else f"{type(error).__name__}: {error}".strip().splitlines()[0]
