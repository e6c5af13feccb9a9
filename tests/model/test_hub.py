"""Words for a model: paths, and ids of a hub that is a server on this machine."""

import hashlib
import json
import os
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import unquote, urlsplit

import pytest
from huggingface_hub import constants, file_download
from huggingface_hub.utils import _http

import serve
from nanorchestra import load_model
from nanorchestra.errors import UserError
from nanorchestra.model import hub as module
from nanorchestra.model.checkpoint import NANO
from nanorchestra.model.hub import HubId, find, local_model
from nanorchestra.settings import load_config
from nanorchestra.tools.corpus import build_index
from nanorchestra.training.build import fetch_policy
from nanorchestra.training.command import choose_run, parse
from nanorchestra.training.distributed import Ranks
from nanorchestra.training.plan import plan
from worlds import policies

ROOT = Path(__file__).parents[2]
REPO = "Qwen/Qwen3-8B"
TOKEN = "hf_a-token-that-no-message-has"
NAMES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
FILES = {name: (NANO / name).read_bytes() for name in (*NAMES, "model.safetensors")}
MORE = {"pytorch_model.bin": b"pickle", "modeling.py": b"code", "original/x.safetensors": b"other"}


@dataclass
class Repository:
    """Files by name, at each commit, and the commits that branches mean."""

    commits: dict[str, dict[str, bytes]]
    refs: dict[str, str]
    gguf: dict | None = None


@dataclass
class FakeHub:
    """A server of repositories by id.

    `faults` has what a path that contains its key is answered with: a status and headers. `cuts`
    has after how many bytes the connection breaks, once each, for a file's name. `requests` has
    what was asked.
    """

    repositories: dict[str, Repository] = field(default_factory=dict)
    faults: dict[str, tuple[int, dict[str, str]]] = field(default_factory=dict)
    cuts: dict[str, list[int]] = field(default_factory=dict)
    slow_s: float = 0.0  # between pieces of a file
    requests: list[str] = field(default_factory=list)
    sent: Counter = field(default_factory=Counter)  # bytes by file

    def add(self, repo: str, files: dict[str, bytes], branch: str = "main", **more) -> str:
        """Commits files on a branch, and returns the commit."""
        repository = self.repositories.setdefault(repo, Repository({}, {}, **more))
        commit = hashlib.sha1(repr((repo, branch, sorted(files.items()))).encode()).hexdigest()
        repository.commits[commit] = files
        repository.refs[branch] = commit
        return commit

    def __enter__(self) -> "FakeHub":
        class Handler(BaseHTTPRequestHandler):
            hub = self
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                self.hub._answer(self)

            def do_HEAD(self):
                self.hub._answer(self)

            def log_message(self, *_):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _answer(self, handler):
        path = unquote(urlsplit(handler.path).path)
        self.requests.append(f"{handler.command} {path}")
        for part, (status, headers) in self.faults.items():
            if part in path:
                _reply(handler, status, b"{}", headers)
                return
        if path.startswith("/api/models/"):
            self._answer_info(handler, path.removeprefix("/api/models/"))
        else:
            repo, _, rest = path[1:].partition("/resolve/")
            self._answer_file(handler, repo, rest)

    def _answer_info(self, handler, rest):
        repo, _, revision = rest.partition("/revision/")
        if repo not in self.repositories:
            _reply(handler, 404, b"{}", {"X-Error-Code": "RepoNotFound"})
            return
        repository = self.repositories[repo]
        commit = repository.refs.get(revision or "main", revision)
        if commit not in repository.commits:
            _reply(handler, 404, b"{}", {"X-Error-Code": "RevisionNotFound"})
            return
        siblings = []
        for name, data in repository.commits[commit].items():
            digest = hashlib.sha256(data).hexdigest()
            lfs = {"size": len(data), "sha256": digest, "pointerSize": 134}
            siblings.append({"rfilename": name, "size": len(data), "blobId": digest, "lfs": lfs})
        info = {"id": repo, "sha": commit, "siblings": siblings}
        if repository.gguf:
            info["gguf"] = repository.gguf
        _reply(handler, 200, json.dumps(info).encode())

    def _answer_file(self, handler, repo, rest):
        repository = self.repositories.get(repo)
        revision, _, name = rest.partition("/")
        commit = repository and repository.refs.get(revision, revision)
        if repository is None or name not in repository.commits.get(commit, {}):
            _reply(handler, 404, b"", {"X-Error-Code": "EntryNotFound"})
            return
        data = repository.commits[commit][name]
        handler.send_response(200)
        handler.send_header("ETag", f'"{hashlib.sha256(data).hexdigest()}"')
        handler.send_header("X-Repo-Commit", commit)
        handler.send_header("X-Linked-Size", str(len(data)))
        handler.send_header("Content-Length", str(len(data)))
        handler.end_headers()
        if handler.command == "HEAD":
            return
        cuts = self.cuts.get(name, [])
        end = cuts.pop(0) if cuts else len(data)
        for start in range(0, end, 65536):
            piece = data[start : min(end, start + 65536)]
            try:
                handler.wfile.write(piece)
            except OSError:  # the client has gone
                break
            self.sent[name] += len(piece)
            time.sleep(self.slow_s)
        if end < len(data):
            handler.wfile.flush()
            handler.close_connection = True


