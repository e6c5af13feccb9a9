"""The run directory: config.toml, two append-only JSON Lines logs, summary.json, and its results.

One process writes a run, any number may read it meanwhile. This file knows nothing of training.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nanorchestra.errors import UserError, require
from nanorchestra.files import read_json, write_whole

LOGS = ("metrics", "trajectories")
# Titles of tables and panels. A column has a title with its unit, a factor, and decimals (None:
# three significant digits); a panel a title, patterns for the keys of a metrics row, and a factor.
TITLES = read_json(Path(__file__).with_name("report.json"))


class Run:
    """A run directory.

    Invariant: a log is a sequence of whole lines, except for a tail that a killed writer may leave.
    Readers skip that tail, and `truncate` removes it before a resumed run writes.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._files: dict[str, Any] = {}

    @classmethod
    def create(cls, path: str | Path, config_text: str) -> Run:
        """Make the directory with config.toml in it. UserError if it exists or cannot be made."""
        path = Path(path)
        try:
            path.mkdir(parents=True)
        except OSError as error:
            advice = "resume that run or choose another run name"
            raise UserError(f"{path}: cannot be made ({error.strerror}); {advice}") from None
        write_whole(path / "config.toml", config_text)
        return cls(path)

    @classmethod
    def open(cls, path: str | Path) -> Run:
        """Open a run, for reading or to go on writing. UserError if `path` holds no run."""
        is_run = (Path(path) / "config.toml").is_file()
        require(is_run, f"{path}: holds no config.toml; give the directory of a run (runs/NAME)")
        return cls(path)

    def lock(self) -> None:
        """Make this process the run's only writer until it ends. UserError if another one is."""
        self._files["lock"] = file = (self.path / ".lock").open("ab")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            message = f"{self.path}: another process is training this run; stop it first"
            raise UserError(message) from None

    def append(self, name: str, row: dict[str, Any]) -> None:
        """Add one line to the log "metrics" or "trajectories"; numbers not finite become null.

        UserError if the disk takes no more.
        """
        path = self._log(name)
        if name not in self._files:
            self._files[name] = path.open("a", encoding="utf-8")
        try:
            self._files[name].write(_dumps(row) + "\n")
            self._files[name].flush()
        except OSError as error:
            message = f"{path}: cannot be written ({error.strerror}); free space, resume"
            raise UserError(message) from error

    def rows(self, name: str, last_bytes: int | None = None) -> Iterator[dict[str, Any]]:
        """Yield the rows of a log, or those that lie wholly in its last bytes.

        UserError for a whole line that is not JSON.
        """
        path = self._log(name)
        if not path.exists():
            return
        with path.open("rb") as file:
            if last_bytes is not None and path.stat().st_size > last_bytes:
                file.seek(-last_bytes - 1, os.SEEK_END)
                file.readline()  # the end of an earlier line
            for line in file:
                if not line.endswith(b"\n"):
                    return
                try:
                    yield json.loads(line)
                except ValueError as error:
                    raise UserError(f"{path}: has a line that is not JSON ({error})") from None

    def offsets(self) -> dict[str, int]:
        """Return the bytes of each log, all of them on disk; a checkpoint keeps them."""
        for file in self._files.values():
            os.fsync(file.fileno())
        return {name: self._log(name).stat().st_size for name in LOGS if self._log(name).exists()}

    def truncate(self, offsets: dict[str, int]) -> None:
        """Cut the logs to `offsets`, so that a resumed run repeats no row."""
        for name in LOGS:
            if self._log(name).exists():
                os.truncate(self._log(name), offsets.get(name, 0))

    def write_json(self, name: str, value: Any) -> None:
        """Replace the file `name` in the run by `value` as JSON, as `append` writes it."""
        write_whole(self.path / name, _dumps(value, indent=2) + "\n")

    def summary(self) -> dict[str, Any]:
        """Return summary.json, or {} while the run has none."""
        path = self.path / "summary.json"
        return read_json(path) if path.exists() else {}

    def _log(self, name: str) -> Path:
        return self.path / f"{name}.jsonl"


def entries(summary: dict[str, Any]) -> list[tuple[str, str, dict[str, Any]]]:
    """Return (key, label, scores) of the held-out results: before, after, then the routers."""
    held_out = summary.get("held_out") or {}
    found = [
        (key, label, held_out[key]) for key, label in TITLES["entries"].items() if held_out.get(key)
    ]
    routers = held_out.get("routers") or {}
    return found + [(key, TITLES["routers"].get(key, key), routers[key]) for key in routers]


def cells(scores: dict[str, Any]) -> list[str]:
    """Return the scores as text, one for each of `columns()`; "-" where there is none."""
    texts = []
    for key, (_, factor, decimals) in TITLES["columns"].items():
        value = scores.get(key)
        digits = number if decimals is None else f"{{:.{decimals}f}}".format
        texts.append("-" if value is None else digits(factor * value))
        if bounds := (scores.get("intervals") or {}).get(key):
            texts[-1] += f" ±{digits(factor * (bounds[1] - bounds[0]) / 2)}"
    return texts


def columns() -> list[str]:
    """Return the titles of the columns of held-out results, with their units."""
    return [title for title, *_ in TITLES["columns"].values()]


def table(summary: dict[str, Any]) -> str:
    """Return the held-out results as aligned lines for a terminal, units in the first line."""
    rows = [[label, *cells(scores)] for _, label, scores in entries(summary)]
    if not rows:
        return "no held-out results yet"
    titles = ["on held-out tasks", *columns()]
    widths = [max(map(len, column)) for column in zip(titles, *rows, strict=True)]
    lines = []
    for label, *values in (titles, *rows):
        aligned = map(str.rjust, values, widths[1:])
        lines.append("  ".join([label.ljust(widths[0]), *aligned]))
    return "\n".join(lines)


def scalars(row: dict[str, Any], prefix: str = "") -> dict[str, float]:
    """Return the numbers of a row; those of a dict inside it are named dict/name."""
    found: dict[str, float] = {}
    for name, value in row.items():
        if isinstance(value, dict):
            found |= scalars(value, f"{prefix}{name}/")
        elif isinstance(value, int | float) and name != "step":
            found[prefix + name] = float(value)
    return found


def number(value: float) -> str:
    """Return three significant digits without exponent: 0.0412, 3.14, 15.9, 1,234."""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    decimals = 2 if value == 0 else min(6, max(0, 2 - math.floor(math.log10(abs(value)))))
    return f"{value:.{decimals}f}"


def _dumps(value: Any, indent: int | None = None) -> str:
    # a diverged loss is recorded too
    finite = json.loads(json.dumps(value), parse_constant=lambda _: None)
    return json.dumps(finite, indent=indent)
