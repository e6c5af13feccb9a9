"""The contract of a tool, and the way of a call from what the policy wrote to what it reads.

`prepare` checks a call and holds it to its `Allowance`; the call that it returns runs the tool, in
a thread if it blocks. `observed` is the thread's edge: whatever a tool raises becomes an
observation there, and a result is cut before anything splits it into words. No torch.
"""

import math
import threading
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from nanorchestra.agent.evidence import Evidence
from nanorchestra.agent.failures import failed, is_infrastructure
from nanorchestra.agent.threads import in_thread
from nanorchestra.agent.truncation import shortened
from nanorchestra.records import RESULT_WORDS, ToolCall, ToolResult, banned
from nanorchestra.schemas import Json, argument_error
from nanorchestra.units import dollars


class RefusedError(Exception):
    """A call that is not run; the message says why, for the policy and the user."""


@dataclass(frozen=True)
class Allowance:
    """What one call may do.

    usd_left: US dollars at most. usd_share: what a call that can be held to less takes of them, so
    that the calls of one turn do not starve each other; an expert takes more only for the shortest
    reply that is of use. seconds: until the call is given up. never: the names that the user
    forbids.
    """

    usd_left: float = math.inf
    usd_share: float = math.inf
    seconds: float = math.inf
    never: Sequence[str] = ()

    def check_names(self, names: Iterable[str]) -> None:
        """Raises RefusedError if the user forbids a call that has one of the names."""
        if ban := banned(set(names), self.never):
            raise RefusedError(f"the user forbids {ban}")

    def check_usd(self, name: str, most_usd: float) -> None:
        """Raises RefusedError if a call of `name` can cost more than the US dollars left."""
        if most_usd > self.usd_left:
            raise self.too_little(name, most_usd)

    def too_little(self, name: str, most_usd: float) -> RefusedError:
        """Returns the refusal of a call that the US dollars left do not pay for."""
        left = dollars(max(self.usd_left, 0.0))
        return RefusedError(f"refused {name}: up to {dollars(most_usd)}, {left} left")


class Tool:
    """What the orchestrator may call.

    A tool states its name, its kind, a description, and `parameters`, the JSON schema of the
    arguments of `call`. The rest of the contract has defaults, which a tool states if it needs to:

    kind: what is behind the name ("code", "search", "expert", ...). A tool of kind "answer" gives
    the final answer: its first result that is no error ends the attempt.
    blocking: whether a call waits; it then runs in a thread and does not hold up other attempts. It
    returns in bounded time, and the seconds that it waits are part of its latency.
    usd_per_call, usd_per_second, timeout_s: its price, from which follows the most that a call can
    cost. A tool with another price says so in its own `most_usd`: a user's limits hold by it.
    helpers: tools that it calls.
    """

    name: str
    kind: str
    description: str
    parameters: Json
    blocking = False
    usd_per_call = 0.0
    usd_per_second = 0.0
    timeout_s = 0.0
    helpers: "Sequence[Tool]" = ()

    def call(self, arguments: Json) -> ToolResult:
        """Returns the observation, with its cost and latency; a call that fails may raise."""
        raise NotImplementedError

    def for_attempt(self, evidence: Evidence) -> "Tool":
        """Returns the tool of an attempt that gathers `evidence`, for one that reads it."""
        return self

    @property
    def prices(self) -> dict[str, float]:
        """The US dollars that it charges, by what for: a "call", a "second"."""
        return {"call": self.usd_per_call, "second": self.usd_per_second}

    def alias(self, arguments: Json) -> str:
        """Returns the expert that a call of a tool with several asks; "" for other tools."""
        return ""

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

    def under(self, arguments: Json, allowance: Allowance) -> "Tool":
        """Returns the tool as it may be called under an allowance, by a call that is not banned.

        A tool that can be held to less says how: to fewer tokens, seconds, or helpers. Raises
        RefusedError if the call can cost more than the dollars left even so.
        """
        allowance.check_usd(self.name, self.most_usd(arguments))
        return self

    def within(self, arguments: Json, allowance: Allowance) -> "Tool":
        """Returns the tool as it may be called under an allowance.

        Raises RefusedError if the call is banned, or can cost more than is left.
        """
        if allowance.never:
            allowance.check_names(self.ban_names(arguments))
        return self.under(arguments, allowance)

    @property
    def schema(self) -> Json:
        """The OpenAI function object that stands in the prompt."""
        about = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": about}


@dataclass(frozen=True)
class PreparedCall:
    """A call that may be made: `run()` returns its result, for `most_usd` US dollars at most.

    `alias` is that of its result, also of one that does not come.
    """

    run: Callable[[], Awaitable[ToolResult]]
    most_usd: float = 0.0
    alias: str = ""


def prepare(tools: Mapping[str, Tool], call: ToolCall, allowance: Allowance) -> PreparedCall:
    """Returns a call of one of the tools as it may be made under an allowance.

    Raises RefusedError for one that cannot be run, and for one that the allowance forbids.
    """
    if call.error:
        raise RefusedError(call.error)
    if call.name not in tools:
        raise RefusedError(f"no tool named {call.name!r}; the tools are {', '.join(tools)}")
    tool = tools[call.name]
    if problem := argument_error(call.arguments, tool.parameters):
        raise RefusedError(f"{call.name}: {problem}")
    tool = tool.within(call.arguments, allowance)
    run = partial(_in_its_thread, tool, call.arguments)
    return PreparedCall(run, tool.most_usd(call.arguments), tool.alias(call.arguments))


async def _in_its_thread(tool: Tool, arguments: Json) -> ToolResult:
    """Returns the result of a call, as the policy reads it; a tool that blocks has a thread."""
    observe = partial(observed, tool.name, partial(tool.call, arguments))
    result = await in_thread(observe) if tool.blocking else observe()
    return replace(result, alias=tool.alias(arguments))


def observed(name: str, call: Callable[[], ToolResult]) -> ToolResult:
    """Returns the result of a call of `name`, cut to RESULT_WORDS; whatever it raises is one, too.

    A cancellation, an interrupt or a panic that a tool raises is no ordinary exception: out of the
    tool's thread it would end other attempts, or the process. Ctrl-C reaches the main thread alone.
    """
    try:
        result = call()
        return replace(result, content=shortened(result.content, RESULT_WORDS))
    except BaseException as error:
        in_main = threading.current_thread() is threading.main_thread()
        if in_main and isinstance(error, KeyboardInterrupt):
            raise
        return failed(name, error, is_infrastructure(error))


def refused(problem: str) -> ToolResult:
    """Returns the observation of a call that is not run."""
    return ToolResult(f"Error: {problem}", error=True, refused=True)


def all_ban_names(tools: Iterable[Tool]) -> list[str]:
    """Returns every name that a ban may have where these tools are on offer, sorted."""
    known = set()
    for tool in tools:
        known |= tool.ban_names() | set(all_ban_names(tool.helpers))
    return sorted(known)
