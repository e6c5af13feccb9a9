"""Finds a model by the user's word for it, and downloads one from the Hugging Face hub.

A word is a directory in Hugging Face layout, a .gguf file, or a hub id: owner/name[@revision], or
owner/name[@revision]/file.gguf. What exists on this machine is never looked for on the hub.
huggingface_hub makes the requests, so its cache, token, progress bar and environment hold: HF_HOME,
HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE. Only files that load_model reads are downloaded, config.json
first and weights last. They come one after another in the caller's thread, not by
snapshot_download: Ctrl-C then ends the download at once, and at most one file is begun again.
"""

import os
import re
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from nanorchestra.errors import UserError, require
from nanorchestra.files import read_json, write_whole
from nanorchestra.model.checkpoint import KINDS, config_from_hf

CONFIG, SINGLE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
TOKENIZER = "tokenizer.json"
SMALL = (
    CONFIG,
    "generation_config.json",
    TOKENIZER,
    "tokenizer_config.json",
    "chat_template.jinja",
)
MOST_NAMES = 3  # of GGUF files in a message
_COMMIT = re.compile(r"[0-9a-f]{40}")
_PART = r"[A-Za-z0-9_][\w.-]*"
_ID = re.compile(
    rf"(?P<repo>{_PART}/{_PART})(@(?P<revision>[^@\s]+?))?(?P<file>(/[^/@\s]+)+\.gguf)?"
)
FORMS = "a directory in Hugging Face layout, a .gguf file, or a hub id such as Qwen/Qwen3-8B[@main]"


@dataclass(frozen=True)
class HubId:
    """A hub id as it was written: a repository, and perhaps a revision and a .gguf file of it."""

    word: str
    repo: str
    revision: str = "main"
    file: str = ""

    @classmethod
    def parse(cls, word: str) -> "HubId | None":
        """Returns the hub id that a word has the form of, or None."""
        match = _ID.fullmatch(word)
        if not match or ".." in word or "--" in match["repo"] or match["repo"].endswith(".gguf"):
            return None
        return cls(word, match["repo"], match["revision"] or "main", (match["file"] or "")[1:])

    @property
    def is_commit(self) -> bool:
        """Whether the revision never changes."""
        return _COMMIT.fullmatch(self.revision) is not None


@dataclass(frozen=True)
class Source:
    """Where a model lies, or will lie once `download` has fetched its `missing` files.

    `missing` has the bytes of each file by name. A directory of the hub has a config.json already.
    """

    path: Path
    hub_id: HubId | None = None
    commit: str = ""
    missing: Mapping[str, int] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The word with which the same weights are found again: of a hub id, with its commit."""
        if self.hub_id is None:
            return str(self.path)
        file = f"/{self.hub_id.file}" if self.hub_id.file else ""
        return f"{self.hub_id.repo}@{self.commit}{file}"

    @property
    def title(self) -> str:
        """A short name for people and clients: the hub id, or the last part of the path."""
        if self.hub_id is None:
            return Path(os.path.abspath(self.path)).name  # a file of the cache is a link
        return self.hub_id.file or self.hub_id.repo

    @property
    def summary(self) -> str:
        """What is to be downloaded, in words."""
        if self.hub_id is None or not self.missing:
            return f"{self.name}: nothing to download"
        short = self.name.replace(self.commit, self.commit[:7])
        return f"{short}: {sum(self.missing.values()) / 1e9:,.2f} GB to download"

    def download(self) -> None:
        """Fetches the missing files. UserError, in one line."""
        if self.hub_id is None:
            return
        for name in self.missing:  # weights last: once they are there, everything is
            _fetched(self.hub_id, self.commit, name)
        # With the commit of a branch the cache serves without a network, too.
        ref = _repo_cache(self.hub_id) / "refs" / self.hub_id.revision
        if not self.hub_id.is_commit and _text(ref) != self.commit:
            with suppress(UserError, OSError):  # of a cache that is only read
                ref.parent.mkdir(parents=True, exist_ok=True)
                write_whole(ref, self.commit)


def fetch_model(name: str | Path) -> Source:
    """Returns where the model of a user's word lies, on this machine.

    A hub id is downloaded, after a line on stderr, unless it is in the cache. Raises UserError.
    """
    source = find(name)
    if source.missing:
        print(source.summary, file=sys.stderr)
    source.download()
    return source


def local_model(name: str | Path) -> Path:
    """Returns the directory or .gguf file that a user's word for a model means. UserError."""
    return fetch_model(name).path


