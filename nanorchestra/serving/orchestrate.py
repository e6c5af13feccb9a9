"""The model NAME+tools: the whole loop runs in the server, and its chunks say what it does."""

import asyncio
import copy
import secrets
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict
from typing import Any

from nanorchestra.agent.environment import Environment
from nanorchestra.agent.loop import Attempt, Rollout
from nanorchestra.engine.request import SamplingParams
from nanorchestra.engine.stream import TurnStream
from nanorchestra.schemas import Json, check
from nanorchestra.serving.protocol import OPENAPI, SAMPLING, usage
from nanorchestra.serving.service import ApiError, Service

MakeEnvironment = Callable[[str, str, int], Environment]  # of a question, a wish and a seed


class Orchestration:
    """One attempt at the last message of a body. Its owner closes it, whatever happens."""

    def __init__(self, service: Service, rollout: Rollout, make: MakeEnvironment, body: Json):
        *before, asked = body["messages"]
        check({**body, "last": asked}, OPENAPI["components"]["schemas"]["WithTools"], "+tools")
        given, seed = body.get("metadata", {}), body.get("seed", secrets.randbits(62))
        limits = [f"{name}={given[name]}" for name in ("usd", "seconds", "never") if name in given]
        env = make(asked["content"], " ".join([given.get("preference", ""), *limits]), seed)
        env.messages[:0] = before
        rollout, chosen = copy.copy(rollout), {name: body[name] for name in SAMPLING}
        rollout.open = lambda attempt, start, prompt: Conversation(service, prompt)
        rollout.params = lambda seed, most: SamplingParams(most, seed=seed, **chosen)
        self.tokenizer, self.events = rollout.tokenizer, asyncio.Queue()
        attempt = Attempt(rollout, 0, env, seed, lambda *event: self.events.put_nowait(event))
        self.task = asyncio.ensure_future(asyncio.wait_for(attempt.run(), service.limits.request_s))
        self.task.add_done_callback(lambda task: self.events.put_nowait(("end", task)))

    def close(self) -> None:
        """Ends the attempt."""
        self.task.cancel()

    async def chunks(self) -> AsyncIterator[Json]:
        """Yields reasoning, calls and results as they come, then the answer, then the usage."""
        stream, (kind, payload) = TurnStream(self.tokenizer), ("", None)
        yield _chunk({"role": "assistant"})
        while kind != "end":
            kind, payload = await self.events.get()
            deltas = stream.feed(payload) if kind == "token" else []
            if kind == "turn":
                deltas, stream = stream.finish()[0], TurnStream(self.tokenizer)
            for part, text in deltas:
                if part == "reasoning":
                    yield _chunk({"reasoning_content": text})
                elif part == "tool_call":
                    yield _chunk({}, call=text)
            for result in payload.results if kind == "results" else ():
                yield _chunk({}, result=asdict(result))
        try:
            t = payload.result()
        except TimeoutError:
            raise ApiError("the request took too long", 504) from None
        if t.status == "infrastructure":
            raise ApiError(t.turns[-1].results[-1].content, 502)
        told = {name: getattr(t, name) for name in ("status", "cost_usd", "latency_s", "calls")}
        reason, delta = "stop" if t.status == "answered" else "length", {}
        if t.answer:
            delta["content"] = t.answer
        yield _chunk(delta, reason, turns=[asdict(turn) for turn in t.turns], **told)
        sampled = sum(t.sampled)
        yield {"choices": [], "usage": usage(len(t.ids) - sampled, sampled)}


def _chunk(delta, reason=None, **told):
    choice = {"index": 0, "delta": delta, "finish_reason": reason}
    return {"choices": [choice]} | ({"nanorchestra": told} if told else {})


class Conversation:
    """The session of an attempt: each turn is a request of its own on the KV of the last."""

    def __init__(self, service: Service, ids: list[int]):
        self.service, self.ids = service, ids

    def append(self, ids: list[int], role: str, contents: list[str]) -> None:
        """Adds observations."""
        self.ids = self.ids + ids

    async def sample(self, params: SamplingParams, on_token: Callable) -> Any:
        """Returns the next turn's Completion. ApiError if the server ends it."""
        answer = self.service.open([(self.ids, params)])
        try:
            async for _, tokens, _ in answer:
                for token, logprob, _ in tokens:
                    on_token(token, logprob)
        finally:
            answer.close()
        (request,) = answer.requests
        self.ids = request.ids
        return request.completion

    def close(self) -> None:
        """Has nothing open between turns."""
