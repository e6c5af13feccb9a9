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
from dataclasses import dataclass, replace
from typing import Any, Protocol

from nanorchestra.agent.environment import Environment, score_answer, shortened
from nanorchestra.agent.rebuild import ANSWER, Notes, first_calls
from nanorchestra.engine.sequence import Completion, OnToken
from nanorchestra.engine.stream import TurnStream
from nanorchestra.model import chat
from nanorchestra.records import (
    RESULT_WORDS,
    ParsedTurn,
    Price,
    ToolCall,
    ToolResult,
    Trajectory,
    Turn,
)
from nanorchestra.tools.limits import SECONDS_PER_TOKEN, UserLimits
from nanorchestra.tools.replies import in_attempt
from nanorchestra.tools.threads import in_thread

# ("start", Trajectory), ("text", deltas of a turn), ("turn", its last deltas), ("results", Turn)
OnEvent = Callable[[str, Any], None]

DEFAULT_PRICE = Price(0.2, 0.2)
NO_CALL = ToolResult("Error: no tool was called; call one of the tools", error=True)
LEAST_CHARS = 64  # of a result that is shortened to fit the context
SEED_STEP = 0x9E3779B97F4A7C15  # between the seeds of two turns with prompts of their own


@dataclass(frozen=True)
class AttemptLimits:
    """Where an attempt is cut. `context_tokens` bounds a session, or with `rebuild` each turn.

    `failed_turns` in a row end it, if that is not None: turns whose calls all were errors, or were
    made before with the same arguments.
    """

    turns: int = 50
    turn_tokens: int = 512
    context_tokens: int = 2048
    calls_per_turn: int = 4
    failed_turns: int | None = None


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
        self.rollout = rollout
        self.index = index
        self.env = env
        self.seed = seed
        self.on_event = on_event
        self.limits = rollout.limits
        self.tokenizer = rollout.tokenizer
        self.trajectory = Trajectory(env.task.id, seed)
        self.user_limits = UserLimits(
            env.task.preference,
            env.prepare,
            self.trajectory,
            rollout.price,
            rollout.seconds_per_token,
        )
        self.conversation: Conversation | None = None
        self.context_start = 0  # where in the trajectory the conversation begins
        self.stream: TurnStream | None = None  # of the turn that is being sampled
        self.counted: Counter[str] = Counter()  # tokens that an endpoint has read and written
        self.answers_by_tool = ANSWER in env.kinds.values()
        env.evidence.tokenizer = self.tokenizer
        self.notes: Notes | None = None  # of rebuilt context: the prompt of each turn
        if rollout.rebuild or self.answers_by_tool:
            prompt_tokens = self.limits.context_tokens - self.limits.turn_tokens
            self.notes = Notes(self.tokenizer, env, prompt_tokens)

    async def run(self) -> Trajectory:
        """Returns the trajectory, with its cost and outcome."""
        t = self.trajectory
        self._emit("start", t)
        with in_attempt(self.seed):
            try:
                t.status = await self._play()
            finally:
                self._close()
                t.cost_usd += self.user_limits.own_usd()
            t.well_formed = t.well_formed and t.status == "answered" and bool(t.answer)
            if t.status == "answered":
                await self._score()
        return t

    async def _score(self) -> None:
        """Fills in the outcome of the answer; may wait for a judge."""
        await in_thread(score_answer, self.env, self.trajectory)

    async def _play(self) -> str:
        """Plays turns until the attempt ends; returns its status."""
        failures = 0  # turns in a row
        for number in range(self.limits.turns):
            if not self._open():
                return "user_limit"
            room = min(self.limits.turn_tokens, self._room())
            max_tokens = self.user_limits.writable(room, *self.conversation.prices())
            if max_tokens <= 0:
                return "token_limit" if room <= 0 else "user_limit"
            completion = await self._sample(number, max_tokens)
            turn, parsed = self._record(completion)
            if completion.finish_reason == "length" and not self.answers_by_tool:  # a void turn
                by_user = max_tokens < room or self.user_limits.seconds_left() <= 0
                return "user_limit" if by_user else "token_limit"
            if completion.finish_reason == "error":
                turn.results = [ToolResult(completion.text, error=True, infrastructure=True)]
                return "infrastructure"
            if parsed.calls:
                results = await self._execute(turn, parsed.calls)
                if self._answered(turn):
                    return "answered"
                failed = any(result.infrastructure for result in results)
                if failed and not self.rollout.survives_failures:
                    return "infrastructure"
                failures = failures + 1 if self._failed(turn) else 0
                if failures == self.limits.failed_turns:
                    return "failed_turns"
            elif self.answers_by_tool:
                results = [NO_CALL]
            else:
                self.trajectory.answer = parsed.content
                reply = await self.env.reply(parsed.content)
                if reply is None:
                    return "answered"
                if reply.infrastructure:
                    turn.results = [reply]
                    return "infrastructure"
                results = [reply]
            if not self._observe(turn, parsed.content, results):
                return "user_limit"
        return "turn_limit"

    def _open(self) -> bool:
        """Begins the conversation; with rebuilt context, a new one for every turn.

        False if the user's dollars do not suffice to read the prompt.
        """
        if self.conversation and not self.notes:
            return True
        self._close()
        t = self.trajectory
        start = self.notes or self.env
        prompt = list(start.prompt)
        if not prompt:
            prompt = chat.encode(self.tokenizer, start.messages, start.tools)
        if len(prompt) > self.user_limits.readable():
            self.conversation = None
            return False
        self.context_start = len(t.ids)
        if not t.prompt_length:
            t.prompt_length = len(prompt)
        self.conversation = self.rollout.open(self, start, prompt)
        self._append_given(prompt)
        return True

    def _close(self):
        """Ends the conversation; the ids of a turn that this cuts stay in the trajectory."""
        if self.conversation:
            cut = self.conversation.close()
            if cut:
                self._append_sampled(cut)

    def _room(self) -> int:
        """Returns how many ids the context still has room for."""
        return self.limits.context_tokens - (len(self.trajectory.ids) - self.context_start)

    async def _sample(self, number: int, max_tokens: int) -> Completion:
        """Samples turn `number` of the attempt."""
        seed = self._seed(number)
        thinks = chat.opens_thinking(self.tokenizer, self.trajectory.ids)
        self.stream = TurnStream(self.tokenizer, calls=self.tokenizer.markers, thinks=thinks)
        params = self.rollout.params(seed, max_tokens)
        return await self.conversation.sample(params, self._on_token if self.on_event else None)

    def _seed(self, number: int) -> int:
        """Returns the seed of turn `number`."""
        if self.notes:  # noise is a function of (seed, position), and these prompts begin alike
            return (self.seed + number * SEED_STEP) % 2**63
        return self.seed

    def _on_token(self, token: int, logprob: float):
        self._emit("text", self.stream.feed(token))

    def _emit(self, kind: str, payload: Any):
        if self.on_event:
            self.on_event(kind, payload)

    def _record(self, completion: Completion) -> tuple[Turn, ParsedTurn]:
        """Adds a sampled turn to the trajectory; returns it with its parts."""
        t = self.trajectory
        start = len(t.ids)
        self._append_sampled(completion)
        turn = Turn(start, len(t.ids), completion.finish_reason, context=self.context_start)
        t.turns.append(turn)
        t.latency_s += self.rollout.seconds_per_token * len(completion.token_ids)
        thinks = chat.opens_thinking(self.tokenizer, t.ids[:start])
        parsed = chat.parse(self.tokenizer, completion.token_ids, thinks)
        misses_call = self.answers_by_tool and not parsed.calls
        turn.well_formed = parsed.well_formed and not misses_call
        t.well_formed = t.well_formed and turn.well_formed
        self._emit("turn", self.stream.finish())
        return turn, parsed

    async def _execute(self, turn: Turn, calls: Sequence[ToolCall]) -> list[ToolResult]:
        """Runs the calls of a turn side by side; those beyond a limit are refused.

        Every call is billed; the turn takes as long as its slowest call.
        """
        t = self.trajectory
        turn.calls = first_calls(calls, self.env.kinds) if self.answers_by_tool else list(calls)
        turn.results = await self.user_limits.execute(turn.calls, self.limits.calls_per_turn)
        if self.answers_by_tool and all(result.refused for result in turn.results):
            turn.well_formed = t.well_formed = False
        t.count_calls(turn)
        self._emit("results", turn)
        return turn.results

    def _answered(self, turn: Turn) -> bool:
        """Tells whether a tool has given the answer, which ends the attempt; keeps the answer."""
        for call, result in zip(turn.calls, turn.results, strict=True):
            if self.env.kinds.get(call.name) == ANSWER and not result.error:
                self.trajectory.answer = result.content
                return True
        return False

    def _failed(self, turn: Turn) -> bool:
        """Tells whether a turn's calls all were errors, or were made before."""
        made = []
        for earlier in self.trajectory.turns[:-1]:
            made += [(call.name, call.arguments) for call in earlier.calls]
        pairs = zip(turn.calls, turn.results, strict=True)
        return all(result.error or (call.name, call.arguments) in made for call, result in pairs)

    def _observe(self, turn: Turn, message: str, results: list[ToolResult]) -> bool:
        """Shows the policy the results of its calls, or the user's reply to its message.

        What is too long for the context or the user's dollars is shortened. False if the policy
        cannot pay for reading them at all.
        """
        for call, result in zip(turn.calls, results, strict=False):  # a reply has no call
            self.env.evidence.add(call, result)
        if self.notes:  # the next prompt is composed from the evidence and the problem
            if not turn.calls:
                self.notes.hear(message, results[0])
            return True
        role = "tool" if turn.calls else "user"
        next_turn = min(self.limits.turn_tokens, self._room() // 2)
        room = min(self._room() - next_turn, self.user_limits.readable() / 2)
        contents, ids = self._fit(role, [result.content for result in results], room)
        if len(ids) > self.user_limits.readable():
            return False
        if turn.calls:
            turn.results = [
                replace(result, content=content)
                for result, content in zip(results, contents, strict=True)
            ]
        self.conversation.append(ids, role, contents)
        self._append_given(ids)
        return True

    def _fit(self, role: str, contents: list[str], room: float) -> tuple[list[str], list[int]]:
        """Returns results that fit in `room` ids, and the ids; the longest are shortened first."""
        fitted = list(contents)
        chars = [len(content) for content in contents]
        ids = chat.encode_reply(self.tokenizer, role, fitted)
        while len(ids) > room:
            longest = chars.index(max(chars))
            chars[longest] = int(chars[longest] * min(0.9, max(room, 0) / len(ids)))
            if chars[longest] < LEAST_CHARS:
                break
            fitted[longest] = shortened(contents[longest], RESULT_WORDS, chars[longest])
            ids = chat.encode_reply(self.tokenizer, role, fitted)
        return fitted, ids

    def _append_given(self, ids: list[int]):
        """Appends ids that the policy reads: a prompt, or observations."""
        t = self.trajectory
        t.ids += ids
        t.sampled += [False] * len(ids)
        t.logprobs += [0.0] * len(ids)
        t.weight_versions += [-1] * len(ids)

    def _append_sampled(self, completion: Completion):
        """Appends the ids of a turn, with their log-probabilities and weight versions."""
        t = self.trajectory
        t.ids += completion.token_ids
        t.sampled += [True] * len(completion.token_ids)
        t.logprobs += completion.logprobs
        t.weight_versions += completion.weight_versions


@dataclass(eq=False)
class Rollout:
    """Plays attempts on one engine. `params(seed, max_tokens)` makes the SamplingParams of a turn.

    `price` and `seconds_per_token` are those of the policy's own tokens: a virtual clock, so that a
    run is a function of its seed. With `rebuild` every turn has a prompt of its own, as it has
    where a tool gives the answer. An attempt ends when a tool fails for reasons of the
    infrastructure; if it `survives_failures`, the policy reads the error and goes on. `on_done` is
    called with each trajectory that has ended.
    """

    engine: Any
    tokenizer: Any
    params: Callable[[int, int], Any]
    limits: AttemptLimits
    price: Price = DEFAULT_PRICE
    seconds_per_token: float = SECONDS_PER_TOKEN
    survives_failures: bool = False
    lockstep: bool = True
    rebuild: bool = False
    breaths = 1  # turns of the event loop between two steps of the engine
    on_done: Callable[[Trajectory], Any] | None = None

    def run(
        self,
        environments: Sequence[Environment],
        seeds: Sequence[int],
        on_event: OnEvent | None = None,
    ) -> list[Trajectory]:
        """Returns the trajectory of one attempt at each environment, in the same order."""
        return asyncio.run(self._run(environments, seeds, on_event))

    def attempt(self, index: int, env: Environment, seed: int, on_event: OnEvent | None) -> Attempt:
        """Returns the attempt in an environment, which is number `index` of those that run."""
        return Attempt(self, index, env, seed, on_event)

    def open(self, attempt: Attempt, start: Environment | Notes, prompt: list[int]) -> Conversation:
        """Opens a conversation of an attempt; `prompt` are the ids of `start`'s messages."""
        session = self.engine.session(prompt)
        return EngineConversation(self._pump, attempt.index, session, self.price)

    async def _run(self, environments, seeds, on_event) -> list[Trajectory]:
        self._pump = Pump(self.engine, self.lockstep, self.breaths)
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

    A turn is in `_ready` until it is submitted, then in `_sampling` until it is finished. Between
    two steps the event loop turns `breaths` times.
    """

    def __init__(self, engine: Any, lockstep: bool, breaths: int = 1):
        self.engine = engine
        self.lockstep = lockstep
        self.breaths = breaths
        self._ready: list[PendingTurn] = []
        self._sampling: dict[int, PendingTurn] = {}  # by the engine's request id
        self._changed = asyncio.Event()  # a turn is ready, or an attempt is done

    def add(self, turn: PendingTurn) -> None:
        """Takes a turn, which is submitted before the next step."""
        self._ready.append(turn)
        self.wake()

    def wake(self) -> None:
        """Makes the pump look again: a turn is ready, or an attempt is done."""
        self._changed.set()

    async def run(self, attempts: Sequence[asyncio.Task]) -> None:
        """Steps the engine until all attempts are done."""
        await asyncio.sleep(0)  # each attempt runs on to its first wait
        while unfinished := [attempt for attempt in attempts if not attempt.done()]:
            waiting = len(self._ready) + len(self._sampling)  # the others wait for tools
            if waiting == 0 or (self.lockstep and waiting < len(unfinished)):
                self._changed.clear()
                await self._changed.wait()
            else:
                self._step()
            for _ in range(self.breaths):
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
    """An attempt's session on our engine. policy.py has the same for a model behind an endpoint."""

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
        future = asyncio.get_running_loop().create_future()
        self.pump.add(PendingTurn(self.attempt, self.session, params, on_token, future))
        return future

    def close(self) -> Completion | None:
        """Ends the session. Returns the Completion of a turn that it cut, or None."""
        return self.session.close()
