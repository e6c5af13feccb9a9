"""What a task offers of a catalogue: tools under aliases and prices of its own, real or simulated.

An offer is JSON: `name` (in the prompt), `what` (in the catalogue), `description`, and `models`,
the language models behind the tool by alias, each with `what`, `usd` (input and output, per million
tokens) and `latency_s`. No torch.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from nanorchestra.agent.environment import Tool
from nanorchestra.records import Price, Task, ToolResult
from nanorchestra.tools.experts import count_tokens
from worlds.miniature.tables import EXPERT_NAMES
from worlds.toolscale import preferences

OFFERED = 0.7  # probability of a tool to be on offer in training
LATENCY_S = 20.0  # of an expert whose entry states none
WRITTEN = 800  # tokens of an expert's usual reply
ANSWER = "{answer}"  # what a simulated expert replies, and what one in a published role
IN_ROLE = "```python\nprint({answer!r})\n```\n<query>{question}</query>\n<answer>{answer}</answer>"


def models(tool: Tool) -> dict[str, Any]:
    """Returns the language models behind a tool of the catalogue, by alias; {} if it has none."""
    if hasattr(tool, "experts"):
        return tool.experts
    return {tool.name: tool.expert} if hasattr(tool, "expert") else {}


def draw_offers(tools: Sequence[Tool], rng: random.Random, varied: bool) -> list[dict[str, Any]]:
    """Returns the offers of a task: the catalogue as it is, or `varied` as in the paper.

    A varied task has a random subset of the tools, one expert at least, and of a published role
    some of its experts, in any order behind its aliases. Other experts have aliases of their own.
    Prices follow a schedule.
    """
    if not varied:
        return [_offer(tool, {name: name for name in models(tool)}) for tool in tools]
    chosen = [tool for tool in tools if hasattr(tool, "experts") or rng.random() < OFFERED]
    needed = [tool for tool in tools if models(tool)] or tools
    if not any(tool in needed for tool in chosen):
        chosen.append(rng.choice(needed))
    rng.shuffle(chosen)
    schedule = rng.choice(preferences.TABLES["schedules"]["train"])
    names, offers = iter(rng.sample(EXPERT_NAMES, len(EXPERT_NAMES))), []
    for tool in chosen:
        behind = list(models(tool))
        if hasattr(tool, "experts"):
            count = rng.randint(1, len(behind))
            behind = dict(zip(rng.sample(behind, count), rng.sample(behind, count), strict=True))
        else:
            behind = {next(names): name for name in behind}
        form = rng.choice(preferences.TABLES["descriptions"])
        offers.append(_offer(tool, behind, schedule, form))
    return offers


def _offer(
    tool: Tool, behind: dict[str, str], schedule: int | None = None, form: str = ""
) -> dict[str, Any]:
    """Returns the offer of a tool; `behind` maps aliases to its models."""
    words, known, specs = tool.description, models(tool), {}
    for alias, name in behind.items():
        usd = preferences.scheduled(schedule, known[name].model, known[name].price)
        specs[alias] = {"what": name, "usd": usd, "latency_s": known[name].latency_s or LATENCY_S}
    offer = {"name": tool.name, "what": tool.name, "models": specs, "listed": schedule is None}
    if hasattr(tool, "experts"):  # it states the prices itself
        return offer | {"description": words}
    for alias, spec in specs.items():
        (given, sampled), seconds = spec["usd"], round(spec["latency_s"])
        words = (form or preferences.TABLES["descriptions"][0]).format(
            alias=alias,
            skill=words.strip().rstrip("."),
            input=given,
            output=sampled,
            seconds=seconds,
        )
        offer["name"] = alias
    for unit in ("call", "second"):
        if usd := getattr(tool, f"usd_per_{unit}", 0.0):
            words = f"{words} Price: ${usd:g} a {unit}."
    return offer | {"description": words}


def offered(tool: Tool, offer: dict[str, Any], simulation: Simulation | None) -> Tool:
    """Returns a tool of the catalogue as a task offers it; a `simulation` stands for its models."""
    known, made = models(tool), {}
    for alias, spec in offer["models"].items():
        expert, price = known[spec["what"]], Price(*spec["usd"])
        if simulation:
            new = {"skill": _skill(expert.price), "latency_s": spec["latency_s"]}
            form = IN_ROLE if hasattr(tool, "experts") else ANSWER
            expert = replace(simulation, note=expert.note, form=form, **new)
        made[alias] = replace(expert, price=price)
    if hasattr(tool, "experts"):
        return replace(tool, experts=made, given=tool.given if offer["listed"] else None)
    tool = replace(tool, name=offer["name"], description=offer["description"])
    if made:
        (tool.expert,) = made.values()
        tool.parameters = tool.parameters | {"required": []}
    return tool


def _skill(price: Price) -> float:
    """Returns how often a simulated expert is right: 0.68 at $1 a million tokens, 0.86 at $10."""
    return min(0.97, max(0.3, 0.68 + 0.18 * math.log10(max(price.output_per_million, 1e-9))))


@dataclass(frozen=True)
class Simulation:
    """A simulated language model, in place of a catalogue's: right with the probability `skill`.

    Within an attempt it repeats its answer; with another seed it may err differently. Its latency
    is virtual. It replies in `form`.
    """

    task: Task
    seed: int
    price: Price = Price(0.0, 0.0)
    latency_s: float = 0.0
    skill: float = 0.0
    form: str = ANSWER
    note: str = ""
    code_tokens: int = 12_000
    context_tokens: int = 24_000
    boxed: bool = False

    def most_usd(self, text: str) -> float:
        """Returns the US dollars of the longest reply to `text`."""
        return self.price.cost(count_tokens(text), 2 * WRITTEN)

    def ask(self, text: str, name: str) -> ToolResult:
        """Returns the reply to one message."""
        data, rng = self.task.data, random.Random(f"{self.task.id}/{self.seed}/{name}")
        answer = data["answer"] if rng.random() < self.skill else rng.choice(data["wrong"])
        tokens = count_tokens(text), round(WRITTEN * rng.uniform(0.2, 2))
        seconds = self.latency_s * rng.uniform(0.7, 1.3)
        said = self.form.format(answer=answer, question=self.task.question)
        usd = self.price.cost(*tokens)
        return ToolResult(said, usd, seconds, False, False, *tokens, alias=name)
