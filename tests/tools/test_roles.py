"""What an expert writes for a role is read from its reply, whatever it babbles around it."""

from __future__ import annotations

import asyncio
import time
from asyncio import CancelledError

import pytest

from nanorchestra.agent.evidence import Evidence
from nanorchestra.agent.threads import in_thread
from nanorchestra.agent.tool import Tool
from nanorchestra.records import Price, ToolResult
from nanorchestra.tools.endpoint import Endpoint
from nanorchestra.tools.models import Expert
from nanorchestra.tools.roles import RoleTool, final_answer
from nanorchestra.tools.spending import Spending


class Scripted(Expert):
    text, usd = "", 0.25

    def ask(self, text, name):
        return ToolResult(Scripted.text, Scripted.usd)


class Recorder(Tool):
    name, kind = "helper", "search"

    def call(self, arguments):
        Recorder.asked = arguments
        return ToolResult("found", findings={"documents": ["found"]})


@pytest.fixture
def ask(nano_tokenizer):
    """ask(role, reply of the expert) -> what the helper was asked, None if nothing."""
    expert = Scripted("e", Endpoint(""), "m", Price(0, 0), Spending())
    evidence = Evidence("question?", tokenizer=nano_tokenizer)

    def run(name, text):
        Scripted.text, Recorder.asked = text, {}
        RoleTool(name, "d", {"e": expert}, [Recorder()], evidence=evidence).call({"model": "e"})
        return next(iter(Recorder.asked.values()), None)

    return run


def test_the_last_query_and_the_last_program_are_used(ask):
    for text, query in (
        ("<query>\n  atomic number of gold \n</query>", "atomic number of gold"),
        ("<query>the first query</query> no: <query>the second query", "the second query"),
        ("<query>the first query</query> no: <query> short   </query>", "the first query"),
        ("<query>short</query>", None),
        ("gold", None),
    ):
        assert ask("search", text) == query
    for text, code in (
        ("```python\n\nprint(1)\n\n```", "print(1)"),
        ("```python\nprint(1)\n``` or ```python\nprint(2)", "print(2)"),
        ("```python\n``` nothing", None),
        ("print(1)", None),
    ):
        assert ask("enhance_reasoning", text) == code
    for text, answer in (
        ("<answer>\n 42 </answer>", "42"),
        ("<answer>41</answer><answer>42", "42"),
        ("so \\boxed{\\frac{1}{2}}", "\\frac{1}{2}"),
        (" 42 ", "42"),
    ):
        assert final_answer(text) == answer


def test_a_reply_of_any_length_is_read_in_linear_time(ask):
    """A model that loops writes spaces to its limit, and a pattern holds up every thread."""
    many = 100_000
    for part in (" ", "\n ", "a ", "<", "{", "{a", "\\boxed{", "```python ", "<query>", "<answer>"):
        noise = part * (many // len(part))
        start = time.monotonic()
        for begin in ("<query>a", "```python a", "<answer>a", "\\boxed{a", ""):
            for end in ("a", ""):
                for role in ("search", "enhance_reasoning", "answer"):
                    ask(role, begin + noise + end)
        assert time.monotonic() - start < 2.0, part


def role_with(nano_tokenizer, *helpers):
    """The role `search`, whose expert writes a query and whose helpers do as they are told."""
    Scripted.text = "<query>atomic number of gold</query>"
    expert = Scripted("e", Endpoint(""), "m", Price(0, 0), Spending())
    evidence = Evidence("question?", tokenizer=nano_tokenizer)
    return RoleTool("search", "d", {"e": expert}, list(helpers), evidence=evidence)


class Raising(Recorder):
    error = None

    def call(self, arguments):
        raise self.error


@pytest.mark.parametrize("error", [RuntimeError("x"), KeyboardInterrupt(), CancelledError()])
def test_whatever_a_helper_raises_the_expert_is_billed(nano_tokenizer, error):
    helper = Raising()
    helper.error = error
    role = role_with(nano_tokenizer, helper)
    result = asyncio.run(in_thread(role.call, {"model": "e"}))
    assert result.error and type(error).__name__ in result.content
    assert result.cost_usd == Scripted.usd > 0


DOWN = ToolResult("Error: down", 0.5, 1.0, error=True, infrastructure=True)
EMPTY = ToolResult("nothing found", 0.5, 1.0)
FOUND = ToolResult("found", 0.5, 1.0, findings={"documents": ["found"]})


@pytest.mark.parametrize(
    "said, asked, infrastructure, error",
    [
        ([DOWN, FOUND], 2, False, False),
        ([FOUND, DOWN], 1, False, False),
        ([EMPTY, FOUND, DOWN], 2, False, False),
        ([DOWN, EMPTY], 2, True, False),
        ([DOWN], 1, True, True),
        ([EMPTY], 1, False, False),
    ],
)
def test_searches_are_asked_until_one_finds_a_document_and_those_asked_are_billed(
    nano_tokenizer, said, asked, infrastructure, error
):
    """A search that is down is forgiven where another one finds something."""

    class Told(Recorder):
        def call(self, arguments):
            return self.result

    helpers = []
    for result in said:
        helpers.append(Told())
        helpers[-1].result = result
    result = role_with(nano_tokenizer, *helpers).call({"model": "e"})
    assert (result.infrastructure, result.error) == (infrastructure, error)
    assert result.cost_usd == Scripted.usd + 0.5 * asked and result.latency_s == asked
    assert [part["name"] for part in result.parts] == ["expert"] + ["helper"] * asked
