"""What an attempt may spend: the user's US dollars and seconds, whatever the policy writes.

`UserLimits` counts what an attempt has spent, its own tokens included, and runs the calls of a turn
within what is left. Each call gets an `Allowance` (tool.py), to which it is held or by which it is
refused. No torch.
"""

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from nanorchestra.agent.environment import Environment
from nanorchestra.agent.numbering import REQUEST_COUNTS, RequestCounts, side_by_side
from nanorchestra.agent.tool import Allowance, PreparedCall, RefusedError, refused
from nanorchestra.records import Price, ToolCall, ToolResult, Trajectory

SECONDS_PER_TOKEN = 0.01  # latency of a sampled id of the policy
ANSWER_SHARE = 0.1  # of the user's dollars and seconds, which calls leave for reading and answering


@dataclass
class UserLimits:
    """The limits of a task's preference on one attempt, whose `trajectory` says what it has spent.

    `price` and `seconds_per_token` are those of the policy's own tokens.
    """

    env: Environment
    trajectory: Trajectory
    price: Price
    seconds_per_token: float = SECONDS_PER_TOKEN

    def __post_init__(self) -> None:
        self.preference = self.env.task.preference

    def usd_left(self) -> float:
        """Returns the US dollars that the attempt may still spend; infinite without a limit."""
        if self.preference.usd is None:
            return math.inf
        return self.preference.usd - self.trajectory.cost_usd

    def seconds_left(self) -> float:
        """Returns the seconds that the attempt may still last; infinite without a limit."""
        if self.preference.seconds is None:
            return math.inf
        return self.preference.seconds - self.trajectory.latency_s

    def readable(self) -> float:
        """Returns how many ids the policy may still read: those of a prompt or of results."""
        return _count(self.usd_left(), self.price.cost(1, 0))

    def writable(self, tokens: int, read_usd: float, token_usd: float) -> int:
        """Returns how many of `tokens` may be sampled in the next turn.

        `read_usd` is the price of reading its prompt, `token_usd` that of a sampled token.
        """
        by_usd = _count(self.usd_left() - read_usd, token_usd)
        by_time = _count(self.seconds_left(), self.seconds_per_token)
        return int(max(0, min(tokens, by_usd, by_time)))

    async def execute(self, calls: Sequence[ToolCall], most: int) -> list[ToolResult]:
        """Returns the results of a turn's calls, which run side by side.

        Calls after the first `most` and those that a limit forbids are refused. Money is set aside
        for the calls in the order in which they were written, for each the most that it can cost.
        The share of a call that can be held to less is an equal part of what the calls before have
        left.
        """
        usd = self.usd_left() - ANSWER_SHARE * (self.preference.usd or 0.0)
        seconds = self.seconds_left() - ANSWER_SHARE * (self.preference.seconds or 0.0)
        running = []
        # A recording tells equal calls apart by the counts of their own.
        with side_by_side([(call.name, call.arguments) for call in calls]) as counts:
            for number, (call, own) in enumerate(zip(calls, counts, strict=True)):
                try:
                    if number >= most:
                        raise RefusedError(f"calls in one turn: at most {most}")
                    if seconds <= 0:
                        raise RefusedError("the user's time for calls is over; answer now")
                    share = usd / (min(len(calls), most) - number)
                    allowance = Allowance(usd, share, seconds, self.preference.never)
                    prepared = self.env.prepare(call, allowance)
                    usd -= prepared.most_usd
                    running.append(_within_seconds(call, prepared, seconds, own))
                except RefusedError as error:
                    running.append(_refused(str(error)))
            return await asyncio.gather(*running)


async def _refused(problem: str) -> ToolResult:
    """Returns the result of a call that is not run."""
    return refused(problem)


async def _within_seconds(
    call: ToolCall, prepared: PreparedCall, seconds: float, counts: RequestCounts | None
) -> ToolResult:
    """Returns a call's result; without one after `seconds` it is given up, billed at its most.

    A call is timed by the wall, also one that states a virtual latency. The dollars of a result
    that comes too late are known. One that the infrastructure failed says so, however late. A
    recording may say that the call was given up earlier, under a lower limit: what it would have
    returned is not known, which is a failure of the infrastructure.
    """
    REQUEST_COUNTS.set(counts)  # of this call's own task
    try:
        async with asyncio.timeout(None if seconds == math.inf else seconds):
            result = await prepared.run()
    except TimeoutError:
        result = ToolResult("", latency_s=seconds, given_up=True)
    if result.given_up and result.latency_s < seconds:
        earlier = f"the recording gave it up after {result.latency_s:.1f} s; record it again"
        content = f"Error: {call.name}: {earlier}"
        return replace(result, content=content, infrastructure=True, given_up=False)
    late = f"Error: {call.name} was given up after {seconds:.1f} s, the user's limit"
    if result.given_up:
        return ToolResult(
            late, prepared.most_usd, seconds, error=True, alias=prepared.alias, given_up=True
        )
    if result.latency_s <= seconds:
        return result
    if result.infrastructure:
        return replace(result, latency_s=seconds)
    return replace(result, content=late, latency_s=seconds, error=True)


def _count(left: float, price: float) -> float:
    """Returns how many things of a price are paid for by what is left; infinite if without end."""
    if left == math.inf or not price:
        return math.inf if left >= 0 else 0
    return max(0, math.floor(left / price))
