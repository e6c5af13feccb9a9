"""Reads files with messages for the user, imports Python, and writes files whole or not at all."""

import gzip
import importlib.util
import json
import os
import shutil
import sys
import threading
import tomllib
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any

from nanorchestra.errors import UserError, WorldError, require


def read_json(path: str | Path) -> Any:
    """Returns the JSON value of a file. UserError names the file and what is wrong with it."""
    try:
        return json.loads(read_text(path))
    except ValueError as error:
        raise UserError(f"{path}: not JSON ({error}); is the file whole?") from None


def read_toml(path: str | Path) -> dict[str, Any]:
    """Returns the tables of a TOML file. UserError names the file and what is wrong with it."""
    try:
        return tomllib.loads(read_text(path))
    except ValueError as error:
        raise UserError(f"{path}: not TOML ({error})") from None


def merge(old: Any, new: Any) -> Any:
    """Returns `new`, or both together, field by field, if both are objects."""
    if not (isinstance(old, dict) and isinstance(new, dict)):
        return new
    return old | {key: merge(old.get(key), value) for key, value in new.items()}


def read_json_lines(path: str | Path) -> Iterator[tuple[int, Any]]:
    """Yields (line number, value) of a JSON Lines file, without its blank lines.

    A file of any size is read line by line, one that ends in .gz is unpacked. UserError names it,
    and the line that is not JSON.
    """
    opened = gzip.open if Path(path).suffix == ".gz" else open
    with _reading(path), opened(path, "rt", encoding="utf-8", newline="\n") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                try:
                    yield number, json.loads(line)
                except ValueError as error:
                    raise UserError(f"{path}, line {number}: not JSON ({error})") from None


def read_text(path: str | Path) -> str:
    """Returns the text of a file. UserError names the file and what is wrong with it."""
    with _reading(path):
        return Path(path).read_text(encoding="utf-8")


@contextmanager
def _reading(path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not a text file in UTF-8 ({error})") from None


@contextmanager
def writing(path: str | Path) -> Iterator[None]:
    """Raises UserError, which names the file, if the system refuses to write it."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror})") from None


def append_line(path: str | Path, line: str) -> None:
    """Adds a line to a file. UserError if the place cannot be written."""
    with writing(path), open(path, "a", encoding="utf-8") as file:
        file.write(line + "\n")


def write_whole(path: str | Path, data: bytes | str) -> None:
    """Replaces the file `path` by `data`; a reader sees the old file or the new one, never a part.

    The data is written aside, synced and renamed. UserError if the place cannot be written.
    """
    path = Path(path)
    aside = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}")
    try:
        with open(aside, "wb") as file:
            file.write(data.encode() if isinstance(data, str) else data)
        sync(aside)
        os.replace(aside, path)
        sync(path.parent)
    except OSError as error:
        aside.unlink(missing_ok=True)
        raise UserError(
            f"{path}: cannot be written ({error.strerror}); give a writable place with free space"
        ) from error


@contextmanager
def replace_directory(path: str | Path) -> Iterator[Path]:
    """Yields a new directory, which takes the place of `path` if the block ends without an error.

    A reader sees the old directory or the new one, whole, or for a moment none. A kill in that
    moment leaves the old one aside, and the next call puts it back. UserError if the place cannot
    be written.
    """
    path = Path(path).resolve()
    aside, previous = (path.with_name(f".{path.name}.{part}") for part in ("partial", "previous"))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _put_back(previous, path)
        for leftover in (aside, previous):  # of a process that was killed
            shutil.rmtree(leftover, ignore_errors=True)
        aside.mkdir()
        yield aside
        for entry in (*aside.iterdir(), aside):
            sync(entry)
        if path.exists():
            path.rename(previous)
        aside.rename(path)
        sync(path.parent)
        shutil.rmtree(previous, ignore_errors=True)
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror or error})") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)
        with suppress(OSError):
            _put_back(previous, path)


def _put_back(previous, path):
    """Renames the old directory back, where the new one did not follow."""
    if previous.exists() and not path.exists():
        previous.rename(path)


def sync(path: str | Path) -> None:
    """Brings a file to disk, or what was renamed in a directory."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def import_file(path: Path, kind: str) -> ModuleType:
    """Imports a user's Python file, which may import its neighbours. Raises what the file raises.

    The module's name begins with `kind`, so that a file json.py replaces no module.
    """
    path = path.resolve()
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    spec = importlib.util.spec_from_file_location(f"{kind}_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look it up there
    spec.loader.exec_module(module)
    return module


def import_function(word: str, setting: str) -> Callable[..., Any]:
    """Returns the function that FILE.py:FUNCTION names, the value of a setting. UserError."""
    file, _, name = word.rpartition(":")
    named = file.endswith(".py") and name.isidentifier()
    require(named, f"{setting} is {word!r}; it must be FILE.py:FUNCTION")
    require(Path(file).is_file(), f"{setting}: {file}: no such file")
    kind = setting.replace(".", "_")
    module = own_code(lambda: import_file(Path(file), kind), f"{setting}: {file}", file)
    function = getattr(module, name, None)
    require(callable(function), f"{setting}: {file} has no function {name!r}")
    return function


def own_code(call: Callable[[], Any], where: str, file: str) -> Any:
    """Returns call(), code of the user's; WorldError that names the line for what it raises."""
    try:
        return call()
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        raise WorldError(own_fault(error, where, file)) from None


def own_fault(error: BaseException, where: str, file: str) -> str:
    """Returns what the user's code has raised in a line, with the line of `file` it comes from."""
    lines = [getattr(error, "lineno", None)]  # of a SyntaxError
    for frame in traceback.extract_tb(error.__traceback__):
        if Path(frame.filename).resolve() == Path(file).resolve():
            lines.append(frame.lineno)
    line = f", line {lines[-1]}" if lines[-1] else ""
    kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
    return " ".join(f"{where}{line}: {kind}{error}".split())
