"""The simulator of experts: right with a given probability, paid in virtual money and time.

Every simulated expert of the project replies by it. A world supplies what the right reply is, and
what a wrong one is. Nothing is asked over a network.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from nanorchestra.records import Price, ToolResult
from nanorchestra.schemas import Json, arguments_schema
from nanorchestra.tools.tool import Tool

Reply = TypeVar("Reply")
Range = tuple[float, float]  # the least and the greatest factor, between which one is drawn
VARIATION: Range = (0.85, 1.15)  # of the tokens and the seconds of a SimulatedExpert


@dataclass(frozen=True)
class SimulatedReply(Generic[Reply]):
    """One reply, what it costs in US dollars, and how long it takes in virtual seconds.

    `complete` is false if the reply needs more tokens than it may have.
    """

    reply: Reply
    complete: bool
    input_tokens: int
    output_tokens: int
    cost_usd: float
    latency_s: float

    def result(self, content: str, **fields: object) -> ToolResult:
        """Returns the observation with this content, and further `fields` of ToolResult."""
        return ToolResult(
            content,
            cost_usd=self.cost_usd,
            latency_s=self.latency_s,
            input_tokens=self.input_tokens,
            output_tokens=self.output_tokens,
            **fields,
        )


@dataclass(frozen=True)
class Simulation:
    """A simulated language model: how often it is right, and what a reply costs.

    skill: the probability of the right reply.
    output_tokens, latency_s: tokens and seconds of a usual reply; each is multiplied by a factor
    drawn uniformly from its range.
    """

    skill: float
    price: Price
    output_tokens: int
    latency_s: float
    token_range: Range = (0.2, 2.0)
    latency_range: Range = (0.7, 1.3)

    def most_output_tokens(self) -> int:
        """Returns the tokens of the longest reply."""
        return round(self.output_tokens * self.token_range[1])

    def reply(
        self,
        seed: str,
        input_tokens: int,
        right: Callable[[random.Random], Reply],
        wrong: Callable[[random.Random], Reply],
        max_tokens: int | None = None,
    ) -> SimulatedReply[Reply]:
        """Returns a reply, which is a function of the arguments.

        `seed` names the task, the seed of the attempt, and the expert. `right(rng)` and
        `wrong(rng)` draw a reply of their kind; one of them is called.
        """
        rng = random.Random(seed)
        reply = right(rng) if rng.random() < self.skill else wrong(rng)
        needed = round(self.output_tokens * rng.uniform(*self.token_range))
        latency_s = self.latency_s * rng.uniform(*self.latency_range)
        output_tokens = needed if max_tokens is None else min(needed, max_tokens)
        cost_usd = self.price.cost(input_tokens, output_tokens)
        complete = output_tokens == needed
        return SimulatedReply(reply, complete, input_tokens, output_tokens, cost_usd, latency_s)


@dataclass(frozen=True)
class Skill:
    """Probabilities of a simulated expert: of being right, and of saying that it is unsure."""

    right: float
    unsure_if_right: float
    unsure_if_wrong: float


@dataclass
class SimulatedExpert(Tool):
    """A simulated language model that answers the task's question, and says how sure it is.

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
        return self.price.cost(self.input_tokens, self._simulation().most_output_tokens())

    def call(self, arguments: Json) -> ToolResult:
        """Returns "sure: ANSWER" or "unsure: ANSWER"."""
        seed = f"{self.seed}/{self.name}"
        simulated = self._simulation().reply(seed, self.input_tokens, self._right, self._wrong)
        return simulated.result(
            simulated.reply, findings={"attempts": [[self.name, simulated.reply]]}
        )

    def _simulation(self) -> Simulation:
        return Simulation(
            self.skill.right, self.price, self.output_tokens, self.latency_s, VARIATION, VARIATION
        )

    def _right(self, rng: random.Random) -> str:
        unsure = rng.random() < self.skill.unsure_if_right
        return _with_confidence(self.gold, unsure)

    def _wrong(self, rng: random.Random) -> str:
        unsure = rng.random() < self.skill.unsure_if_wrong
        return _with_confidence(rng.choice(self.wrong), unsure)


def _with_confidence(answer: str, unsure: bool) -> str:
    return f"unsure: {answer}" if unsure else f"sure: {answer}"
