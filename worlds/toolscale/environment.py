"""The worlds as environments that the agent loop plays: domain tools, a user who answers, and experts that may take over a turn.

`load_world(DIR)` reads what data_gen.py wrote (small.py makes some in memory). Its `task(split, index)` gives a nanorchestra Task, its `environment(task, seed)` one attempt.
`call_expert(expert)` hands the turn over: what the expert writes goes to the user, what it calls is done, and the policy reads what happened.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Iterator, Protocol, Sequence

from nanorchestra.agent.environment import in_thread
from nanorchestra.agent.loop import SECONDS_PER_TOKEN
from nanorchestra.errors import UserError
from nanorchestra.model import chat
from nanorchestra.records import Preference, Price, Task, ToolCall, ToolResult
from nanorchestra.tools.experts import EndpointError, chat_completion
from nanorchestra.training.lessons import Lesson
from reward import POLICY, PRICES
from worlds.toolscale import preferences
from worlds.toolscale.formats import load_tasks
from worlds.toolscale.program import ToolError
from worlds.toolscale.score import Judge, Scorer
from worlds.toolscale.user import ScriptedUser, User, ended
from worlds.toolscale.verify import altered
from worlds.toolscale.world import World

HELD_OUT = 5  # every fifth task of a domain is held out
VERIFIERS = (
    "actions",
    "env_assertions",
    "communicate_info",
)  # what a task is scored by; an nl_assertion alone needs a judge
EXPERT = "call_expert"
STEP_TOKENS = 4000, 400  # that an expert reads and writes for a step, for the bounds of a reward
ROLE = "You serve the user under the policy below. In each turn either write to the user or call a tool, never both.\n\n<policy>\n{policy}\n</policy>"
HAND_OVER = "\n\nYou may also let an expert do a turn for you with call_expert: what it writes goes to the user, what it calls is done. Experts cost money and time; ask a strong one for hard turns only."


@dataclass(frozen=True)
class Action:
    """What an expert does with a turn: calls, or else a message to the user; what it cost in dollars, seconds and tokens."""

    content: str
    calls: tuple[ToolCall, ...]
    cost_usd: float
    latency_s: float
    tokens: tuple[int, int]


class Expert(Protocol):
    """`act` sees the environment's messages and tools. Raises EndpointError if there is no answer. `blocking`: run it in a thread."""

    blocking: bool

    def act(self, env: DomainEnvironment) -> Action: ...


@dataclass
class SimulatedExpert:
    """A declared simulation: with probability `skill` it does the next golden step, else one with an argument altered, or says nothing of use."""

    skill: float
    price: Price
    latency_s: float
    seed: str
    blocking: bool = False

    def act(self, env: DomainEnvironment) -> Action:
        rng = random.Random(f"{self.seed}/{len(env.messages)}")
        left = [call for call in env.scorer.golden_calls() if call not in env.calls]
        tokens = (
            sum(len(message.get("content") or "") for message in env.messages) // 4,
            rng.randint(80, 600),
        )
        cost, seconds = self.price.cost(*tokens), self.latency_s * rng.uniform(0.8, 1.2)
        right = rng.random() < self.skill
        if left and (right or rng.random() < 0.5):
            name, arguments = left[0] if right else altered(env.world, left[:1], rng)[0]
            return Action("", (ToolCall(name, arguments),), cost, seconds, tokens)
        told = ", ".join(env.scorer.criteria.get("communicate_info") or ())
        return Action(
            f"This is done. {told}".strip() if right else "One moment, I am looking into it.",
            (),
            cost,
            seconds,
            tokens,
        )


