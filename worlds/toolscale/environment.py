"""An environment that the agent loop plays: domain tools, a user, experts."""

import json
import random
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from nanorchestra.agent.evidence import Evidence
from nanorchestra.agent.failures import EndpointError
from nanorchestra.agent.threads import in_thread
from nanorchestra.agent.tool import (
    Allowance,
    PreparedCall,
    RefusedError,
    Tool,
    observed,
    refused,
)
from nanorchestra.records import ParsedTurn, Price, Task, ToolCall, ToolResult
from nanorchestra.tools.models import Expert
from nanorchestra.tools.simulated import Simulation
from worlds.toolscale.domain import Domain
from worlds.toolscale.expert import next_turn, wrong_turn
from worlds.toolscale.model_user import ModelUser, parsed
from worlds.toolscale.offers import CALL_EXPERT
from worlds.toolscale.program import ToolError
from worlds.toolscale.score import Call, Scorer, judged
from worlds.toolscale.user import ScriptedUser, ended, wishes
from worlds.toolscale.words import expand

EXPERT = "call_expert"
STEP_TOKENS = 600  # that an expert writes for a turn at most
TURN_TOKENS = 300  # that a simulated expert writes for a usual turn
CHARS_PER_TOKEN = 4  # of the history, which a simulated expert reads
ROLE = (
    "You serve the user under the policy below. In each turn either write to the user or call a "
    "tool, never both.\n\n<policy>\n{policy}\n</policy>"
)
HAND_OVER = (
    "\n\nYou may also let an expert do a turn for you with call_expert: what it writes goes to the "
    "user, what it calls is done. Experts cost money and time; ask a strong one for hard turns "
    "only."
)

TURN = """{talk}

You are the agent, and these are your functions:
{tools}

Do the agent's next turn and nothing else: write either a message to the user, or one call as
<tool_call>{{"name": ..., "arguments": {{...}}}}</tool_call>."""


@dataclass(frozen=True)
class Models:
    """The language models that take part: the user, the judge, and experts by their models.

    None: the scripted user, no judge, and simulated experts.
    """

    user: Tool | None = None
    judge: Tool | None = None
    experts: dict[str, Expert] | None = None


SIMULATED = Models()


