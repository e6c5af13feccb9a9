"""The user's hard limits on an attempt: names never to call, US dollars, seconds.

No torch. The limits hold whatever the policy writes: a call that could break one is made smaller or
not run, a call that takes too long is given up, and a turn neither reads nor writes more tokens
than are paid for.
"""

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from nanorchestra.agent.environment import Environment, PreparedCall, refused_call
from nanorchestra.records import Price, ToolCall, ToolResult, Trajectory
from nanorchestra.tools.allowance import Allowance
from nanorchestra.tools.replies import REQUESTS, RequestCounts, side_by_side

SECONDS_PER_TOKEN = 0.01  # latency of a sampled id of the policy
ANSWER_SHARE = 0.1  # of the user's dollars and seconds, which calls leave for reading and answering


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

    def readable(self) -> float:
        """Returns how many ids the policy may still read: those of a prompt or of results."""
        usd, _ = self._left()
        return _count(usd, self.price.cost(1, 0))

    def seconds_left(self) -> float:
        """Returns the seconds that the attempt may still last; infinite without a limit."""
        return self._left()[1]

    def writable(self, tokens: int, read_usd: float, token_usd: float) -> int:
        """Returns how many of `tokens` may be sampled in the next turn.

        `read_usd` is the price of reading its prompt, `token_usd` that of a sampled token.
        """
        usd, seconds = self._left()
        by_usd = _count(usd - read_usd, token_usd)
        by_time = _count(seconds, self.seconds_per_token)
        return int(max(0, min(tokens, by_usd, by_time)))

    async def execute(self, calls: Sequence[ToolCall], most: int) -> list[ToolResult]:
        """Returns the results of a turn's calls, which run side by side.

        Calls after the first `most` and those that a limit forbids are refused. Money is set aside
        for the calls in the order in which they were written, for each the most that it can cost;
        one that is made smaller gets its share of what is left.
        """
        preference = self.env.task.preference
        usd, seconds = self._left()
        usd -= ANSWER_SHARE * (preference.usd or 0.0)
        seconds -= ANSWER_SHARE * (preference.seconds or 0.0)
        running = []
        for number, call in enumerate(calls):
            if number >= most:
                prepared = refused_call(f"calls in one turn: at most {most}")
            elif seconds <= 0:
                prepared = refused_call("the user's time for calls is over; answer now")
            else:
                share = usd / (min(len(calls), most) - number)
                prepared = self.env.prepare(call, Allowance(usd, share, seconds, preference))
            if usd < math.inf:  # an orchestrator may have no bound without a limit of dollars
                usd -= prepared.most_usd
            running.append((call, prepared, seconds))
        with side_by_side([(call.name, call.arguments) for call in calls]) as counts:
            made = zip(running, counts, strict=True)
            return await asyncio.gather(*(self._run(*each, own) for each, own in made))

    async def _run(
        self, call: ToolCall, prepared: PreparedCall, seconds: float, counts: RequestCounts | None
    ) -> ToolResult:
        """Returns a call's result; without one after `seconds` it is given up, billed at its most.

        The dollars of a result that comes too late are known. One that the infrastructure failed
        says so, however late. A call without a bound of dollars is
        waited for, so that its bill is known: an orchestrator keeps to the seconds itself.
        """
        REQUESTS.set(counts)  # of this call's own task
        late = f"Error: {call.name} was given up after {seconds:.1f} s, the user's limit"
        endless = math.inf in (seconds, prepared.most_usd)
        try:
            async with asyncio.timeout(None if endless else seconds):
                result = await prepared.run()
        except TimeoutError:
            return ToolResult(late, prepared.most_usd, seconds, error=True)
        if result.latency_s <= seconds or result.infrastructure:
            return replace(result, latency_s=min(result.latency_s, seconds))
        return replace(result, content=late, latency_s=seconds, error=True)

    def _left(self) -> tuple[float, float]:
        """Returns the US dollars and the seconds that are left; infinite without a limit."""
        t, preference = self.trajectory, self.env.task.preference
        usd = math.inf
        if preference.usd is not None:
            usd = preference.usd - t.cost_usd - self.own_usd()
        seconds = math.inf
        if preference.seconds is not None:
            seconds = preference.seconds - t.latency_s
        return usd, seconds


def _count(usd, token_usd) -> float:
    """Returns how many tokens `usd` US dollars pay for: whole ones, or infinitely many."""
    if usd == math.inf or not token_usd:
        return math.inf if usd >= 0 else 0
    return max(0, math.floor(usd / token_usd))
