"""Finds a model by the user's word for it, and downloads one from the Hugging Face hub.

A word is a directory in Hugging Face layout, a .gguf file, or a hub id: owner/name[@revision], or
owner/name[@revision]/file.gguf. What exists on this machine is never looked for on the hub.
huggingface_hub makes the requests, so its cache, token, progress bar and environment hold: HF_HOME,
HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE. Only files that load_model reads are downloaded, config.json
first and weights last. They come one after another in the caller's thread, not by
snapshot_download: Ctrl-C then ends the download at once, and at most one file is begun again.
"""

import difflib
import errno
import logging
import os
import re
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from nanorchestra.errors import UserError, require
from nanorchestra.files import read_object, write_whole
from nanorchestra.model.hf_config import MODEL_TYPES, config_from_hf

CONFIG, SINGLE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
TOKENIZER = "tokenizer.json"
SMALL = (
    CONFIG,
    "generation_config.json",
    TOKENIZER,
    "tokenizer_config.json",
    "chat_template.jinja",
)
MOST_NAMES = 3  # that a message suggests
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
    `numbers` is how many a .gguf file of the hub holds, 0 where that is not known.
    """

    path: Path
    hub_id: HubId | None = None
    commit: str = ""
    missing: Mapping[str, int] = field(default_factory=dict)
    numbers: int = 0

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
    def download_bytes(self) -> int:
        """Bytes that are still to be downloaded."""
        return sum(self.missing.values())

    @property
    def fits_disk(self) -> bool:
        """Whether the disk of the cache has room for the missing files."""
        return self.download_bytes <= _free_bytes()

    @property
    def summary(self) -> str:
        """What is to be downloaded, in words."""
        if self.hub_id is None or not self.missing:
            return f"{self.name}: nothing to download"
        short = self.name.replace(self.commit, self.commit[:7])
        free = f"{gigabytes(_free_bytes())} free in {_cache()}"
        return f"{short}: {gigabytes(self.download_bytes)} to download, {free}"

    def download(self) -> Path:
        """Fetches the missing files and returns the path. UserError, in one line."""
        if self.hub_id is None:
            return self.path
        if self.missing:
            self._fetch()
        # With the commit of a branch the cache serves without a network, too.
        ref = _repo_cache(self.hub_id) / "refs" / self.hub_id.revision
        if not self.hub_id.is_commit and _text(ref) != self.commit:
            with suppress(UserError, OSError):  # of a cache that is only read
                ref.parent.mkdir(parents=True, exist_ok=True)
                write_whole(ref, self.commit)
        return self.path

    def _fetch(self) -> None:
        free = _free_bytes()
        require(
            self.fits_disk,
            f"{self.hub_id.word}: {self.download_bytes:,} bytes to download; {free:,} are free in "
            f"{_cache()}; free some, or set HF_HOME to a place on another disk",
        )
        for name in self.missing:  # weights last: once they are there, everything is
            file = _fetched(self.hub_id, self.commit, name)
            if name == INDEX:
                absent = set(_shards(file)) - set(self.missing)
                absent = [shard for shard in absent if not (file.parent / shard).exists()]
                require(
                    not absent,
                    f"{self.hub_id.word}: {INDEX} names {', '.join(sorted(absent)[:MOST_NAMES])}; "
                    "the repository has no such file",
                )


def local_model(name: str | Path) -> Path:
    """Returns the directory or .gguf file that a user's word for a model means.

    What exists is returned as it is. A hub id is downloaded, after a line on stderr, unless it is
    in the cache. Raises UserError.
    """
    source = find(name)
    if source.missing:
        print(source.summary, file=sys.stderr)
    return source.download()


def gigabytes(count: float) -> str:
    """Returns a number of bytes in words, in units of 1e9."""
    return f"{count / 1e9:,.2f} GB"


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
    pasted = re.match(r"(https?://)?(www\.)?(huggingface\.co|hf\.co)/([^/]+/[^/?#]+)", word)
    if pasted:
        raise UserError(f"{word}: an address; give the hub id alone: {pasted[4]}")
    hub_id = HubId.parse(word)
    if hub_id is None:
        near = _near_paths(word)
        raise UserError(f"{word or repr(word)}: no such file or directory{near}; expected {FORMS}")
    return _find_on_hub(hub_id)


def _near_paths(word: str) -> str:
    """Returns " (did you mean PATH?)" for models here that a wrong path is like, else ""."""
    path, near = Path(word), []
    for folder in dict.fromkeys([path.parent, Path("assets")]):
        models = [each.name for each in sorted(folder.glob("*")) if is_model(each)]
        near += [str(folder / name) for name in difflib.get_close_matches(path.name, models)]
    return f" (did you mean {' or '.join(near)}?)" if near else ""


def _find_on_hub(hub_id) -> Source:
    from huggingface_hub import HfApi, constants

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
        if info.siblings is None or not _COMMIT.fullmatch(str(info.sha)):
            raise ValueError("not the answer of a hub")
    except Exception as error:  # of httpx, the hub's statuses, or fields that an answer lacks
        problem = _explained(error, hub_id)
        if cached and _is_outage(error):
            print(f"{problem}; takes commit {cached.commit[:7]} of the cache", file=sys.stderr)
            return cached
        raise problem from None

    sizes = {file.rfilename: file.size or 0 for file in info.siblings}
    names = _wanted(hub_id, sizes)
    directory = _repo_cache(hub_id) / "snapshots" / info.sha
    blobs = {}
    for file in info.siblings:
        blobs[file.rfilename] = file.lfs.sha256 if file.lfs else file.blob_id
    numbers = 0
    if hub_id.file:
        about = info.gguf or {}
        kind = about.get("architecture")
        require(
            kind is None or kind in MODEL_TYPES,
            f"{hub_id.word}: architecture {kind!r}: expected {' or '.join(map(repr, MODEL_TYPES))}",
        )
        numbers = about.get("total") or 0
    else:
        config = read_object(_fetched(hub_id, info.sha, CONFIG))
        config_from_hf(config, f"{hub_id.word}: {CONFIG}")  # refuses what is not served
    missing = {}
    for name in names:
        blob = _repo_cache(hub_id) / "blobs" / str(blobs[name])
        if not (directory / name).exists():  # a file of an older commit needs a link only
            missing[name] = 0 if blob.exists() else sizes[name]
    return Source(directory / hub_id.file, hub_id, info.sha, missing, numbers)


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
        near = _nearest(hub_id.file, ggufs) or ggufs[:MOST_NAMES]
        has = f"it has {', '.join(near)}" if near else "it has no .gguf file"
        require(hub_id.file in sizes, f"{hub_id.word}: no such file in {hub_id.repo}; {has}")
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
    pickled = any(name.endswith((".bin", ".pt", ".pth")) for name in sizes)
    reason = "weights are pickle files (.bin), which can run code and are not read"
    if not pickled:
        absent = CONFIG if CONFIG not in sizes else f"{SINGLE} or {INDEX}"
        reason = f"no {absent} in the repository"
    raise UserError(
        f"{hub_id.word}: {reason}; expected a repository or revision of a language model with "
        "config.json and model.safetensors"
    )


def _other_parts(file, names) -> list[str]:
    """Returns the other parts of a split file: of x-00001-of-00002.gguf x-00002-of-00002.gguf."""
    split = re.fullmatch(r"(.*-)\d{5}(-of-\d{5}\.gguf)", file)
    if split is None:
        return []
    part = re.compile(rf"{re.escape(split[1])}\d{{5}}{re.escape(split[2])}")
    return [name for name in names if name != file and part.fullmatch(name)]


def _shards(index) -> list[str]:
    """Returns the files that an index names; [] for one that load_model will refuse."""
    weight_map = read_object(index).get("weight_map")
    return sorted(set(map(str, weight_map.values()))) if isinstance(weight_map, dict) else []


def _fetched(hub_id, commit, name) -> Path:
    """Returns a file in the cache, downloaded if it is not there."""
    from huggingface_hub import hf_hub_download

    logging.getLogger("huggingface_hub.file_download").addFilter(_without_queries)
    with _explaining(hub_id):
        return Path(hf_hub_download(hub_id.repo, name, revision=commit))


def _without_queries(record: logging.LogRecord) -> bool:
    """Removes the queries of addresses from a warning: a signed one lets others read the file."""
    if isinstance(record.args, tuple):
        record.args = tuple(
            re.sub(r"\?\S*", "", value) if isinstance(value, str) else value
            for value in record.args
        )
    return True


@contextmanager
def _explaining(hub_id) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # of httpx, hf_xet and others that huggingface_hub lets through
        raise _explained(error, hub_id) from None


def _is_outage(error) -> bool:
    """Returns whether the hub did not answer, or answered that it fails."""
    import httpx
    from huggingface_hub.errors import HfHubHTTPError

    if isinstance(error, HfHubHTTPError):
        return error.response.status_code == 429 or error.response.status_code >= 500
    return isinstance(error, httpx.TransportError | KeyError | TypeError | ValueError)


def _explained(error: Exception, hub_id: HubId) -> UserError:
    """Returns one line for an error of huggingface_hub: what is wrong, and what would be right."""
    import httpx
    from huggingface_hub import constants, errors, get_token

    if isinstance(error, errors.LocalEntryNotFoundError) and error.__cause__:
        error = error.__cause__
    word, repo, host = hub_id.word, hub_id.repo, urlsplit(constants.ENDPOINT).hostname
    page = f"{constants.ENDPOINT}/{repo}"
    status = error.response.status_code if isinstance(error, errors.HfHubHTTPError) else 0
    again = "the same command continues the download"
    here = _near_paths(word)

    if isinstance(error, errors.OfflineModeIsEnabled):
        text = (
            f"HF_HUB_OFFLINE is set, and {_cache()} does not hold all of it; unset it, or copy the "
            f"cache of a machine where `hf download {repo}` has run"
        )
    elif isinstance(error, errors.GatedRepoError):
        text = f"its licence must be accepted first, at {page}; then set HF_TOKEN to your token"
        if get_token():
            text = f"the account of your token (HF_TOKEN) has no access; ask for it at {page}"
    elif isinstance(error, errors.RevisionNotFoundError):
        text = f"{repo} has no revision {hub_id.revision!r}{_suggestions(_near_revisions(hub_id))}"
    elif isinstance(error, errors.RepositoryNotFoundError):
        private = "" if get_token() else " (a private one needs HF_TOKEN)"
        text = f"no such directory here{here}, and no such model at {host}{private}"
        text += _suggestions(_near_models(repo))
    elif isinstance(error, errors.DisabledRepoError):
        text = f"{host} has disabled it; {page} may say why"
    elif status == 401:
        text = f"{host} refuses your token (HTTP 401); set HF_TOKEN to a valid one, or unset it"
    elif status == 403:
        text = f"your token (HF_TOKEN) may not read it (HTTP 403); {page} says who may"
    elif status == 429:
        text = f"{host} has had too many requests from here (HTTP 429); wait some minutes"
        text += "" if get_token() else ", or set HF_TOKEN"
    elif status:
        text = f"{host} fails (HTTP {status}); try again later: {again}"
    elif isinstance(error, errors.HFValidationError):
        text = f"no such file or directory; expected {FORMS}"
    elif host is None or isinstance(error, httpx.UnsupportedProtocol | httpx.InvalidURL):
        text = f"HF_ENDPOINT is {constants.ENDPOINT!r}; expected an address such as https://host"
    elif isinstance(error, httpx.TimeoutException):
        waits = sorted({constants.HF_HUB_ETAG_TIMEOUT, constants.HF_HUB_DOWNLOAD_TIMEOUT})
        text = f"{host} did not answer within {' or '.join(map(str, waits))} s; {again}"
    elif isinstance(error, httpx.ConnectError):
        text = f"no such directory here{here}, and {host} cannot be reached ({error})"
        text += "; check the network, or HF_ENDPOINT"
    elif isinstance(error, httpx.TransportError):
        text = f"the connection to {host} broke ({type(error).__name__}); {again}"
    elif isinstance(error, OSError) and error.errno == errno.ENOSPC:
        text = f"no space left in {_cache()}: {_free_bytes():,} bytes are free; {again}"
    elif isinstance(error, OSError) and error.errno:
        text = f"{error.filename or _cache()}: {error.strerror}; HF_HOME chooses another place"
    elif isinstance(error, OSError):  # a file that ended early
        text = f"the download is not whole; {again}"
    elif isinstance(error, KeyError | TypeError | ValueError):
        text = f"{host} does not answer as a hub does; check the network's log-in, or HF_ENDPOINT"
    else:
        text = f"the download failed ({type(error).__name__}); {again}"
    return UserError(f"{word}: {text}")


def _near_models(repo) -> list[str]:
    """Returns the ids nearest to one that does not exist; [] if the hub does not answer."""
    owner, _, name = repo.partition("/")
    names = []
    for params in ({"author": owner, "sort": "downloads", "limit": 200}, {"search": name}):
        rows = _asked("/api/models", {"limit": 20} | params)
        names += [str(row.get("id")) for row in rows] if isinstance(rows, list) else []
    return _nearest(repo, names)


def _near_revisions(hub_id) -> list[str]:
    refs = _asked(f"/api/models/{hub_id.repo}/refs", {})
    rows = [*refs.get("branches", []), *refs.get("tags", [])] if isinstance(refs, dict) else []
    names = [str(row.get("name")) for row in rows]
    return _nearest(hub_id.revision, names) or names[:MOST_NAMES]


def _nearest(name, names) -> list[str]:
    """Returns the names most like one, without regard to case."""
    by_lower = {other.lower(): other for other in names}
    near = difflib.get_close_matches(name.lower(), by_lower, MOST_NAMES)
    return [by_lower[lower] for lower in near]


def _suggestions(names) -> str:
    return f"; did you mean {' or '.join(names)}?" if names else ""


def _asked(path, params) -> Any:
    """Returns what the hub answers to a request of a few seconds; None if it does not."""
    from huggingface_hub import constants
    from huggingface_hub.utils import build_hf_headers, get_session

    with suppress(Exception):  # a suggestion is no reason to fail
        answer = get_session().get(
            constants.ENDPOINT + path,
            params=params,
            headers=build_hf_headers(),
            timeout=constants.HF_HUB_ETAG_TIMEOUT,
        )
        return answer.json() if answer.is_success else None


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


def _free_bytes() -> int:
    """Returns the free bytes of the disk that holds the cache, or will."""
    place = _cache().absolute()
    while not place.exists():
        place = place.parent
    return shutil.disk_usage(place).free
