"""One chat completion of a scripted server: what it returns, what is tried again, what is told."""

from __future__ import annotations

import pytest
from openai_server import openai_server, said

from nanorchestra.tools import experts
from nanorchestra.tools.experts import EndpointError, chat_completion

KEY = "sk-secret/key"


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.setattr(experts.time, "sleep", lambda seconds: None)  # between the tries
    with openai_server() as served:
        yield served


def test_a_completion_is_a_message_and_its_tokens(server):
    server.answer = lambda body: said("hi", [("f", "{}")], "tool_calls", (7, 2), reasoning="r")
    message, tokens = chat_completion(server.url + "/", {"model": "m"})
    assert (message["content"], message["reasoning"], tokens) == ("hi", "r", (7, 2))
    assert message["finish_reason"] == "tool_calls"
    assert message["tool_calls"][0]["function"] == {"name": "f", "arguments": "{}"}
    assert server.bodies == [{"model": "m"}]
    assert server.headers[0]["Authorization"] == f"Bearer {KEY}"
    server.answer = lambda body: {"choices": [{"message": {}}], "usage": None}
    assert chat_completion(server.url, {}) == ({"finish_reason": None}, (0, 0))


NONSENSE = {
    "no JSON": b"hello",
    "no choice": {"choices": []},
    "no message": {"choices": [{}]},
    "a number": said(7),
    "a call without a name": said(tool_calls=[{"function": {}}]),
    "no count": said("42", usage=("many", 1)),
}


@pytest.mark.parametrize("what", NONSENSE)
def test_what_is_no_completion_is_an_error_in_one_line_at_once(server, what):
    server.answer = lambda body: NONSENSE[what]
    with pytest.raises(EndpointError) as error:
        chat_completion(server.url, {})
    assert "\n" not in str(error.value) and len(server.bodies) == 1


@pytest.mark.parametrize("status, tries", [(500, 3), (429, 3), (401, 1)])
def test_a_refusal_is_tried_again_if_it_may_pass_and_told_without_the_key(server, status, tries):
    server.status = status
    server.answer = lambda body: f"the model\n`big` and the key {KEY} {'x' * 999}".encode()
    with pytest.raises(EndpointError) as error:
        chat_completion(server.url, {})
    assert len(server.bodies) == tries and len(str(error.value)) <= 300
    assert str(error.value).startswith(f"HTTP {status}: the model `big` and the key ... x")


def test_an_endpoint_that_is_not_there_is_tried_three_times_and_named(server, monkeypatch):
    tries, post = [], experts.requests.post
    monkeypatch.setattr(experts.requests, "post", lambda *a, **k: tries.append(1) or post(*a, **k))
    with pytest.raises(EndpointError, match="^ConnectionError$"):
        chat_completion("http://127.0.0.1:9/v1", {})
    assert len(tries) == 3