@dataclass
class HttpExpert:
    """An expert behind an OpenAI-compatible endpoint: it gets the conversation and the domain's tools, not call_expert."""

    base_url: str
    model: str
    price: Price
    key_variable: str = "OPENAI_API_KEY"
    timeout_s: float = 120.0
    blocking: bool = True

    def act(self, env: DomainEnvironment) -> Action:
        tools = [tool for tool in env.tools if tool["function"]["name"] != EXPERT]
        start = time.monotonic()
        message, tokens = chat_completion(
            self.base_url,
            {"model": self.model, "messages": env.messages, "tools": tools},
            key_variable=self.key_variable,
            timeout_s=self.timeout_s,
        )
        calls = []
        for call in message.get("tool_calls") or ():
            try:
                function = call["function"]
                calls.append(ToolCall(function["name"], json.loads(function["arguments"])))
            except (ValueError, KeyError, TypeError):
                calls.append(
                    ToolCall(
                        "", {}, error="the expert's call is not JSON with a name and arguments"
                    )
                )
        return Action(
            message.get("content") or "",
            tuple(calls),
            self.price.cost(*tokens),
            time.monotonic() - start,
            tokens,
        )


class DomainEnvironment:
    """One attempt at a task of a world. Plays in nanorchestra.agent.loop.Rollout; `calls` and `said` are what will be scored.

    Invariant: `tables` are the task's start with all of `calls` done, those that err too (they change nothing).
    """

    def __init__(
        self,
        world: World,
        tau2: dict[str, Any],
        task: Task,
        user: User,
        experts: dict[str, Expert],
        judge: Judge | None = None,
    ):
        self.world, self.task, self.user, self.experts, self.judge = (
            world,
            task,
            user,
            experts,
            judge,
        )
        self.scorer = Scorer(world, tau2)
        self.tables = self.scorer.start()
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.said: list[str] = []
        self.over = False
        self.tools = world.functions(tau2.get("tools"))
        self.offered = {tool["function"]["name"] for tool in self.tools}
        self.kinds = {EXPERT: "expert"}
        if experts:
            texts = " ".join(offered["description"] for offered in task.data["experts"])
            shape = {
                "type": "object",
                "properties": {
                    "expert": {"type": "string", "enum": list(experts), "description": texts}
                },
                "required": ["expert"],
            }
            self.tools.append(
                {
                    "type": "function",
                    "function": {
                        "name": EXPERT,
                        "description": "Lets an expert do this turn.",
                        "parameters": shape,
                    },
                }
            )
        system = (
            ROLE.format(policy=tau2.get("policy") or world.policy)
            + (HAND_OVER if experts else "")
            + (f"\n\nYour operator's wish: {task.preference.text}" if task.preference.text else "")
        )
        self.messages: list[dict[str, Any]] = [
            {"role": "system", "content": system},
            {"role": "user", "content": task.question},
        ]

    async def execute(self, call: ToolCall) -> ToolResult:
        """One call of the policy, of a domain tool or of an expert. What cannot be done is an error observation."""
        if call.error is None and call.name == EXPERT and self.experts:
            return await self._hand_over(call.arguments)
        return self._call(call)

    async def reply(self, content: str) -> ToolResult | None:
        """The user's answer; None if the conversation is over, by a signal of the user or because it was over before."""
        if self.over:
            return None
        self.said.append(content)
        self.messages.append({"role": "assistant", "content": content})
        try:
            answer = (
                await in_thread(self.user.reply, content)
                if not isinstance(self.user, ScriptedUser)
                else self.user.reply(content)
            )
        except EndpointError as error:
            return ToolResult(
                f"Error: the user did not answer ({error})", error=True, infrastructure=True
            )
        self.messages.append({"role": "user", "content": answer})
        self.over = ended(answer)
        return None if self.over else ToolResult(answer)

    def score(self, answer: str) -> float:
        """The task's reward, 0.0 or 1.0, for all calls and messages so far. `answer` is the last message, which `reply` has heard."""
        return self.scorer.score(self.calls, self.said, self.judge).reward

    def _call(self, call: ToolCall) -> ToolResult:
        if call.error is not None or call.name not in self.offered:
            text = f"Error: {call.error or f'no tool named {call.name!r}; the tools are ' + ', '.join(sorted(self.offered))}"
            return ToolResult(text, error=True)
        self.calls.append((call.name, call.arguments))
        try:
            text, error = (
                json.dumps(
                    self.world.call(self.tables, call.name, call.arguments), ensure_ascii=False
                ),
                False,
            )
        except ToolError as problem:
            text, error = f"Error: {problem}", True
        number = f"call_{len(self.calls)}"
        function = {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)}
        self.messages.append(
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"id": number, "type": "function", "function": function}],
            }
        )
        self.messages.append({"role": "tool", "tool_call_id": number, "content": text})
        return ToolResult(text, error=error)

    async def _hand_over(self, arguments: Any) -> ToolResult:
        alias = arguments.get("expert") if isinstance(arguments, dict) else None
        expert = self.experts.get(alias) if isinstance(alias, str) else None
        if expert is None:
            return ToolResult(
                f"Error: {EXPERT}: expert must be one of {', '.join(self.experts)}, not {alias!r}",
                error=True,
            )
        try:
            action = await in_thread(expert.act, self) if expert.blocking else expert.act(self)
        except EndpointError as error:
            return ToolResult(
                f"Error: {alias} did not answer ({error})", error=True, infrastructure=True
            )
        lines = []
        for call in action.calls:
            lines.append(
                f"{alias} called {call.name}({json.dumps(call.arguments, ensure_ascii=False)}): {self._call(call).content}"
            )
        infrastructure = False
        if not action.calls:
            answer = await self.reply(action.content or "One moment, please.")
            infrastructure = answer is not None and answer.infrastructure
            lines.append(
                f"{alias} wrote to the user: {action.content}\n"
                + (
                    "The user has ended the conversation."
                    if answer is None
                    else f"The user: {answer.content}"
                )
            )
        return ToolResult(
            "\n".join(lines),
            action.cost_usd,
            action.latency_s,
            False,
            infrastructure,
            *action.tokens,
            alias=alias,
        )


