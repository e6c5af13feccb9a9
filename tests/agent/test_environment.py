"""What a call brings back, whatever the policy or a tool does."""

from __future__ import annotations

import asyncio

import pytest
from scripted import EchoTool, echoing

from nanorchestra.agent.environment import MAX_OBSERVATION_CHARS
from nanorchestra.records import ToolCall


@pytest.mark.parametrize(
    "call, says",
    [
        (ToolCall("nothing", {}), "no tool named 'nothing'; the tools are echo"),
        (ToolCall("echo", {}), "echo: 'text' is a required property"),
        (ToolCall("echo", {"text": "a", "b": 1}), "('b' was unexpected)"),
        (ToolCall("echo", "hello"), "echo: 'hello' is not of type 'object'"),
        (ToolCall("", {}, error="not valid JSON"), "not valid JSON"),
        (ToolCall("echo", {"text": "raise"}), "echo failed: RuntimeError: broken tool"),
    ],
)
@pytest.mark.parametrize("blocking", [False, True])
def test_a_call_that_cannot_be_run_says_why_and_costs_nothing(call, says, blocking):
    result = asyncio.run(echoing(EchoTool(blocking=blocking)).execute(call))
    assert result.error and result.content.startswith("Error: ") and says in result.content
    assert result.cost_usd == 0.0 and not result.infrastructure


def test_a_long_observation_is_cut():
    call = ToolCall("echo", {"text": "x" * 20_000})
    content = asyncio.run(echoing().execute(call)).content
    assert content == "x" * MAX_OBSERVATION_CHARS + "\n[cut]"
