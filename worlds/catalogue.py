"""What a task offers of a catalogue: tools under aliases and prices of its own, real or simulated.

A simulated expert knows the answer to the task, and gives it with a probability that grows with its
price in the catalogue. No torch.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from nanorchestra.agent.environment import Tool
from nanorchestra.agent.nested import Orchestrator
from nanorchestra.records import Price, Task, ToolResult, banned
from nanorchestra.schemas import Json, arguments_schema
from nanorchestra.tools.http import count_tokens
from nanorchestra.tools.models import Endpoint, Expert, ExpertTool
from nanorchestra.tools.roles import RoleTool
from nanorchestra.tools.spending import Spending
from worlds.miniature.draw import draw_names
from worlds.miniature.tables import TRAIN
from worlds.toolscale import preferences

OFFERED = 0.7  # probability of a tool to be on offer in training
LATENCY_S = 20.0  # of an expert whose entry states none
WRITTEN = 800  # tokens of an expert's usual reply
FORMS = preferences.TABLES["descriptions"]
FOUND = 0.7  # probability that the page of a simulated search has the answer
REPLY = "```python\nprint({answer!r})\n```\n<query>{question}</query>\n<answer>{answer}</answer>"


def row(tool: Tool) -> Json:
    """Returns an offer as JSON, for a task's data; `usd` is per million tokens."""
    models = {
        alias: {"what": expert.name, "usd": list(expert.price)}
        for alias, expert in experts_of(tool).items()
    }
    what = tool.expert.name if isinstance(tool, ExpertTool) else tool.name
    return {"name": tool.name, "description": tool.description, "what": what, "models": models}


def experts_of(tool: Tool) -> dict[str, Expert]:
    """Returns the language models behind a tool, by alias; {} if it has none."""
    return getattr(tool, "experts", {})


def names_of(tools: Sequence[Tool]) -> list[str]:
    """Returns the names that a preference may weigh: of tools, and of the models behind them."""
    return [name for tool in tools for name in (tool.name, *experts_of(tool))]


def reached(never: Sequence[str], tools: Sequence[Tool]) -> list[str]:
    """Returns the tools and the aliases on offer that bans reach, as the prompt names them."""
    found = []
    for tool in tools:
        experts = experts_of(tool)
        if not isinstance(tool, ExpertTool) and banned({tool.name, tool.kind}, never):
            found.append(tool.name)
        found += [
            alias
            for alias, expert in experts.items()
            if banned({tool.kind, expert.name, *expert.ban_names}, never)
        ]
    return list(dict.fromkeys(found))


def draw(tools: Sequence[Tool], rng: random.Random, varied: bool) -> list[Tool]:
    """Returns what a task offers: the catalogue as it is, or `varied` as in the paper.

    A varied task has a random subset of the tools, or all if no expert is among it, and of a
    published role some of its experts, in any order behind its aliases. Other experts have aliases
    of their own. Prices follow a schedule.
    """
    if not varied:
        return [_offer(tool, {name: name for name in experts_of(tool)}) for tool in tools]
    chosen = [tool for tool in tools if isinstance(tool, RoleTool) or rng.random() < OFFERED]
    chosen = chosen if any(map(experts_of, chosen)) else list(tools)
    rng.shuffle(chosen)
    schedule = rng.choice(preferences.TABLES["schedules"]["train"])
    names, offers = iter(draw_names(rng, len(chosen), TRAIN)), []
    for tool in chosen:
        known = list(experts_of(tool))
        count = rng.randint(1, len(known)) if isinstance(tool, RoleTool) else 0
        shuffled = dict(zip(rng.sample(known, count), rng.sample(known, count), strict=True))
        behind = shuffled or {next(names): name for name in known}
        offers.append(_offer(tool, behind, schedule, rng.choice(FORMS)))
    return offers


