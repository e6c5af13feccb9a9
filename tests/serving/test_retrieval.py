"""The search server: what it answers, what it refuses, and what a tool makes of its absence."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import requests
from running_server import wait

from nanorchestra.serving import retrieval
from nanorchestra.serving.http import listen
from nanorchestra.serving.retrieval import SearchServer
from nanorchestra.tools import index as index_module
from nanorchestra.tools.corpus import open_index
from nanorchestra.tools.index import Index, Passage
from tools import load_tools

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
        self.batches.append(queries)
        self.go.wait(20)
        if "poison" in queries:
            raise RuntimeError("cannot\nbe embedded")
        return [[Passage(query)] * k for query in queries]


def waiting(address):
    return requests.get(f"{address}/health", timeout=5).json()["waiting"]


def test_a_server_finds_what_its_index_finds_and_a_dead_one_is_the_infrastructures_failure(
    tmp_path, monkeypatch
):
    """A bad request is one line and harms nothing."""
    index = Index.of(PASSAGES)
    entry = {"name": "wiki", "description": "d", "kind": "search", "usd_per_call": 0.5}
    with served(index) as address:
        for body, status, says in (
            (b"[" * 100_000, 400, "error parsing the body"),
            (b'{"query": "a", "k": 1000000000}', 400, "k is 1000000000; it should be less than"),
            (b'{"query": "a", "limit": 3}', 400, "there is no limit"),
            (b'{"query": "%s"}' % (b"a" * (1 << 20)), 413, "Too Large"),
        ):
            headers = {"Content-Type": "application/json"}
            answer = requests.post(f"{address}/search", body, headers=headers, timeout=5)
            assert answer.status_code == status and says in answer.text, answer.text
            assert "\n" not in answer.text
        remote = open_index(address + "/")
        for query, k in (("iron", 3), ("IRON water", 1), ("", 1), ("zebra", 1000)):
            assert remote.search(query, k) == index.search(query, k)
        (tmp_path / "t.json").write_text(json.dumps([entry | {"corpus": address}]))
        (tool,) = load_tools(tmp_path / "t.json", None)
        result = tool.call({"query": "yellow gold"})
        assert result.content.startswith("Gold is yellow. [gold.md]") and result.cost_usd == 0.5
    monkeypatch.setattr(index_module, "TIMEOUT_S", 0.5)
    result = tool.call({"query": "gold"})
    assert result.error and result.infrastructure and result.cost_usd == 0
    assert result.content.startswith("Error: wiki failed: EndpointError: no connection")


def test_waiting_queries_are_answered_together_and_a_bad_one_fails_alone(monkeypatch):
    """One more than may wait is told to come again."""
    monkeypatch.setattr(retrieval, "MOST_WAITING", 8)
    index = Slow()

    def ask(query):
        return requests.post(f"{address}/search", json={"query": query, "k": 2}, timeout=20)

    with served(index) as address, ThreadPoolExecutor(8) as pool:
        answers = [pool.submit(ask, "first")]
        wait(lambda: index.batches)
        queries = ["first", *(f"q{i}" for i in range(6)), "poison"]
        answers += [pool.submit(ask, query) for query in queries[1:]]
        wait(lambda: waiting(address) == 8)
        refused = ask("more")
        assert refused.status_code == 503 and refused.headers["Retry-After"] == "1"
        index.go.set()
        *whole, poisoned = [answer.result().json() for answer in answers]
    found = [[passage["text"] for passage in answer["passages"]] for answer in whole]
    assert found == [[query] * 2 for query in queries[:-1]]
    assert poisoned == {"error": "the search failed: RuntimeError: cannot be embedded"}
    assert [len(batch) for batch in index.batches][:2] == [1, 7]
