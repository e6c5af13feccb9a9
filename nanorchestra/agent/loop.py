"""The multi-turn loop: sample a turn, parse it, run its calls, append the observations, repeat.

`Attempt.run` is one coroutine per trajectory. `Rollout` starts one for each environment. Below them
is the `Pump`: it submits the turns that wait to the engine in the order of the attempts, steps the
engine, and wakes the attempts whose turn has finished. Text is never tokenised twice: a trajectory
is a list of ids.

With `lockstep` the engine takes no step while a tool runs, so that a run is a function of its seed.
Without it, the attempts that wait for tools do not hold up the others.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Protocol

from nanorchestra.agent.context import Prompt, context_of
from nanorchestra.agent.environment import ANSWER, Environment, score_answer
from nanorchestra.agent.limits import SECONDS_PER_TOKEN, UserLimits
from nanorchestra.agent.numbering import in_attempt
from nanorchestra.agent.threads import in_thread
from nanorchestra.config import RolloutSection
from nanorchestra.engine.sequence import Completion, OnToken
from nanorchestra.engine.stream import TurnStream
from nanorchestra.model import chat
from nanorchestra.records import ParsedTurn, Price, ToolResult, Trajectory, Turn

# ("start", Trajectory), ("text", deltas of a turn), ("turn", its last deltas), ("results", Turn)
OnEvent = Callable[[str, Any], None]

DEFAULT_PRICE = Price(0.2, 0.2)
SEED_STEP = 0x9E3779B97F4A7C15  # between the seeds of an attempt's prompts
REPEATS = 3  # turns with the same calls and results, after which more would be the same again


class Conversation(Protocol):
    """What samples the turns of an attempt: a session on an engine, or a chat at an endpoint."""

    def prices(self) -> tuple[float, float]:
        """Returns the US dollars of reading the next turn's prompt, and of each id it samples."""

    def append(self, ids: list[int], role: str, contents: list[str]) -> None:
        """Adds observations (role "tool") or the user's reply ("user"), as ids and as text."""

    def sample(self, params: Any, on_token: OnToken | None) -> Awaitable[Completion]:
        """Samples the next turn. A turn that failed has finish_reason "error", `text` says why."""

    def close(self) -> Completion | None:
        """Ends the conversation. Returns the Completion of a turn that it cut, or None."""


