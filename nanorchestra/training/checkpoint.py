"""Checkpoints of a run: one directory each, with a safetensors file a rank, notes.json, SHA256SUMS.

Every rank writes the rows that it holds: those of a GPU in a thread while training goes on, from a
copy taken at once; those of a CPU without a copy, before training goes on. A checkpoint is written
aside and renamed when all of it is on disk, so a directory with a checkpoint's name is whole;
digests taken while it was written tell what has changed since. Any number of ranks reads it, each
the rows that it holds. No file can run code when it is read.
"""

import json
import math
import os
import shutil
import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from nanorchestra.errors import UserError, require
from nanorchestra.files import (
    SUMS,
    check_sums,
    read_object,
    read_sums,
    sha256,
    sync,
    write_sums,
    write_whole,
)
from nanorchestra.model.sharded import fill, first_row, is_first_copy, local
from nanorchestra.model.tensor_files import DTYPES, open_tensors, write_tensors
from nanorchestra.schemas import Json
from nanorchestra.training.distributed import Ranks

NOTES = "notes.json"
KEPT = 2


@dataclass(frozen=True)
class WrittenPart:
    """What one rank has written: its file, and of each tensor in it the first of its rows."""

    file: str
    rows: dict[str, int]
    sha256: str


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
            part = problem = None
            try:
                part = self._write_part(aside, tensors, rows)
            except Exception as error:
                problem = one_line(error)
            tensors.clear()  # their memory is free while other ranks still write
            parts, problems = zip(*self._writing_ranks.all_gather((part, problem)), strict=True)
            problem = next(filter(None, problems), "")
            if not problem and self.ranks.first:
                try:
                    self._publish(name, aside, parts, notes)
                except Exception as error:
                    problem = one_line(error)
            return self._writing_ranks.broadcast(problem)
        finally:
            if self.ranks.first:
                shutil.rmtree(aside, ignore_errors=True)

    def _write_part(self, aside, tensors, rows) -> WrittenPart:
        file = f"rank-{self.ranks.rank:05d}.safetensors"
        aside.mkdir(exist_ok=True)
        digest = write_tensors(aside / file, tensors)
        return WrittenPart(file, rows, digest)

    def _publish(self, name, aside, parts, notes):
        """Adds notes and digests, renames the directory, and removes the oldest."""
        rows = {part.file: part.rows for part in parts}
        write_whole(aside / NOTES, json.dumps({"rows": rows, "notes": notes}))
        digests = {part.file: part.sha256 for part in parts}
        write_sums(aside, digests | {NOTES: sha256(aside / NOTES)})
        shutil.rmtree(self.folder / name, ignore_errors=True)  # one that could not be read
        os.replace(aside, self.folder / name)
        sync(self.folder)
        for old in [old for old in self._names() if old <= name][:-KEPT]:  # later ones are damaged
            shutil.rmtree(self.folder / old)

    def restore(self, prepare: Callable[[Json], dict[str, Tensor]]) -> Json | None:
        """Reads the newest whole checkpoint in place into prepare(notes); returns its notes.

        A damaged one is named on stderr, with the damaged file and the checkpoint that is read
        instead. None if there is no checkpoint; UserError if none is whole.
        """
        names = self.ranks.broadcast(self._names())
        damages = []
        for name in reversed(names):
            path = self.folder / name
            notes, problem = None, ""
            try:
                written = self._check(path)
            except UserError as error:
                problem = str(error)
            problem = self._first_problem(problem)
            if not problem:  # with every rank
                try:
                    notes = _load(path, written, prepare)
                except UserError as error:
                    problem = str(error)
                problem = self._first_problem(problem)
            if problem:
                damages.append(problem)
                continue
            for line in damages if self.ranks.first else []:
                print(f"{line}; resuming from {path}, which is whole", file=sys.stderr)
            return notes
        require(
            not names,
            f"{self.folder}: none of its {len(names)} checkpoints can be read ("
            f"{'; '.join(damages)}); remove the directory to start the run from its beginning",
        )
        return None

    def _first_problem(self, problem: str) -> str:
        """Returns the problem of the first rank that has one, on every rank; "" if none has."""
        return next(filter(None, self.ranks.all_gather(problem)), "")

    def _check(self, path) -> Json:
        """Returns what notes.json holds if all files are those that were written, else UserError.

        Each rank reads notes.json and a share of the other files.
        """
        digests = read_sums(path)
        require(NOTES in digests, f"{path / SUMS}: has no SHA-256 of {NOTES}")
        check_sums(path, digests, [NOTES])
        written = read_object(path / NOTES)
        known = isinstance(written.get("rows"), dict) and isinstance(written.get("notes"), dict)
        require(known, f"{path / NOTES}: expected the objects rows and notes")
        files = sorted(written["rows"])
        others = sorted((digests.keys() - {NOTES}) ^ set(files))
        require(not others, f"{path / SUMS}: names other files than {NOTES}, such as {others[:1]}")
        check_sums(path, digests, files[self.ranks.rank :: self.ranks.world_size])
        return written

    def _names(self) -> list[str]:
        return sorted(path.name for path in self.folder.glob("[!.]*"))


def _load(path, written, prepare) -> Json:
    """Fills prepare(notes) from a checkpoint whose files are sound; returns its notes.

    `written` is what notes.json holds. UserError if these are not the tensors of the checkpoint, as
    those of another model.
    """
    parts = _parts(path, written["rows"])
    wanted = prepare(written["notes"])
    others = sorted(wanted.keys() ^ parts.keys())
    require(not others, f"{path}: holds other tensors than this run, such as {others[:1]}")
    for name, tensor in wanted.items():
        filled, stored = 0, 0
        for begin, file in parts[name]:
            stored += math.prod(file.get_slice(name).get_shape())
            filled += _fill_from(file, name, begin, tensor, path)
        held = local(tensor).numel()
        require(
            stored == tensor.numel() and filled == held,
            f"{path}: {name} has {stored} numbers, {filled} of the {held} that this rank holds; "
            f"expected {tensor.numel()}",
        )
    return written["notes"]


def _parts(path, rows_of) -> dict[str, list[tuple[int, Any]]]:
    """Returns (first row, open file) of each part of each tensor, from the rows by file."""
    parts = {}
    for file, rows in rows_of.items():
        opened = open_tensors(path / file)
        same = isinstance(rows, dict) and rows.keys() == set(opened.keys())
        whole = same and all(type(row) is int and row >= 0 for row in rows.values())
        require(whole, f"{path / NOTES}: does not state the rows of each tensor in {file}")
        for name, row in rows.items():
            parts.setdefault(name, []).append((row, opened))
    return parts


def _fill_from(file, name, begin, tensor, path) -> int:
    """Copies those rows of a file that this rank holds; returns how many numbers they are."""
    stored = file.get_slice(name)
    shape, dtype = stored.get_shape(), stored.get_dtype()
    fits = dtype == DTYPES[tensor.dtype] and shape[1:] == list(tensor.shape[1:])
    require(
        fits and len(shape) == tensor.dim(),
        f"{path}: {name} is {dtype} {shape}; this run has {DTYPES[tensor.dtype]} "
        f"{list(tensor.shape)}",
    )
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
