"""Checkpoints of a run by torch.distributed.checkpoint: safetensors files, and notes.json.

Each row is written by one rank that holds it: those of a GPU in a thread while training goes on,
from a copy taken at once; those of a CPU without a copy, before training goes on. notes.json comes
last, when the files of all ranks are on disk, so a directory that has it is whole. Any number of
ranks reads it, each the rows that it holds.
"""

import json
import shutil
import warnings
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path

import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)

from nanorchestra.errors import UserError
from nanorchestra.files import read_json, sync, write_whole
from nanorchestra.model.sharded import local
from nanorchestra.schemas import Json
from nanorchestra.training.distributed import Ranks

NOTES = "notes.json"
KEPT = 2
FILE_TENSORS = 32  # in a file, which takes twice its size in memory while it is written

warnings.filterwarnings("ignore", "torch.distributed is disabled")  # a single rank has none


class Checkpoints:
    """The last KEPT checkpoints in a directory that all ranks see; names sort by age."""

    def __init__(self, folder: Path, ranks: Ranks):
        self.folder, self.ranks = folder, ranks
        self._saving: tuple[Path, Future] | None = None
        self._writing_ranks = ranks.with_own_group()  # for the thread that writes
        if ranks.first:
            folder.mkdir(exist_ok=True)
            for unfinished in set(folder.iterdir()) - set(whole_checkpoints(folder)):
                shutil.rmtree(unfinished)  # of a run that was killed
        ranks.barrier()

    def save(self, name: str, tensors: dict[str, Tensor], notes: Json) -> None:
        """Begins to save; the tensors may change once it returns. Waits for the save before it.

        A copy of what lies in a CPU's memory, masters and moments, would be the peak of a run: it
        is saved when this returns. UserError as in `wait`.
        """
        self.wait()
        path = self.folder / name
        options = {
            "storage_writer": Writer(path, list(tensors), notes),
            "process_group": self._writing_ranks.group,
            "no_dist": self.ranks.world_size == 1,
        }
        if any(local(tensor).is_cpu for tensor in tensors.values()):
            with in_one_line(f"{path}: cannot be written, the checkpoint before it is whole"):
                dcp.save(tensors, **options)
        else:
            self._saving = path, dcp.async_save(tensors, **options)

    def wait(self) -> None:
        """Returns when the last save is on disk. UserError on every rank if it failed on one."""
        if self._saving is None:
            return
        path, saving = self._saving
        self._saving = None
        with in_one_line(f"{path}: cannot be written, the checkpoint before it is whole"):
            saving.result()

    def newest(self) -> Path | None:
        """Returns the newest whole checkpoint, the same on all ranks; None if there is none."""
        whole = whole_checkpoints(self.folder)
        return self.ranks.broadcast(whole[-1] if whole else None)

    def load(self, path: Path, tensors: dict[str, Tensor]) -> None:
        """Reads a checkpoint into the tensors.

        UserError if it lacks a tensor, or has it in another shape.
        """
        with in_one_line(f"{path}: cannot be read into this run"):
            dcp.load(
                tensors,
                storage_reader=HuggingFaceStorageReader(str(path)),
                process_group=self.ranks.group,
                no_dist=self.ranks.world_size == 1,
            )


class Writer(HuggingFaceStorageWriter):
    """Writes the files of each rank, several, as each is put together in memory."""

    def __init__(self, path: Path, names: list[str], notes: Json):
        files = {name: 1 + number // FILE_TENSORS for number, name in enumerate(names)}
        super().__init__(str(path), files, save_distributed=True)
        self.notes = notes

    def finish(self, metadata: dcp.Metadata, results: list) -> None:
        """Writes notes.json, on the first rank when all files are written; removes the oldest."""
        write_whole(self.path / NOTES, json.dumps(self.notes))
        sync(self.path.parent)
        for old in whole_checkpoints(self.path.parent)[:-KEPT]:
            shutil.rmtree(old)


def notes_of(path: Path) -> Json:
    """Returns what a checkpoint holds besides tensors."""
    return read_json(path / NOTES)


def whole_checkpoints(folder: Path) -> list[Path]:
    """Returns the checkpoints that are whole, the oldest first."""
    return sorted(notes.parent for notes in folder.glob(f"*/{NOTES}"))


@contextmanager
def in_one_line(problem: str) -> Iterator[None]:
    """Raises UserError for what failed on a rank, of which DCP tells all."""
    try:
        yield
    except dcp.CheckpointException as error:
        failure, _ = next(iter(error.failures.values()))
        if isinstance(failure, KeyboardInterrupt):
            raise failure from None
        text = failure if isinstance(failure, UserError) else repr(failure)
        raise UserError(f"{problem}: {text}") from error
