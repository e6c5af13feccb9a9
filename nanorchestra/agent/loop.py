"""The multi-turn loop: sample a turn, parse it, run its calls, show what they bring back, until an answer or a limit.

One coroutine per trajectory reads from top to bottom what happens to it. `Rollout` is the pump beneath them: it collects the turns that
wait, gives them to the engine in a fixed order, steps it, and wakes whoever has finished. No text is ever re-tokenised: a trajectory
is the session's list of ids. With `rebuild` every turn has a prompt of its own (rebuild.py) and a session of its own, whose beginning the engine
finds in its cache; the trajectory is then those sessions, one after the other.

With `lockstep` no engine step is taken while a tool is running, which makes a run a pure function of its seed (the miniature: its tools
answer in milliseconds and their latencies are on a virtual clock). Without it, tools and experts wait while the others decode.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Callable, Sequence

from nanorchestra.agent.environment import Environment
from nanorchestra.agent.rebuild import Notes
from nanorchestra.model import chat
from nanorchestra.records import ToolResult, Trajectory, Turn

Event = Callable[[str, Any], None]


@dataclass(frozen=True)
class Limits:
    """Where an attempt is cut. Tokens are ids; `context_tokens` counts a session: the whole trajectory, or a turn and its prompt."""

    turns: int = 50
    turn_tokens: int = 512
    context_tokens: int = 2048
    calls_per_turn: int = 4


@dataclass(frozen=True)
class PolicyPrice:
    """What the orchestrator's own tokens cost: US dollars per million given and sampled ids, seconds per sampled id."""

    given_per_million: float = 0.2
    sampled_per_million: float = 0.2
    seconds_per_token: float = 0.01


class Unavailable(Exception):
    """The policy could not be asked, through no fault of its own."""


