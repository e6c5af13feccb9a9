"""The user's hard limits on an attempt: tools never to call, US dollars, seconds.

No torch. The limits hold whatever the policy writes: a call that could break one is not run, a call
that takes too long is given up, and a turn has no more tokens than are paid for.
"""

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from nanorchestra.agent.environment import Environment, refused
from nanorchestra.records import Price, ToolCall, ToolResult, Trajectory

SECONDS_PER_TOKEN = 0.01  # latency of a sampled id of the policy
ANSWER_SHARE = 0.1  # of the user's seconds, kept for the answer: no call may run on into it


@dataclass
class UserLimits:
    """The limits of `env.task.preference` on one attempt.

    `price` and `seconds_per_token` are those of its own tokens.
    """

    env: Environment
    trajectory: Trajectory
    price: Price
    seconds_per_token: float = SECONDS_PER_TOKEN

    def own_usd(self) -> float:
        """Returns what the policy's own tokens cost so far."""
        sampled = sum(self.trajectory.sampled)
        return self.price.cost(len(self.trajectory.ids) - sampled, sampled)

    def affordable(self, tokens: int) -> int:
        """Returns how many of `tokens` may be sampled in the next turn."""
        (usd, seconds), token_usd = self._left(), self.price.cost(0, 1)
        by_usd = usd / token_usd if token_usd else math.inf if usd > 0 else 0
        token_s = self.seconds_per_token
        by_time = seconds / token_s if token_s else math.inf if seconds > 0 else 0
        return int(min(tokens, by_usd, by_time))

    def seconds_left(self) -> float:
        """Returns the seconds that the attempt may still last; infinite without a limit."""
        return self._left()[1]

    async def execute(self, calls: Sequence[ToolCall], most: int) -> list[ToolResult]:
        """Returns the results of a turn's calls, which run side by side.

        Calls after the first `most` and those that a limit forbids are refused.
        """
        wish, running = self.env.task.preference, []
        usd, seconds = self._left()
        seconds -= ANSWER_SHARE * (wish.seconds or 0.0)
        for number, call in enumerate(calls):
            bound = 0.0 if wish.usd is None else self.env.most_usd(call)
            words = call.arguments.values() if isinstance(call.arguments, dict) else ()
            forbidden = [name for name in wish.never if name in (call.name, *words)]
            problem = None
            if number >= most:
                problem = f"at most {most} calls in one turn"
            elif forbidden:
                problem = f"the user forbids {forbidden[0]}"
            elif bound > usd:
                problem = f"{call.name} may cost ${bound:.2g}; ${max(usd, 0):.2g} may be spent"
            elif seconds <= 0:
                problem = "the user's time for calls is over; answer now"
            usd -= 0.0 if problem else bound
            running.append(self._call(call, seconds, problem))
        return await asyncio.gather(*running)

    async def _call(self, call, seconds, problem) -> ToolResult:
        """Runs a call, or refuses it; one without a result after `seconds` is given up.

        That is billed at its most.
        """
        if problem:
            return refused(problem)
        late = f"Error: {call.name} was given up after {seconds:.1f} s, the user's limit"
        try:
            async with asyncio.timeout(None if seconds == math.inf else seconds):
                result = await self.env.execute(call)
        except TimeoutError:
            return ToolResult(late, self.env.most_usd(call), seconds, error=True)
        if result.latency_s <= seconds:
            return result
        return replace(result, content=late, latency_s=seconds, error=True)

    def _left(self) -> tuple[float, float]:
        """Returns the US dollars and the seconds that are left; infinite without a limit."""
        t, wish = self.trajectory, self.env.task.preference
        usd = math.inf if wish.usd is None else wish.usd - t.cost_usd - self.own_usd()
        return usd, math.inf if wish.seconds is None else wish.seconds - t.latency_s
