"""A role reads whatever its expert babbles, asks its searches in turn, and bills all of them."""

from __future__ import annotations

import asyncio
import time
from asyncio import CancelledError
from dataclasses import dataclass

import pytest

from nanorchestra.agent.evidence import Evidence
from nanorchestra.agent.threads import in_thread
from nanorchestra.agent.tool import Tool
from nanorchestra.records import Price, ToolResult
from nanorchestra.tools.endpoint import Endpoint
from nanorchestra.tools.models import Expert
from nanorchestra.tools.roles import RoleTool
from nanorchestra.tools.spending import Spending

FOUND = ToolResult("found", 0.5, 1.0, findings={"documents": ["found"]})
EMPTY = ToolResult("nothing found", 0.5, 1.0)
DOWN = ToolResult("Error: down", 0.5, 1.0, error=True, infrastructure=True)


class Scripted(Expert):
    """Writes `text` for 0.25 dollars."""

    text = "<query>atomic number of gold</query>"

    def ask(self, text, name):
        return ToolResult(Scripted.text, 0.25)


@dataclass
class Helper(Tool):
    """Returns a result, or raises it."""

    result: ToolResult | BaseException = FOUND
    name, kind = "helper", "search"

    def call(self, arguments):
        if isinstance(self.result, BaseException):
            raise self.result
        return self.result


@pytest.fixture
def role(nano_tokenizer):
    """role(name, helpers): the role, whose expert is scripted."""
    expert = Scripted("e", Endpoint(""), "m", Price(0, 0), Spending())
    evidence = Evidence("question?", tokenizer=nano_tokenizer)
    return lambda name, *helpers: RoleTool(name, "d", {"e": expert}, helpers, evidence=evidence)


def test_a_reply_of_any_length_is_read_in_linear_time(role, monkeypatch):
    """A model that loops writes spaces to its limit, and a pattern holds up every thread."""
    for part in (" ", "\n ", "a ", "<", "{", "{a", "\\boxed{", "```python ", "<query>", "<answer>"):
        noise = part * (100_000 // len(part))
        start = time.monotonic()
        for begin in ("<query>a", "```python a", "<answer>a", "\\boxed{a", ""):
            for name in ("search", "enhance_reasoning", "answer"):
                for end in ("a", ""):
                    monkeypatch.setattr(Scripted, "text", begin + noise + end)
                    role(name, Helper()).call({"model": "e"})
        assert time.monotonic() - start < 2.0, part


@pytest.mark.parametrize(
    "said, asked, infrastructure, error",
    [
        ([DOWN, FOUND], 2, False, False),
        ([EMPTY, FOUND, DOWN], 2, False, False),
        ([DOWN, EMPTY], 2, True, False),
        ([DOWN], 1, True, True),
        ([KeyboardInterrupt()], 0, False, True),
        ([CancelledError()], 0, True, True),
    ],
)
def test_searches_are_asked_until_one_finds_a_document_and_those_asked_are_billed(
    role, said, asked, infrastructure, error
):
    """A search that is down is forgiven where another one finds something.

    Whatever a search raises, the expert is billed.
    """
    search = role("search", *map(Helper, said))
    result = asyncio.run(in_thread(search.call, {"model": "e"}))
    assert (result.infrastructure, result.error) == (infrastructure, error)
    assert result.cost_usd == 0.25 + 0.5 * asked and result.latency_s == asked
