"""One chat completion of a scripted server: what it returns, what is tried again, what is told."""

from __future__ import annotations

import time
from email.utils import formatdate

import pytest
from openai_server import openai_server, said

from nanorchestra.records import Price
from nanorchestra.tools import http, models
from nanorchestra.tools.endpoint import Endpoint
from nanorchestra.tools.models import Expert
from nanorchestra.tools.spending import Spending

KEY = "sk-secret/key"
BODY = {"model": "m", "messages": [{"role": "user", "content": "x" * 300}]}


def chat_completion(url, body, timeout_s=120.0):
    return Endpoint(url, "OPENAI_API_KEY").complete(body, timeout_s)


@pytest.fixture
def waits(monkeypatch):
    """The seconds between the tries, which pass at once."""
    waited = []
    monkeypatch.setattr(http.time, "sleep", waited.append)
    return waited


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    with openai_server() as served:
        yield served


def test_a_completion_is_a_message_and_its_tokens(server):
    server.answer = lambda body: said("hi", [("f", "{}")], "tool_calls", (7, 2), reasoning="r")
    reply = chat_completion(server.url + "/", {"model": "m"})
    message = reply.content
    assert (message["content"], message["reasoning"], reply.tokens) == ("hi", "r", (7, 2))
    assert (message["finish_reason"], reply.retries) == ("tool_calls", 0)
    assert message["tool_calls"][0]["function"] == {"name": "f", "arguments": "{}"}
    assert server.bodies == [{"model": "m"}]
    assert server.headers[0]["Authorization"] == f"Bearer {KEY}"


@pytest.mark.parametrize(
    "content, text",
    [
        ([{"type": "text", "text": "a"}, "b", {"type": "image_url"}], "ab"),
        (7, "7"),
        (None, ""),
        ("half \ud800", "half \ufffd"),
    ],
)
def test_content_of_any_form_is_text_that_can_be_written(server, content, text):
    server.answer = lambda body: said(content)
    assert chat_completion(server.url, BODY).content["content"] == text


@pytest.mark.parametrize("usage", [None, {}, {"prompt_tokens": None}, {"prompt_tokens": "9"}, 3])
def test_tokens_that_the_reply_does_not_state_are_counted(server, usage):
    server.answer = lambda body: said("y" * 60) | {"usage": usage}
    given, written = chat_completion(server.url, BODY).tokens
    assert 75 <= given <= 150 and 15 <= written <= 60


NONSENSE = {
    "no JSON": b"hello",
    "an error": {"error": {"message": "quota", "code": 7}},
    "a list": [],
    "no choice": {"choices": []},
    "no message": {"choices": [{}]},
    "a call without a name": said(tool_calls=[{"function": {}}]),
}


@pytest.mark.parametrize("what", NONSENSE)
def test_what_is_no_completion_is_an_error_in_one_line_at_once(server, what):
    server.answer = lambda body: NONSENSE[what]
    reply = chat_completion(server.url, BODY)
    assert reply.problem and "\n" not in reply.problem and len(server.bodies) == 1
    assert ("quota" in reply.problem) == what.startswith("an error")
    # A reply of a model is billed, even if it cannot be read; a gateway's page is not.
    written = what in ("a list", "no choice", "no message", "a call without a name")
    assert (reply.tokens > (0, 0)) == written


@pytest.mark.parametrize("status, tries", [(500, 3), (429, 3), (401, 1)])
def test_a_refusal_is_tried_again_if_it_may_pass_and_told_without_the_key(
    server, waits, status, tries
):
    server.status = status
    server.answer = lambda body: f"the model\n`big` and the key {KEY} {'x' * 999}".encode()
    reply = chat_completion(server.url, {})
    assert len(server.bodies) == tries and len(reply.problem) <= 300
    assert reply.problem.startswith(f"HTTP {status}: the model `big` and the key ... x")
    assert len(waits) == tries - 1 == reply.retries and all(1 <= w <= 4 for w in waits)
    assert 0 <= reply.waited < reply.seconds  # the wait itself is not slept here
    assert (reply.waited > 1e-4) == (tries > 1)


def test_the_wait_is_as_long_as_the_server_says_but_within_the_time_out(server, waits):
    for value, low, high in (("7", 7, 7), (formatdate(time.time() + 30, usegmt=True), 25, 30)):
        waits.clear()
        server.status, server.reply_headers = 429, {"Retry-After": value}
        assert chat_completion(server.url, {}).problem
        assert len(waits) == 2 and all(low <= wait <= high for wait in waits)
    waits.clear()
    server.reply_headers = {"Retry-After": "86400"}
    assert chat_completion(server.url, {}).problem.startswith("HTTP 429")
    assert not waits


def test_a_missing_key_is_named(server, monkeypatch, capsys):
    monkeypatch.delenv("OPENAI_API_KEY")
    monkeypatch.setattr(models, "TOLD", set())
    endpoint = Endpoint(server.url, "OPENAI_API_KEY")
    for rank in ("1", "0"):
        monkeypatch.setenv("RANK", rank)
        for _ in range(2):
            Expert("e", endpoint, "gpt", Price(0, 0), Spending()).ask("hi", "e")
    assert capsys.readouterr().err == "gpt needs OPENAI_API_KEY, which is not set\n"
    server.status = 401
    problem = chat_completion(server.url, {}).problem
    assert problem.startswith("the environment variable OPENAI_API_KEY is not set")
    assert "Authorization" not in server.headers[0]


def test_an_endpoint_that_is_not_there_is_tried_three_times_and_named(waits):
    reply = chat_completion("http://127.0.0.1:9/v1", {})
    assert reply.problem == "no connection (Connection refused)"
    assert reply.retries == len(waits) == 2


@pytest.mark.parametrize(
    "model, says, told",
    [
        ("r", "r redirected", "r redirected"),
        ("big.1", "big.1 redirected, big.1x.", "c redirected, big.1x."),
    ],
)
def test_the_models_name_is_hidden_and_no_other_word_is_changed(server, model, says, told):
    server.status, server.answer = 400, lambda body: says.encode()
    expert = Expert("c", Endpoint(server.url), model, Price(1, 1), Spending())
    assert expert.ask("hi", "c").content == f"Error: c did not answer: HTTP 400: {told}"