class DomainEnvironment:
    """One attempt at a task of a domain; `trace` is what will be scored.

    `call_expert(expert)` hands the turn over: what the expert writes goes to the user, what it
    calls is done, and the policy reads what happened. `seed` is that of the simulated experts.
    The user and the judge are not billed.

    Invariant: `tables` are the domain's with all calls of the trace done; those that fail change
    nothing.
    """

    verdict, prompt = "", ()

    def __init__(self, domain: Domain, task: Task, seed: int, models: Models = SIMULATED):
        tau2 = task.data["task"]
        self.domain, self.task, self.seed = domain, task, seed
        self.experts = {expert["alias"]: expert for expert in task.data["experts"]}
        self.models, self.scorer = models, Scorer(domain, tau2)
        self.user = ModelUser(tau2, models.user) if models.user else ScriptedUser(tau2, domain)
        self.tables, self.wishes = dict(domain.tables), wishes(tau2)
        self.trace = [("user", task.question)]
        self.over, self.evidence = False, Evidence(task.question)
        self.tools = domain.functions(tau2["tools"])
        self.offered = tau2["tools"]
        self.kinds = {EXPERT: "expert"}
        system = ROLE.format(policy=tau2.get("policy") or domain.policy)
        self.history = [system, f"The user: {task.question}"]  # what an expert reads
        if self.experts:
            descriptions = (expert["description"] for expert in self.experts.values())
            words = {"names": list(self.experts), "descriptions": " ".join(descriptions)}
            self.tools.append(tau2.get("asking") or expand(CALL_EXPERT, words))
            system += HAND_OVER
        if task.preference.words:
            system += f"\n\nYour operator's preference: {task.preference.words}"
        self.messages = [
            {"role": "system", "content": system},
            {"role": "user", "content": task.question},
        ]

    def prepare(self, call: ToolCall, allowance: Allowance) -> PreparedCall:
        """Returns a call as it may be made: the tools of a domain are free, experts charge.

        Raises RefusedError, no other.
        """
        if call.error is None and call.name == EXPERT and self.experts:
            return self._prepare_expert(call.arguments.get("expert"), allowance)
        allowance.check_names({call.name})
        return PreparedCall(partial(self._do, call))

    def _prepare_expert(self, alias, allowance) -> PreparedCall:
        """Returns a turn of an expert as it may be made. Raises RefusedError."""
        if not isinstance(alias, str) or alias not in self.experts:
            names = ", ".join(self.experts)
            raise RefusedError(f"{EXPERT}: expert must be one of {names}, not {alias!r}")
        expert = self.experts[alias]
        price = Price(*expert["usd"])  # that the task quotes
        allowance.check_names(self._ban_names(expert))
        if self.models.experts is None:
            most = price.cost(sum(map(len, self.history)), STEP_TOKENS)
            allowance.check_usd(alias, most)
            return PreparedCall(partial(self._hand_over, expert, None), most)
        asked = replace(self.models.experts[expert["model"]], price=price)
        asked = asked.smaller(self._turn(), allowance)
        most = asked.most_usd(self._turn())
        allowance.check_usd(alias, most)
        return PreparedCall(partial(self._hand_over, expert, asked), most)

    async def _do(self, call) -> ToolResult:
        return self.do(call)

    def _ban_names(self, expert) -> set[str]:
        """The names under which the user can ban an expert."""
        model, names = expert["model"], {EXPERT, self.kinds[EXPERT], expert["alias"]}
        if self.models.experts is not None:
            return names | self.models.experts[model].ban_names
        return names | {model, model.rpartition("/")[2]}

    async def reply(self, content: str) -> ToolResult | None:
        """Returns the user's answer; None if the conversation is over."""
        if self.over:
            return None
        try:
            answer = await in_thread(self.hear, content) if self.models.user else self.hear(content)
        except EndpointError as error:
            problem = f"Error: the user did not answer ({error})"
            return ToolResult(problem, error=True, infrastructure=True)
        return None if self.over else ToolResult(answer)

    def hear(self, content: str) -> str:
        """Returns the user's answer to a message. Raises EndpointError."""
        self.trace.append(("agent", content))
        pending, handed = self.scorer.pending(self.trace), self.scorer.handed(self.trace)
        answer = self.user.reply(content, pending, handed)
        self.trace.append(("user", answer))
        self.history += [f"The agent: {content}", f"The user: {answer}"]
        self.over = ended(answer)
        return answer

    def score(self, answer: str) -> float:
        """Returns the task's reward, 0.0 or 1.0. `reply` has heard the answer already.

        Raises EndpointError if the judge does not answer.
        """
        reward, claims = self.scorer.score(self.trace), self.scorer.claims
        right = reward and (not claims or judged(self.models.judge, claims, self.history[1:]))
        return float(right)

    def do(self, call: ToolCall) -> ToolResult:
        """Runs a call of a domain tool."""
        if call.error is not None or call.name not in self.offered:
            known = ", ".join(sorted(self.offered))
            return refused(call.error or f"no tool named {call.name!r}; the tools are {known}")
        try:
            value = self.domain.call(self.tables, call.name, call.arguments)
            if not isinstance(value, str):
                value = json.dumps(value, ensure_ascii=False, default=_plain)
            result = ToolResult(value)
        except ToolError as problem:
            result = ToolResult(f"Error: {problem}", error=True)
        self.trace.append(("call", call.name, call.arguments, result.error))
        arguments = json.dumps(call.arguments, ensure_ascii=False)
        self.history.append(f"The agent called {call.name}({arguments}): {result.content}")
        return result

    async def _hand_over(self, expert, asked) -> ToolResult:
        """Lets an expert do the turn; one that has failed has done nothing.

        `asked` is the language model behind it, None for a simulation.
        """
        alias, answer = expert["alias"], None
        if asked is None:
            turn, result = self._simulated(expert)
        else:
            result = await in_thread(observed, alias, partial(asked.ask, self._turn(), alias))
            turn = parsed("" if result.error else result.content)
        if result.error:
            text = result.content
        elif turn.calls:
            made = self.do(turn.calls[0])
            text = made.content if made.refused else self.history[-1].replace("The agent", alias, 1)
        else:
            answer = await self.reply(turn.content)
            reaction = f"The user: {answer.content}" if answer else "The user has ended the talk."
            text = f"{alias} wrote to the user: {turn.content}\n{reaction}"
        failed = result.infrastructure or answer is not None and answer.infrastructure
        evidence = {} if result.error else {"attempts": [[alias, text]]}
        return replace(result, content=text, infrastructure=failed, alias=alias, findings=evidence)

    def _turn(self) -> str:
        """What an expert is asked."""
        return TURN.format(talk="\n".join(self.history), tools=json.dumps(self.tools[:-1]))

    def _simulated(self, expert) -> tuple[ParsedTurn, ToolResult]:
        """A declared simulation of an expert, whose turns are right with probability `skill`."""
        simulation = Simulation(
            expert["skill"], Price(*expert["usd"]), TURN_TOKENS, expert["latency_s"]
        )
        return simulation.reply(
            f"{self.task.id}/{self.seed}/{expert['alias']}/{len(self.history)}",
            sum(map(len, self.history)) // CHARS_PER_TOKEN,
            self._right_turn,
            self._wrong_turn,
            STEP_TOKENS,
        )

    def _right_turn(self, rng: random.Random) -> ParsedTurn:
        return _parsed(*next_turn(self))

    def _wrong_turn(self, rng: random.Random) -> ParsedTurn:
        return _parsed(*wrong_turn(self, rng))


def _parsed(content: str, call: Call | None) -> ParsedTurn:
    """Returns the turn of an expert that writes to the user or makes a call."""
    calls = (ToolCall(*call),) if call else ()
    return ParsedTurn("", content, calls)


def _plain(value) -> Any:
    return value.model_dump() if hasattr(value, "model_dump") else str(value)
