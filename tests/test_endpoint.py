"""`serve.py --model MODEL@URL`: loop, tools, prices and server with a model of another server."""

from __future__ import annotations

import io
import json
import socket
import sys
import threading

import pytest
from openai import APIStatusError, OpenAI
from openai_server import openai_server, said, told
from running_server import wait

import serve
from nanorchestra.serving import api as serving
from nanorchestra.tools import http

RUN = ("python", json.dumps({"code": "print(6 * 7)"}))
TOOLS = """
[[tools]]
kind = "code"
name = "python"
description = "Runs Python."
usd_per_call = 0.5
"""


def reply(body):
    """Calls Python, if there is any, and says what it reads."""
    last = body["messages"][-1]
    if last["role"] == "tool":
        return said(f"It is {last['content']}", usage=(300, 12), reasoning="so")
    if "tools" not in body:
        return said("No tools.", usage=(20, 2))
    return said("I look.", [RUN], usage=(200, 30), reasoning_content="I run it")


@pytest.fixture
def endpoint(monkeypatch):
    monkeypatch.setattr(http.random, "uniform", lambda *_: 0.0)  # no wait between the tries
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with openai_server() as served:
        served.answer = reply
        yield served


@pytest.fixture
def tools(tmp_path):
    """The name of a catalogue of one tool."""
    (tmp_path / "tools.toml").write_text(TOOLS)
    return str(tmp_path / "tools.toml")


def test_a_pipe_of_questions_and_commands(endpoint, tools, monkeypatch, capsys):
    """The second question follows the first, and the third is under a limit."""
    lines = ["What is 6 * 7?", "And again?", "/prefer usd=0.4", "And now?"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(lines)))
    model = f"big:1b@{endpoint.url}:input=1:output=10"
    assert serve.main(["--model", model, "--tools", tools, "--temperature", "0.5"]) == 0
    out, err = capsys.readouterr()
    assert "\n  think  I run it" in out and "\n  answer It is 42" in out
    # 500 tokens read and 42 written, and a call.
    assert "cost   $0.501, " in out and " 2 turns\n" in out and "python (1): $0.5, " in out
    assert "big:1b at http" in err and "$1 in, $10 out per million tokens; any question" in err
    first, _, again = endpoint.bodies[:3]
    assert (first["model"], first["temperature"]) == ("big:1b", 0.5) and "seed" not in first
    said_before = [message["content"] for message in again["messages"]]
    assert said_before == ["What is 6 * 7?", "It is 42", "And again?"]
    limited = endpoint.bodies[5]["messages"]
    assert limited[-2]["tool_calls"] and "refused python" in limited[-1]["content"]


def test_over_http_the_loop_alone_is_served(endpoint, tools, monkeypatch):
    started = []

    def run(server, port):
        listening = socket.create_server(("127.0.0.1", 0))
        started.extend([server, f"http://127.0.0.1:{listening.getsockname()[1]}/v1"])
        server.run([listening])

    monkeypatch.setattr(serving, "serve_http", run)
    model = f"big@{endpoint.url}:input=1:output=10"
    arguments = serve.parse(["--model", model, "--tools", tools, "--http"])
    thread = threading.Thread(target=serve.play, args=(arguments,))
    thread.start()
    wait(lambda: len(started) == 2 and started[0].started)
    server, url = started
    client = OpenAI(base_url=url, api_key="none", max_retries=0)

    def ask(model="big+tools", **more):
        messages = [{"role": "user", "content": "What is 6 * 7?"}]
        return client.chat.completions.create(model=model, messages=messages, **more)

    try:
        assert [each.id for each in client.models.list()] == ["big+tools"]
        whole = ask(temperature=0.25, metadata={"usd": "2"})
        assert whole.choices[0].message.content == "It is 42"
        assert whole.choices[0].message.reasoning_content == "I run it\n\nso"
        assert whole.nanorchestra["cost_usd"] == pytest.approx(0.50092, rel=1e-3)
        assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (500, 42)
        assert endpoint.bodies[0]["temperature"] == 0.25 and "seed" not in endpoint.bodies[0]
        ask(seed=7)
        assert endpoint.bodies[-1]["seed"] == 7 and "temperature" not in endpoint.bodies[-1]
        endpoint.answer = lambda body: told(reply(body))
        deltas = [chunk.choices[0].delta for chunk in ask(stream=True)]
        assert "".join(delta.content or "" for delta in deltas) == "I look.\n\nIt is 42"
        with pytest.raises(APIStatusError, match=r"model: it must be big\+tools"):
            ask("big")
        endpoint.status, endpoint.answer = 404, lambda body: {"error": {"message": "no big"}}
        with pytest.raises(APIStatusError, match="HTTP 404: no big"):
            ask()
    finally:
        server.should_exit = True
        thread.join(30)
    assert not thread.is_alive()
