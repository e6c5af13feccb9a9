"""The search server: what it answers, what it refuses, and what a tool makes of its absence."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import requests
from openai_server import openai_server

from nanorchestra.errors import UserError
from nanorchestra.serving import retrieval
from nanorchestra.serving.http import listen
from nanorchestra.serving.retrieval import SearchServer
from nanorchestra.tools import index as index_module
from nanorchestra.tools.corpus import open_index
from nanorchestra.tools.index import Index, Passage
from tools import load_tools, main

ROOT = Path(__file__).resolve().parents[2]
JSON = {"Content-Type": "application/json"}
PASSAGES = [
    Passage("Gold is yellow.", "gold.md"),
    Passage("Iron rusts in water.", "iron.md"),
    Passage("Tin melts; na\u00efve \U0001f600 iron does not."),
]


@contextmanager
def served(index):
    """The address of a server of an index."""
    with listen("127.0.0.1", 0) as listening:
        server = SearchServer(index)
        thread = threading.Thread(target=server.run, args=([listening],))
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(20)
            assert not thread.is_alive(), "the server ends"


class Slow:
    """An index that answers the query itself, once `go` is set. `batches` are what it was asked."""

    count, about = len(PASSAGES), "slow"

    def __init__(self):
        self.go, self.batches = threading.Event(), []

    def search_all(self, queries, k):
        self.batches.append((k, list(queries)))
        self.go.wait(20)
        if "poison" in queries:
            raise RuntimeError("cannot\nbe embedded")
        return [[Passage(query)] * k for query in queries]


def test_a_server_finds_what_its_index_finds(tmp_path):
    index = Index.of(PASSAGES)
    with served(index) as address:
        remote = open_index(address + "/")
        for query, k in (
            ("iron", 3),
            ("IRON water", 1),
            ("", 1),
            ("zebra", 1000),
            ("iron\ud800", 2),
        ):
            assert remote.search(query, k) == index.search(query, k)
        entry = {"name": "wiki", "description": "d", "kind": "search", "passages": 2}
        (tmp_path / "t.json").write_text(json.dumps([entry | {"corpus": address}]))
        (tool,) = load_tools(tmp_path / "t.json", None)
        result = tool.call({"query": "yellow gold"})
        assert result.content == "Gold is yellow. [gold.md]" and not result.error and tool.blocking
        assert result.findings == {"documents": ["Gold is yellow. [gold.md]"]}
        remote.search("iron " * 300_000)  # it is cut
        health = requests.get(f"{address}/health", timeout=5).json()
        assert (health["status"], health["passages"], health["waiting"]) == ("ok", 3, 0)
        assert "3 passages, found by BM25" in health["index"] and health["searches"] == 9


def test_a_bad_request_is_one_line_and_harms_nothing():
    with served(Index.of(PASSAGES)) as address:
        for body, status, says in (
            (b"\xff", 400, "error parsing the body"),
            (b"[" * 100_000, 400, "error parsing the body"),
            (b"{}", 400, "query is missing"),
            (b'{"query": 7}', 400, "query is 7; it should be a valid string"),
            (b'{"query": "a", "k": 0}', 400, "k is 0; it should be greater than or equal to 1"),
            (b'{"query": "a", "k": 1000000000}', 400, "k is 1000000000; it should be less than"),
            (b'{"query": "a", "k": 1e400}', 400, "body is not JSON"),
            (b'{"query": "a", "limit": 3}', 400, "there is no limit"),
            (b'{"query": "%s"}' % (b"a" * (1 << 20)), 413, "Too Large"),
        ):
            answer = requests.post(f"{address}/search", body, headers=JSON, timeout=5)
            assert answer.status_code == status and says in answer.text, answer.text
            assert "\n" not in answer.text
        assert requests.post(f"{address}/search", b'{"query": "a"}', timeout=5).status_code == 415
        for method, path, status in (("GET", "/search", 405), ("POST", "/", 404)):
            assert requests.request(method, address + path, timeout=5).status_code == status
        foreign = requests.get(f"{address}/health", headers={"Host": "evil.example"}, timeout=5)
        assert foreign.status_code == 400
        whole = requests.post(
            f"{address}/search", b'{"query": "gold", "k": 2.0}', headers=JSON, timeout=5
        )
        assert [p["text"] for p in whole.json()["passages"]] == ["Gold is yellow."]


def test_waiting_queries_are_answered_together_and_a_bad_one_fails_alone(capsys):
    index = Slow()

    def ask(query, k):
        body = {"query": query, "k": k}
        return requests.post(f"{address}/search", json=body, timeout=20).json()

    with served(index) as address, ThreadPoolExecutor(12) as pool:
        first = pool.submit(ask, "first", 1)
        while not index.batches:
            time.sleep(0.01)
        asked = [(f"q{i}", 1 + i % 2) for i in range(10)] + [("poison", 1)]
        answers = [pool.submit(ask, *each) for each in asked]
        while requests.get(f"{address}/health", timeout=5).json()["waiting"] < 12:
            time.sleep(0.01)
        index.go.set()
        assert first.result()["passages"][0]["text"] == "first"
        *whole, poisoned = [answer.result() for answer in answers]
    for (query, k), answer in zip(asked, whole, strict=False):
        assert [p["text"] for p in answer["passages"]] == [query] * k
    assert poisoned == {"error": "the search failed: RuntimeError: cannot be embedded"}
    assert sorted(len(queries) for k, queries in index.batches if k == 2) == [5]
    assert capsys.readouterr().err.count("\n") == 1


def test_too_many_and_too_slow_ones_are_told_so(monkeypatch):
    monkeypatch.setattr(retrieval, "MOST_WAITING", 2)
    monkeypatch.setattr(retrieval, "ANSWER_S", 1.0)
    index = Slow()

    def ask(_):
        return requests.post(f"{address}/search", json={"query": "q"}, timeout=20)

    with served(index) as address, ThreadPoolExecutor(2) as pool:
        late = [pool.submit(ask, i) for i in range(2)]
        while requests.get(f"{address}/health", timeout=5).json()["waiting"] < 2:
            time.sleep(0.01)
        refused = ask(2)
        assert refused.status_code == 503 and "2 queries wait already" in refused.json()["error"]
        assert refused.headers["Retry-After"] == "1"
        assert [answer.result().status_code for answer in late] == [504, 504]
        index.go.set()
        assert ask(0).json()["passages"][0]["text"] == "q"


def test_a_dead_server_is_a_failure_of_the_infrastructure_in_bounded_time(tmp_path, monkeypatch):
    entry = {"name": "wiki", "description": "d", "kind": "search", "usd_per_call": 0.5}
    with served(Index.of(PASSAGES)) as address:
        (tmp_path / "t.json").write_text(json.dumps([entry | {"corpus": address}]))
        (tool,) = load_tools(tmp_path / "t.json", None)
    monkeypatch.setattr(index_module, "TIMEOUT_S", 0.5)
    start = time.monotonic()
    result = tool.call({"query": "gold"})
    assert result.error and result.infrastructure and result.cost_usd == 0
    assert result.content.startswith("Error: wiki: the search server does not answer: ")
    with pytest.raises(UserError, match=f"{address}: no search server answers .*serve-index DIR"):
        load_tools(tmp_path / "t.json", None)
    with openai_server() as other:
        other.answer = lambda body: {"choices": []}
        wrong = other.url.removesuffix("/v1")
        with pytest.raises(UserError, match=r"no search server answers \(not the reply"):
            open_index(wrong)
    with pytest.raises(UserError, match="it must be like http://127.0.0.1:8100"):
        open_index("http://h/path")
    assert time.monotonic() - start < 10


def test_a_server_that_cannot_start_says_why_in_one_line(tmp_path, capsys):
    corpus, port = tmp_path / "c.jsonl", ["--port", "0"]
    corpus.write_text('{"text": "gold"}\n')
    with listen("127.0.0.1", 0) as taken:
        busy = str(taken.getsockname()[1])
        for arguments, says in (
            (["none", "--port", busy], f"--port {busy}: Address already in use; give another\n"),
            ([str(corpus), "--host", "no.such.host.invalid"], "--host no.such.host.invalid"),
            ([str(tmp_path), *port], "no index; build it"),
        ):
            assert main(["serve-index", *arguments]) == 2
            error = capsys.readouterr().err
            assert error.startswith("tools.py: ") and says in error and error.count("\n") == 1


@pytest.mark.slow
def test_the_command_serves_until_ctrl_c(tmp_path):
    corpus = tmp_path / "c.jsonl"
    corpus.write_text('{"text": "gold is yellow", "source": "s"}\n')
    command = [sys.executable, ROOT / "tools.py", "serve-index", corpus, "--port", "0"]
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=ROOT, env=environment, **pipes) as process:
        lines = [process.stdout.readline() for _ in range(3)]
        assert lines[0] == "1 passages, found by BM25\n", lines
        address = lines[1].split(",")[0].removeprefix("served at ")
        assert open_index(address).search("gold")[0].source == "s"
        process.send_signal(signal.SIGINT)
        out, error = process.communicate(timeout=20)
    assert (process.returncode, error) == (0, "") and out.startswith("ended after 2 searches in ")