@dataclass(frozen=True)
class ToolScaleWorld:
    """tau2 tasks and their worlds, in the style of data_gen.World. `experts`: how many a task offers (0: none). A task with a `policy` of its own
    shows that instead of its world's. `name` stands in the data of every task."""

    splits: dict[str, list[dict[str, Any]]]  # split -> tau2 tasks
    worlds: dict[str, World]
    seed: int = 0
    experts: int = 3
    name: str = ""

    def tasks(self, split: str, count: int, start: int = 0) -> list[Task]:
        return [self.task(split, i) for i in range(start, start + count)]

    def task(self, split: str, index: int) -> Task:
        """Task `index` of a split ("train", "held_out"), taken round and round; a pure function of its arguments and `seed`."""
        tau2 = self.splits[split][index % len(self.splits[split])]
        rng = random.Random(f"{self.seed}/{split}/{index}/{tau2['id']}")
        offered = preferences.catalogue(rng, split, self.experts) if self.experts else []
        wish = preferences.draw(rng, [expert["alias"] for expert in offered])
        text = preferences.write(wish, rng, split)
        preference = Preference(text, wish.outcome, wish.cost, wish.latency, wish.tools)
        question = ScriptedUser(tau2["user_scenario"]).open()
        world = self.worlds[tau2["domain"]]
        tools = [
            {
                "name": f["function"]["name"],
                "what": world.by_name[f["function"]["name"]]["kind"],
                "description": f["function"]["description"],
            }
            for f in world.functions(tau2.get("tools"))
        ]
        tools += [
            {"name": expert["alias"], "what": expert["model"], "description": expert["description"]}
            for expert in offered
        ]
        return Task(
            f"{tau2['id']}/{split}-{index}",
            question,
            preference,
            {
                "kind": tau2["domain"],
                "domain": tau2["domain"],
                "world": self.name,
                "task": tau2,
                "experts": offered,
                "tools": tools,
                "wish": _kind_of(wish),
                "bounds": _bounds(tau2, offered),
            },
        )

    def environment(
        self,
        task: Task,
        seed: int,
        *,
        user: User | None = None,
        experts: Callable[[dict[str, Any]], Expert] | None = None,
        judge: Judge | None = None,
    ) -> DomainEnvironment:
        """One attempt. Without `user` a scripted one answers; without `experts` (offered -> Expert) they are simulated, from `seed`."""
        data = task.data
        simulate = lambda offered: SimulatedExpert(
            offered["skill"],
            Price(offered["input_per_million"], offered["output_per_million"]),
            offered["latency_s"],
            f"{task.id}/{seed}/{offered['alias']}",
        )
        if user is None:
            user = ScriptedUser(data["task"]["user_scenario"])
            user.open()
        return DomainEnvironment(
            self.worlds[data["domain"]],
            data["task"],
            task,
            user,
            {offered["alias"]: (experts or simulate)(offered) for offered in data["experts"]},
            judge,
        )