class Rollout:
    """Runs many attempts on one engine. `params(seed, budget)` makes the engine's SamplingParams for one turn."""

    def __init__(
        self,
        engine,
        tokenizer,
        params: Callable[[int, int], Any],
        limits: Limits = Limits(),
        price: PolicyPrice = PolicyPrice(),
        *,
        lockstep: bool = True,
        enable_thinking: bool | None = None,
        rebuild: bool = False,
    ):
        self.engine, self.tokenizer, self.params = engine, tokenizer, params
        self.limits, self.price, self.lockstep, self.enable_thinking, self.rebuild = (
            limits,
            price,
            lockstep,
            enable_thinking,
            rebuild,
        )
        self._ready: list[
            tuple[int, Any, Any, Any, asyncio.Future]
        ] = []  # turns that wait for the engine
        self._waiting: dict[Any, asyncio.Future] = {}  # request id -> who waits for it
        self._tools_running = 0
        self._changed = asyncio.Event()

    def run(
        self,
        environments: Sequence[Environment],
        seeds: Sequence[int],
        on_done: Callable[[Trajectory], None] | None = None,
        on_event: Event | None = None,
    ) -> list[Trajectory]:
        """One attempt at each environment, each with its own sampling seed; the trajectories in the same order."""
        return asyncio.run(self._run(environments, seeds, on_done, on_event))

    async def _run(self, environments, seeds, on_done, on_event) -> list[Trajectory]:
        self._changed = asyncio.Event()
        attempts = [
            asyncio.ensure_future(self._attempt(i, env, seed, on_event))
            for i, (env, seed) in enumerate(zip(environments, seeds, strict=True))
        ]
        for attempt in attempts:
            attempt.add_done_callback(lambda _: self._changed.set())
            if on_done is not None:
                attempt.add_done_callback(
                    lambda done: done.cancelled() or done.exception() or on_done(done.result())
                )
        try:
            await self._pump(attempts)
            return [attempt.result() for attempt in attempts]
        finally:
            for attempt in attempts:
                attempt.cancel()
            await asyncio.gather(*attempts, return_exceptions=True)
            self._ready.clear()
            self._waiting.clear()
            self._tools_running = 0

    async def _pump(self, attempts: list[asyncio.Future]) -> None:
        while not all(attempt.done() for attempt in attempts):
            await asyncio.sleep(0)  # let whoever was woken reach its next wait
            failed = next((a for a in attempts if a.done() and a.exception() is not None), None)
            if failed is not None:
                failed.result()  # raises here, once, with its own traceback
            if self.lockstep and self._tools_running or not (self._ready or self._waiting):
                self._changed.clear()
                if self._tools_running or not all(a.done() for a in attempts) and not self._ready:
                    await self._changed.wait()
                continue
            for _, session, params, on_token, future in sorted(
                self._ready, key=lambda entry: entry[0]
            ):
                self._waiting[session.submit(params, on_token=on_token).id] = future
            self._ready.clear()
            for request in self.engine.step():
                future = self._waiting.pop(request.id)
                if not future.done():
                    future.set_result(request.completion)

    # What the policy is: here the engine; a model elsewhere, in the program's endpoint.py, does these three otherwise.

    def _open(self, start: Environment | Notes, prompt: list[int]) -> Any:
        """A conversation that begins with the `messages` and `tools` of `start`, whose ids are `prompt`."""
        return self.engine.session(prompt)

    def _give(
        self, session, trajectory: Trajectory, ids: list[int], role: str, contents: Sequence[str]
    ) -> None:
        """Shows the policy what came back: the results of its calls (role "tool"), or the user's words ("user"); and their ids."""
        session.append(ids)
        _extend(trajectory, ids)

    def _sample(self, index: int, session, params, on_token) -> asyncio.Future:
        """A future: the Completion of the conversation's next turn. Awaiting it raises Unavailable if the policy cannot be asked."""
        future = asyncio.get_running_loop().create_future()
        self._ready.append((index, session, params, on_token, future))
        self._changed.set()
        return future

    async def _execute(self, env: Environment, calls) -> list[ToolResult]:
        """All calls of one turn at once; those beyond the limit are refused by an error observation."""
        allowed, refused = calls[: self.limits.calls_per_turn], calls[self.limits.calls_per_turn :]
        with self._tool_running():
            results = list(await asyncio.gather(*(env.execute(call) for call in allowed)))
        message = f"Error: at most {self.limits.calls_per_turn} calls in one turn"
        return results + [ToolResult(message, error=True) for _ in refused]

    @contextmanager
    def _tool_running(self) -> Iterator[None]:
        """While one runs, lockstep launches no step of the engine."""
        self._tools_running += 1
        try:
            yield
        finally:
            self._tools_running -= 1
            self._changed.set()

    async def _attempt(
        self, index: int, env: Environment, seed: int, on_event: Event | None
    ) -> Trajectory:
        emit = on_event or (lambda kind, payload: None)
        notes = (
            Notes(
                self.tokenizer,
                env,
                self.limits.context_tokens - self.limits.turn_tokens,
                self.enable_thinking,
            )
            if self.rebuild
            else None
        )
        prompt = (
            notes.prompt()
            if notes
            else chat.encode(
                self.tokenizer, env.messages, env.tools, enable_thinking=self.enable_thinking
            )
        )
        session, context = self._open(notes or env, prompt), 0
        trajectory = Trajectory(env.task.id, seed, len(prompt), [], [], [], [], status="turn_limit")
        _extend(trajectory, prompt)
        try:
            for number in range(self.limits.turns):
                if notes and number:
                    session.close()
                    prompt = notes.prompt()
                    session, context = self._open(notes, prompt), len(trajectory.ids)
                    _extend(trajectory, prompt)
                budget = min(
                    self.limits.turn_tokens,
                    self.limits.context_tokens - (len(trajectory.ids) - context),
                )
                if budget <= 0:
                    trajectory.status = "token_limit"
                    break
                on_token = (lambda token, logprob: emit("token", token)) if on_event else None
                try:
                    completion = await self._sample(
                        index,
                        session,
                        self.params(turn_seed(seed, number) if notes else seed, budget),
                        on_token,
                    )
                except Unavailable as error:
                    at, trajectory.status = len(trajectory.ids), "infrastructure"
                    trajectory.turns.append(
                        Turn(
                            at,
                            at,
                            "error",
                            results=[ToolResult(str(error), error=True, infrastructure=True)],
                            context=context,
                        )
                    )
                    break
                parsed = chat.parse(
                    self.tokenizer, completion.token_ids, enable_thinking=self.enable_thinking
                )
                turn = Turn(
                    len(trajectory.ids),
                    len(trajectory.ids) + len(completion.token_ids),
                    completion.finish_reason,
                    context=context,
                )
                trajectory.turns.append(turn)
                _extend(
                    trajectory,
                    completion.token_ids,
                    completion.logprobs,
                    completion.weight_versions,
                )
                trajectory.latency_s += self.price.seconds_per_token * len(completion.token_ids)
                trajectory.well_formed &= parsed.well_formed
                emit("turn", parsed)
                if completion.finish_reason == "length":
                    trajectory.status = "token_limit"
                    break
                if not parsed.calls:
                    trajectory.answer = parsed.content
                    with self._tool_running():  # for lockstep, a user who thinks is one
                        said = await env.reply(parsed.content)
                    if said is None or said.infrastructure:
                        trajectory.status = "answered" if said is None else "infrastructure"
                        break
                    emit("user", said)
                    if notes:
                        notes.hear(parsed.content, said.content)
                    else:
                        given = chat.encode_user(
                            self.tokenizer, said.content, enable_thinking=self.enable_thinking
                        )
                        self._give(session, trajectory, given, "user", [said.content])
                    continue
                turn.calls = list(parsed.calls)
                turn.results = await self._execute(env, turn.calls)
                _account(trajectory, turn)
                emit("results", turn)
                if any(result.infrastructure for result in turn.results):
                    trajectory.status = "infrastructure"
                    break
                if notes:
                    notes.see(turn.calls, turn.results)
                else:
                    contents = [result.content for result in turn.results]
                    self._give(
                        session,
                        trajectory,
                        chat.encode_observations(
                            self.tokenizer, contents, enable_thinking=self.enable_thinking
                        ),
                        "tool",
                        contents,
                    )
        finally:
            session.close()
        sampled = sum(trajectory.sampled)
        trajectory.cost_usd += (
            self.price.given_per_million * (len(trajectory.ids) - sampled)
            + self.price.sampled_per_million * sampled
        ) / 1e6
        trajectory.well_formed &= trajectory.status == "answered" and bool(trajectory.answer)
        trajectory.outcome = (
            env.score(trajectory.answer) if trajectory.status == "answered" else 0.0
        )
        return trajectory


def turn_seed(seed: int, number: int) -> int:
    """The seed of a turn whose prompt is composed afresh: the noise is a function of (seed, position), and every such turn begins at much the same positions."""
    return (seed + number * 0x9E3779B97F4A7C15) % 2**63


def _extend(trajectory: Trajectory, ids, logprobs=None, versions=None) -> None:
    """Appends ids to the log: sampled ones with their log-probabilities and weight versions, given ones without."""
    sampled = logprobs is not None
    trajectory.ids += ids
    trajectory.sampled += [sampled] * len(ids)
    trajectory.logprobs += logprobs if sampled else [0.0] * len(ids)
    trajectory.weight_versions += versions if sampled else [-1] * len(ids)


def _account(trajectory: Trajectory, turn: Turn) -> None:
    """Every call is billed; the calls of one turn run side by side, so the turn takes as long as the slowest of them."""
    trajectory.cost_usd += sum(result.cost_usd for result in turn.results)
    trajectory.latency_s += max(result.latency_s for result in turn.results)
    for call, result in zip(turn.calls, turn.results):
        name = result.alias or call.name
        trajectory.calls[name] = trajectory.calls.get(name, 0) + 1
