"""The simulator of experts: right with a given probability, paid in virtual money and time.

Every simulated expert of the project replies by it. A world supplies what the right reply is, and
what a wrong one is. Nothing is asked over a network.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from nanorchestra.records import Price, ToolResult

Said = TypeVar("Said")
Range = tuple[float, float]  # the least and the greatest factor, between which one is drawn


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
        right: Callable[[random.Random], Said],
        wrong: Callable[[random.Random], Said],
        max_tokens: int | None = None,
    ) -> tuple[Said, ToolResult]:
        """Returns a reply and its bill, which are a function of the arguments.

        The bill is a result without content: US dollars, virtual seconds, tokens. It is an error if
        the reply needs more than `max_tokens`.

        `seed` names the task, the seed of the attempt, and the expert. `right(rng)` and
        `wrong(rng)` draw a reply of their kind; one of them is called.
        """
        rng = random.Random(seed)
        reply = right(rng) if rng.random() < self.skill else wrong(rng)
        needed = round(self.output_tokens * rng.uniform(*self.token_range))
        latency_s = self.latency_s * rng.uniform(*self.latency_range)
        written = needed if max_tokens is None else min(needed, max_tokens)
        bill = ToolResult(
            "",
            self.price.cost(input_tokens, written),
            latency_s,
            error=written < needed,
            input_tokens=input_tokens,
            output_tokens=written,
        )
        return reply, bill
