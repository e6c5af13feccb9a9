"""The multi-turn loop: sample a turn, parse it, run its calls, append the observations, repeat.

`Attempt.run` is one coroutine per trajectory. `Rollout` is the pump beneath all of them: it submits
the turns that wait to the engine in the order of the attempts, steps the engine, and wakes the
attempts whose turn has finished. Text is never tokenised twice: a trajectory is a list of ids.

With `lockstep` the engine takes no step while a tool runs, so that a run is a function of its seed.
Without it, the attempts that wait for tools do not hold up the others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from nanorchestra.agent.environment import Environment, score_answer, shortened
from nanorchestra.agent.limits import SECONDS_PER_TOKEN, UserLimits
from nanorchestra.agent.rebuild import ANSWER, Notes, counted
from nanorchestra.engine.stream import TurnStream
from nanorchestra.model import chat
from nanorchestra.records import RESULT_WORDS, ParsedTurn, Price, ToolResult, Trajectory, Turn
from nanorchestra.tools.threads import in_thread

# ("start", Trajectory), ("text", deltas of a turn), ("turn", its last deltas), ("results", Turn)
OnEvent = Callable[[str, Any], None]


@dataclass(frozen=True)
class AttemptLimits:
    """Where an attempt is cut. `context_tokens` bounds a session, or with `rebuild` each turn."""

    turns: int = 50
    turn_tokens: int = 512
    context_tokens: int = 2048
    calls_per_turn: int = 4

    @classmethod
    def of(cls, settings: Any) -> AttemptLimits:
        """Returns the limits that settings, as config.rollout, have under the same names."""
        return cls(**{field.name: getattr(settings, field.name) for field in fields(cls)})


DEFAULT_PRICE = Price(0.2, 0.2)
NO_CALL = ToolResult("Error: no tool was called; call one of the tools", error=True)
LEAST_CHARS = 64  # of a result that is shortened to fit the context
SEED_STEP = 0x9E3779B97F4A7C15  # between the seeds of two turns with prompts of their own


class Attempt:
    """One attempt at a task, from the prompt to the score."""

    def __init__(
        self, rollout: Rollout, index: int, env: Environment, seed: int, on_event: OnEvent | None
    ):
        self.rollout, self.index, self.env, self.seed = rollout, index, env, seed
        self.limits, self.tokenizer = rollout.limits, rollout.tokenizer
        self.emit = on_event or (lambda kind, payload: None)
        self.on_token = on_event and (lambda token, _: on_event("text", self.stream.feed(token)))
        self.trajectory = Trajectory(env.task.id, seed)
        self.user = UserLimits(env, self.trajectory, rollout.price, rollout.seconds_per_token)
        self.conversation, self.context = None, 0  # and where in the trajectory it begins
        room = self.limits.context_tokens - self.limits.turn_tokens
        self.has_answer = ANSWER in env.kinds.values()
        env.evidence.tokenizer = self.tokenizer
        rebuild = rollout.rebuild or self.has_answer
        self.notes = Notes(self.tokenizer, env, room) if rebuild else None

    async def run(self) -> Trajectory:
        """Returns the trajectory, with its cost and outcome."""
        t = self.trajectory
        self.emit("start", t)
        try:
            t.status = await self._play()
        finally:
            self._close()
            t.cost_usd += self.user.own_usd()
        t.well_formed &= t.status == "answered" and bool(t.answer)
        if t.status == "answered":
            await in_thread(score_answer, self.env, t)
        return t

    async def _play(self) -> str:
        """Plays turns until the attempt ends; returns its status."""
        for number in range(self.limits.turns):
            if not self._open():
                return "user_limit"
            budget = min(self.limits.turn_tokens, self._room())
            allowed = self.user.writable(budget, *self.conversation.prices())
            if allowed <= 0:
                return "token_limit" if budget <= 0 else "user_limit"
            # Noise is a function of (seed, position), and prompts of one length begin alike.
            seed = (self.seed + number * SEED_STEP) % 2**63 if self.notes else self.seed
            params = self.rollout.params(seed, allowed)
            self.stream = TurnStream(self.tokenizer)
            completion = await self.conversation.sample(params, self.on_token)
            turn, parsed = self._record(completion)
            if completion.finish_reason == "length" and not self.has_answer:  # the turn is void
                over = allowed < budget or self.user.seconds_left() <= 0
                return "user_limit" if over else "token_limit"
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
            elif self.has_answer:
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
            if not self._observe(parsed.content, turn, results):
                return "user_limit"
        return "turn_limit"

    def _room(self) -> int:
        """Returns how many ids the context still has room for."""
        return self.limits.context_tokens - (len(self.trajectory.ids) - self.context)

    def _open(self) -> bool:
        """Begins the conversation; with rebuilt context, a new one for every turn.

        False if the user's dollars do not suffice to read the prompt.
        """
        if self.conversation and not self.notes:
            return True
        self._close()
        t, start = self.trajectory, self.notes or self.env
        known = getattr(start, "prompt", ())
        prompt = list(known) or chat.encode(self.tokenizer, start.messages, start.tools)
        if len(prompt) > self.user.readable():
            self.conversation = None
            return False
        self.context = len(t.ids)
        t.prompt_length = t.prompt_length or len(prompt)
        self.conversation = self.rollout.open(self, start, prompt)
        self._extend(prompt)
        return True

    def _close(self):
        if self.conversation and (cut := self.conversation.close()):
            self._extend(cut.token_ids, cut.logprobs, cut.weight_versions)

    def _record(self, completion) -> tuple[Turn, ParsedTurn]:
        """Adds a sampled turn to the trajectory; returns it with its parts."""
        t, ids = self.trajectory, completion.token_ids
        start, end = len(t.ids), len(t.ids) + len(ids)
        turn = Turn(start, end, completion.finish_reason, context=self.context)
        t.turns.append(turn)
        self._extend(ids, completion.logprobs, completion.weight_versions)
        t.latency_s += self.rollout.seconds_per_token * len(ids)
        parsed = chat.parse(self.tokenizer, ids)
        turn.well_formed = parsed.well_formed and bool(parsed.calls or not self.has_answer)
        t.well_formed &= turn.well_formed
        self.emit("turn", self.stream.finish())
        return turn, parsed

    async def _execute(self, turn, calls) -> list[ToolResult]:
        """Runs the calls of a turn side by side; those beyond a limit are refused.

        Every call is billed; the turn takes as long as its slowest call.
        """
        t = self.trajectory
        turn.calls = counted(calls, self.env.kinds) if self.has_answer else list(calls)
        turn.results = await self.user.execute(turn.calls, self.limits.calls_per_turn)
        if self.has_answer:
            turn.well_formed &= not all(result.refused for result in turn.results)
            t.well_formed &= turn.well_formed
        t.count_calls(turn)
        self.emit("results", turn)
        return turn.results

    def _answered(self, turn) -> bool:
        """Whether a tool has given the answer, which ends the attempt; the answer is kept."""
        for call, result in zip(turn.calls, turn.results, strict=True):
            if self.env.kinds.get(call.name) == ANSWER and not result.error:
                self.trajectory.answer = result.content
                return True
        return False

    def _observe(self, said, turn, results) -> bool:
        """Shows the policy the results of its calls, or the user's reply to its message.

        What is too long for the context or the user's dollars is shortened. False if the policy
        cannot pay for reading them at all.
        """
        for pair in zip(turn.calls, results, strict=False):
            self.env.evidence.add(*pair)
        if self.notes:
            if not turn.calls:
                self.notes.hear(said, results[0])
            return True
        role = "tool" if turn.calls else "user"
        kept = min(self.limits.turn_tokens, self._room() // 2)  # for the next turn
        room = min(self._room() - kept, self.user.readable() / 2)
        contents, ids = self._fitted(role, [result.content for result in results], room)
        if len(ids) > self.user.readable():
            return False
        if turn.calls:
            pairs = zip(results, contents, strict=True)
            turn.results = [replace(result, content=content) for result, content in pairs]
        self.conversation.append(ids, role, contents)
        self._extend(ids)
        return True

    def _fitted(self, role, contents, room) -> tuple[list[str], list[int]]:
        """Returns results that fit in `room` ids, and the ids; the longest are shortened first."""
        shown, chars = [*contents], [len(text) for text in contents]
        ids = chat.encode_reply(self.tokenizer, role, shown)
        while len(ids) > room:
            longest = chars.index(max(chars))
            chars[longest] = int(chars[longest] * min(0.9, max(room, 0) / len(ids)))
            if chars[longest] < LEAST_CHARS:
                break
            shown[longest] = shortened(contents[longest], RESULT_WORDS, chars[longest])
            ids = chat.encode_reply(self.tokenizer, role, shown)
        return shown, ids

    def _extend(self, ids, logprobs=None, versions=None):
        """Appends ids: sampled ones with log-probabilities and weight versions, or given ones."""
        t, given = self.trajectory, logprobs is None
        t.ids += ids
        t.sampled += [not given] * len(ids)
        t.logprobs += [0.0] * len(ids) if given else logprobs
        t.weight_versions += [-1] * len(ids) if given else versions


@dataclass(eq=False)
class Rollout:
    """Plays attempts on one engine. `params(seed, budget)` makes the SamplingParams of a turn.

    `price` and `seconds_per_token` are those of the policy's own tokens: a virtual clock, so that a
    run is a function of its seed. With `rebuild` every turn has a prompt of its own, as it has
    where a tool gives the answer. An attempt ends when a tool fails for reasons of the
    infrastructure; if it `survives_failures`, the policy reads the error and goes on. `on_done` is
    told of each trajectory that has ended.
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
    on_done: Callable[[Trajectory], Any] = lambda trajectory: None

    def run(
        self,
        environments: Sequence[Environment],
        seeds: Sequence[int],
        on_event: OnEvent | None = None,
    ) -> list[Trajectory]:
        """Returns the trajectory of one attempt at each environment, in the same order."""
        return asyncio.run(self._run(environments, seeds, on_event))

    def open(
        self, attempt: Attempt, start: Environment | Notes, prompt: list[int]
    ) -> EngineConversation:
        """Opens a conversation of an attempt; `prompt` are the ids of `start`'s messages."""
        return EngineConversation(self, attempt.index, self.engine.session(prompt))

    async def _run(self, environments, seeds, on_event) -> list[Trajectory]:
        self._ready: list[tuple] = []  # (attempt, session, params, on_token, future) of a turn
        self._sampling: dict[int, asyncio.Future] = {}  # by the engine's request id
        self._changed = asyncio.Event()  # a turn is ready, or an attempt is done

        async def attempt(*start):
            trajectory = await Attempt(self, *start, on_event).run()
            self.on_done(trajectory)
            self._changed.set()
            return trajectory

        starts = zip(range(len(seeds)), environments, seeds, strict=True)
        try:
            async with asyncio.TaskGroup() as group:
                attempts = [group.create_task(attempt(*start)) for start in starts]
                await self._pump(attempts)
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
        return [task.result() for task in attempts]

    async def _pump(self, attempts):
        """Steps the engine until all attempts are done."""
        await asyncio.sleep(0)  # each attempt runs on to its first wait
        while unfinished := sum(not task.done() for task in attempts):
            waiting = len(self._ready) + len(self._sampling)
            if waiting < (unfinished if self.lockstep else 1):
                self._changed.clear()
                await self._changed.wait()
            else:
                self._ready.sort(key=lambda turn: turn[0])
                for _, session, params, on_token, future in self._ready:
                    self._sampling[session.submit(params, on_token=on_token).id] = future
                self._ready.clear()
                for request in self.engine.step():
                    self._sampling.pop(request.id).set_result(_completion(request))
            await asyncio.sleep(0)  # each attempt that was woken runs on to its next wait


