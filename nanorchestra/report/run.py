"""The record of a run: a directory with two append-only JSON-lines logs, small files written whole, and the table of its results.

`Run` owns the directory (config.toml, metrics.jsonl, trajectories.jsonl, summary.json). It knows nothing of training and imports
neither torch nor matplotlib; `report.py` draws from what is recorded here.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nanorchestra.errors import UserError
from nanorchestra.files import sync, write_whole

LOGS = ("metrics", "trajectories")
ROUTER_NAMES = {
    "strongest": "always the strongest",
    "cheapest": "always the cheapest",
    "random": "random tool",
    "rule": "hand-written rule",
}


class Run:
    """One run directory. One process writes to it; any number may read it meanwhile.

    Invariant: a log is a sequence of whole lines, but for the tail that a killed writer may leave. Readers skip that tail and the
    next writer removes it, so a line once followed by a newline is never changed, except by `truncate`.
    """

    def __init__(self, path: Path):
        self.path = path
        self._files: dict[str, Any] = {}

    @classmethod
    def create(cls, path: str | Path, config_text: str) -> Run:
        """Makes the directory `path` with config.toml in it, whole or not at all. UserError if it exists or cannot be made."""
        path = Path(path)
        if os.path.lexists(path):
            raise UserError(f"{path}: already exists; resume that run or choose another run name")
        missing = [parent for parent in path.parents if not parent.exists()]
        aside = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            aside.mkdir()
            write_whole(aside / "config.toml", config_text.encode())
            os.rename(aside, path)
            sync(path.parent)
        except (OSError, UserError) as error:
            shutil.rmtree(aside, ignore_errors=True)
            for (
                parent
            ) in missing:  # innermost first; one that is not empty is somebody else's by now
                try:
                    parent.rmdir()
                except OSError:
                    break
            reason = error.strerror if isinstance(error, OSError) else error
            raise UserError(
                f"{path}: cannot make the run directory: {reason}; choose a place that can be written"
            ) from error
        return cls(path)

    @classmethod
    def open(cls, path: str | Path) -> Run:
        """Opens an existing run, for reading or to go on writing. UserError if `path` is not a run directory."""
        path = Path(path)
        if not (path / "config.toml").is_file():
            reason = (
                "holds no config.toml"
                if path.is_dir()
                else "is not a directory"
                if path.exists()
                else "does not exist"
            )
            raise UserError(f"{path}: {reason}; give the directory of a run, such as runs/NAME")
        for log in (path / f"{name}.jsonl" for name in LOGS):
            if log.exists() and not log.is_file():
                raise UserError(
                    f"{log}: is not a file; restore it, or remove it if the run is to begin again"
                )
        return cls(path)

    def lock(self) -> None:
        """Makes this process the run's only writer until it ends, however it ends. UserError if another process is."""
        try:
            self._files["lock"] = file = (self.path / ".lock").open("ab")
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"{self.path}: another process is training this run; wait for it or stop it first"
            ) from None
        except OSError as error:
            raise UserError(
                f"{self.path / '.lock'}: cannot be locked ({error.strerror}); it must be a file that can be written"
            ) from None

    def append(self, name: str, row: dict[str, Any]) -> None:
        """Adds one JSON line to the log `name` ("metrics" or "trajectories") and hands it to the operating system at once.

        Numbers that are not finite become null. UserError if the line cannot be written; the log is then as it was before.
        """
        line = memoryview((_dumps(row) + "\n").encode())
        try:
            file = self._writer(name)
            start = file.seek(0, os.SEEK_END)
            try:
                while line:  # a raw write may be short
                    line = line[file.write(line) :]
            except OSError:
                file.truncate(start)
                raise
        except OSError as error:
            raise UserError(
                f"{self._log(name)}: cannot write: {error.strerror}; free or allow the space, then resume the run"
            ) from error

    def rows(self, name: str, last_bytes: int | None = None) -> Iterator[dict[str, Any]]:
        """The rows of a log in order, without a broken last line; none if the log does not exist.

        With `last_bytes`, only the rows that lie wholly in the last so many bytes. UserError if a line is not a JSON object.
        """
        path = self._log(name)
        if not path.exists():
            return
        with path.open("rb") as file:
            if last_bytes is not None and path.stat().st_size > last_bytes:
                file.seek(-last_bytes - 1, os.SEEK_END)
                file.readline()  # the rest of a line that began earlier, or the newline before one that begins here
            start = file.tell()
            for line in file:
                if not line.endswith(b"\n"):
                    return
                try:
                    row = json.loads(line)
                except ValueError:
                    row = None
                if not isinstance(row, dict):
                    raise UserError(
                        f"{path}: the line at byte {start} is not a JSON object; remove it, or restore the file"
                    )
                yield row
                start += len(line)

    def offsets(self) -> dict[str, int]:
        """The length in bytes of each log's whole lines, all of them on disk. To be stored in a checkpoint, for `truncate`."""
        for file in self._files.values():
            os.fsync(file.fileno())
        return {name: _whole_lines(self._log(name)) for name in LOGS}

    def truncate(self, offsets: dict[str, int]) -> None:
        """Cuts each log to `offsets`, so that a resumed run repeats no row. UserError, with nothing cut, if a log does not reach so far."""
        for name in LOGS:
            path, length = self._log(name), offsets.get(name)
            if type(length) is not int or length < 0:
                raise UserError(
                    f"{path}: the checkpoint's offset is {length!r}, not a number of bytes; resume from another checkpoint"
                )
            if _whole_lines(path, length) != length:
                raise UserError(
                    f"{path}: has no line ending at byte {length}, where the checkpoint was taken; the file was changed since"
                )
        for name in LOGS:
            if self._log(name).exists():
                with self._log(name).open("r+b") as file:
                    file.truncate(offsets[name])
                    os.fsync(file.fileno())

    def write_json(self, name: str, value: Any) -> None:
        """Replaces the file `name` in the run by `value` as JSON, whole or not at all. Not finite becomes null. UserError as `write_text`."""
        self.write_text(name, _dumps(value, indent=2) + "\n")

    def write_text(self, name: str, text: str) -> None:
        """Replaces the file `name` in the run by `text` in UTF-8, whole or not at all. UserError if it cannot be written."""
        write_whole(self.path / name, text.encode())

    def summary(self) -> dict[str, Any]:
        """summary.json, or an empty dict while the run has none. UserError if it is not a JSON object."""
        path = self.path / "summary.json"
        try:
            value = json.loads(path.read_bytes())
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, RecursionError):
            value = None
        if not isinstance(value, dict):
            raise UserError(f"{path}: is not a JSON object; remove it, or restore the file")
        return value

    def close(self) -> None:
        """Closes the logs. A later `append` opens them again."""
        for file in self._files.values():
            file.close()
        self._files.clear()

    def _log(self, name: str) -> Path:
        if name not in LOGS:
            raise ValueError(f"log {name!r}: must be one of {', '.join(LOGS)}")
        return self.path / f"{name}.jsonl"

    def _writer(self, name: str):
        if name not in self._files:
            path = self._log(name)
            file = path.open("ab", buffering=0)
            file.truncate(
                _whole_lines(path)
            )  # what a killed writer left must not run into the next line
            self._files[name] = file
        return self._files[name]


