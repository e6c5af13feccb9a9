"""Words for a model: paths, and ids of a hub that is a server on this machine."""

import json
import sqlite3
from pathlib import Path

import pytest
from fake_hub import FakeHub
from huggingface_hub import constants

import serve
from nanorchestra import formats, load_model
from nanorchestra.errors import UserError
from nanorchestra.formats.fetch import fetch
from nanorchestra.model.checkpoint import NANO
from nanorchestra.report.plan import plan
from nanorchestra.settings import load_config
from nanorchestra.tools.corpus import build_index
from nanorchestra.training.command import choose_run, parse
from nanorchestra.training.distributed import Ranks
from worlds import policies

REPO = "Qwen/Qwen3-8B"
TOKEN = "hf_a-token-that-no-message-has"
NAMES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
FILES = {name: (NANO / name).read_bytes() for name in (*NAMES, "model.safetensors")}
MORE = {"pytorch_model.bin": b"pickle", "modeling.py": b"code", "original/x.safetensors": b"other"}


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A hub, and an empty cache."""
    with FakeHub() as server:
        server.serve_to(monkeypatch, tmp_path / "cache")
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        monkeypatch.chdir(tmp_path)
        yield server


def line(call, *arguments) -> str:
    """Returns the message of a UserError, which is one line without a secret."""
    with pytest.raises(UserError) as caught:
        call(*arguments)
    message = str(caught.value)
    assert "\n" not in message and TOKEN not in message
    return message


def test_what_exists_is_taken_as_it_is(hub, tmp_path):
    path = tmp_path / REPO
    path.mkdir(parents=True)
    hub.add(REPO, FILES)
    assert "Qwen3-8B: has no config.json; expected a directory" in line(formats.directory_of, REPO)
    (path / "x.gguf").touch()
    assert "give one of its GGUF files: x.gguf" in line(formats.directory_of, REPO)
    (path / "config.json").touch()
    assert formats.directory_of(REPO) == Path(REPO) and formats.pinned(REPO) == REPO
    assert formats.title(REPO) == "Qwen3-8B"
    (tmp_path / "notes.txt").touch()
    assert "notes.txt: a file of another kind; expected a directory" in line(
        formats.directory_of, "notes.txt"
    )
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
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "not whole on this machine, and the hub cannot be reached" in line(
        formats.directory_of, REPO
    )
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    commit = hub.add(REPO, FILES)
    path = formats.directory_of(REPO)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert formats.directory_of(REPO) == path and formats.pinned(REPO) == f"{REPO}@{commit}"
    assert "the hub cannot be reached" in line(formats.directory_of, "Qwen/Qwen3-4B")


@pytest.mark.parametrize(("rank", "opened"), [("0", [str(NANO)]), ("1", [])])
def test_one_rank_of_a_node_downloads_or_converts(monkeypatch, rank, opened):
    done = []
    monkeypatch.setattr(formats, "directory_of", done.append)
    monkeypatch.setenv("LOCAL_RANK", rank)
    assert fetch(str(NANO), Ranks()) == str(NANO) and done == opened


@pytest.mark.parametrize(
    ("word", "fault", "expected"),
    [
        ("Qwen/Qwen-3", {}, "no such directory here, and no such model on the hub"),
        (f"{REPO}@v9", {}, "the repository has no such revision"),
        (f"{REPO}/x.gguf", {}, "has no file x.gguf"),
        (REPO, {"/resolve/": (401, "GatedRepo")}, "its licence must be accepted first"),
        (REPO, {"/resolve/": (503, "")}, "the hub cannot be reached"),
        ("a/b-GGUF", {}, "name one of its GGUF files, such as a/b-GGUF/x-Q1.gguf"),
        ("a/other", {}, "config.json: model_type = 'gpt_oss': expected 'qwen3'"),
    ],
)
def test_a_refusal_is_one_line(hub, word, fault, expected):
    hub.add(REPO, FILES)
    hub.add("a/b-GGUF", {"x-Q1.gguf": b"GGUF"})
    hub.add("a/other", FILES | {"config.json": b'{"model_type": "gpt_oss"}'})
    hub.faults = fault
    assert expected in line(formats.directory_of, word)
    assert not any("model.safetensors" in request for request in hub.requests)


def test_a_gguf_file_comes_with_its_other_parts_and_shards_with_their_index(hub, monkeypatch):
    monkeypatch.setattr("nanorchestra.formats.gguf.converted", lambda path: path)
    parts = {f"y-0000{n}-of-00003.gguf": b"GGUF" for n in (1, 2, 3)}
    hub.add("a/split", parts | {"y.gguf": b"GGUF", "z-00002-of-00003.gguf": b"GGUF"})
    first = formats.directory_of("a/split/y-00001-of-00003.gguf")
    assert {file.name for file in first.parent.iterdir()} == set(parts)

    shards = {f"model-0000{n}-of-00002.safetensors": b"0" for n in (1, 2)}
    sharded = {name: FILES[name] for name in NAMES} | shards
    sharded["model.safetensors.index.json"] = b"{}"
    hub.add(REPO, sharded | {"consolidated.safetensors": b"0"})
    assert {file.name for file in formats.directory_of(REPO).iterdir()} == set(sharded)


def test_where_a_model_is_named_a_hub_id_will_do(hub, sandbox, tmp_path, capsys):
    pinned = f"{REPO}@{hub.add(REPO, FILES)}"
    policy = policies.parse(f"{REPO}:turns=3", ())
    assert policy.base == str(formats.directory_of(REPO)) and policy.settings["turns"] == 3
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("One passage of text.")
    assert build_index(tmp_path / "texts", tmp_path / "index", REPO) == 1
    with sqlite3.connect(tmp_path / "index" / "passages.sqlite") as database:
        ((checkpoint,),) = database.execute("SELECT checkpoint FROM about")
    assert checkpoint == pinned  # the index can be opened on another machine

    for wrong in ("nobody", "runs/nobody/model"):
        assert f"--policy {wrong}: {wrong} is none of" in line(policies.parse, wrong, ())
    assert serve.main(["--model", REPO, "--ask", "Hello?", "--json", "--seed", "0"]) in (0, 1)
    assert f"{pinned}, float32 on cpu" in capsys.readouterr().err


def test_a_plan_reads_config_json_alone(hub):
    hub.add("a/b", FILES)
    text, fits = plan(
        load_config("nano", {"model.path": "a/b"}), 1, None, "4090", formats.directory_of
    )
    assert fits and "B numbers" in text
    assert {Path(name).name for name in hub.requests if "resolve" in name} == {"config.json"}
    text, fits = plan(
        load_config("nano", {"model.path": REPO}), 1, None, "h100", formats.directory_of
    )
    assert "planned with the sizes of the preset" in text and "8.19 B numbers" in text


def test_a_run_keeps_the_commit_it_began_with(hub, make_training, tmp_path, monkeypatch):
    commit = hub.add(REPO, FILES)
    settings = {"model.path": REPO, "grpo.steps": 1, "lora.rank": 2}
    assert make_training("run", settings).train()
    hub.add(REPO, FILES | {"README.md": b"new"})
    hub.requests.clear()
    assert fetch(f"{REPO}@{commit}", Ranks()) == f"{REPO}@{commit}" and not hub.requests
    assert fetch(str(NANO), Ranks()) == str(NANO)
    assert f'path = "{REPO}@{commit}"' in (tmp_path / "run" / "config.toml").read_text()
    adapter = json.loads((tmp_path / "run" / "adapter" / "adapter_config.json").read_text())
    assert (adapter["base_model_name_or_path"], adapter["revision"]) == (REPO, commit)

    # torchrun starts the command as it was given again, which goes on with the commit of the run.
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    again = ["--run.root", str(tmp_path), "--run.name", "run", "--model.path", REPO]
    config, _, resumed = choose_run(parse(again), again)
    assert resumed and config.model.path == f"{REPO}@{commit}"
