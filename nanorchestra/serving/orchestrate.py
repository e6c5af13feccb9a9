"""The model NAME+tools: the whole loop runs in the server, and its chunks say what it does."""

from __future__ import annotations

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
from nanorchestra.serving.protocol import SAMPLING, messages_of
from nanorchestra.serving.service import ApiError, Service

MakeEnvironment = Callable[[str, str, int], Environment]  # of a question, a wish and a seed
FOREIGN = ("tools", "stop", "logprobs", "return_token_ids", "response_format")
WISH = ("preference", "usd", "seconds", "never")  # of the metadata


class Orchestration:
    """One attempt at the last message of a body. Its owner closes it, whatever happens."""

    def __init__(
        self, service: Service, rollout: Rollout, make: MakeEnvironment, body: dict[str, Any]
    ):
        *before, asked = messages_of(body)
        for name in FOREIGN:
            if body[name] not in ([], False, {"type": "text"}):
                raise ApiError(f"{name}: a model with +tools has none", param=name)
        if asked["role"] != "user" or body["n"] > 1:
            raise ApiError("messages, n: +tools gives one answer to a last message of the user")
        given, seed = body.get("metadata", {}), body.get("seed", secrets.randbits(62))
        wishes = [f"{name}={given[name]}" for name in WISH[1:] if name in given]
        env = make(asked["content"], " ".join([given.get(WISH[0], ""), *wishes]), seed)
        env.messages[:0] = before
        self.service, self.tokenizer, rollout = service, rollout.tokenizer, copy.copy(rollout)
        rollout.open = lambda attempt, start, prompt: Conversation(service, prompt)
        chosen = {name: body[name] for name in SAMPLING}
        rollout.params = lambda seed, most: SamplingParams(most, seed=seed, **chosen)
        self.events: asyncio.Queue = asyncio.Queue()
        attempt = Attempt(rollout, 0, env, seed, lambda *event: self.events.put_nowait(event))
        limit = asyncio.wait_for(attempt.run(), service.limits.request_s)
        self.task = asyncio.ensure_future(limit)
        self.task.add_done_callback(lambda task: self.events.put_nowait(("end", task)))

    def close(self) -> None:
        """Ends the attempt."""
        self.task.cancel()

    async def chunks(self) -> AsyncIterator[dict[str, Any]]:
        """Yields reasoning, calls and results as they come, then the answer, then the usage."""
        stream, kind = TurnStream(self.tokenizer), ""
        yield _chunk({"role": "assistant"})
        while kind != "end":
            kind, payload = await self.events.get()
            deltas = []
            if kind == "token":
                deltas = stream.feed(payload)
            elif kind == "turn":
                deltas, stream = stream.finish()[0], TurnStream(self.tokenizer)
            elif kind == "results":
                for call, result in zip(payload.calls, payload.results, strict=True):
                    yield _chunk({}, result={"name": call.name} | asdict(result))
            for part, text in deltas:
                if part == "reasoning":
                    yield _chunk({"reasoning_content": text})
                elif part == "tool_call":
                    yield _chunk({}, call=text)
        try:
            t = payload.result()
        except TimeoutError:
            raise ApiError("the request took too long", 504) from None
        if t.status == "infrastructure":
            raise ApiError(t.turns[-1].results[-1].content, 502)
        reason = "stop" if t.status == "answered" else "length"
        told = {"status": t.status, "cost_usd": t.cost_usd, "latency_s": t.latency_s}
        turns = [asdict(turn) for turn in t.turns]
        delta = {"content": t.answer} if t.answer else {}
        yield _chunk(delta, reason, calls=t.calls, turns=turns, **told)
        counts = len(t.ids) - sum(t.sampled), sum(t.sampled)
        usage = dict(zip(("prompt_tokens", "completion_tokens"), counts, strict=True))
        yield {"choices": [], "usage": usage | {"total_tokens": len(t.ids)}}


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
        answer = self.service.open([(self.ids, params, None)])
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