def names_model(word: str) -> bool:
    """Returns whether a word is a path that exists, or has the form of a hub id."""
    return bool(word) and (os.path.lexists(word) or HubId.parse(word.rstrip("/")) is not None)


def is_model(path: Path) -> bool:
    """Returns whether a path that exists has the form of a model."""
    return path.suffix == ".gguf" or (path / CONFIG).exists()


def find(name: str | Path) -> Source:
    """Returns where a model lies, without downloading more than its config.json.

    A hub id asks the hub which commit its revision means, unless it names the commit and that is
    in the cache. Without network, or with HF_HUB_OFFLINE, the cache alone is asked. UserError.
    """
    word = str(name).rstrip("/") or str(name)
    path = Path(word)
    if word and os.path.lexists(path):
        wrong = path.is_file() and path.suffix != ".gguf"
        require(not wrong, f"{word}: a file of another kind; expected {FORMS}")
        return Source(path)
    hub_id = HubId.parse(word)
    require(hub_id, f"{word or repr(word)}: no such file or directory; expected {FORMS}")
    return _find_on_hub(hub_id)


def _find_on_hub(hub_id) -> Source:
    from huggingface_hub import HfApi, constants, errors

    cached = _find_in_cache(hub_id)
    if cached and constants.is_offline_mode():
        return cached
    if cached and hub_id.is_commit and (hub_id.file or (cached.path / TOKENIZER).exists()):
        return cached
    try:
        info = HfApi().model_info(
            hub_id.repo,
            revision=hub_id.revision,
            files_metadata=True,
            timeout=constants.HF_HUB_ETAG_TIMEOUT,
        )
    except Exception as error:  # of httpx, the hub's statuses, or fields that an answer lacks
        problem = _explained(error, hub_id)
        refused = isinstance(error, errors.RepositoryNotFoundError | errors.RevisionNotFoundError)
        if cached and not refused:
            print(f"{problem}; takes commit {cached.commit[:7]} of the cache", file=sys.stderr)
            return cached
        raise problem from None

    sizes = {file.rfilename: file.size or 0 for file in info.siblings}
    names = _wanted(hub_id, sizes)
    directory = _repo_cache(hub_id) / "snapshots" / info.sha
    blobs = {}
    for file in info.siblings:
        blobs[file.rfilename] = file.lfs.sha256 if file.lfs else file.blob_id
    if hub_id.file:
        kind = (info.gguf or {}).get("architecture")
        require(
            kind is None or kind in KINDS,
            f"{hub_id.word}: architecture {kind!r}: expected {' or '.join(map(repr, KINDS))}",
        )
    else:
        config = read_json(_fetched(hub_id, info.sha, CONFIG))
        config_from_hf(config, f"{hub_id.word}: {CONFIG}")  # refuses what is not served
    missing = {}
    for name in names:
        blob = _repo_cache(hub_id) / "blobs" / str(blobs[name])
        if not (directory / name).exists():  # a file of an older commit needs a link only
            missing[name] = 0 if blob.exists() else sizes[name]
    return Source(directory / hub_id.file, hub_id, info.sha, missing)


