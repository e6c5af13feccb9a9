"""Checkpoints of a run: one directory each, with a safetensors file a rank, and notes.json.

Every rank writes the rows that it holds: those of a GPU in a thread while training goes on, from a
copy taken at once; those of a CPU without a copy, before training goes on. A checkpoint is written
aside and renamed when all of it is on disk, so a directory with a checkpoint's name is whole. Any
number of ranks reads it, each the rows that it holds.
"""

import json
import os
import shutil
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from nanorchestra.errors import UserError, require
from nanorchestra.files import read_json, sync, write_whole
from nanorchestra.model.checkpoint import open_tensors
from nanorchestra.model.sharded import fill, first_row, is_first_copy, local
from nanorchestra.schemas import Json
from nanorchestra.training.distributed import Ranks

NOTES = "notes.json"
KEPT = 2


class Checkpoints:
    """The last KEPT checkpoints in a directory that all ranks see; names sort by age."""

    def __init__(self, folder: Path, ranks: Ranks):
        self.folder, self.ranks = folder, ranks
        self._saving: tuple[str, Future[str]] | None = None
        self._writing_ranks = ranks.new_group()  # for the thread that writes
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        if ranks.first:
            folder.mkdir(exist_ok=True)
            for unfinished in folder.glob(".*.part"):  # of a run that was killed
                shutil.rmtree(unfinished)
        ranks.barrier()

    def save(self, name: str, tensors: dict[str, Tensor], notes: Json) -> None:
        """Begins to save; the tensors may change once it returns. Waits for the save before it.

        Each row is written by one rank: of a tensor that is not sharded, and of replicas, by the
        first that has it. A copy of what lies in a CPU's memory, masters and moments, would be the
        peak of a run: it is saved when this returns.
        """
        self.wait()
        parts = {}
        rows = {}
        for key, tensor in tensors.items():
            held = local(tensor).detach()
            if is_first_copy(tensor, self.ranks.rank) and held.numel():
                parts[key] = held.cpu().contiguous()
                rows[key] = first_row(tensor)
        self._saving = name, self._thread.submit(self._write, name, parts, rows, notes)
        if any(local(tensor).is_cpu for tensor in tensors.values()):
            self.wait()

    def wait(self) -> None:
        """Returns when the last save is on disk. UserError on every rank if it failed on one."""
        if self._saving is None:
            return
        name, saving = self._saving
        self._saving = None
        problem = saving.result()
        require(
            not problem,
            f"{self.folder / name}: the checkpoint cannot be written: {problem}; "
            "the ones before it are whole: free the space, then resume",
        )

    def _write(self, name, tensors, rows, notes) -> str:
        """Writes this rank's file; when all are on disk, rank 0 makes a checkpoint of them.

        Returns what went wrong, on every rank the same; "" if nothing did.
        """
        aside = self.folder / f".{name}.part"
        try:
            file, problem = f"rank-{self.ranks.rank:05d}.safetensors", ""
            try:
                aside.mkdir(exist_ok=True)
                save_file(tensors, aside / file)
                sync(aside / file)
            except Exception as error:
                problem = one_line(error)
            tensors.clear()  # their memory is free while other ranks still write
            parts = self._writing_ranks.all_gather((file, rows, problem))
            problem = next((problem for _, _, problem in parts if problem), "")
            if not problem and self.ranks.first:
                rows_of = {file: rows for file, rows, _ in parts}
                try:
                    self._publish(name, aside, {"rows": rows_of, "notes": notes})
                except Exception as error:
                    problem = one_line(error)
            return self._writing_ranks.broadcast(problem)
        finally:
            if self.ranks.first:
                shutil.rmtree(aside, ignore_errors=True)

    def _publish(self, name, aside, written):
        """Adds notes.json, renames the directory, and removes the oldest."""
        write_whole(aside / NOTES, json.dumps(written))
        os.replace(aside, self.folder / name)
        sync(self.folder)
        for old in self._names()[:-KEPT]:
            shutil.rmtree(self.folder / old)

    def restore(self, prepare: Callable[[Json], dict[str, Tensor]]) -> Json | None:
        """Reads the newest checkpoint in place into prepare(notes); returns its notes.

        None if there is no checkpoint. UserError if its tensors are not those of this run.
        """
        names = self.ranks.broadcast(self._names())
        if not names:
            return None
        path = self.folder / names[-1]
        written = read_json(path / NOTES)
        wanted = prepare(written["notes"])
        parts = {}  # of each tensor: its first row in a file, and the open file
        for file, rows in written["rows"].items():
            opened = open_tensors(path / file)
            for name, row in rows.items():
                parts.setdefault(name, []).append((row, opened))
        others = sorted(wanted.keys() ^ parts.keys())
        require(not others, f"{path}: holds other tensors than this run, such as {others[:1]}")
        for name, tensor in wanted.items():
            filled = sum(_fill_from(file, name, begin, tensor) for begin, file in parts[name])
            held = local(tensor).numel()
            require(
                filled == held,
                f"{path}: {name} has {filled} of the {held} numbers that this rank holds",
            )
        return written["notes"]

    def _names(self) -> list[str]:
        return sorted(path.name for path in self.folder.glob("[!.]*"))


def _fill_from(file, name, begin, tensor) -> int:
    """Copies those rows of a file that this rank holds; returns how many numbers they are."""
    stored = file.get_slice(name)
    shape = stored.get_shape()
    if not shape:
        local(tensor).copy_(file.get_tensor(name))
        return 1
    low = max(begin, first_row(tensor))
    high = min(begin + shape[0], first_row(tensor) + len(local(tensor)))
    if low >= high:
        return 0
    rows = stored[low - begin : high - begin]
    fill(tensor, rows, low)
    return rows.numel()


def one_line(error: Exception) -> str:
    """Returns an error in one line: the text of a UserError, and the class of any other."""
    text = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
    return text.strip().splitlines()[0]