def _reply(handler, status, body, headers=()):
    handler.send_response(status)
    for name, value in dict(headers).items():
        handler.send_header(name, value)
    handler.send_header("Content-Length", str(len(body)))
    handler.end_headers()
    if handler.command != "HEAD":
        handler.wfile.write(body)


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A hub, an empty cache, and a huggingface_hub that asks it without waiting between tries."""
    with FakeHub() as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        template = server.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
        monkeypatch.delenv("HF_TOKEN", raising=False)
        impatient = SimpleNamespace(**vars(time) | {"sleep": lambda seconds: None})
        for library in (file_download, _http):
            monkeypatch.setattr(library, "time", impatient)
        monkeypatch.chdir(tmp_path)
        yield server
        _http.close_session()


def line(call, *arguments) -> str:
    """Returns the message of a UserError, which is one line."""
    with pytest.raises(UserError) as caught:
        call(*arguments)
    message = str(caught.value)
    assert "\n" not in message and TOKEN not in message
    return message


def test_what_exists_is_taken_as_it_is(hub, tmp_path):
    (tmp_path / "Qwen" / "Qwen3-8B").mkdir(parents=True)
    hub.add(REPO, FILES)
    assert str(local_model(REPO)) == REPO
    (tmp_path / "x.gguf").write_bytes(b"")
    assert str(local_model(tmp_path / "x.gguf")) == str(tmp_path / "x.gguf")
    (tmp_path / "notes.txt").write_text("")
    assert "notes.txt: a file of another kind; expected a directory" in line(find, "notes.txt")
    for word in ("Qwen3-8B", "runs/a/model", "models/x.gguf"):
        assert "no such file or directory; expected a directory" in line(find, word)
    assert not hub.requests


@pytest.mark.parametrize(
    ("word", "parts"),
    [
        (REPO, (REPO, "main", "")),
        (f"{REPO}@refs/pr/1", (REPO, "refs/pr/1", "")),
        ("a/b.c-D_1@v1.0/q/x.gguf", ("a/b.c-D_1", "v1.0", "q/x.gguf")),
        ("a/b/x.gguf", ("a/b", "main", "x.gguf")),
    ],
)
def test_the_parts_of_a_hub_id(word, parts):
    hub_id = HubId.parse(word)
    assert (hub_id.repo, hub_id.revision, hub_id.file) == parts


def test_a_hub_id_is_downloaded_once_and_only_what_is_read(hub, capsys):
    commit = hub.add(REPO, FILES | MORE)
    path = local_model(REPO)
    text = capsys.readouterr().err
    assert f"{REPO}@{commit[:7]}: 0.01 GB to download\n" in text
    assert {file.name for file in path.iterdir()} == set(FILES)
    model, tokenizer = load_model(REPO)
    assert tokenizer and model.config.num_hidden_layers
    weights = [text for text in hub.requests if text.startswith("GET") and "safetensors" in text]
    assert len(weights) == 1 and path.name == commit

    hub.requests.clear()
    assert local_model(f"{REPO}@{commit}") == path and not hub.requests  # a commit never changes
    assert local_model(REPO) == path and len(hub.requests) == 1
    newer = hub.add(REPO, FILES | {"README.md": b"new"})
    assert find(REPO).name == f"{REPO}@{newer}" and not sum(find(REPO).missing.values())
    assert local_model(f"{REPO}@main").name == newer
    assert hub.sent["model.safetensors"] == len(FILES["model.safetensors"])


def test_without_a_network_the_cache_serves(hub, monkeypatch, capsys):
    commit = hub.add(REPO, FILES)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "unset the `HF_HUB_OFFLINE` environment variable" in line(local_model, REPO)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    path = local_model(REPO)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert local_model(REPO) == path
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)

    hub.faults["/api/"] = 500, {}
    capsys.readouterr()
    assert local_model(REPO) == path
    assert "127.0.0.1 failed: " in (text := capsys.readouterr().err)
    assert text.endswith(f"takes commit {commit[:7]} of the cache\n")
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert local_model(REPO) == path
    assert "not on this machine, and 127.0.0.1 failed: " in line(local_model, "Qwen/Qwen3-4B")


@pytest.mark.parametrize(
    ("place", "status", "headers", "expected"),
    [
        (
            "/resolve/",
            401,
            {"X-Error-Code": "GatedRepo"},
            "its licence must be accepted first, at ",
        ),
        (
            "/api/",
            404,
            {"X-Error-Code": "RepoNotFound"},
            "no such directory here, and no such model",
        ),
        ("/resolve/", 503, {}, "127.0.0.1 failed: "),
    ],
)
def test_a_refusal_is_one_line(hub, monkeypatch, place, status, headers, expected):
    hub.add(REPO, FILES)
    hub.faults[place] = status, headers
    assert expected in line(local_model, REPO)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    line(local_model, REPO)  # without the token in it
    hub.faults.clear()
    assert load_model(REPO)[1]


def test_an_architecture_is_refused_before_its_weights(hub):
    config = json.loads(FILES["config.json"]) | {"model_type": "gpt_oss"}
    hub.add(REPO, FILES | {"config.json": json.dumps(config).encode()})
    assert f"{REPO}: config.json: model_type = 'gpt_oss': expected 'qwen3'" in line(find, REPO)
    hub.add("a/b-GGUF", {"x.gguf": b"GGUF"}, gguf={"architecture": "mamba"})
    assert "architecture 'mamba': expected 'qwen3'" in line(find, "a/b-GGUF/x.gguf")
    assert not hub.sent["model.safetensors"] and not hub.sent["x.gguf"]


def test_repositories_without_safetensors(hub):
    quantised = {f"x-Q{n}.gguf": b"GGUF" for n in range(5)}
    hub.add("a/b-GGUF", quantised)
    text = line(local_model, "a/b-GGUF")
    names = ", ".join(f"a/b-GGUF/x-Q{n}.gguf" for n in range(3))
    assert text == f"a/b-GGUF: weights are in GGUF files; name one: {names} and 2 more"
    commit = hub.add("a/b-GGUF", quantised)
    path = local_model("a/b-GGUF/x-Q2.gguf")
    assert path.read_bytes() == b"GGUF" and find("a/b-GGUF/x-Q2.gguf").title == "x-Q2.gguf"
    hub.requests.clear()
    assert local_model(f"a/b-GGUF@{commit}/x-Q2.gguf") == path and not hub.requests
    assert "no such file in a/b-GGUF" in line(local_model, "a/b-GGUF/x-Q9.gguf")

    parts = {f"y-0000{n}-of-00003.gguf": b"GGUF" for n in (1, 2, 3)}
    hub.add("a/split", parts | {"y.gguf": b"GGUF", "z-00002-of-00003.gguf": b"GGUF"})
    first = local_model("a/split/y-00001-of-00003.gguf")
    assert {file.name for file in first.parent.iterdir()} == set(parts)


def test_shards_are_those_of_the_index(hub):
    first, second = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    index = json.dumps({"weight_map": {"a": first, "b": second}}).encode()
    sharded = {name: FILES[name] for name in NAMES} | {module.INDEX: index}
    decoys = {"consolidated-00001-of-00001.safetensors": b"0", "consolidated.safetensors": b"0"}
    hub.add(REPO, sharded | decoys | {first: b"1", second: b"2"})
    path = local_model(REPO)
    assert {file.name for file in path.iterdir()} == {*sharded, first, second}


def test_a_download_that_breaks_goes_on_with_the_next_command(hub):
    hub.add(REPO, FILES)
    hub.cuts["model.safetensors"] = [0] * 6  # as often as huggingface_hub tries
    assert "127.0.0.1 failed: " in line(local_model, REPO)
    assert find(REPO).missing == {"model.safetensors": len(FILES["model.safetensors"])}
    tokenizer_bytes = hub.sent["tokenizer.json"]
    assert load_model(REPO)[1] and hub.sent["tokenizer.json"] == tokenizer_bytes


def test_where_a_model_is_named_a_hub_id_will_do(hub, sandbox, tmp_path, monkeypatch, capsys):
    commit = hub.add(REPO, FILES)
    pinned = f"{REPO}@{commit}"
    policy = policies.parse(f"{REPO}:turns=3", ())
    path = local_model(REPO)
    assert policy.kind == "checkpoint" and policy.base == str(path) and policy.text.startswith(REPO)
    assert policy.settings["turns"] == 3
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


def test_a_plan_reads_config_json_alone(hub, monkeypatch):
    config = json.loads(FILES["config.json"]) | {"num_hidden_layers": 7}
    files = FILES | {"config.json": json.dumps(config).encode()}
    commit = hub.add("a/b", files)
    settings = load_config("nano", {"model.path": "a/b"})
    text, fits = plan(settings, 1, None, "4090")
    assert fits and text.startswith(f"a/b@{commit[:7]}: 0.01 GB to download\n")
    assert set(hub.sent) == {"config.json"}
    hub.faults["/api/"] = 500, {}
    assert "127.0.0.1 failed: " in line(plan, settings, 1, None, "4090")
    text, fits = plan(load_config("nano", {"model.path": REPO}), 1, None, "h100")
    assert "planned with the sizes of the preset" in text and "8.19 B numbers" in text
    hub.faults.clear()
    hub.add("a/b-GGUF", {"x.gguf": b"GGUF"})
    planned = load_config("nano", {"model.path": "a/b-GGUF/x.gguf"})
    assert "plan with the repository that it was converted from" in line(
        plan, planned, 1, None, "4090"
    )


def test_a_run_keeps_the_commit_it_began_with(hub, make_training, tmp_path, monkeypatch):
    commit = hub.add(REPO, FILES)
    config = load_config("nano", {"model.path": REPO})
    fetched = fetch_policy(config, Ranks())
    assert fetched.model.path == f"{REPO}@{commit}"
    hub.add(REPO, FILES | {"README.md": b"new"})
    hub.requests.clear()
    assert fetch_policy(fetched, Ranks()) == fetched and not hub.requests
    local = load_config("nano", {"model.path": str(NANO)})
    assert fetch_policy(local, Ranks()) == local

    settings = {"model.path": fetched.model.path, "grpo.steps": 1, "lora.rank": 2}
    run = make_training("run", settings)
    assert run.train() and not hub.requests
    assert f'path = "{REPO}@{commit}"' in (tmp_path / "run" / "config.toml").read_text()
    adapter = json.loads((tmp_path / "run" / "adapter" / "adapter_config.json").read_text())
    assert (adapter["base_model_name_or_path"], adapter["revision"]) == (REPO, commit)
    assert (tmp_path / "run" / "tokenizer" / "tokenizer.json").exists()  # the report's

    # torchrun starts the command as it was given again, which goes on with the commit of the run.
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    again = ["--run.root", str(tmp_path), "--run.name", "run", "--model.path", REPO]
    config, _, resumed = choose_run(parse(again))
    assert resumed and config.model.path == f"{REPO}@{commit}"


def environment(hub, cache):
    """Returns variables with which a process asks the hub of a test."""
    return os.environ | {
        "HF_ENDPOINT": hub.url,
        "HF_HUB_CACHE": str(cache),
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_XET": "1",
        "PYTHONPATH": str(ROOT),
    }


@pytest.mark.slow
def test_one_rank_of_a_node_downloads(hub, tmp_path):
    commit = hub.add(REPO, FILES)
    hub.slow_s = 0.02
    code = f"""
import os
from nanorchestra.settings import load_config
from nanorchestra.training.build import fetch_policy
from nanorchestra.training.distributed import Ranks
os.environ["RANK"] = os.environ["LOCAL_RANK"] = "0" if os.fork() else "1"
ranks = Ranks.start()
config = fetch_policy(load_config("nano", {{"model.path": "{REPO}"}}), ranks)
print(config.model.path)
ranks.close()
"""
    variables = environment(hub, tmp_path / "cache")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    variables |= {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines() == [f"{REPO}@{commit}"] * 2, done.stderr
    assert len([text for text in hub.requests if text.startswith("HEAD /Qwen")]) == len(FILES)
    assert len([text for text in hub.requests if text.startswith("GET /Qwen")]) == len(FILES)
