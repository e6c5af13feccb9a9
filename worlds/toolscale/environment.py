"""An environment that the agent loop plays: domain tools, a user who answers, and experts."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from nanorchestra.agent.environment import in_thread
from nanorchestra.records import Price, Task, ToolCall, ToolResult
from nanorchestra.tools.experts import EndpointError
from worlds.toolscale.program import ToolError
from worlds.toolscale.score import Judge, Scorer
from worlds.toolscale.shapes import Json
from worlds.toolscale.user import ScriptedUser, User, ended
from worlds.toolscale.verify import altered
from worlds.toolscale.world import World

EXPERT = "call_expert"
ROLE = (
    "You serve the user under the policy below. In each turn either write to the user or call a "
    "tool, never both.\n\n<policy>\n{policy}\n</policy>"
)
HAND_OVER = (
    "\n\nYou may also let an expert do a turn for you with call_expert: what it writes goes to the "
    "user, what it calls is done. Experts cost money and time; ask a strong one for hard turns "
    "only."
)


@dataclass(frozen=True)
class Action:
    """What an expert does with a turn: calls, or else a message to the user.

    `cost_usd` in US dollars, `latency_s` in seconds, `tokens` are (input, output).
    """

    content: str
    calls: tuple[ToolCall, ...]
    cost_usd: float
    latency_s: float
    tokens: tuple[int, int]


class Expert(Protocol):
    """An expert; if it is `blocking`, it runs in a thread."""

    blocking: bool

    def act(self, env: DomainEnvironment) -> Action:
        """Returns what the expert does next. Raises EndpointError if there is no answer."""


@dataclass
class SimulatedExpert:
    """A declared simulation of an expert.

    With probability `skill` it does the next golden step; else it does one with an argument
    altered, or says nothing of use.
    """

    skill: float
    price: Price
    latency_s: float
    seed: str
    blocking: bool = False

    def act(self, env: DomainEnvironment) -> Action:
        """Returns what the expert does next."""
        rng = random.Random(f"{self.seed}/{len(env.messages)}")
        left = [call for call in env.scorer.golden_calls() if call not in env.calls]
        read = sum(len(message.get("content") or "") for message in env.messages) // 4
        tokens = read, rng.randint(80, 600)
        cost, seconds = self.price.cost(*tokens), self.latency_s * rng.uniform(0.8, 1.2)
        right = rng.random() < self.skill
        if left and (right or rng.random() < 0.5):
            name, arguments = left[0] if right else altered(env.world, left[:1], rng)[0]
            return Action("", (ToolCall(name, arguments),), cost, seconds, tokens)
        content = env.last_word() if right else "One moment, I am looking into it."
        return Action(content, (), cost, seconds, tokens)


class DomainEnvironment:
    """One attempt at a task of a world; `calls` and `said` are what will be scored.

    `call_expert(expert)` hands the turn over: what the expert writes goes to the user, what it
    calls is done, and the policy reads what happened.

    Invariant: `tables` are the world's with all of `calls` done; those that fail change
    nothing.
    """

    def __init__(
        self,
        world: World,
        task: Task,
        user: User,
        experts: dict[str, Expert],
        judge: Judge | None = None,
    ):
        tau2 = task.data["task"]
        self.world, self.task, self.user, self.experts, self.judge = (
            world,
            task,
            user,
            experts,
            judge,
        )
        self.scorer = Scorer(world, tau2)
        self.tables = dict(world.tables)
        self.calls: list[tuple[str, Json]] = []
        self.said: list[str] = []
        self.over = False
        self.tools = world.functions(tau2.get("tools"))
        self.offered = [tool["function"]["name"] for tool in self.tools]
        self.kinds = {EXPERT: "expert"}
        system = ROLE.format(policy=tau2.get("policy") or world.policy)
        if experts:
            self.tools.append(_expert_tool(task.data["experts"]))
            system += HAND_OVER
        if task.preference.text:
            system += f"\n\nYour operator's wish: {task.preference.text}"
        self.messages: list[Json] = [
            {"role": "system", "content": system},
            {"role": "user", "content": task.question},
        ]

    async def execute(self, call: ToolCall) -> ToolResult:
        """Runs a call of a domain tool or an expert. One that fails is an error observation."""
        if call.error is None and call.name == EXPERT and self.experts:
            return await self._hand_over(call.arguments.get("expert"))
        return self._call(call)

    async def reply(self, content: str) -> ToolResult | None:
        """Returns the user's answer; None if the conversation is over."""
        if self.over:
            return None
        self.said.append(content)
        self.messages.append({"role": "assistant", "content": content})
        try:
            if isinstance(self.user, ScriptedUser):
                answer = self.user.reply(content)
            else:
                answer = await in_thread(self.user.reply, content)
        except EndpointError as error:
            return _unreached("the user", error)
        self.messages.append({"role": "user", "content": answer})
        self.over = ended(answer)
        return None if self.over else ToolResult(answer)

    def score(self, answer: str) -> float:
        """Returns the task's reward, 0.0 or 1.0. `reply` has heard the answer already."""
        return self.scorer.score(self.calls, self.said, self.judge).reward

    def last_word(self) -> str:
        """Returns a message with all that the user wants to be told."""
        told = ", ".join(self.scorer.criteria["communicate_info"])
        return f"This is done. {told}".strip()

    def _call(self, call: ToolCall) -> ToolResult:
        if call.error is not None or call.name not in self.offered:
            names = ", ".join(sorted(self.offered))
            problem = call.error or f"no tool named {call.name!r}; the tools are {names}"
            return ToolResult(f"Error: {problem}", error=True)
        self.calls.append((call.name, call.arguments))
        arguments = json.dumps(call.arguments, ensure_ascii=False)
        try:
            value = self.world.call(self.tables, call.name, call.arguments)
            result = ToolResult(json.dumps(value, ensure_ascii=False))
        except ToolError as problem:
            result = ToolResult(f"Error: {problem}", error=True)
        name, function = f"call_{len(self.calls)}", {"name": call.name, "arguments": arguments}
        asked = [{"id": name, "type": "function", "function": function}]
        self.messages += [
            {"role": "assistant", "content": "", "tool_calls": asked},
            {"role": "tool", "tool_call_id": name, "content": result.content},
        ]
        return result

    async def _hand_over(self, alias: Any) -> ToolResult:
        expert = self.experts.get(alias) if isinstance(alias, str) else None
        if expert is None:
            names = ", ".join(self.experts)
            problem = f"Error: {EXPERT}: expert must be one of {names}, not {alias!r}"
            return ToolResult(problem, error=True)
        try:
            action = await in_thread(expert.act, self) if expert.blocking else expert.act(self)
        except EndpointError as error:
            return _unreached(alias, error)
        lines, answer = [], None
        for call in action.calls:
            arguments = json.dumps(call.arguments, ensure_ascii=False)
            lines.append(f"{alias} called {call.name}({arguments}): {self._call(call).content}")
        if not action.calls:
            answer = await self.reply(action.content or "One moment, please.")
            said = (
                f"The user: {answer.content}" if answer else "The user has ended the conversation."
            )
            lines.append(f"{alias} wrote to the user: {action.content}\n{said}")
        return ToolResult(
            "\n".join(lines),
            action.cost_usd,
            action.latency_s,
            infrastructure=answer is not None and answer.infrastructure,
            input_tokens=action.tokens[0],
            output_tokens=action.tokens[1],
            alias=alias,
        )


def _unreached(name: str, error: EndpointError) -> ToolResult:
    return ToolResult(f"Error: {name} did not answer ({error})", error=True, infrastructure=True)


def _expert_tool(offered: Sequence[Json]) -> Json:
    shape = {
        "type": "string",
        "enum": [expert["alias"] for expert in offered],
        "description": " ".join(expert["description"] for expert in offered),
    }
    function = {
        "name": EXPERT,
        "description": "Lets an expert do this turn.",
        "parameters": {"type": "object", "properties": {"expert": shape}, "required": ["expert"]},
    }
    return {"type": "function", "function": function}
