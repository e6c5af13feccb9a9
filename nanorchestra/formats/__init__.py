"""Doors: every word for a model becomes a directory in Hugging Face layout, which the core reads.

A word is such a directory, a .gguf file, or a hub id: owner/name[@revision], or
owner/name[@revision]/file.gguf. What exists on this machine is never looked for on the hub. The
core does not import this package.
"""

import os
import re
from pathlib import Path

from nanorchestra.errors import require

FORMS = "a directory in Hugging Face layout, a .gguf file, or a hub id such as Qwen/Qwen3-8B[@main]"
_NAME = r"[A-Za-z0-9_][\w.-]*"
_HUB_ID = re.compile(
    rf"({_NAME}/(?![^/@]*\.gguf$){_NAME})(?:@([^@\s]+?))?(?:/((?:[^/@\s]+/)*[^/@\s]+\.gguf))?"
)


def directory_of(word: str | Path, config_only: bool = False) -> Path:
    """Returns the directory in Hugging Face layout that a user's word for a model means.

    A hub id is downloaded and a GGUF file converted, once, into the user's cache. config_only: of
    a hub id only config.json is downloaded. Raises UserError.
    """
    path = Path(word)
    if not os.path.lexists(word):
        from nanorchestra.formats import hub

        path = hub.download(*_parts(str(word)), config_only)
    if path.is_file():
        from nanorchestra.formats import gguf

        require(path.suffix == ".gguf", f"{word}: a file of another kind; expected {FORMS}")
        return gguf.converted(path)
    beside = sorted(file.name for file in path.glob("*.gguf"))
    more = f"; give one of its GGUF files: {', '.join(beside)}" if beside else ""
    require((path / "config.json").exists(), f"{word}: has no config.json; expected {FORMS}{more}")
    return path


def data_file(repo: str, file: str) -> Path:
    """Returns a file of a data set of the hub, which is downloaded once. UserError."""
    from nanorchestra.formats import hub

    return hub.data_file(repo, file)


def names_model(word: str) -> bool:
    """Returns whether a word is a path that exists, or has the form of a hub id."""
    hub_id = _HUB_ID.fullmatch(word.rstrip("/"))
    return bool(word) and (os.path.lexists(word) or hub_id is not None)


def pinned(word: str) -> str:
    """Returns the word with which the same weights are found again: a hub id with its commit.

    The hub is asked which commit the revision means, or the cache without a network. UserError.
    """
    if os.path.lexists(word):
        return word
    from nanorchestra.formats import hub

    repo, revision, file = _parts(word)
    name = f"{repo}@{hub.commit(repo, revision)}"
    return f"{name}/{file}" if file else name


def title(word: str) -> str:
    """Returns a short name for people and clients: the last part of a path, or the hub id."""
    return os.path.basename(os.path.abspath(word)) if os.path.lexists(word) else word


def _parts(word) -> tuple[str, str, str]:
    """Returns repository, revision and file of a hub id, "" for what it lacks. UserError."""
    match = _HUB_ID.fullmatch(word.rstrip("/"))
    require(match, f"{word or repr(word)}: no such file or directory; expected {FORMS}")
    repo, revision, file = match.groups("")
    return repo, revision, file
