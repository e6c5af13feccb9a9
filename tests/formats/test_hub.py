"""Words for a model: paths, and ids of a hub that is a server on this machine."""

import json
import os
from pathlib import Path

import pytest
from huggingface_hub import constants

from nanorchestra import formats, load_model
from nanorchestra.errors import UserError
from nanorchestra.model.checkpoint import NANO
from nanorchestra.training.command import choose_run, parse

REPO = "Qwen/Qwen3-8B"
NAMES = "config", "generation_config", "tokenizer", "tokenizer_config"
FILES = {f"{name}.json": (NANO / f"{name}.json").read_bytes() for name in NAMES}
FILES["model.safetensors"] = (NANO / "model.safetensors").read_bytes()
MORE = {"pytorch_model.bin": b"pickle", "modeling.py": b"code", "original/x.safetensors": b"other"}


def line(call, *arguments) -> str:
    """Returns the message of a UserError, which is one line without a secret."""
    with pytest.raises(UserError) as caught:
        call(*arguments)
    message = str(caught.value)
    assert "\n" not in message and os.environ["HF_TOKEN"] not in message
    return message


def test_what_exists_is_taken_as_it_is(hub, tmp_path):
    path = tmp_path / REPO
    path.mkdir(parents=True)
    hub.add(REPO, FILES)
    (path / "config.json").touch()
    assert formats.directory_of(REPO) == Path(REPO) and formats.pinned(REPO) == REPO
    for word in ("Qwen3-8B", "runs/a/model", "models/x.gguf", ""):
        assert "no such file or directory; expected a directory" in line(formats.directory_of, word)
        assert not formats.names_model(word)
    assert not hub.requests


def test_only_what_is_read_is_downloaded_and_a_commit_never_changes(hub):
    commit = hub.add(REPO, FILES | MORE)
    path = formats.directory_of(REPO)
    assert path.name == commit and {file.name for file in path.iterdir()} == set(FILES)
    newer = hub.add(REPO, FILES | {"README.md": b"new"})
    assert formats.pinned(REPO) == f"{REPO}@{newer}"
    hub.requests.clear()
    assert formats.directory_of(f"{REPO}@{commit}") == path
    assert load_model(f"{REPO}@{commit}")[1] and not hub.requests


def test_without_a_network_the_cache_serves(hub, monkeypatch):
    commit = hub.add(REPO, FILES)
    path = formats.directory_of(REPO)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert formats.directory_of(REPO) == path and formats.pinned(REPO) == f"{REPO}@{commit}"
    assert "the Hub could not be reached" in line(formats.directory_of, "Qwen/Qwen3-4B")


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("Qwen/Qwen-3", "not on this machine, and the hub says: 404 Client Error. Repository Not"),
        ("a/gated", "Cannot access gated repo for url"),
        ("a/other", "config.json: model_type = 'gpt_oss': expected 'qwen3'"),
    ],
)
def test_a_refusal_is_one_line(hub, word, expected):
    hub.add("a/gated", FILES)
    hub.add("a/other", FILES | {"config.json": b'{"model_type": "gpt_oss"}'})
    assert expected in line(formats.directory_of, word)
    assert not any("model.safetensors" in request for request in hub.requests)


def test_a_run_keeps_the_commit_it_began_with(hub, make_training, tmp_path, monkeypatch):
    commit = hub.add(REPO, FILES)
    settings = {"model.path": REPO, "grpo.steps": 1, "lora.rank": 2}
    assert make_training("run", settings).train()
    hub.add(REPO, FILES | {"README.md": b"new"})
    assert f'path = "{REPO}@{commit}"' in (tmp_path / "run" / "config.toml").read_text()
    adapter = json.loads((tmp_path / "run" / "adapter" / "adapter_config.json").read_text())
    assert (adapter["base_model_name_or_path"], adapter["revision"]) == (REPO, commit)

    # torchrun starts the command as it was given again, which goes on with the commit of the run.
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    again = ["--run.root", str(tmp_path), "--run.name", "run", "--model.path", REPO]
    config, _, resumed = choose_run(parse(again))
    assert resumed and config.model.path == f"{REPO}@{commit}"
