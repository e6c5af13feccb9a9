"""Reads JSON files with messages for the user, and writes files whole or not at all."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from nanorchestra.errors import UserError


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(
            f"{next(name for name in names if names.count(name) > 1)!r} stands twice in one object"
        )
    return values


def read_json(path: Path) -> Any:
    """The JSON value of a file. UserError that names the file and what is wrong."""
    try:
        return json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_unique)
    except OSError as error:
        raise UserError(
            f"{path}: cannot be read ({error.strerror}); it must be a JSON file"
        ) from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not JSON ({error}); is it whole?") from None


def write_whole(path: Path, data: bytes) -> None:
    """Replaces the file `path` by `data`: written aside, synced, then renamed, so that a reader sees the old file or the new one."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        try:
            with aside.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(aside, path)
            sync(path.parent)
        except BaseException:
            aside.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise UserError(
            f"{path}: cannot write: {error.strerror}; give a place that can be written and has space"
        ) from error


def sync(path: Path) -> None:
    """Brings a file, or what was renamed in a directory, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def is_utf8(text: str) -> bool:
    """Whether it can be written as UTF-8: half of a surrogate pair, which JSON may bring, cannot."""
    return not any("\ud800" <= character <= "\udfff" for character in text)
