"""A tool on offer in a task of the miniature: its words, its price, its skill, its use.

An offer is plain data: `name` (the alias), `what` ("large", "medium", "small", a specialist's
subject, "code", "search" or "records"), `price` in US cents (for 100,000 tokens of an expert, 100
calls of a tool) and `latency` in seconds.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from nanorchestra.files import read_json_lines
from nanorchestra.model.checkpoint import NANO
from nanorchestra.records import Bounds, Task, ToolCall, ToolResult
from nanorchestra.tools.index import Index, Passage
from tools import Skill
from worlds.miniature.tables import (
    EXPERT_TOKENS,
    FITTING_TOOL,
    SKILLS,
    UNSURE,
)

Offer = dict[str, Any]


@cache
def corpus() -> tuple[tuple[dict[str, str], ...], Index]:
    """Returns the bundled facts and the search index over their texts."""
    facts = tuple(fact for _, fact in read_json_lines(NANO / "corpus.jsonl"))
    return facts, Index.of(Passage(fact["text"]) for fact in facts)


def is_expert(offer: Offer) -> bool:
    """Returns true for a language model, false for a code, search or records tool."""
    return offer["what"] in SKILLS


def fits(offer: Offer, task: Task) -> bool:
    """Returns true if the offer is the tool made for the task's kind of question."""
    return offer["what"] == FITTING_TOOL.get(task.kind)


def skill(what: str, subject: str, difficulty: str) -> Skill:
    """Returns the skill of an expert at a question, which the policy never sees."""
    return Skill(SKILLS[what][subject][difficulty == "hard"], *UNSURE[what])


def expected_cost(offer: Offer, difficulty: str) -> float:
    """Returns the expected cost of one call in US dollars."""
    units = sum(EXPERT_TOKENS[difficulty]) / 1e5 if is_expert(offer) else 1e-2
    return offer["price"] / 100 * units


def bounds(tools: Sequence[Offer], difficulty: str) -> Bounds:
    """Returns the bounds of a reward.

    The high ends are one call of the most expensive, and of the slowest, tool on offer.
    """
    highest_usd = max(expected_cost(offer, difficulty) for offer in tools)
    slowest_s = float(max(offer["latency"] for offer in tools))
    return Bounds((0.0, highest_usd), (0.0, slowest_s))


def title(offer: Offer) -> str:
    """Returns kind and name, as preferences and thoughts mention the offer: "medium tool-ka-fe"."""
    return f"{offer['what']} {offer['name']}"


def describe(offer: Offer) -> str:
    """Returns the description in the prompt, such as "41s 22c medium tool-ka-fe".

    Latency in seconds, price in US cents (for 100,000 tokens of an expert, 100 calls of a tool),
    kind and alias.
    """
    return f"{offer['latency']:02d}s {offer['price']:02d}c {title(offer)}"


@dataclass(frozen=True)
class Reading:
    """What an observation says; `next_row` is the (table, id) that a chain goes on with."""

    thought: str
    answer: str | None = None
    sure: bool = False
    next_row: tuple[str, int] | None = None


def call_for(task: Task, offer: Offer, row: tuple[str, int] | None = None) -> ToolCall:
    """Returns a call that suits the question; `row` is the (table, id) to read in a chain."""
    solution, arguments = task.data["solution"], {}
    if offer["what"] == "code":
        arguments = {"code": solution if fits(offer, task) else "0"}
    elif offer["what"] == "search":
        arguments = {"query": solution if fits(offer, task) else task.data["subject"]}
    elif offer["what"] == "records":
        table, number = row or solution
        arguments = {"table": table, "id": number}
    return ToolCall(offer["name"], arguments)


def read_result(task: Task, offer: Offer, result: ToolResult) -> Reading:
    """Returns what the result of a call says about the question."""
    text = result.content
    if result.error:
        return Reading("failed")
    if offer["what"] == "records":
        ((name, value),) = json.loads(text).items()
        if name in task.data["tables"]:
            return Reading(f"{name} {value}", sure=True, next_row=(name, value))
        return Reading(f"{name} {value}", str(value), sure=True)
    if offer["what"] == "search":
        for fact in corpus()[0]:
            asked = f"{fact['relation']} of {fact['subject']}" == task.data["solution"]
            if asked and fact["text"] == text:
                return Reading(f"found {fact['value']}", fact["value"], sure=True)
        return Reading("failed")
    if offer["what"] == "code":
        return Reading(f"value {text}", text, sure=fits(offer, task))
    confidence, value = text.split(": ")
    return Reading(f"{confidence} {value}", value, confidence == "sure")
