"""The directory of a run: config.toml, two append-only JSON Lines logs, and summary.json.

One process writes a run, any number may read it meanwhile. progress.py has the training.
"""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import tomli_w

from nanorchestra.config import Config
from nanorchestra.errors import UserError, require
from nanorchestra.files import append_line, read_json, sync, write_whole, writing
from nanorchestra.schemas import Json

LOGS = ("metrics", "trajectories")


class RunFolder:
    """A run directory.

    Invariant: a log is a sequence of whole lines, except for a tail that a killed writer may leave.
    Readers skip that tail, and `truncate` removes it before a resumed run writes.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    @classmethod
    def create(cls, path: str | Path, config_text: str) -> RunFolder:
        """Makes the directory, with config.toml in it from the first.

        UserError if it cannot be made, or exists and is not empty.
        """
        path = Path(path)
        aside = path.with_name(f".{path.name}.{os.getpid()}")
        shutil.rmtree(aside, ignore_errors=True)  # of a process that was killed
        try:
            aside.mkdir(parents=True)
            cls(aside).write_config(config_text)
            aside.rename(path)
        except OSError as error:
            if not path.exists():
                advice = f"{path.parent} must be a directory that can be written"
            elif (path / "config.toml").is_file():
                advice = "it holds a run; choose another run name"
            else:
                advice = "it holds no run; choose another run name"
            raise UserError(f"{path}: cannot be made ({error.strerror}); {advice}") from None
        finally:
            shutil.rmtree(aside, ignore_errors=True)
        return cls(path)

    @classmethod
    def open(cls, path: str | Path) -> RunFolder:
        """Opens a run, for reading or to go on writing. UserError if `path` holds no run."""
        is_run = (Path(path) / "config.toml").is_file()
        require(is_run, f"{path}: holds no config.toml; give the directory of a run (runs/NAME)")
        return cls(path)

    def write_config(self, text: str) -> None:
        """Replaces config.toml."""
        write_whole(self.path / "config.toml", text)

    def lock(self) -> None:
        """Makes this process the run's only writer until it ends. UserError if another one is."""
        self._lock = (self.path / ".lock").open("ab")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            message = f"{self.path}: another process is training this run; stop it first"
            raise UserError(message) from None

    def unlock(self) -> None:
        """Lets another process go on with the run."""
        self._lock.close()

    def append(self, name: str, row: Json) -> None:
        """Adds one line to the log "metrics" or "trajectories"; numbers not finite become null.

        UserError if the disk takes no more.
        """
        append_line(self._log(name), _dumps(row))

    def rows(self, name: str, last_bytes: int | None = None) -> Iterator[Json]:
        """Yields the rows of a log, or those that lie wholly in its last bytes."""
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
        """Returns the bytes of each log, all of them on disk; a checkpoint keeps them."""
        logs = [log for log in map(self._log, LOGS) if log.exists()]
        for log in logs:
            with writing(log):
                sync(log)
        return {log.stem: log.stat().st_size for log in logs}

    def truncate(self, offsets: dict[str, int]) -> None:
        """Cuts the logs to `offsets`, so that a resumed run repeats no row.

        UserError, before any is cut, for a log that is shorter.
        """
        logs = [log for log in map(self._log, LOGS) if log.exists()]
        for log in logs:
            whole = log.stat().st_size >= offsets.get(log.stem, 0)
            require(whole, f"{log}: it has lost rows; remove it to go on without them")
        for log in logs:
            with writing(log):
                os.truncate(log, offsets.get(log.stem, 0))

    def write_json(self, name: str, value: Json) -> None:
        """Replaces the file `name` in the run by `value` as JSON, as `append` writes it."""
        write_whole(self.path / name, _dumps(value, indent=2) + "\n")

    def summary(self) -> Json:
        """Returns summary.json, or {} while the run has none."""
        path = self.path / "summary.json"
        return read_json(path) if path.exists() else {}

    def _log(self, name):
        return self.path / f"{name}.jsonl"


def path_of_run(root: str | Path, name: str, option: str) -> Path:
    """Returns the directory of a run in `root`. UserError, which names the option, for no name."""
    require(
        name not in ("", ".", "..") and "/" not in name,
        f"{option} is {name!r}; it must be the name of a directory, to be made in {root}",
    )
    return Path(root) / name


def training_command(*words: str) -> str:
    """Returns the command line of train.py with these words, by torchrun if that started this."""
    ranks = os.environ.get("LOCAL_WORLD_SIZE")
    program = f"torchrun --nproc-per-node {ranks} train.py" if ranks else "python train.py"
    return f"{program} {shlex.join(words)}"


def to_toml(config: Config) -> str:
    """Returns all settings as the TOML of config.toml; settings.load_config reads it back."""
    return tomli_w.dumps(dataclasses.asdict(config))


def _dumps(value, indent=None):
    # a diverged loss is recorded too
    finite = json.loads(json.dumps(value), parse_constant=lambda _: None)
    return json.dumps(finite, indent=indent)