def _kind_of(wish: Preference) -> str:
    if not wish.cost and not wish.latency:
        return "right"
    return (
        "balanced" if wish.cost == wish.latency else "cheap" if wish.cost > wish.latency else "fast"
    )


def _bounds(
    tau2: dict[str, Any], offered: Sequence[dict[str, Any]]
) -> tuple[tuple[float, float], tuple[float, float]]:
    """Dollars and seconds, from nothing to the dearest, and the slowest, expert doing every golden step and the last word; without experts, the policy."""
    steps = 1 + len(tau2["evaluation_criteria"].get("actions") or ())
    prices = [
        Price(expert["input_per_million"], expert["output_per_million"]) for expert in offered
    ] or [PRICES[POLICY]]
    return (
        (0.0, steps * max(price.cost(*STEP_TOKENS) for price in prices)),
        (
            0.0,
            steps
            * max(
                (expert["latency_s"] for expert in offered),
                default=STEP_TOKENS[1] * SECONDS_PER_TOKEN,
            ),
        ),
    )


def teach(env: DomainEnvironment) -> Iterator[Lesson]:
    """Acts out the golden calls, then says what the user wants to know, then answers until the user is content. No calls of experts: it shows how
    the tools are used, not whom to ask."""
    for name, arguments in env.scorer.golden_calls():
        call = ToolCall(name, arguments)
        yield Lesson("", call=call, result=asyncio.run(env.execute(call)))
    words = f"This is done. {', '.join(env.scorer.criteria.get('communicate_info') or ())}".strip()
    while (answer := asyncio.run(env.reply(words))) is not None:
        yield Lesson("", words, result=answer)
        words = "Is there anything else?"
    yield Lesson("", words)


def texts(world: ToolScaleWorld, count: int) -> Iterator[str]:
    """The prompts of `count` train tasks: what a tokenizer can be trained on."""
    for task in world.tasks("train", count):
        env = world.environment(task, 0)
        yield chat.render(env.messages, env.tools)


def split(tasks: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """{"train", "held_out"}: every fifth task of each domain is held out."""
    splits: dict[str, list[dict[str, Any]]] = {"train": [], "held_out": []}
    counts: Counter[str] = Counter()
    for task in tasks:
        counts[task["domain"]] += 1
        splits["held_out" if counts[task["domain"]] % HELD_OUT == 0 else "train"].append(task)
    return splits


def load_world(path: str | Path, seed: int = 0, experts: int = 3) -> ToolScaleWorld:
    """The tasks of a directory that data_gen.py wrote (tasks.jsonl), or of any .jsonl file of tau2 tasks, and their worlds (worlds/DOMAIN beside it).

    Raises UserError if something is missing or not whole, or a task has nothing that verifies it.
    """
    file = Path(path) if str(path).endswith(".jsonl") else Path(path) / "tasks.jsonl"
    tasks = load_tasks(file)
    worlds: dict[str, World] = {}
    for task in tasks:
        domain, criteria = task.get("domain"), task["evaluation_criteria"]
        if not any(criteria.get(what) for what in VERIFIERS):
            raise UserError(
                f"{file}: task {task['id']}: evaluation_criteria has none of {', '.join(VERIFIERS)}; without any the task cannot be scored"
            )
        if domain not in worlds:
            directory = file.parent / "worlds" / str(domain)
            if not directory.is_dir():
                raise UserError(
                    f"{file}: task {task['id']}: domain is {domain!r}, and there is no {directory}"
                )
            worlds[domain] = World.load(directory)
    splits = split(tasks)
    if not all(splits.values()):
        raise UserError(
            f"{file}: {len(tasks)} tasks; at least {HELD_OUT} of a domain are needed, so that one is held out"
        )
    return ToolScaleWorld(splits, worlds, seed, experts, str(path))
