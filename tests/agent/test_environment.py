"""What a call brings back, whatever the policy or a tool does."""

from __future__ import annotations

import pytest
from scripted import EchoTool, echoing, execute

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
    result = execute(echoing(EchoTool(blocking=blocking)), call)
    assert result.error and result.content.startswith("Error: ") and says in result.content
    assert result.cost_usd == 0.0 and not result.infrastructure


@pytest.mark.parametrize(
    "text, words, says",
    [
        ("x" * 20_000, None, "x" * 16_000 + "\n[16,000 of 20,000 characters]"),
        ("a b\n\nc d " * 750, None, None),  # 3,000 words
        ("a b\n\nc d " * 751, None, ("a b\n\nc d " * 750)[:-1] + "\n[3,000 of 3,004 words]"),
        ("one two three", 2, "one two\n[2 of 3 words]"),
        ("w" * 15 + " ", 5000, None),
    ],
)
def test_a_long_result_is_shortened_and_says_of_how_much(text, words, says):
    tool = EchoTool()
    if words:
        tool.result_words = words  # a setting of the tool
    content = execute(echoing(tool), ToolCall("echo", {"text": text})).content
    assert content == (says or text)
