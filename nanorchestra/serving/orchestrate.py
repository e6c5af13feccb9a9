"""The model NAME+tools: the whole loop runs in the server, and its chunks say what it does."""

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from copy import copy
from dataclasses import asdict, dataclass, replace

from starlette.exceptions import HTTPException

from nanorchestra.agent.environment import Environment
from nanorchestra.agent.loop import Attempt, Rollout
from nanorchestra.engine.sequence import Completion, OnToken, SamplingParams
from nanorchestra.errors import require
from nanorchestra.records import Preference, Price, Trajectory
from nanorchestra.schemas import Json
from nanorchestra.serving.protocol import (
    SAMPLING,
    ChatRequest,
    Metadata,
    nothing_yet,
    reasoning_tokens,
    require_values,
    usage,
)
from nanorchestra.serving.service import REQUEST_S, Service

MakeEnvironment = Callable[[str, Preference, int], Environment]  # of a question, and a seed
KEEP_S = 5.0  # without a chunk, after which `nothing_yet` is one
REPORTED = "status", "cost_usd", "latency_s", "calls"  # of the trajectory, in the last chunk


async def orchestrated(
    service: Service,
    rollout: Rollout,
    make: MakeEnvironment,
    body: ChatRequest,
    too_long: str = "",
) -> AsyncIterator[Json]:
    """Runs an attempt at the last message of a body; closed, it ends the attempt.

    too_long: why earlier messages were left out, which only a world's task can do without.

    Yields reasoning, calls and results as they come, then the answer, then the usage.
    """
    *before, last = body.messages
    right = "NAME+tools runs the server's own alone; with NAME the client runs those that it brings"
    require(not body.tools, f"tools: {right}")
    require(last["role"] == "user", "messages: the last must be the user's question")
    require_values(
        body,
        "NAME+tools has no other",
        tool_choice=("auto", "none"),
        response_format=({"type": "text"},),
        stop=([],),
        n=(1,),
        logprobs=(False,),
        return_token_ids=(False,),
    )
    seed = secrets.randbits(62) if body.seed is None else body.seed
    env = make(last["content"], preference_of(body.metadata), seed)
    limited = env.task.preference.stricter(limits_of(body.metadata))
    env.task = replace(env.task, preference=limited)
    if not env.task.data:  # a world's task stands alone
        require(not too_long, too_long)
        env.messages[:0] = before
    attempt = ServedAttempt(service, rollout, env, seed, body)
    async with aclosing(attempt.answer()) as chunks:
        async for chunk in chunks:
            yield chunk