def _find_in_cache(hub_id) -> Source | None:
    """Returns a model whose weights are all in the cache, None without one."""
    home = _repo_cache(hub_id)
    commit = hub_id.revision if hub_id.is_commit else _text(home / "refs" / hub_id.revision)
    directory = home / "snapshots" / commit
    if not commit or not directory.is_dir():
        return None
    wanted = [hub_id.file]
    if not hub_id.file:
        wanted = [CONFIG, SINGLE]
        if (directory / INDEX).exists():
            wanted = [CONFIG, *_shards(directory / INDEX)]
    whole = all((directory / name).exists() for name in wanted)
    return Source(directory / hub_id.file, hub_id, commit) if whole else None


def _wanted(hub_id, sizes) -> list[str]:
    """Returns the files of a repository to download, weights last. UserError if it has none."""
    ggufs = sorted(name for name in sizes if name.endswith(".gguf"))
    if hub_id.file:
        require(hub_id.file in sizes, f"{hub_id.word}: no such file in {hub_id.repo}")
        return [*_other_parts(hub_id.file, ggufs), hub_id.file]
    names = [name for name in SMALL if name in sizes]
    weights = [SINGLE] if SINGLE in sizes else []
    if INDEX in sizes:
        names.append(INDEX)
        # The index says which they are, and is not here yet. "consolidated" is another layout.
        shard = re.compile(r"(?!consolidated)[^/]+-of-\d+\.safetensors")
        weights = sorted(filter(shard.fullmatch, sizes)) or weights
    if CONFIG in sizes and weights:
        return names + weights
    if ggufs:
        shown = ", ".join(f"{hub_id.word}/{name}" for name in ggufs[:MOST_NAMES])
        more = f" and {len(ggufs) - MOST_NAMES} more" if len(ggufs) > MOST_NAMES else ""
        raise UserError(f"{hub_id.word}: weights are in GGUF files; name one: {shown}{more}")
    raise UserError(
        f"{hub_id.word}: expected a repository of a language model with {CONFIG} and {SINGLE}; "
        "pickle files (.bin) are not read"
    )


def _other_parts(file, names) -> list[str]:
    """Returns the other parts of a split file: of x-00001-of-00002.gguf x-00002-of-00002.gguf."""
    split = re.fullmatch(r"(.*-)\d{5}(-of-\d{5}\.gguf)", file)
    if split is None:
        return []
    part = re.compile(rf"{re.escape(split[1])}\d{{5}}{re.escape(split[2])}")
    return [name for name in names if name != file and part.fullmatch(name)]


def _shards(index) -> list[str]:
    """Returns the files that an index names."""
    return sorted(set(read_json(index)["weight_map"].values()))


def _fetched(hub_id, commit, name) -> Path:
    """Returns a file in the cache, downloaded if it is not there."""
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(hub_id.repo, name, revision=commit))
    except Exception as error:  # of httpx, hf_xet and others that huggingface_hub lets through
        raise _explained(error, hub_id) from None


def _explained(error: Exception, hub_id: HubId) -> UserError:
    """Returns one line for an error of huggingface_hub."""
    from huggingface_hub import constants, errors

    host = urlsplit(constants.ENDPOINT).hostname
    if isinstance(error, errors.GatedRepoError):
        page = f"{constants.ENDPOINT}/{hub_id.repo}"
        text = f"its licence must be accepted first, at {page}; then set HF_TOKEN to your token"
    elif isinstance(error, errors.RevisionNotFoundError):
        text = f"{hub_id.repo} has no revision {hub_id.revision!r}"
    elif isinstance(error, errors.RepositoryNotFoundError):
        text = f"no such directory here, and no such model at {host} (a private one needs HF_TOKEN)"
    else:
        reason = " ".join(str(error).split())
        text = f"not on this machine, and {host} failed: {reason}"
    return UserError(f"{hub_id.word}: {text}")


def _cache() -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def _repo_cache(hub_id) -> Path:
    return _cache() / f"models--{hub_id.repo.replace('/', '--')}"


def _text(path) -> str:
    """Returns the text of a file, "" without one."""
    with suppress(OSError, ValueError):
        return path.read_text().strip()
    return ""
