"""Web search against a scripted Tavily: documents, prices, and every fault."""

from __future__ import annotations

import pytest
from openai_server import openai_server

from nanorchestra.errors import UserError
from nanorchestra.tools import http
from nanorchestra.tools.search import WebSearch

KEY = "tvly-secret"
LONG = "The tower is 330 m high. " * 10
HITS = [
    {"url": "http://b", "title": "B", "content": "of b", "score": 0.9, "raw_content": LONG},
    {"url": "http://a", "title": "A", "content": "of a", "score": 0.4, "raw_content": "cookies?"},
    {"url": "http://c", "title": None, "content": "of c", "score": 0.1, "raw_content": None},
]


@pytest.fixture
def tavily(monkeypatch):
    monkeypatch.setenv("TAVILY_API_KEY", KEY)
    monkeypatch.setattr(http.random, "uniform", lambda *_: 0.0)
    with openai_server() as server:
        server.answer = lambda body: {"results": HITS, "response_time": 1}
        yield server


@pytest.fixture
def make(tavily):
    """make(...) a tool that asks the scripted server."""
    return lambda **more: WebSearch("web", "", **{"pages": 2, "base_url": tavily.url} | more)


def test_pages_come_best_first_and_are_billed(tavily, make):
    web = make()
    result = web.call({"query": "tower " * 100})
    best, other = result.content.split("\n\n")
    assert best.startswith("B\nhttp://b (score 0.90)\nThe tower is 330 m") and LONG in best
    assert other == "A\nhttp://a (score 0.40)\nof a", "more than asked for is left out"
    assert result.findings == {"documents": [other, best]}
    assert result.cost_usd == web.most_usd({}) == 0.016 and result.latency_s > 0
    (asked,) = tavily.bodies
    assert len(asked["query"]) == 400 and asked["max_results"] == 2
    assert asked["include_raw_content"] == "text"
    assert tavily.headers[0]["Authorization"] == f"Bearer {KEY}"


def test_every_fault_is_a_short_error_and_the_next_call_works(tavily, make):
    web, answer = make(), tavily.answer
    for status, reply, says in (
        (401, {"detail": KEY}, "401"),
        (500, b"<html>", "500"),
        (200, b"<html>", "JSON"),
        (200, {"answer": 1}, "results"),
    ):
        tavily.status, tavily.answer = status, lambda body, r=reply: r
        tavily.bodies.clear()
        result = web.call({"query": "q"})
        begun = status == 200 and not isinstance(reply, bytes)  # some reply, if not the right one
        assert result.error and result.infrastructure and says in result.content, result
        assert result.cost_usd == (0.016 if begun else 0.0), result
        assert len(result.content) < 300 and KEY not in result.content
        assert len(tavily.bodies) == (3 if status == 500 else 1)
    tavily.status, tavily.answer = 200, lambda body: {"results": []}
    assert web.call({"query": "r"}).content == "nothing found"
    tavily.answer = answer
    assert "(score 0.10)\nof c" in make(pages=3).call({"query": "q"}).content


def test_a_missing_key_is_named(make, monkeypatch):
    monkeypatch.delenv("TAVILY_API_KEY")
    with pytest.raises(UserError, match="TAVILY_API_KEY is not set"):
        make()
