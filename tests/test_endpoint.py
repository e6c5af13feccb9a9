"""`serve.py --model MODEL@URL`: loop, tools, prices and server with a model of another server."""

from __future__ import annotations

import io
import json
import re
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
    (tmp_path / "tools.toml").write_text(TOOLS)
    return str(tmp_path / "tools.toml")


def test_a_pipe_of_questions_and_commands(endpoint, tools, monkeypatch, capsys):
    """The second question follows the first, and the third is under a limit."""
    lines = ["What is 6 * 7?", "And again?", "/prefer usd=0.4", "And now?", "/tools python", "Hm?"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(lines)))
    model = f"big:1b@{endpoint.url}:input=1:output=10"
    assert serve.main(["--model", model, "--tools", tools, "--temperature", "0.5"]) == 0
    out, err = capsys.readouterr()
    for line in (
        "think  I run it",
        "text   I look.",
        "result 42 ",
        "think  so",
        "answer It is 42",
        "answer No tools.",
    ):
        assert f"\n  {line}" in out
    # 500 tokens read and 42 written, and a call.
    assert "cost   $0.501, " in out and " 2 turns\n" in out and "python (1): $0.5, " in out
    assert "big:1b at http" in err and "$1 in, $10 out per million tokens; any question" in err
    first, _, again = endpoint.bodies[:3]
    assert (first["model"], first["temperature"]) == ("big:1b", 0.5) and "seed" not in first
    said_before = [message["content"] for message in again["messages"]]
    assert said_before == ["What is 6 * 7?", "It is 42", "And again?"]
    limited = endpoint.bodies[5]["messages"]
    assert limited[-2]["tool_calls"] and "refused python" in limited[-1]["content"]
    assert "tools" not in endpoint.bodies[-1] and len(endpoint.bodies) == 7


def test_what_the_server_refuses_is_one_line_in_its_words(endpoint, capsys):
    for status, words, says in (
        (401, {"error": {"message": "No key"}}, "OPENAI_API_KEY is not set; HTTP 401: No key"),
        (400, {"object": "error", "message": "max_tokens is too large"}, "HTTP 400: max_tokens is"),
    ):
        endpoint.status, endpoint.answer = status, lambda body, words=words: words
        assert serve.main(["--model", f"m@{endpoint.url}", "--ask", "x"]) == 1
        (line,) = [line for line in capsys.readouterr().out.splitlines() if "answer " in line]
        assert says in line and '"message' not in line
    endpoint.status, endpoint.answer = 200, reply
    for given in ({}, {"--temperature": 0.0, "--seed": 7}):
        options = [word for pair in given.items() for word in map(str, pair)]
        assert serve.main(["--model", f"m@{endpoint.url}", *options, "--ask", "x"]) == 0
        stated = {f"--{name}": endpoint.bodies[-1].get(name) for name in ("temperature", "seed")}
        assert {name: value for name, value in stated.items() if value is not None} == given
    capsys.readouterr()
    assert serve.main(["--model", "m@http://127.0.0.1:1/v1", "--ask", "x"]) == 1
    assert "no connection (Connection refused)" in capsys.readouterr().out
    at = f"m@{endpoint.url}"
    for arguments, wrong in (
        (["--model", f"{at}:turnz=3"], "input, output; did you mean turns?"),
        (["--model", at, "--top-k", "3"], "--top-k: leave it out"),
        (["--model", at, "--temperature", "-1"], "--temperature is -1; it must be 0 or more"),
    ):
        assert serve.main([*arguments, "--ask", "x"]) == 2
        assert wrong in capsys.readouterr().err


def test_a_name_without_an_address_is_told_the_three_forms(endpoint, monkeypatch, capsys):
    """The one that would work comes first, if a server listens where Ollama does."""
    served, hub, path = r"llama3\.2@\S*(http://\S*/v1|URL).*", "owner/name .*", "the path .*"
    for url, forms in (
        (endpoint.url, (served, hub, path)),
        ("http://127.0.0.1:1/v1", (path, hub, served)),
    ):
        monkeypatch.setattr(serve, "OLLAMA", url)
        assert serve.main(["--model", "llama3.2", "--ask", "x"]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        begin = r"serve\.py: --model llama3\.2: no such file; it must be "
        assert re.fullmatch(begin + "; (or )?".join(forms), line) and f"llama3.2@{url}" in line


def test_over_http_the_loop_alone_is_served(endpoint, tools, monkeypatch, capsys):
    started = []

    def run(server, port):
        started.append(server)
        listening = socket.create_server(("127.0.0.1", 0))
        started.append(f"http://127.0.0.1:{listening.getsockname()[1]}/v1")
        server.run([listening])

    monkeypatch.setattr(serving, "serve_http", run)
    model = f"big@{endpoint.url}:input=1:output=10"
    arguments = ["--model", model, "--tools", tools, "--http"]
    thread = threading.Thread(target=serve.play, args=(serve.parse(arguments),))
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
        first, *others = endpoint.bodies
        assert first["temperature"] == 0.25 and "temperature" not in ask(seed=7).nanorchestra
        assert not any("seed" in body for body in (first, *others))
        assert endpoint.bodies[-1]["seed"] == 7 and "temperature" not in endpoint.bodies[-1]

        seen = threading.Semaphore(0)

        def hesitant(body):
            """Waits for each word to be read before it sends the next."""
            for event in told(reply(body), size=3):
                yield event
                delta = event["choices"][0]["delta"] if isinstance(event, dict) else {}
                if {"content", "reasoning", "reasoning_content"} & delta.keys():
                    assert seen.acquire(timeout=10), f"{delta} did not come"

        endpoint.answer = hesitant
        content, reasoning, steps = "", "", []
        for chunk in ask(stream=True):
            delta, own = chunk.choices[0].delta, getattr(chunk, "nanorchestra", {})
            thought = getattr(delta, "reasoning_content", None) or ""
            content, reasoning = content + (delta.content or ""), reasoning + thought
            steps += [own[kind] for kind in ("call", "result", "status") if kind in own]
            for _ in filter(None, [delta.content, thought]):
                seen.release()
        assert (content, reasoning) == ("I look.\n\nIt is 42", "I run it\n\nso")
        assert "python" in steps[0] and steps[1]["content"] == "42" and steps[2] == "answered"

        with pytest.raises(APIStatusError, match="top_p: an endpoint is given temperature and"):
            ask(top_p=0.5)
        with pytest.raises(APIStatusError, match=r"model: it must be big\+tools"):
            ask("big")
        endpoint.status, endpoint.answer = 404, lambda body: {"error": {"message": "no big"}}
        with pytest.raises(APIStatusError, match="HTTP 404: no big"):
            ask()

        left = threading.Event()  # an attempt that the end of the server ends
        endpoint.status, endpoint.answer = 200, lambda body: left.wait(20) and said("late")
        refused = []

        def wait_for_it():
            try:
                ask()
            except APIStatusError as error:
                refused.append(error)

        asking = threading.Thread(target=wait_for_it)
        asking.start()
        wait(lambda: server.service.attempts)
        server.service.end()
        asking.join(10)
        left.set()
        assert refused[0].status_code == 503 and not server.service.attempts
    finally:
        server.should_exit = True
        thread.join(30)
    assert not thread.is_alive()