def _completion(request) -> Any:
    """Returns a finished request's Completion. One that failed says why, and ends no other."""
    try:
        return request.completed()
    except Exception as error:
        problem = f"Error: the engine could not sample this turn ({type(error).__name__}: {error})"
        return replace(request.completion, text=problem)


@dataclass
class EngineConversation:
    """An attempt's session on our engine. policy.py has the same for a model behind an endpoint."""

    rollout: Rollout
    index: int
    session: Any

    def prices(self) -> tuple[float, float]:
        """Returns the US dollars of reading the next turn's prompt, and of each id it samples.

        The KV cache has read the prompt already.
        """
        return 0.0, self.rollout.price.cost(0, 1)

    def append(self, ids: list[int], role: str, contents: list[str]) -> None:
        """Adds observations (role "tool") or the user's reply ("user"), as ids and as text."""
        self.session.append(ids)

    def sample(self, params: Any, on_token: Callable | None) -> asyncio.Future:
        """Returns a future of the next turn's Completion; the pump submits and settles it."""
        future = asyncio.get_running_loop().create_future()
        self.rollout._ready.append((self.index, self.session, params, on_token, future))
        self.rollout._changed.set()
        return future

    def close(self) -> Any:
        """Ends the session. Returns the Completion of a turn that it cut, or None."""
        return self.session.close()
