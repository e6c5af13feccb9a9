"""An environment that the agent loop plays: domain tools, a user, experts."""

import asyncio
import json
import random
from dataclasses import dataclass, replace
from functools import partial

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
from nanorchestra.model.parser import StreamParser
from nanorchestra.records import ParsedTurn, Price, Task, ToolCall, ToolResult
from nanorchestra.tools.functions import within_seconds
from nanorchestra.tools.models import Expert
from nanorchestra.tools.simulated import Simulation
from worlds.toolscale.domain import Domain
from worlds.toolscale.expert import next_turn, wrong_turn
from worlds.toolscale.offers import call_expert
from worlds.toolscale.score import Call, Scorer, judged
from worlds.toolscale.toolkit import ToolError
from worlds.toolscale.user import ModelUser, ScriptedUser, ended

EXPERT = "call_expert"
STEP_TOKENS = 600  # that an expert writes for a turn at most
TURN_TOKENS = 300  # that a simulated expert writes for a usual turn
CHARS_PER_TOKEN = 4  # of the history, which a simulated expert reads
CALL_SECONDS = 10.0  # until a call of a domain's tool is given up
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

    Invariant: `kit` is the domain's database with all calls of the trace done; those that fail
    change nothing.
    """

    verdict, prompt, blocking = "", (), True

    def __init__(self, domain: Domain, task: Task, seed: int, models: Models = SIMULATED):
        tau2 = task.data["task"]
        self.domain, self.task, self.seed = domain, task, seed
        self.experts = {expert["alias"]: expert for expert in task.data["experts"]}
        self.models, self.scorer = models, Scorer(domain, tau2)
        self.user = ModelUser(tau2, models.user) if models.user else ScriptedUser(tau2)
        self.kit, self._calling = domain.start.copy(), asyncio.Lock()
        self.trace = [("user", task.question)]
        self.over, self.evidence = False, Evidence(task.question)
        self.offered = list(tau2["tools"])
        self.tools = [domain.functions[name] for name in self.offered]
        self.kinds = {EXPERT: "expert"}
        system = ROLE.format(policy=tau2.get("policy") or domain.policy)
        self.history = [system, f"The user: {task.question}"]  # what an expert reads
        if self.experts:
            self.tools.append(tau2.get("asking") or call_expert(task.data["experts"]))
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
            return PreparedCall(partial(self._hand_over, expert, None), most, alias)
        asked = replace(self.models.experts[expert["model"]], price=price)
        asked = asked.under(self._turn(), allowance, alias)
        hand_over = partial(self._hand_over, expert, asked)
        return PreparedCall(hand_over, asked.most_usd(self._turn()), alias)

    async def _do(self, call) -> ToolResult:
        """Runs a call in a thread: one that never ends fails alone, and has done nothing.

        Calls of one turn run in their order, each on the database that the last one has left.
        """
        async with self._calling:
            kit = self.kit.copy()
            run = partial(within_seconds, CALL_SECONDS, partial(self._tried, kit, call))
            return self._record(call, kit, await in_thread(observed, call.name, run))

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
        """Runs a call of a domain tool, of a teacher or a simulated expert."""
        kit = self.kit.copy()
        return self._record(call, kit, self._tried(kit, call))

    def _tried(self, kit, call) -> ToolResult:
        """Returns the result of a call on a database of its own."""
        if call.error is not None or call.name not in self.offered:
            known = ", ".join(sorted(self.offered))
            return refused(call.error or f"no tool named {call.name!r}; the tools are {known}")
        try:
            value = kit.call(call.name, call.arguments)
        except ToolError as problem:
            return ToolResult(f"Error: {problem}", error=True)
        return ToolResult(
            value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        )

    def _record(self, call, kit, result) -> ToolResult:
        """Takes over the database of a call that succeeded; returns the result."""
        if not result.error:
            self.kit = kit
        if not result.refused:
            self.trace.append(("call", call.name, call.arguments, result.error))
            arguments = json.dumps(call.arguments, ensure_ascii=False)
            self.history.append(f"The agent called {call.name}({arguments}): {result.content}")
        return result

    async def _hand_over(self, expert, asked) -> ToolResult:
        """Lets an expert do the turn; one that has failed has done nothing.

        `asked` is the language model behind it, None for a simulation.
        """
        alias = expert["alias"]
        if asked is None:
            turn, result = self._simulated(expert)
        else:
            result = await in_thread(observed, alias, partial(asked.ask, self._turn(), alias))
            turn = _read("" if result.error else result.content)
        failed = result.infrastructure
        if result.error:
            text = result.content
        elif turn.calls:
            made = await self._do(turn.calls[0])
            failed = made.infrastructure
            text = made.content if made.refused else self.history[-1].replace("The agent", alias, 1)
        else:
            answer = await self.reply(turn.content)
            failed = answer is not None and answer.infrastructure
            reaction = f"The user: {answer.content}" if answer else "The user has ended the talk."
            text = f"{alias} wrote to the user: {turn.content}\n{reaction}"
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
        return _turn_of(*next_turn(self))

    def _wrong_turn(self, rng: random.Random) -> ParsedTurn:
        return _turn_of(*wrong_turn(self, rng))


def _turn_of(content: str, call: Call | None) -> ParsedTurn:
    """The turn of an expert that writes to the user or makes a call."""
    calls = (ToolCall(*call),) if call else ()
    return ParsedTurn("", content, calls)


def _read(text: str) -> ParsedTurn:
    """The turn that a language model has written."""
    parser = StreamParser()
    parser.feed(text)
    return parser.finish()
