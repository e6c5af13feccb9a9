"""Tools without anything behind them: records of a task, and declared simulations of experts."""

import json
import random
from dataclasses import dataclass

from nanorchestra.records import Price, ToolResult
from nanorchestra.schemas import Json, arguments_schema

VARIATION = 0.15  # of the tokens and the seconds of a simulated answer, up and down


@dataclass
class RecordsTool:
    """Reads one row of a table by its id. `tables` is {table: {id as text: row}}."""

    name: str
    description: str
    tables: dict[str, dict[str, Json]]
    usd_per_call: float = 0.0
    latency_s: float = 0.0
    kind, blocking = "records", False
    parameters = arguments_schema(table="string", id="integer")

    def call(self, arguments: Json) -> ToolResult:
        """Returns the row as JSON."""
        table, key = arguments["table"], str(arguments["id"])
        row = self.tables.get(table, {}).get(key)
        if row is not None:
            text = json.dumps(row)
        elif table in self.tables:
            text = f"Error: no {table} {key}"
        else:
            text = f"Error: no table {table}; there are {', '.join(self.tables)}"
        return ToolResult(text, self.usd_per_call, self.latency_s, error=row is None)


@dataclass(frozen=True)
class Skill:
    """Probabilities of a simulated expert: of being right, and of saying that it is unsure."""

    right: float
    unsure_if_right: float
    unsure_if_wrong: float


@dataclass
class SimulatedExpert:
    """A simulated language model that answers the task's question, as its skill and seed decide.

    Within an attempt it repeats its answer; with another seed it may err differently.
    """

    name: str
    description: str
    skill: Skill
    gold: str
    wrong: tuple[str, ...]
    price: Price
    input_tokens: int
    output_tokens: int
    latency_s: float
    seed: str
    kind, blocking = "expert", False
    parameters = arguments_schema()

    def most_usd(self, arguments: Json) -> float:
        """Returns the US dollars of the longest answer."""
        return self.price.cost(self.input_tokens, round(self.output_tokens * (1 + VARIATION)))

    def call(self, arguments: Json) -> ToolResult:
        """Returns "sure: ANSWER" or "unsure: ANSWER"."""
        rng, skill = random.Random(f"{self.seed}/{self.name}"), self.skill
        right = rng.random() < skill.right
        unsure = rng.random() < (skill.unsure_if_right if right else skill.unsure_if_wrong)
        answer = self.gold if right else rng.choice(self.wrong)
        low, high = 1 - VARIATION, 1 + VARIATION
        tokens = self.input_tokens, round(self.output_tokens * rng.uniform(low, high))
        seconds = self.latency_s * rng.uniform(low, high)
        text = f"{'unsure' if unsure else 'sure'}: {answer}"
        return ToolResult(
            text,
            self.price.cost(*tokens),
            seconds,
            input_tokens=tokens[0],
            output_tokens=tokens[1],
            findings={"attempts": [[self.name, text]]},
        )
