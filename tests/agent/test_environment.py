"""What a call brings back, whatever the policy writes. What tools do: test_every_tool.py."""

from __future__ import annotations

import threading

import pytest
from scripted import EchoTool, echoing, execute

from nanorchestra.records import ToolCall, ToolResult


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
def test_a_call_that_cannot_be_run_says_why_and_costs_nothing(call, says):
    result = execute(echoing(EchoTool()), call)
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
        ("one two" + " " * 20_000, None, "one two"),
    ],
)
def test_a_long_result_is_shortened_in_its_thread_and_says_of_how_much(text, words, says):
    """Where 50 MB were split into words in the event loop, it stood still for seconds."""
    threads = set()

    class Text(str):
        def rstrip(self):
            threads.add(threading.current_thread())
            return super().rstrip()

    tool = EchoTool(blocking=True, result=ToolResult(Text(text)))
    if words:
        tool.result_words = words  # a setting of the tool
    content = execute(echoing(tool), ToolCall("echo", {"text": ""})).content
    assert content == (says or text) and threading.main_thread() not in threads
