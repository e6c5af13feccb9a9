"""What a call may do and an attempt may spend: US dollars, seconds, names never to call.

The limits are the user's, and hold whatever the policy writes. A `Tool` says before a call the most
that it can cost. Each call gets an `Allowance`, under which the tool is made smaller or the call is
refused. `UserLimits` counts what an attempt has spent, its own tokens included. No torch.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from nanorchestra.records import (
    RESULT_WORDS,
    Preference,
    Price,
    ToolCall,
    ToolResult,
    Trajectory,
    banned,
)
from nanorchestra.schemas import Json
from nanorchestra.tools.replies import REQUESTS, RequestCounts, side_by_side

SECONDS_PER_TOKEN = 0.01  # latency of a sampled id of the policy
ANSWER_SHARE = 0.1  # of the user's dollars and seconds, which calls leave for reading and answering


class RefusedError(Exception):
    """A call cannot be made within its allowance; the message is for the policy and the user."""


@dataclass(frozen=True)
class Allowance:
    """What one call may do.

    usd: US dollars at most. share: what a call that can be made smaller takes of them at most, so
    that calls of one turn do not starve each other. seconds: until the call is given up. never: the
    names that the user forbids.
    """

    usd: float = math.inf
    share: float = math.inf
    seconds: float = math.inf
    never: Sequence[str] = ()

    def check_names(self, names: Iterable[str]) -> None:
        """Raises RefusedError if the user forbids a call that has one of the names."""
        if ban := banned(set(names), self.never):
            raise RefusedError(f"the user forbids {ban}")

    def check_usd(self, name: str, most_usd: float) -> None:
        """Raises RefusedError if a call of `name` can cost more than the US dollars left."""
        if most_usd > self.usd:
            left = dollars(max(self.usd, 0.0))
            raise RefusedError(f"refused {name}: up to {dollars(most_usd)}, {left} left")

    def minus(self, usd: float) -> "Allowance":
        """Returns what is left of it beside something that costs `usd` US dollars."""
        return replace(self, usd=self.usd - usd, share=self.share - usd)


class Tool:
    """What the orchestrator may call under `name`; `parameters` is the JSON schema of `call`.

    `kind` says what is behind the name ("code", "search", "expert", ...). A tool of kind "answer"
    gives the final answer: its first result that is no error ends the attempt. A `blocking` call
    runs in a thread, so that it does not hold up other attempts; it returns in bounded time, and
    the seconds that it waits are part of its latency. A tool with a field `evidence` has the
    attempt's there. `helpers` are tools that it calls. The policy reads `result_words` of a result.

    A tool that costs money says so in its prices, or in a `most_usd` of its own: limits hold by it.
    """

    name: str
    kind: str
    description: str
    parameters: Json
    blocking = False
    usd_per_call = 0.0
    usd_per_second = 0.0
    timeout_s = 0.0
    result_words = RESULT_WORDS
    helpers: "Sequence[Tool]" = ()

    def call(self, arguments: Json) -> ToolResult:
        """Returns the observation and its price."""
        raise NotImplementedError

    @property
    def prices(self) -> dict[str, float]:
        """The US dollars that it charges, by what for: a "call", a "second"."""
        return {"call": self.usd_per_call, "second": self.usd_per_second}

    def most_usd(self, arguments: Json) -> float:
        """Returns the most US dollars that a call can cost, a finite number."""
        return self.usd_per_call + self.usd_per_second * self.timeout_s

    def ban_names(self, arguments: Json | None = None) -> set[str]:
        """Returns the names under which the user can ban a call: of the tool, its kind, its models.

        Without `arguments` those of every call. An argument that is one of a schema's choices names
        what is called, too.
        """
        names = {self.name, self.kind}
        for name, schema in self.parameters.get("properties", {}).items():
            for choice in schema.get("enum", ()) if isinstance(schema, dict) else ():  # or True
                chosen = arguments is None or arguments.get(name) == choice
                if chosen and isinstance(choice, str):
                    names.add(choice)
        return names

    def smaller(self, arguments: Json, allowance: Allowance) -> "Tool":
        """Returns the tool as it may be called under an allowance, where it can be made smaller."""
        return self


def within(tool: Tool, arguments: Json, allowance: Allowance) -> Tool:
    """Returns `tool` as it may be called with `arguments` under an allowance, smaller if need be.

    Raises RefusedError if the call is banned, or can cost more than is left even so.
    """
    allowance.check_names(tool.ban_names(arguments))
    tool = tool.smaller(arguments, allowance)
    allowance.check_usd(tool.name, tool.most_usd(arguments))
    return tool


def all_ban_names(tools: Iterable[Tool]) -> list[str]:
    """Returns every name that a ban may have where these tools are on offer, sorted."""
    known = set()
    for tool in tools:
        known |= tool.ban_names() | set(all_ban_names(tool.helpers))
    return sorted(known)


@dataclass(frozen=True)
class PreparedCall:
    """A call that may be made: `run()` returns its result, for `most_usd` US dollars at most."""

    run: Callable[[], Awaitable[ToolResult]]
    most_usd: float = 0.0


def refused(problem: str) -> ToolResult:
    """Returns the observation of a call that is not run."""
    return ToolResult(f"Error: {problem}", error=True, refused=True)


def refused_call(problem: str) -> PreparedCall:
    """Returns a call that is not run, and says why."""

    async def run():
        return refused(problem)

    return PreparedCall(run)


@dataclass
class UserLimits:
    """The limits of a preference on one attempt, whose `trajectory` says what it has spent.

    `prepare` prepares its calls. `price` and `seconds_per_token` are those of its own tokens.
    """

    preference: Preference
    prepare: Callable[[ToolCall, Allowance], PreparedCall]
    trajectory: Trajectory
    price: Price
    seconds_per_token: float = SECONDS_PER_TOKEN

    def own_usd(self) -> float:
        """Returns what the policy's own tokens cost so far."""
        sampled = sum(self.trajectory.sampled)
        return self.price.cost(len(self.trajectory.ids) - sampled, sampled)

    def usd_left(self) -> float:
        """Returns the US dollars that the attempt may still spend; infinite without a limit."""
        if self.preference.usd is None:
            return math.inf
        return self.preference.usd - self.trajectory.cost_usd - self.own_usd()

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
        for the calls in the order in which they were written, for each the most that it can cost;
        one that is made smaller gets its share of what is left.
        """
        usd = self.usd_left() - ANSWER_SHARE * (self.preference.usd or 0.0)
        seconds = self.seconds_left() - ANSWER_SHARE * (self.preference.seconds or 0.0)
        made = []
        for number, call in enumerate(calls):
            if number >= most:
                prepared = refused_call(f"calls in one turn: at most {most}")
            elif seconds <= 0:
                prepared = refused_call("the user's time for calls is over; answer now")
            else:
                share = usd / (min(len(calls), most) - number)
                allowance = Allowance(usd, share, seconds, self.preference.never)
                prepared = self.prepare(call, allowance)
            usd -= prepared.most_usd
            made.append(prepared)
        running = []
        with side_by_side([(call.name, call.arguments) for call in calls]) as counts:
            for call, prepared, own in zip(calls, made, counts, strict=True):
                running.append(_run(call, prepared, seconds, own))
            return await asyncio.gather(*running)


async def _run(
    call: ToolCall, prepared: PreparedCall, seconds: float, counts: RequestCounts | None
) -> ToolResult:
    """Returns a call's result; without one after `seconds` it is given up, billed at its most.

    The dollars of a result that comes too late are known. One that the infrastructure failed says
    so, however late.
    """
    REQUESTS.set(counts)  # of this call's own task
    late = f"Error: {call.name} was given up after {seconds:.1f} s, the user's limit"
    try:
        async with asyncio.timeout(None if seconds == math.inf else seconds):
            result = await prepared.run()
    except TimeoutError:
        return ToolResult(late, prepared.most_usd, seconds, error=True)
    if result.latency_s <= seconds or result.infrastructure:
        return replace(result, latency_s=min(result.latency_s, seconds))
    return replace(result, content=late, latency_s=seconds, error=True)


def _count(left: float, price: float) -> float:
    """Returns how many things of a price are paid for by what is left; infinite if without end."""
    if left == math.inf or not price:
        return math.inf if left >= 0 else 0
    return max(0, math.floor(left / price))


def dollars(usd: float) -> str:
    """Returns US dollars with two digits: "$0.012", "$0.000011"."""
    digits = f"{float(f'{usd:.2g}'):.9f}".rstrip("0").rstrip(".")
    return f"${digits}"
