"""A served orchestrator as the model of serve.py, and as an expert."""

from __future__ import annotations

from dataclasses import replace

import httpx
import openai
import pytest
from openai_server import openai_server, said
from running_server import Running
from scripted import ANSWER, EchoTool, call, play

import serve
from nanorchestra.agent.environment import ToolEnvironment
from nanorchestra.records import Preference, Task
from nanorchestra.serving import loop
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
    assert "shows no calls: an answer may take minutes, 600 s at most" in err
    assert serve.main([*model, "--tools", "mine.toml", "--ask", "!ask"]) == 2
    assert "leave out --tools and --index: it has tools of its own" in capsys.readouterr().err
    with Sandbox() as sandbox:
        (orchestra,) = load_tools(tmp_path / "orchestra.toml", sandbox)
    assert "orchestra: nano+tools plays a whole loop" in capsys.readouterr().err
    assert orchestra.call({"task": "!ask"}).content == "Answer: fourty-two, or so."


class Priced(EchoTool):
    usd_per_call = 0.25


def test_a_limit_holds_for_the_tree_and_the_bill_is_its_sum(make_engine, nano_tokenizer, tmp_path):
    """The inner orchestrator has what the outer one's calls leave, and says what it has spent."""
    records = []
    server = Running(make_engine(), Priced(), record=lambda task, t: records.append((task, t)))
    catalogue = tmp_path / "orchestra.toml"
    catalogue.write_text(ORCHESTRATOR.format(f"{server.base}/v1"))
    asks = call("!ask", "orchestra").replace('"text"', '"task"')
    try:
        with Sandbox() as sandbox:
            (tool,) = load_tools(catalogue, sandbox)
            for limits, says in (
                ({"usd": 0.5}, "fourty-two"),
                ({"usd": 0.26}, "fourty-two"),  # a tenth is kept back: the echo is refused
                ({"usd": 0.5, "seconds": 60.0}, "fourty-two"),
                ({"usd": 0.5, "never": ["echo"]}, "fourty-two"),
                ({"usd": 1e-6}, None),
                ({}, "fourty-two"),
            ):
                task = Task("t", "question?", Preference(**limits))
                (t,), _ = play(nano_tokenizer, [asks, ANSWER], envs=[ToolEnvironment(task, [tool])])
                usd = limits.get("usd", 9.0)
                assert t.cost_usd <= usd, limits
                if says is None:
                    assert t.status == "user_limit"
                    continue
                (result,) = t.turns[0].results
                inner, spent = records[-1]
                assert says in result.content and result.cost_usd == spent.cost_usd
                assert t.cost_usd == pytest.approx(spent.cost_usd + own_usd(t))
                handed = inner.preference
                assert handed.usd <= min(usd * 0.9, 1.0) and handed.never == limits.get("never", [])
                assert (handed.seconds or 60.0) <= 60.0
                echoed = not limits.get("never") and usd > 0.3
                assert spent.calls == ({"echo": 1} if echoed else {})
            assert len(records) == 5
            held = replace(tool, expert=replace(tool.expert, task_usd=0.1))
            result = held.call({"task": "!ask"})
            assert result.cost_usd == records[-1][1].cost_usd < 0.1
    finally:
        server.stop()


def own_usd(t):
    """What the ids of an attempt of `play` cost, at 1 and 2 dollars per million."""
    sampled = sum(t.sampled)
    return (len(t.ids) - sampled + 2 * sampled) / 1e6


def test_what_a_task_has_cost_that_failed_under_way_is_its_most(tmp_path):
    """It is asked once: each request may spend the whole limit."""
    catalogue = tmp_path / "orchestra.toml"
    with openai_server() as server, Sandbox() as sandbox:
        catalogue.write_text(ORCHESTRATOR.format(server.url))
        (tool,) = load_tools(catalogue, sandbox)
        for status, stated, usd in (
            (502, 0.5, 1.0),
            (400, 0.5, 0.0),
            (200, 0.5, 0.5),
            (200, 9.0, 1.0),  # more than it was allowed
            (200, -9.0, 15e-6),  # no cost: its tokens are counted
        ):
            count, reply = len(server.bodies), said("x") | {"nanorchestra": {"cost_usd": stated}}
            server.status, server.answer = status, lambda body, reply=reply: reply
            assert tool.call({"task": "?"}).cost_usd == pytest.approx(usd)
            assert len(server.bodies) == count + 1
    assert tool.call({"task": "?"}).cost_usd == 0, "nothing was sent"


def test_a_silent_stream_has_comments_that_clients_ignore(make_engine, monkeypatch):
    """A tool takes a second, in which nothing was sent: a read time-out could end the answer."""
    monkeypatch.setattr(loop, "KEEP_S", 0.1)
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