def table(summary: dict[str, Any]) -> str:
    """The held-out results of `summary` for a terminal: one aligned line for before, after and each router, units in the first line."""
    columns, rows = comparison(summary)
    if not rows:
        return "no held-out results yet"
    lines = [("on held-out tasks", *columns)] + [(label, *cells) for _, label, cells in rows]
    widths = [max(map(len, column)) for column in zip(*lines)]
    return "\n".join(
        "  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])])
        for line in lines
    )


def comparison(summary: dict[str, Any]) -> tuple[list[str], list[tuple[str, str, list[str]]]]:
    """The held-out results as text: column titles with units, and (key, label, cells) for before, after and each router."""
    held_out = summary.get("held_out") or {}
    entries = [
        (key, label, held_out[key])
        for key, label in (("before", "before (warm start)"), ("after", "after GRPO"))
        if held_out.get(key)
    ]
    entries += [
        (f"{key}-domains", f"domains, {label}", scores["domains"])
        for key, label, scores in entries
        if "domains" in scores
    ]
    entries += [
        (name, ROUTER_NAMES.get(name, name), scores)
        for name, scores in (held_out.get("routers") or {}).items()
    ]
    scale, unit = money_unit(
        scores.get(key) for _, _, scores in entries for key in ("cost_usd", "cost_per_correct_usd")
    )
    columns = {
        "reward": ("reward", lambda value: f"{value:.3f}"),
        "accuracy": ("right, %", lambda value: f"{100 * value:.1f}"),
        "cost_usd": (f"cost/task, {unit}", lambda value: number(scale * value)),
        "cost_per_correct_usd": (f"cost/right, {unit}", lambda value: number(scale * value)),
        "latency_s": ("latency/task, s", lambda value: f"{value:.2f}"),
        "preference": ("preference", lambda value: f"{value:.3f}"),
        "avoided_rate": ("used avoided, %", lambda value: f"{100 * value:.1f}"),
    }
    rows = []
    for key, label, scores in entries:
        cells = [
            "-" if scores.get(column) is None else show(scores[column])
            for column, (_, show) in columns.items()
        ]
        rows.append((key, label, cells))
    return [title for title, _ in columns.values()], rows


def money_unit(amounts_usd) -> tuple[float, str]:
    """(factor, unit) in which these amounts of dollars read best together: (1000, "m$"), thousandths, below ten cents, else (1, "$")."""
    largest = max((abs(amount) for amount in amounts_usd if amount is not None), default=0.0)
    return (1000.0, "m$") if largest < 0.1 else (1.0, "$")


def number(value: float) -> str:
    """Three significant digits, never in exponent notation: 0.0412, 3.14, 15.9, 1,234."""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    decimals = 2 if value == 0 else min(6, max(0, 2 - math.floor(math.log10(abs(value)))))
    return f"{value:.{decimals}f}"


def _whole_lines(path: Path, limit: int | None = None) -> int:
    """Bytes of the file up to and including its last newline (0 if there is no file), looking at its first `limit` bytes only."""
    if not path.exists():
        return 0
    with path.open("rb") as file:
        end = file.seek(0, os.SEEK_END)
        if limit is not None:
            end = min(end, limit)
        while end > 0:
            start = max(0, end - 65536)
            file.seek(start)
            newline = file.read(end - start).rfind(b"\n")
            if newline >= 0:
                return start + newline + 1
            end = start
    return 0


def _dumps(value: Any, indent: int | None = None) -> str:
    try:
        return json.dumps(value, allow_nan=False, indent=indent)
    except ValueError:  # a diverged loss must not cost the record of how it came about
        return json.dumps(_finite(value), allow_nan=False, indent=indent)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
