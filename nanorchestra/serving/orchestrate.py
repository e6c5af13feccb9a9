"""The model NAME+tools: the whole loop runs in the server, and its chunks say what it does."""

import asyncio
import json
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace

from starlette.exceptions import HTTPException

from nanorchestra.agent.environment import Environment
from nanorchestra.agent.loop import Attempt, Rollout
from nanorchestra.engine.sequence import Completion, OnToken, SamplingParams
from nanorchestra.errors import UserError, require
from nanorchestra.records import Price, stricter, words_and_vector
from nanorchestra.schemas import Json, check
from nanorchestra.serving.protocol import OPENAPI, SAMPLING, reasoning_tokens, usage
from nanorchestra.serving.service import REQUEST_S, Service

# Of a question, a preference in words and as a vector, and a seed.
MakeEnvironment = Callable[[str, str, Json, int], Environment]
MOST_CHARACTERS = 2_000  # of the words of a preference
REPORTED = "status", "cost_usd", "latency_s", "calls"  # of the trajectory, in the last chunk


async def orchestrated(
    service: Service, rollout: Rollout, make: MakeEnvironment, body: Json
) -> AsyncIterator[Json]:
    """Runs an attempt at the last message of a body; closed, it ends the attempt.

    Yields reasoning, calls and results as they come, then the answer, then the usage.
    """
    *before, question = body["messages"]
    check({**body, "last": question}, OPENAPI["components"]["schemas"]["WithTools"], "+tools")
    seed = body.get("seed", secrets.randbits(62))
    words, vector = preference_of(body.get("metadata") or {})
    env = make(question["content"], words, vector, seed)
    if not env.task.data:  # a world's task stands alone
        require("too_long" not in body, body.get("too_long", ""))
        env.messages[:0] = before
    sampling = {name: body[name] for name in SAMPLING}
    chunks = asyncio.Queue()  # of the answer; None at the end

    def open_conversation(attempt, start, prompt):
        return OrchestratorConversation(service, rollout.price, prompt)

    def params(seed, max_tokens):
        return SamplingParams(max_tokens, seed=seed, **sampling)

    def on_event(kind, payload):
        if kind in ("text", "turn"):
            for part, text in payload:
                if part == "reasoning":
                    chunks.put_nowait(_chunk({"reasoning_content": text}))
                elif part == "tool_call":
                    chunks.put_nowait(_chunk({}, call=text))
        elif kind == "results":
            for result in payload.results:
                chunks.put_nowait(_chunk({}, result=asdict(result)))

    served = replace(rollout, params=params)
    served.open = open_conversation
    attempt = Attempt(served, 0, env, seed, on_event).run()
    task = asyncio.ensure_future(asyncio.wait_for(attempt, REQUEST_S))
    task.add_done_callback(lambda _: chunks.put_nowait(None))
    try:
        yield _chunk({"role": "assistant"})
        while chunk := await chunks.get():
            yield chunk
        t = task.result()
        if t.status == "infrastructure":
            raise HTTPException(502, t.failure)
        report = {name: getattr(t, name) for name in REPORTED}
        delta = {"content": t.answer} if t.answer else {}
        reason = "stop" if t.status == "answered" else "length"
        yield _chunk(delta, reason, turns=[asdict(turn) for turn in t.turns], **report)
        sampled = sum(t.sampled)
        parts = (t.ids[turn.start : turn.end] for turn in t.turns)
        reasoning = sum(reasoning_tokens(rollout.tokenizer, part) for part in parts)
        yield {"choices": [], "usage": usage(len(t.ids) - sampled, sampled, 0, reasoning)}
    finally:
        task.cancel()


def preference_of(metadata: Json) -> tuple[str, Json]:
    """Returns the words and the vector of the preference in a request's metadata.

    `preference` is a line as in the terminal, or a JSON object of weights and limits whose "text"
    are the words; `usd`, `seconds` and `never` are limits beside it. OpenAI's clients send values
    as strings: JSON in a string is read. UserError.
    """
    fields = {}
    for name in ("preference", "usd", "seconds", "never"):
        value = metadata.get(name)
        if isinstance(value, str) and value.lstrip()[:1] in ("{", "["):
            try:
                value = json.loads(value)
            except (ValueError, RecursionError):
                raise UserError(f"metadata.{name}: {value[:80]!r} is not JSON") from None
        if value is not None:
            fields[name] = value
    words, vector = "", fields.pop("preference", {})
    if isinstance(vector, str):
        words, vector = words_and_vector(vector)
    require(isinstance(vector, dict), "metadata.preference: must be a text or an object")
    vector = dict(vector)
    words = vector.pop("text", words)
    require(isinstance(words, str), "metadata.preference.text: must be a text")
    require(
        len(words) <= MOST_CHARACTERS,
        f"metadata.preference.text: has {len(words):,} characters; {MOST_CHARACTERS:,} at most",
    )
    for name, value in fields.items():
        if isinstance(value, str) and name == "never":
            value = [ban.strip() for ban in value.split(",")]
        elif isinstance(value, str):
            with suppress(ValueError):  # what is no number is refused by its name
                value = json.loads(value)
        vector[name] = stricter(name, vector.get(name), value)
    return words, vector


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
