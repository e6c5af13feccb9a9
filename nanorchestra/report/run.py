"""The run directory: config.toml, two append-only JSON Lines logs, summary.json, and its results.

One process writes a run, any number may read it meanwhile. This file knows nothing of training.
"""

from __future__ import annotations

import dataclasses
import fcntl
import json
import math
import os
from collections.abc import Iterator
from pathlib import Path

import tomli_w

from nanorchestra.config import Config
from nanorchestra.errors import UserError, require
from nanorchestra.files import append_line, read_json, sync, write_whole
from nanorchestra.schemas import Json

LOGS = ("metrics", "trajectories")
FIRST_COLUMN = 38  # characters, so that a table fits a terminal of 80
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

    @classmethod
    def create(cls, path: str | Path, config_text: str) -> Run:
        """Make the directory with config.toml in it. UserError if it exists or cannot be made."""
        path = Path(path)
        try:
            path.mkdir(parents=True)
        except OSError as error:
            if not isinstance(error, FileExistsError):
                advice = f"{path.parent} must be a directory that can be written"
            elif (path / "config.toml").is_file():
                advice = "resume that run or choose another run name"
            else:
                advice = "it holds no run; choose another run name"
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
        self._lock = (self.path / ".lock").open("ab")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            message = f"{self.path}: another process is training this run; stop it first"
            raise UserError(message) from None

    def unlock(self) -> None:
        """Let another process go on with the run."""
        self._lock.close()

    def append(self, name: str, row: Json) -> None:
        """Add one line to the log "metrics" or "trajectories"; numbers not finite become null.

        UserError if the disk takes no more.
        """
        append_line(self._log(name), _dumps(row))

    def rows(self, name: str, last_bytes: int | None = None) -> Iterator[Json]:
        """Yield the rows of a log, or those that lie wholly in its last bytes."""
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
                yield json.loads(line)

    def offsets(self) -> dict[str, int]:
        """Return the bytes of each log, all of them on disk; a checkpoint keeps them."""
        logs = [log for log in map(self._log, LOGS) if log.exists()]
        for log in logs:
            sync(log)
        return {log.stem: log.stat().st_size for log in logs}

    def truncate(self, offsets: dict[str, int]) -> None:
        """Cut the logs to `offsets`, so that a resumed run repeats no row.

        UserError, before any is cut, for a log that is shorter: it has lost rows since.
        """
        logs = [log for log in map(self._log, LOGS) if log.exists()]
        for log in logs:
            size, written = log.stat().st_size, offsets.get(log.stem, 0)
            require(
                size >= written,
                f"{log}: has {size:,} bytes; {written:,} were written up to the checkpoint; get "
                "the whole file again, or remove it to go on without its rows",
            )
        for log in logs:
            os.truncate(log, offsets.get(log.stem, 0))

    def write_json(self, name: str, value: Json) -> None:
        """Replace the file `name` in the run by `value` as JSON, as `append` writes it."""
        write_whole(self.path / name, _dumps(value, indent=2) + "\n")

    def summary(self) -> Json:
        """Return summary.json, or {} while the run has none."""
        path = self.path / "summary.json"
        return read_json(path) if path.exists() else {}

    def _log(self, name):
        return self.path / f"{name}.jsonl"


def path_of_run(root: str | Path, name: str, option: str) -> Path:
    """Return the directory of a run in `root`. UserError, which names the option, for no name."""
    require(
        name not in ("", ".", "..") and "/" not in name,
        f"{option} is {name!r}; it must be the name of a directory, to be made in {root}",
    )
    return Path(root) / name


def to_toml(config: Config) -> str:
    """Return all settings as the TOML of config.toml; settings.load_config reads it back."""
    return tomli_w.dumps(dataclasses.asdict(config))


def held_out_scores(summary: Json) -> dict[str, Json]:
    """Return the held-out scores of a training run by name: before, after, then the routers."""
    held_out = summary.get("held_out", {})
    sides = {name: held_out.get(name) for name in ("before", "after")}
    named = sides | held_out.get("routers", {})
    return {name: scores for name, scores in named.items() if scores}


def label(name: str) -> str:
    """Return what a table calls a policy: as --policy does; report.html says more of routers."""
    return TITLES["names"].get(name, name)


def table(policies: dict[str, Json], heading: str = "on held-out tasks") -> str:
    """Return scores by name as aligned lines for a terminal of 80 columns, units in the first.

    The other measures are in summary.json and report.html.
    """
    rows = [[heading, *TITLES["terminal"].values()]]
    for name, scores in policies.items():
        rows.append([label(name), *(_cell(scores, key) for key in TITLES["terminal"])])
    lines = aligned(rows)
    for name, scores in policies.items():
        if scores.get("failed"):
            failed = f"{scores['failed']} of {scores['attempts']} attempts"
            reason = " ".join(scores["failure"].split())
            lines.append(f"{label(name)}: {failed} failed, and are in no mean: {reason}")
    return "\n".join(lines)


def aligned(rows: list[list[str]]) -> list[str]:
    """Return rows of texts as lines of columns; the first column is cut to FIRST_COLUMN."""
    heads = []
    for head, *_ in rows:
        heads.append(head if len(head) <= FIRST_COLUMN else "..." + head[3 - FIRST_COLUMN :])
    columns = zip(*(texts for _, *texts in rows), strict=True)
    widths = [max(map(len, column)) for column in columns]
    lines = []
    for head, (_, *texts) in zip(heads, rows, strict=True):
        cells = map(str.rjust, texts, widths)
        lines.append("  ".join([head.ljust(max(map(len, heads))), *cells]))
    return lines


def _cell(scores, key):
    """A score, that of the reward with half of its interval; "-" if there is none."""
    _, factor, decimals = TITLES["columns"][key]
    digits = number if decimals is None else f"{{:.{decimals}f}}".format
    if scores.get(key) is None:
        return "-"
    low, high = scores.get("intervals", {}).get(key, (None, None))
    half = f" ±{digits(factor * (high - low) / 2)}" if key == "reward" and high else ""
    return digits(factor * scores[key]) + half


def scalars(row: Json, prefix: str = "") -> dict[str, float]:
    """Return the numbers of a row; those of a dict inside it are named dict/name."""
    numbers: dict[str, float] = {}
    for name, value in row.items():
        if isinstance(value, dict):
            numbers |= scalars(value, f"{prefix}{name}/")
        elif isinstance(value, int | float) and name != "step":
            numbers[prefix + name] = float(value)
    return numbers


def number(value: float) -> str:
    """Return three significant digits without exponent: 0.0412, 3.14, 15.9, 1,234."""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    decimals = 2 if value == 0 else min(6, max(0, 2 - math.floor(math.log10(abs(value)))))
    return f"{value:.{decimals}f}"


def _dumps(value, indent=None):
    # a diverged loss is recorded too
    finite = json.loads(json.dumps(value), parse_constant=lambda _: None)
    return json.dumps(finite, indent=indent)
