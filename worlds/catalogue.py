"""What a task offers of a catalogue: tools under aliases and prices of its own, real or simulated.

A simulated expert knows the answer to the task, and gives it with a probability that grows with its
price in the catalogue. No torch.
"""

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace

from nanorchestra.agent.tool import Tool
from nanorchestra.records import Price, Task, ToolResult, banned
from nanorchestra.schemas import Json, arguments_schema
from nanorchestra.tools.endpoint import Endpoint
from nanorchestra.tools.http import count_tokens
from nanorchestra.tools.models import Expert, ExpertTool
from nanorchestra.tools.roles import RoleTool
from nanorchestra.tools.search import QUERY
from nanorchestra.tools.simulated import Simulation
from nanorchestra.tools.spending import Spending
from worlds.toolscale.offers import DESCRIPTIONS, SCHEDULES, describe, scheduled

OFFERED = 0.7  # probability of a tool to be on offer in training
LATENCY_S = 20.0  # of the simulation of an expert whose entry states none
REPLY_TOKENS = 800  # of an expert's usual reply
FREE = Price(0.0, 0.0)
CONSONANTS = "bdfghklmnprstvz"  # of an alias,
PREFIXES = ((), ("tool",), ("ask",))  # and the words before it
SEARCH_SKILL = 0.7  # probability that the page of a simulated search has the right answer
ANSWER_FORM = "{answer}"
# What a simulated expert of a published role replies: code, a query and an answer.
ROLE_FORM = (
    "```python\nprint({answer!r})\n```\n<query>{question}</query>\n<answer>{answer}</answer>"
)


def row(tool: Tool) -> Json:
    """Returns an offer as JSON, for a task's data; `usd` is per million tokens."""
    models = {}
    for alias, expert in experts_of(tool).items():
        models[alias] = {"what": expert.offered_as, "usd": list(expert.price)}
    what = tool.expert.offered_as if isinstance(tool, ExpertTool) else tool.name
    return {"name": tool.name, "description": tool.description, "what": what, "models": models}


def experts_of(tool: Tool) -> dict[str, Expert]:
    """Returns the language models behind a tool, by alias; {} if it has none."""
    return getattr(tool, "experts", {})


def names_of(tools: Sequence[Tool]) -> list[str]:
    """Returns the names that a preference may weigh: of tools, and of the models behind them."""
    names = []
    for tool in tools:
        names += [tool.name, *experts_of(tool)]
    return names


def reached(never: Sequence[str], tools: Sequence[Tool]) -> list[str]:
    """Returns the tools and the aliases on offer that bans reach, as the prompt names them."""
    names = []
    for tool in tools:
        if not isinstance(tool, ExpertTool) and banned({tool.name, tool.kind}, never):
            names.append(tool.name)
        for alias, expert in experts_of(tool).items():
            if banned({tool.kind, expert.offered_as, *expert.ban_names}, never):
                names.append(alias)
    return list(dict.fromkeys(names))


# --- what is on offer


def as_listed(tools: Sequence[Tool]) -> list[Tool]:
    """Returns the catalogue as it is, each tool described with what it charges."""
    return [_described(tool, DESCRIPTIONS[0]) for tool in tools]


def draw(tools: Sequence[Tool], rng: random.Random, varied: bool) -> list[Tool]:
    """Returns what a task offers: the catalogue as listed, or `varied` as in the paper.

    A varied task has a random subset of the tools, or all if no expert is among it, and of a
    published role some of its experts, in any order behind its aliases. Other experts have aliases
    of their own. Prices follow a schedule.
    """
    if not varied:
        return as_listed(tools)
    chosen = [tool for tool in tools if isinstance(tool, RoleTool) or rng.random() < OFFERED]
    if not any(experts_of(tool) for tool in chosen):
        chosen = list(tools)
    rng.shuffle(chosen)
    schedule = rng.choice(SCHEDULES["train"])
    aliases = iter(draw_aliases(rng, len(chosen)))
    offers = []
    for tool in chosen:
        models = _shuffled(tool, rng) if isinstance(tool, RoleTool) else _renamed(tool, aliases)
        experts = {}
        for alias, name in models.items():
            expert = tool.experts[name]
            price = scheduled(schedule, expert.model, expert.price)
            experts[alias] = replace(expert, price=price)
        if isinstance(tool, RoleTool):  # given parameters have the aliases of the catalogue's order
            tool = replace(tool, experts=experts, given=None)
        elif experts:
            ((alias, expert),) = experts.items()
            tool = replace(tool, name=alias, expert=expert)
        offers.append(_described(tool, rng.choice(DESCRIPTIONS)))
    return offers