class Attempt:
    """One attempt at a task, from the prompt to the score."""

    def __init__(
        self, rollout: Rollout, index: int, env: Environment, seed: int, on_event: OnEvent | None
    ):
        self.rollout, self.settings, self.tokenizer = rollout, rollout.settings, rollout.tokenizer
        self.index, self.env, self.seed, self.on_event = index, env, seed, on_event
        self.trajectory = Trajectory(env.task.id, seed)
        self.user_limits = UserLimits(
            env, self.trajectory, rollout.price, rollout.seconds_per_token
        )
        self.context = context_of(self.settings, self.tokenizer, env)
        self.conversation: Conversation | None = None
        self.prompts = 0  # conversations begun
        self.context_start = 0  # where in the trajectory the conversation begins
        self.stream: TurnStream | None = None  # of the turn that is being sampled, for on_event
        self.counted: Counter[str] = Counter()  # tokens that an endpoint has read and written

    async def run(self) -> Trajectory:
        """Returns the trajectory, with its cost and outcome."""
        t = self.trajectory
        self._emit("start", t)
        with in_attempt(self.seed):
            try:
                t.status = await self._play()
            finally:
                self._close()
            well_formed = all(turn.well_formed for turn in t.turns)
            t.well_formed = well_formed and t.status == "answered" and bool(t.answer)
            if t.status == "answered":
                await self._score()
        return t

    async def _score(self) -> None:
        """Fills in the outcome of the answer; may wait for a judge."""
        if self.env.blocking:
            await in_thread(score_answer, self.env, self.trajectory)
        else:
            score_answer(self.env, self.trajectory)

    async def _play(self) -> str:
        """Plays turns until the attempt ends; returns its status."""
        limits = self.user_limits
        for _ in range(self.settings.turns):
            if prompt := self.context.prompt():
                if len(prompt.ids) > limits.readable():
                    return "user_limit"
                self._begin(prompt)
            room = min(self.settings.turn_tokens, self._room())
            max_tokens = limits.writable(room, *self.conversation.prices())
            if max_tokens <= 0:
                return "token_limit" if room <= 0 else "user_limit"
            completion, parsed = await self._sample(max_tokens)
            turn = self.trajectory.turns[-1]
            if completion.finish_reason == "error":
                return "infrastructure"
            if completion.finish_reason == "length" and not self.context.survives_cuts:
                by_user = max_tokens < room or limits.seconds_left() <= 0
                return "user_limit" if by_user else "token_limit"
            results = await self._act(turn, parsed)
            if results is None:
                return "answered"
            if any(result.infrastructure for result in results):
                no_reply = not turn.calls  # of the user's, without which no policy goes on
                if no_reply or not self.rollout.survives_failures:
                    return "infrastructure"
            if not self._observe(turn, results):
                return "user_limit"
            if self.rollout.ends_repeats and self._repeats():
                break
        return "turn_limit"

    def _begin(self, prompt: Prompt):
        """Begins a conversation with a prompt, and ends the one before."""
        self._close()
        t = self.trajectory
        self.prompts += 1
        self.context_start = len(t.ids)
        t.prompt_length = t.prompt_length or len(prompt.ids)
        self.conversation = self.rollout.open(self, prompt)
        self._append_given(prompt.ids)

    def _close(self):
        """Ends the conversation; the ids of a turn that this cuts stay in the trajectory."""
        if self.conversation:
            cut = self.conversation.close()
            if cut:
                self._append_sampled(cut)

    def _room(self) -> int:
        """Returns how many ids the context still has room for."""
        return self.settings.context_tokens - (len(self.trajectory.ids) - self.context_start)

    async def _sample(self, max_tokens: int) -> tuple[Completion, ParsedTurn]:
        """Samples a turn and adds it to the trajectory; returns it, and its parts."""
        t = self.trajectory
        start, thinks = len(t.ids), chat.opens_thinking(self.tokenizer, t.ids)
        has_tools = bool(self.env.tools)
        if self.on_event:
            self.stream = TurnStream(self.tokenizer, has_tools, thinks=thinks)
        # Noise is a function of seed and position, and prompts of an attempt may begin alike.
        seed = (self.seed + (self.prompts - 1) * SEED_STEP) % 2**63
        params = self.rollout.params(seed, max_tokens)
        on_token = self._on_token if self.on_event else None
        completion = await self.conversation.sample(params, on_token)
        self._append_sampled(completion)
        turn = Turn(start, len(t.ids), completion.finish_reason, context=self.context_start)
        if completion.finish_reason == "error":
            turn.results = [ToolResult(completion.text, error=True, infrastructure=True)]
        t.turns.append(turn)
        t.latency_s += self.rollout.seconds_per_token * len(completion.token_ids)
        parsed = chat.parse(self.tokenizer, completion.token_ids, thinks, has_tools)
        turn.well_formed = parsed.well_formed
        if self.on_event:
            self._emit("turn", self.stream.finish())
        return completion, parsed

    def _append_given(self, ids: list[int]):
        self.trajectory.append_given(ids)
        self.rollout.bill_ids(self.trajectory)

    def _append_sampled(self, turn: Completion):
        self.trajectory.append_sampled(turn.token_ids, turn.logprobs, turn.weight_versions)
        self.rollout.bill_ids(self.trajectory)

    def show(self, text: str) -> None:
        """Emits what comes of the turn that is being sampled, before its ids are known."""
        self._emit("text", self.stream.read(text))

    def _on_token(self, token: int, logprob: float):
        self._emit("text", self.stream.feed(token))

    def _emit(self, kind: str, payload: Any):
        if self.on_event:
            self.on_event(kind, payload)

    async def _act(self, turn: Turn, parsed: ParsedTurn) -> list[ToolResult] | None:
        """Runs the calls of a turn side by side, or tells the user its message.

        Returns the results, or the user's reply; None if the attempt has its answer. Every call is
        billed, and the turn takes as long as its slowest call.
        """
        t = self.trajectory
        if not parsed.calls:
            reply = await self.env.reply(parsed.content)
            if reply is None or not reply.refused:
                t.answer = parsed.content
            if reply and reply.infrastructure:
                turn.results = [reply]
            return None if reply is None else [reply]
        calls = self.context.chosen(parsed.calls)
        results = await self.user_limits.execute(calls, self.settings.calls_per_turn)
        t.add_calls(turn, calls, results)
        self._emit("results", turn)
        for call, result in zip(turn.calls, turn.results, strict=True):
            if self.env.kinds.get(call.name) == ANSWER and not result.error:
                t.answer = result.content
                return None
        return turn.results

    def _repeats(self) -> bool:
        """Returns whether the last REPEATS turns made the same calls and had the same results."""
        last = []
        for turn in self.trajectory.turns[-REPEATS:]:
            calls = [(call.name, call.arguments) for call in turn.calls]
            last.append((calls, [result.content for result in turn.results]))
        return bool(calls) and last.count(last[-1]) == REPEATS

    def _observe(self, turn: Turn, results: list[ToolResult]) -> bool:
        """Shows the policy the results of its calls, or the user's reply to its message.

        What is too long for the context or the user's dollars is shortened. False if the policy
        cannot pay for reading them at all.
        """
        for call, result in zip(turn.calls, results, strict=False):  # a reply has no call
            self.env.evidence.add(call, result)
        left, readable = self._room(), self.user_limits.readable()
        # The next turn keeps its tokens, or half of the context if that is fewer; and half of the
        # dollars, which are infinite without a limit.
        next_turn = min(self.settings.turn_tokens, left // 2)
        room = min(left - next_turn, readable / 2)
        observation = self.context.observe(turn, results, room)
        if observation is None:
            return True
        if turn.calls:
            read = zip(results, observation.contents, strict=True)
            turn.results = [replace(result, content=content) for result, content in read]
        if len(observation.ids) > readable:
            return False
        self.conversation.append(*observation)
        self._append_given(observation.ids)
        return True


@dataclass(eq=False)
class Rollout:
    """Plays attempts on one engine. `params(seed, max_tokens)` makes the SamplingParams of a turn.

    `settings` is the section of a config that says where an attempt is cut, and whether attempts
    run in lockstep. `price` and `seconds_per_token` are those of the policy's own tokens: a virtual
    clock, so that a run is a function of its seed. An attempt ends when a tool fails for reasons of
    the infrastructure; if it `survives_failures`, the policy reads the error and goes on. If it
    `ends_repeats`, an attempt ends after REPEATS turns with the same calls and results. `on_done`
    is called with each trajectory that has ended.
    """

    engine: Any
    tokenizer: Any
    params: Callable[[int, int], Any]
    settings: RolloutSection
    price: Price = DEFAULT_PRICE
    seconds_per_token: float = SECONDS_PER_TOKEN
    survives_failures: bool = False
    ends_repeats: bool = False
    on_done: Callable[[Trajectory], Any] | None = None

    def run(
        self,
        environments: Sequence[Environment],
        seeds: Sequence[int],
        on_event: OnEvent | None = None,
    ) -> list[Trajectory]:
        """Returns the trajectory of one attempt at each environment, in the same order."""
        trajectories = []  # no task's result: asyncio.run formats that as text, ids and all

        async def play():
            with suppress(KeyboardInterrupt):  # asyncio would log a task that ends with it
                trajectories.extend(await self._run(environments, seeds, on_event))

        asyncio.run(play())
        if len(trajectories) < len(environments):
            raise KeyboardInterrupt
        return trajectories

    def attempt(self, index: int, env: Environment, seed: int, on_event: OnEvent | None) -> Attempt:
        """Returns the attempt in an environment, which is number `index` of those that run."""
        return Attempt(self, index, env, seed, on_event)

    def open(self, attempt: Attempt, prompt: Prompt) -> Conversation:
        """Opens a conversation of an attempt."""
        session = self.engine.session(prompt.ids)
        return EngineConversation(self._pump, attempt.index, session, self.price)

    def bill_ids(self, t: Trajectory) -> None:
        """Sets what the policy's tokens have cost so far, by the ids of an attempt."""
        sampled = sum(t.sampled)
        t.policy_usd = self.price.cost(len(t.ids) - sampled, sampled)

    def pump(self) -> Pump:
        """Returns what steps the engine for the attempts."""
        return Pump(self.engine, self.settings.lockstep)

    async def _run(self, environments, seeds, on_event) -> list[Trajectory]:
        self._pump = self.pump()
        attempts = []
        for index, (env, seed) in enumerate(zip(environments, seeds, strict=True)):
            attempts.append(self.attempt(index, env, seed, on_event))
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._finish(attempt)) for attempt in attempts]
                await self._pump.run(tasks)
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
        return [task.result() for task in tasks]

    async def _finish(self, attempt: Attempt) -> Trajectory:
        """Runs an attempt to its end, and reports it. The pump looks again however it has ended."""
        try:
            trajectory = await attempt.run()
            if self.on_done:
                self.on_done(trajectory)
            return trajectory
        finally:
            self._pump.wake()