class ServedAttempt:
    """An attempt that a client follows in one answer."""

    def __init__(
        self, service: Service, rollout: Rollout, env: Environment, seed: int, body: ChatRequest
    ):
        self.service, self.tokenizer = service, rollout.tokenizer
        self.chunks: asyncio.Queue[Json | None] = asyncio.Queue()  # None at the end
        served = copy(rollout)
        if service.engine is None:
            service.check_room(1)
            self._ask_endpoint(served, body)
        else:
            self._ask_engine(served, body)
        self.attempt = Attempt(served, 0, env, seed, self._on_event)
        self.task = asyncio.ensure_future(self._run())
        self.task.add_done_callback(lambda task: self.chunks.put_nowait(None))
        if service.engine is None:
            service.follow(self.task)

    def _ask_engine(self, served, body):
        """Has the turns of a rollout sampled by the service, as the body says."""
        sampling = {name: getattr(body, name) for name in SAMPLING}

        def open_conversation(attempt, prompt):
            return OrchestratorConversation(self.service, served.price, prompt.ids)

        def params(seed, max_tokens):
            return SamplingParams(max_tokens, seed=seed, **sampling)

        served.open, served.params = open_conversation, params

    def _ask_endpoint(self, served, body):
        """Has an endpoint sample with the body's temperature; it has its own other settings."""
        why = "an endpoint is given the temperature alone"
        require_values(body, why, top_p=(1.0,), top_k=(0,), ignore_eos=(False,))
        params = served.params

        def with_temperature(seed, max_tokens):
            return params(seed, max_tokens) | {"temperature": body.temperature}

        served.params = with_temperature

    async def _run(self) -> Trajectory:
        try:
            async with asyncio.timeout(REQUEST_S):
                return await self.attempt.run()
        except asyncio.CancelledError:  # the client has left, or the time is over
            self.attempt.trajectory.status = "stopped"
            raise
        finally:
            self.service.record(self.attempt.env.task, self.attempt.trajectory)

    def _on_event(self, kind, payload):
        if kind in ("text", "turn"):
            for part, text in payload:
                if part == "reasoning":
                    self.chunks.put_nowait(_chunk({"reasoning_content": text}))
                elif part == "tool_call":
                    self.chunks.put_nowait(_chunk({}, call=text))
        elif kind == "results":
            for result in payload.results:
                self.chunks.put_nowait(_chunk({}, result=asdict(result)))

    async def answer(self) -> AsyncIterator[Json]:
        """Yields the chunks up to the attempt's end; closed, it ends the attempt."""
        try:
            yield _chunk({"role": "assistant"})
            while chunk := await self._next():
                yield chunk
            if self.task.cancelled():
                raise HTTPException(*self.service.aborted)
            t = self.task.result()
            if t.status == "infrastructure":
                raise HTTPException(502, t.failure)
            report = {name: getattr(t, name) for name in REPORTED}
            if t.answer and "answer" in (known := self.attempt.env.task.data):
                report |= {"right": t.outcome > 0, "expected": known["answer"]}
            delta = {"content": t.answer} if t.answer else {}
            reason = "stop" if t.status == "answered" else "length"
            yield _chunk(delta, reason, turns=[asdict(turn) for turn in t.turns], **report)
            sampled = sum(t.sampled)
            parts = (t.ids[turn.start : turn.end] for turn in t.turns)
            reasoning = sum(reasoning_tokens(self.tokenizer, part) for part in parts)
            read, counted = len(t.ids) - sampled, self.attempt.counted
            if counted:  # by an endpoint; the ids are another tokenizer's
                read, sampled, reasoning = counted["read"], counted["written"], 0
            yield {"choices": [], "usage": usage(read, sampled, 0, reasoning)}
        finally:
            self.task.cancel()

    async def _next(self) -> Json | None:
        """Returns the next chunk, None at the end; an empty one after KEEP_S."""
        try:
            return await asyncio.wait_for(self.chunks.get(), KEEP_S)
        except TimeoutError:
            return nothing_yet()


def preference_of(metadata: Metadata) -> Preference:
    """Returns the preference in a request's metadata, with the limits beside it.

    UserError, also for a name of one of these in capitals or with or without a final s; any other
    name belongs to the client, and is ignored.
    """
    names = ("preference", "usd", "seconds", "never")
    meant = {name.removesuffix("s"): name for name in names}
    for name in metadata:
        near = meant.get(name.casefold().removesuffix("s"), name)
        require(near == name, f"metadata: there is no {name!r}; did you mean {near}?")
    stated = {name: metadata[name] for name in names if name in metadata}
    wish = stated.pop("preference", "")
    limits = Preference.of("", stated, "metadata")
    if isinstance(wish, str):
        return Preference.parse(wish, "metadata").stricter(limits)
    weights = {name: value for name, value in wish.items() if name != "text"}
    return Preference.of(wish.get("text", ""), weights, "metadata").stricter(limits)


def limits_of(metadata: Metadata) -> Preference:
    """Returns the limits that a caller hands over, an orchestrator of which this is an expert.

    They bind and are not said in the prompt. A ban may name what is not here.
    """
    return Preference.of("", metadata.get("limits", {}), "metadata.limits")


def _chunk(delta, reason=None, **extension):
    """Returns a chunk of a chat; `extension` are fields that OpenAI's API does not have."""
    chunk = {"choices": [{"index": 0, "delta": delta, "finish_reason": reason}]}
    if extension:
        chunk["nanorchestra"] = extension
    return chunk


@dataclass
class OrchestratorConversation:
    """The session of an attempt: each turn is a request of its own on the KV of the last."""

    service: Service
    price: Price
    ids: list[int]

    def prices(self) -> tuple[float, float]:
        """Returns no price of reading, since the KV cache holds the prompt, and that of an id."""
        return 0.0, self.price.cost(0, 1)

    def append(self, ids: list[int], role: str, contents: list[str]) -> None:
        """Adds the ids of observations."""
        self.ids = self.ids + ids

    async def sample(self, params: SamplingParams, on_token: OnToken) -> Completion:
        """Returns the next turn's Completion. HTTPException if the server ends it."""
        count = 0
        async for ((request, _),) in self.service.sample([(self.ids, params)]):
            new = request.logprobs[count:]
            for place, logprob in enumerate(new, request.prompt_tokens + count):
                on_token(request.ids[place], logprob)
            count += len(new)
        self.ids = request.ids
        return request.completion

    def close(self) -> None:
        """Does nothing: no request is open between turns."""