def draw_aliases(rng: random.Random, count: int) -> list[str]:
    """Returns different made-up names of experts, such as "ka-fe" or "tool-ro-ta-vi"."""
    aliases: dict[str, None] = {}
    while len(aliases) < count:
        parts = [rng.choice(CONSONANTS) + rng.choice("aeiou") for _ in range(rng.randint(2, 3))]
        aliases["-".join([*rng.choice(PREFIXES), *parts])] = None
    return list(aliases)


def _shuffled(role: RoleTool, rng: random.Random) -> dict[str, str]:
    """Returns some of a role's models, each behind an alias of the role: alias -> model."""
    names = list(role.experts)
    count = rng.randint(1, len(names))
    aliases = rng.sample(names, count)
    models = rng.sample(names, count)
    return dict(zip(aliases, models, strict=True))


def _renamed(tool: Tool, aliases: Iterator[str]) -> dict[str, str]:
    """Returns the model of a tool, if it has one, behind the next of the aliases."""
    return {next(aliases): name for name in experts_of(tool)}


def _described(tool: Tool, form: list[str]) -> Tool:
    """Returns a tool whose description states what it charges, as the policy reads it everywhere.

    form: the form of the description of an expert. A role states prices in its parameters.
    """
    description = tool.description
    if isinstance(tool, ExpertTool):
        expert, skill = tool.expert, description.strip().rstrip(".")
        description = describe(form, tool.name, skill, expert.price, expert.latency_s)
    for unit, usd in tool.prices.items():
        if usd:
            description = f"{description} Price: ${usd:g} a {unit}."
    return tool if description == tool.description else replace(tool, description=description)


# --- simulations


def simulated(tool: Tool, task: Task, seed: int) -> Tool:
    """Returns a tool of the catalogue whose language models are simulated for one attempt."""
    if isinstance(tool, ExpertTool):
        return replace(tool, expert=_simulated_model(tool.expert, task, seed, ANSWER_FORM))
    if not isinstance(tool, RoleTool):
        return tool
    experts = {}
    for name, expert in tool.experts.items():
        experts[name] = _simulated_model(expert, task, seed, ROLE_FORM)
    if tool.kind == "search" and not tool.helpers:
        return replace(tool, experts=experts, helpers=[SimulatedSearch(task, seed)])
    return replace(tool, experts=experts)


def _simulated_model(expert: Expert, task: Task, seed: int, form: str) -> "SimulatedModel":
    """Returns the simulation of a language model, which nothing is paid for."""
    settings = {each.name: getattr(expert, each.name) for each in fields(Expert)}
    settings |= {"spending": Spending(), "endpoint": Endpoint("")}
    usd = max(expert.price.output_per_million, 1e-9)
    skill = min(0.97, max(0.3, 0.68 + 0.18 * math.log10(usd)))  # 0.86 at $10 per million tokens
    return SimulatedModel(**settings, task=task, seed=seed, skill=skill, form=form)


@dataclass(frozen=True)
class SimulatedModel(Expert):
    """A simulated language model: right with the probability `skill`, it replies in `form`.

    Within an attempt it repeats its answer; with another seed it may err differently. Its latency
    is virtual.
    """

    task: Task | None = None
    seed: int = 0
    skill: float = 0.0
    form: str = ""

    def ask(self, text: str, name: str) -> ToolResult:
        """Returns the simulated reply to one message."""
        latency_s = self.latency_s or LATENCY_S
        reply, bill = Simulation(self.skill, self.price, REPLY_TOKENS, latency_s).reply(
            f"{self.task.id}/{self.seed}/{name}",
            count_tokens(text),
            self._right,
            self._wrong,
            self.max_tokens,
        )
        if bill.error:
            reply = f"Error: {name} gave no answer within {self.max_tokens} tokens"
        return replace(bill, content=reply)

    def _right(self, rng: random.Random) -> str:
        return self._reply(self.task.data["answer"])

    def _wrong(self, rng: random.Random) -> str:
        return self._reply(rng.choice(self.task.data["wrong"]))

    def _reply(self, answer: str) -> str:
        return self.form.format(answer=answer, question=self.task.question)


@dataclass
class SimulatedSearch(Tool):
    """A search with nothing behind it, for a role without one: a page with an answer to the task.

    The answer is right with the probability SEARCH_SKILL. A call has the published price of one.
    """

    task: Task
    seed: int
    name = kind = "search"
    blocking, parameters = False, arguments_schema({"query": QUERY}, query="string")
    usd_per_call, latency_s = 0.01, 1.0

    def call(self, arguments: Json) -> ToolResult:
        """Returns the page."""
        data, seed = self.task.data, f"{self.task.id}/{self.seed}/page"
        answer, bill = Simulation(
            SEARCH_SKILL, FREE, 0, self.latency_s, latency_range=(1, 1)
        ).reply(seed, 0, lambda rng: data["answer"], lambda rng: rng.choice(data["wrong"]))
        page = f"{self.task.question}\n{answer}"
        return replace(
            bill, content=page, cost_usd=self.usd_per_call, findings={"documents": [page]}
        )
