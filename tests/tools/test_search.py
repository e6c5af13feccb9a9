"""Web search against a scripted Tavily: what it is asked, and documents."""

from __future__ import annotations

import pytest
from openai_server import openai_server

from nanorchestra.errors import UserError
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


def test_scores_are_numbers_or_nothing_and_what_is_found_may_be_nothing(tavily, make):
    for number, (score, shown) in enumerate((("1" + "0" * 400, 0.0), ("NaN", 0.0), ("0.5", 0.5))):
        hits = f'{{"results": [{{"url": "u", "content": "text", "score": {score}}}]}}'
        tavily.answer = lambda body, hits=hits: hits.encode()
        assert f"u (score {shown:.2f})" in make().call({"query": f"q{number}"}).content
    tavily.answer = lambda body: {"results": []}
    assert make().call({"query": "r"}).content == "nothing found"


def test_a_missing_key_is_named(make, monkeypatch):
    monkeypatch.delenv("TAVILY_API_KEY")
    with pytest.raises(UserError, match="TAVILY_API_KEY is not set"):
        make()
