"""A served orchestrator as an expert of another one."""

from __future__ import annotations

import httpx
import pytest
from running_server import Running
from scripted import ANSWER, EchoTool, call, play

from nanorchestra.agent.environment import ToolEnvironment
from nanorchestra.records import Preference, Task
from nanorchestra.serving import loop
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


class Priced(EchoTool):
    usd_per_call = 0.25


def test_a_limit_holds_for_the_tree_and_the_bill_is_its_sum(
    make_engine, nano_tokenizer, sandbox, monkeypatch, tmp_path
):
    """The inner orchestrator has what the outer one's calls leave, and says what it has spent."""
    records = []
    server = Running(
        make_engine(),
        Priced(seconds=0.3, blocking=True),
        record=lambda task, t: records.append((task, t)),
    )
    asks = call("!ask", "orchestra").replace('"text"', '"task"')
    monkeypatch.setattr(loop, "KEEP_S", 0.1)
    (tmp_path / "orchestra.toml").write_text(ORCHESTRATOR.format(f"{server.base}/v1"))
    (tool,) = load_tools(tmp_path / "orchestra.toml", sandbox)
    for limits, calls in (
        ({"usd": 0.5}, {"echo": 1}),
        ({"usd": 0.26}, {}),  # a tenth is kept back: the echo is refused
        ({"usd": 0.5, "seconds": 60.0, "never": ["echo"]}, {}),
        ({"usd": 1e-6}, None),
    ):
        task = Task("t", "question?", Preference(**limits))
        (t,), _ = play(nano_tokenizer, [asks, ANSWER], envs=[ToolEnvironment(task, [tool])])
        assert t.cost_usd <= limits["usd"], limits
        if calls is None:
            assert t.status == "user_limit" and len(records) == 3
            continue
        (result,) = t.turns[0].results
        inner, spent = records[-1]
        assert "fourty-two" in result.content and result.cost_usd == spent.cost_usd
        sampled = sum(t.sampled)  # at 2 dollars per million, what is read at 1
        assert t.cost_usd == pytest.approx(spent.cost_usd + (len(t.ids) + sampled) / 1e6)
        handed = inner.preference
        assert handed.usd <= limits["usd"] * 0.9 and handed.never == limits.get("never", [])
        assert spent.calls == calls
    body = {"model": "nano+tools", "messages": [{"role": "user", "content": "!ask"}]}
    url = f"{server.base}/v1/chat/completions"
    raw = httpx.post(url, json=body | {"stream": True}, timeout=60).text
    assert "\n\n: still at work\n\n" in raw, "no read time-out ends a stream of a slow tool"
    server.stop()
