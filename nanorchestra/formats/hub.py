"""Downloads models and data sets of the Hugging Face hub, by huggingface_hub.

Its cache, token, progress bar and environment hold: HF_HOME, HF_TOKEN, HF_ENDPOINT,
HF_HUB_OFFLINE. A commit that is whole in the cache is taken without a question to the hub.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from huggingface_hub import HfApi, get_cached_repo_tree, hf_hub_download, snapshot_download
from huggingface_hub.errors import CachedRepoTreeNotFoundError, LocalEntryNotFoundError
from huggingface_hub.utils import filter_repo_objects

from nanorchestra.errors import UserError, require
from nanorchestra.model.checkpoint import read_config

CONFIG = "config.json"
READ = [CONFIG, "generation_config.json", "tokenizer*.json", "*.jinja", "model*.safetensors*"]


def download(repo: str, revision: str, file: str, config_only: bool) -> Path:
    """Returns the directory of a repository, or its GGUF file if `file` names one. UserError.

    The parts of a split file come with it. A model that is not served is refused by its
    config.json, before its weights.
    """
    sha = commit(repo, revision)
    if file:
        parts = re.sub(r"-\d{5}-of-(\d{5}\.gguf)$", r"-*-of-\1", file)
        path = _snapshot(repo, sha, [parts]) / file
        require(path.exists(), f"{repo}: has no file {file}")
        return path
    directory = _snapshot(repo, sha, [CONFIG])
    if not (directory / CONFIG).exists():
        files = [file.path for file in get_cached_repo_tree(repo, revision=sha)]
        names = [name for name in files if name.endswith(".gguf")]
        more = f"; name one of its GGUF files, such as {repo}/{names[0]}" if names else ""
        raise UserError(f"{repo}: expected a repository with config.json and safetensors{more}")
    read_config(directory)
    return directory if config_only else _snapshot(repo, sha, READ)


def data_file(repo: str, file: str) -> Path:
    """Returns a file of a data set of the hub, which is downloaded once. UserError."""
    with _one_line(f"datasets/{repo}"):
        return Path(hf_hub_download(repo, file, repo_type="dataset"))


def commit(repo: str, revision: str) -> str:
    """Returns the commit that a revision means, "" for the main one. UserError.

    Without a network it is what the revision meant at the last download.
    """
    with _one_line(repo):
        return HfApi().resolve_revision(repo, revision=revision or None).resolved


def _snapshot(repo, sha, patterns) -> Path:
    """Returns the directory of a commit with the files that fit the patterns.

    They are downloaded one after another in this thread: Ctrl-C ends snapshot_download, which has
    threads, only when the files in progress are whole.
    """
    wanted = {"repo_id": repo, "revision": sha, "allow_patterns": patterns}
    with suppress(CachedRepoTreeNotFoundError, LocalEntryNotFoundError):
        get_cached_repo_tree(repo, revision=sha)  # by which the next call finds what is missing
        return Path(snapshot_download(**wanted, local_files_only=True))
    with _one_line(repo):
        names = HfApi().list_repo_files(repo, revision=sha)
        for name in filter_repo_objects(names, allow_patterns=patterns):
            hf_hub_download(repo, name, revision=sha)
        return Path(snapshot_download(**wanted))


@contextmanager
def _one_line(repo) -> Iterator[None]:
    """Turns what huggingface_hub raises, also of httpx and hf_xet, into a UserError."""
    try:
        yield
    except Exception as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{repo}: not on this machine, and the hub says: {reason}") from None