@dataclass(eq=False)
class PendingTurn:
    """A turn that an attempt waits for. `completion` is settled once the engine has sampled it."""

    attempt: int  # index of the attempt: turns are submitted in this order
    session: Any
    params: Any
    on_token: OnToken | None
    completion: asyncio.Future


class Pump:
    """Steps the engine for the turns of all attempts.

    A turn is in `_ready` until it is submitted, then in `_sampling` until it is finished.
    `iterations` are those of the event loop between two steps of the engine: attempts that a server
    plays need several, for requests on the way.
    """

    def __init__(self, engine: Any, lockstep: bool, iterations: int = 1):
        self.engine, self.lockstep, self.iterations = engine, lockstep, iterations
        self._ready: list[PendingTurn] = []
        self._sampling: dict[int, PendingTurn] = {}  # by the engine's request id
        self._changed = asyncio.Event()  # a turn is ready, or an attempt is done

    def sample(
        self, attempt: int, session: Any, params: Any, on_token: OnToken | None
    ) -> asyncio.Future[Completion]:
        """Returns a future of a session's next turn, which is submitted before the next step."""
        future = asyncio.get_running_loop().create_future()
        turn = PendingTurn(attempt, session, params, on_token, future)
        self._ready.append(turn)
        self.wake()
        return future

    def wake(self) -> None:
        """Makes the pump look again: a turn is ready, or an attempt is done."""
        self._changed.set()

    async def run(self, attempts: Sequence[asyncio.Task]) -> None:
        """Steps the engine until all attempts are done."""
        await asyncio.sleep(0)  # each attempt runs on to its first wait
        unfinished = attempts
        while unfinished := [attempt for attempt in unfinished if not attempt.done()]:
            waiting = len(self._ready) + len(self._sampling)  # the others wait for tools
            if waiting == 0 or (self.lockstep and waiting < len(unfinished)):
                self._changed.clear()
                await self._changed.wait()
            else:
                self._step()
            for _ in range(self.iterations):
                await asyncio.sleep(0)  # each attempt that was woken runs on to its next wait

    def _step(self):
        """Submits the turns that are ready, takes one step, settles those that it finished."""
        self._ready.sort(key=lambda turn: turn.attempt)
        for turn in self._ready:
            request = turn.session.submit(turn.params, on_token=turn.on_token)
            self._sampling[request.id] = turn
        self._ready.clear()
        for request in self.engine.step():
            turn = self._sampling.pop(request.id)
            turn.completion.set_result(_completion(request))


def _completion(request) -> Completion:
    """Returns a finished request's Completion. One that failed says why, and ends no other."""
    try:
        return request.completed()
    except Exception as error:
        problem = f"Error: the engine could not sample this turn ({type(error).__name__}: {error})"
        return replace(request.completion, text=problem)


@dataclass
class EngineConversation:
    """An attempt's session on our engine; serving/endpoint.py has that at another server."""

    pump: Pump
    attempt: int  # its index
    session: Any
    price: Price

    def prices(self) -> tuple[float, float]:
        """Returns no price of reading, since the KV cache holds the prompt, and that of an id."""
        return 0.0, self.price.cost(0, 1)

    def append(self, ids: list[int], role: str, contents: list[str]) -> None:
        """Adds observations (role "tool") or the user's reply ("user"), as ids and as text."""
        self.session.append(ids)

    def sample(self, params: Any, on_token: OnToken | None) -> asyncio.Future[Completion]:
        """Returns a future of the next turn's Completion; the pump submits and settles it."""
        return self.pump.sample(self.attempt, self.session, params, on_token)

    def close(self) -> Completion | None:
        """Ends the session. Returns the Completion of a turn that it cut, or None."""
        return self.session.close()
