"""A served orchestrator as the model of serve.py, and as an expert."""

from __future__ import annotations

import httpx
import openai
from running_server import Running
from scripted import EchoTool

import serve
from nanorchestra.serving import orchestrate
from nanorchestra.tools.sandbox import Sandbox
from tools import load_tools

ORCHESTRATOR = """
[[tools]]
kind = "expert"
name = "orchestra"
description = "d"
expert = "nano"
[experts.nano]
endpoint = "here"
model = "nano+tools"
usd = [1, 1]
[endpoints.here]
base_url = "{}"
"""


def test_an_orchestrator_is_asked_by_another_one(running, tmp_path, capsys):
    """It has tools of its own, takes no others, and says that it is slow."""
    (tmp_path / "orchestra.toml").write_text(ORCHESTRATOR.format(f"{running.base}/v1"))
    model = "--model", f"nano+tools@{running.base}/v1"
    assert serve.main([*model, "--ask", "!ask"]) == 0
    out, err = capsys.readouterr()
    assert "answer Answer: fourty-two" in out and err.count("\n") == 1
    assert "shows nothing before its answer, which may take minutes, 600 s at most" in err
    assert serve.main([*model, "--tools", "mine.toml", "--ask", "!ask"]) == 2
    assert "leave out --tools and --index: it has tools of its own" in capsys.readouterr().err
    with Sandbox() as sandbox:
        (orchestra,) = load_tools(tmp_path / "orchestra.toml", sandbox)
    assert "orchestra: nano+tools plays a whole loop" in capsys.readouterr().err
    assert orchestra.call({"task": "!ask"}).content == "Answer: fourty-two, or so."


def test_a_silent_stream_has_comments_that_clients_ignore(make_engine, monkeypatch):
    """A tool takes a second, in which nothing was sent: a read time-out could end the answer."""
    monkeypatch.setattr(orchestrate, "KEEP_S", 0.1)
    server = Running(make_engine(), EchoTool(seconds=1.0, blocking=True))
    try:
        client = openai.OpenAI(base_url=f"{server.base}/v1", api_key="none", max_retries=0)
        messages = [{"role": "user", "content": "!ask"}]
        body = {"model": "nano+tools", "messages": messages, "stream": True}
        text = ""
        for chunk in client.chat.completions.create(**body):
            text += "".join(choice.delta.content or "" for choice in chunk.choices)
        assert text == "Answer: fourty-two, or so."
        raw = httpx.post(f"{server.base}/v1/chat/completions", json=body, timeout=60).text
        assert "\n\n: still at work\n\n" in raw and raw.endswith("[DONE]\n\n")
    finally:
        server.stop()


def test_silent_answers_leave_the_server_as_it_was(make_engine, monkeypatch):
    """Two answers whose tool takes longer than a silence may, each at once and as a stream."""
    monkeypatch.setattr(orchestrate, "KEEP_S", 0.1)
    server = Running(make_engine(), EchoTool(seconds=0.5, blocking=True))
    body = {"model": "nano+tools", "messages": [{"role": "user", "content": "!ask"}]}
    try:
        for stream in (False, False, True, True):
            url = f"{server.base}/v1/chat/completions"
            answer = httpx.post(url, json=body | {"stream": stream}, timeout=60)
            assert answer.status_code == 200 and "fourty-two" in answer.text, answer.text
    finally:
        server.stop()