def _offer(tool, behind, schedule=None, form=FORMS[0]):
    """Returns a tool as a task offers it: aliases for the experts `behind`, a schedule's prices."""
    experts, name, words = {}, tool.name, tool.description
    for alias, model in behind.items():
        expert = tool.experts[model]
        usd = preferences.scheduled(schedule, expert.model, expert.price)
        seconds = expert.latency_s or LATENCY_S
        experts[alias] = replace(expert, price=Price(*usd), latency_s=seconds)
    if isinstance(tool, RoleTool):  # it states the prices itself
        return replace(tool, experts=experts, given=tool.given if schedule is None else None)
    for name in experts:  # one, or none
        numbers = {"input": usd[0], "output": usd[1], "seconds": round(seconds)}
        words = form.format(alias=name, skill=words.strip().rstrip("."), **numbers)
    for unit in ("call", "second"):
        if usd := getattr(tool, f"usd_per_{unit}", 0.0):
            words = f"{words} Price: ${usd:g} a {unit}."
    changes = {"experts": experts} if experts else {}
    return replace(tool, name=name, description=words, **changes)


def simulated(tool: Tool, task: Task, seed: int) -> Tool:
    """Returns a tool of the catalogue whose language models are simulated for one attempt.

    Those of an orchestrator's tools are, too.
    """
    if isinstance(tool, Orchestrator):
        return replace(tool, tools=[simulated(inner, task, seed) for inner in tool.tools])
    form, made = REPLY if isinstance(tool, RoleTool) else "{answer}", {}
    for name, expert in experts_of(tool).items():
        usd = max(expert.price.output_per_million, 1e-9)
        skill = min(0.97, max(0.3, 0.68 + 0.18 * math.log10(usd)))  # 0.86 at $10
        settings = vars(expert) | {"spending": Spending(), "endpoint": Endpoint("")}
        made[name] = Simulation(**settings, task=task, seed=seed, skill=skill, form=form)
    changes = {"experts": made} if made else {}
    if isinstance(tool, RoleTool) and tool.kind == "search" and not tool.helpers:
        changes["helpers"] = [SimulatedSearch(task, seed)]
    return replace(tool, **changes)


@dataclass(frozen=True)
class Simulation(Expert):
    """A simulated language model: right with the probability `skill`, it replies in `form`.

    Within an attempt it repeats its answer; with another seed it may err differently. Its latency
    is virtual.
    """

    task: Task | None = None
    seed: int = 0
    skill: float = 0.0
    form: str = ""

    def _ask(self, text: str, name: str) -> ToolResult:
        data, rng = self.task.data, random.Random(f"{self.task.id}/{self.seed}/{name}")
        answer = data["answer"] if rng.random() < self.skill else rng.choice(data["wrong"])
        needed = round(WRITTEN * rng.uniform(0.2, 2))
        seconds = self.latency_s * rng.uniform(0.7, 1.3)
        tokens = count_tokens(text), min(self.max_tokens, needed)
        said = self.form.format(answer=answer, question=self.task.question)
        cut = needed > self.max_tokens
        if cut:
            said = f"Error: {name} gave no answer within {self.max_tokens} tokens"
        return ToolResult(said, self.price.cost(*tokens), seconds, cut, False, *tokens, name)


@dataclass
class SimulatedSearch:
    """A search with nothing behind it, for a role without one: a page with an answer to the task.

    The answer is right with the probability FOUND. A call costs what Tavily's search does.
    """

    task: Task
    seed: int
    name = kind = "search"
    blocking, parameters = False, arguments_schema(query="string")
    usd_per_call, latency_s = 0.01, 1.0

    def call(self, arguments: Json) -> ToolResult:
        """Returns the page."""
        data, rng = self.task.data, random.Random(f"{self.task.id}/{self.seed}/page")
        answer = data["answer"] if rng.random() < FOUND else rng.choice(data["wrong"])
        page = f"{self.task.question}\n{answer}"
        return ToolResult(page, self.usd_per_call, self.latency_s, findings={"documents": [page]})
