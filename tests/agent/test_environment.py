"""What a call brings back, whatever the policy or a tool does."""

from __future__ import annotations

import asyncio
import threading
import tracemalloc

import pytest
from scripted import ANSWER, EchoTool, call, echoing, execute, play

from nanorchestra.records import ToolCall, ToolResult
from nanorchestra.tools.functions import tool


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
        ("one two" + " " * 20_000, None, "one two"),
    ],
)
def test_a_long_result_is_shortened_and_says_of_how_much(text, words, says):
    tool = EchoTool()
    if words:
        tool.result_words = words  # a setting of the tool
    content = execute(echoing(tool), ToolCall("echo", {"text": text})).content
    assert content == (says or text)


class PanicException(BaseException):  # noqa: N818
    """As pyo3 names the panic of a library in Rust."""


RAISED = [
    asyncio.CancelledError("closed"),
    KeyboardInterrupt("of a tool"),
    PanicException("index out of bounds"),
    GeneratorExit(),
    StopIteration(),
]


@pytest.mark.parametrize("error", RAISED, ids=lambda error: type(error).__name__)
def test_whatever_a_tool_raises_in_its_thread_is_an_observation(nano_tokenizer, error):
    """A CancelledError of one tool made its attempt hang, a KeyboardInterrupt ended all others."""

    class Raising(EchoTool):
        def call(self, arguments):
            raise error

    @tool
    def echo(text: str) -> str:
        """Says it again."""
        raise error

    for raising in (Raising(blocking=True), echo):
        envs = [echoing(raising), echoing(EchoTool(blocking=True, seconds=0.05))]
        bad, good = play(nano_tokenizer, [call(), ANSWER], [call(), ANSWER], envs=envs)[0]
        for attempt in (bad, good):
            assert attempt.status in ("answered", "infrastructure")
        result = bad.turns[0].results[0]
        assert result.error and type(error).__name__ in result.content
        assert good.outcome == 1.0 and not good.turns[0].results[0].error


def test_a_result_of_50_megabytes_is_cut_in_its_thread_without_a_list_of_its_words():
    """It was split into words in the event loop, which stood still for seconds and took 1.4 GB."""
    threads = set()

    class Text(str):
        def rstrip(self):
            threads.add(threading.current_thread())
            return super().rstrip()

    text = Text(f"{'w' * 99} " * 500_000)
    env = echoing(EchoTool(blocking=True, result=ToolResult(text)))
    tracemalloc.start()
    content = execute(env, ToolCall("echo", {"text": ""})).content
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    kept, note = content.rsplit("\n", 1)
    assert text.startswith(kept) and note == "[160 of 500,000 words]"
    assert most < 200e6 and threading.main_thread() not in threads
