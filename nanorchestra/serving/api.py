"""OpenAI's API: the bodies that it reads, the answers that it writes, and its routes.

pydantic checks the bodies, and /openapi.json is made of their types. An answer is a stream of
chunks, from ids as the model samples them or from an attempt as it is played; it is sent as events,
or joined to one JSON object.
"""

import asyncio
import base64
import hashlib
import logging
import secrets
import socket
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import (
    Annotated,
    Any,
    ClassVar,
    Literal,
    NotRequired,  # pydantic needs it before Python 3.12
    Self,
    TypeVar,
)

import uvicorn
from fastapi import Depends, Request
from fastapi.responses import (
    HTMLResponse,
    JSONResponse,
    Response,
    StreamingResponse,
)
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    WrapValidator,
    model_validator,
)
from starlette.background import BackgroundTask
from starlette.exceptions import HTTPException
from starlette.types import Send
from typing_extensions import TypedDict

from nanorchestra.agent.loop import Rollout
from nanorchestra.engine.guide import Form, Guide
from nanorchestra.engine.sequence import Limits, SamplingParams
from nanorchestra.engine.sequence import Request as SampledRequest
from nanorchestra.engine.stream import TurnStream
from nanorchestra.errors import UserError, require
from nanorchestra.model import chat
from nanorchestra.model.parser import CALL, CALL_END
from nanorchestra.model.tokenizer import Tokenizer
from nanorchestra.records import Limit, Preference
from nanorchestra.schemas import Json
from nanorchestra.serving.grammars import Grammars
from nanorchestra.serving.http import (
    REFUSED,
    Application,
    Body,
    Whole,
    address,
    dumps,
    listen,
    problem_of,
    serve,
)
from nanorchestra.serving.loop import (
    REPORTED,
    Names,
    Questions,
    Record,
    ServedAttempt,
    Service,
    Words,
)
from nanorchestra.tools.models import SERVED

T = TypeVar("T")
CHAT = "/v1/chat/completions"
SAMPLING = ("temperature", "top_p", "top_k", "ignore_eos")
SILENT = {"enable_thinking": False}
LEAST = -9999.0  # stands for minus infinity, which is no JSON
KEEP_ALIVE = b": still at work\n\n"  # a comment in a stream, which clients ignore
DRAIN_S = 20.0  # until what runs is ended, once the server is
PAGE = Path(__file__).with_name("page.html").read_text(encoding="utf-8")


# --- what it reads

Many = Annotated[list[T], Field(fail_fast=True)]  # a list that is all wrong has one error


def text_of(content: Any) -> str:
    """Returns the content of a message as text."""
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def as_given(value: Any, check: Any) -> Any:
    """Returns a checked value as the client wrote it, in its order: the prompt has it like that."""
    check(value)
    return value


def names_in(value: Any) -> Any:
    """Returns the names in a text with commas: OpenAI's clients send metadata as texts."""
    return [name.strip() for name in value.split(",")] if isinstance(value, str) else value


def few(value: Any) -> Any:
    """Raises ValueError for an object of many names, each of which might be an error."""
    if isinstance(value, dict) and len(value) > MOST_NAMES:
        raise ValueError(f"has {len(value)} names, {MOST_NAMES} at most")
    return value


MOST_NAMES = 16  # in metadata
Short = Annotated[str, Field(max_length=512)]
Few = BeforeValidator(few)
Count = Annotated[Whole, Field(ge=1, le=2**31 - 1)]
Top = Annotated[Whole, Field(ge=0, le=20)]
Stop = Annotated[str, Field(min_length=1, max_length=200)]
Stops = Annotated[
    Stop | Annotated[list[Stop], Field(max_length=16)],
    AfterValidator(lambda stop: [stop] if isinstance(stop, str) else stop),
]
Id = Annotated[int, Field(ge=0, le=2**31 - 1)]
Prompt = str | Annotated[list[Id], Field(min_length=1, fail_fast=True)]
UNSUPPORTED = "Not supported beyond this value."


class Part(TypedDict):
    """A part of a content."""

    type: Literal["text"]
    text: str


Content = Annotated[str | Many[Part], AfterValidator(text_of)]
Role = Annotated[
    Literal["system", "developer", "user", "tool"],
    AfterValidator(lambda role: role.replace("developer", "system")),
]


class Said(TypedDict):
    """A message that is not the model's own."""

    role: Role
    content: Content
    name: NotRequired[str | None]
    tool_call_id: NotRequired[str | None]


class CalledFunction(TypedDict):
    """What a call asks for; the arguments are JSON in a text."""

    name: str
    arguments: str


class Call(TypedDict):
    """A call in a message of the model."""

    id: NotRequired[str]
    type: NotRequired[Literal["function"]]
    function: CalledFunction


class Answered(TypedDict):
    """A message of the model."""

    role: Literal["assistant"]
    content: NotRequired[Content | None]
    reasoning_content: NotRequired[str | None]
    tool_calls: NotRequired[Many[Call] | None]


Message = Annotated[Said | Answered, Field(discriminator="role")]


class Function(TypedDict):
    """A function that the client runs."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
    description: NotRequired[str]
    parameters: NotRequired[Annotated[Json, Field(description="A JSON schema.")]]
    strict: NotRequired[bool | None]


class Tool(TypedDict):
    """A function that the model may call."""

    type: Literal["function"]
    function: Function


class FunctionName(TypedDict):
    """The name of a function."""

    name: str


class ToolChoice(TypedDict):
    """The function that the model must call."""

    type: Literal["function"]
    function: FunctionName


class AnyFormat(TypedDict):
    """Text, or any JSON object."""

    type: Literal["text", "json_object"]


class Schema(TypedDict):
    """A JSON schema; `strict` refuses what cannot be enforced."""

    name: str
    description: NotRequired[str]
    schema: Json
    strict: NotRequired[bool | None]


class SchemaFormat(TypedDict):
    """JSON that fits a schema."""

    type: Literal["json_schema"]
    json_schema: Schema


class TemplateSettings(TypedDict):
    """What the chat template is given; false lets the model answer without reasoning."""

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)
    enable_thinking: NotRequired[bool]


class StreamOptions(TypedDict):
    """With include_usage a last chunk without choices holds the usage."""

    include_usage: NotRequired[bool]


class CallerLimits(TypedDict):
    """Limits that bind and are not said in the prompt; a ban may name what is not here."""

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)
    usd: NotRequired[Limit]
    seconds: NotRequired[Limit]
    never: NotRequired[Names]


class Metadata(TypedDict, extra_items=Short):
    """The preference of NAME+tools: a line, as after /prefer, and limits beside it.

    `limits` are those of a caller that is an orchestrator itself. Other names belong to the client.
    """

    preference: NotRequired[Words]
    usd: NotRequired[Annotated[Limit, Field(strict=False)]]
    seconds: NotRequired[Annotated[Limit, Field(strict=False)]]
    never: NotRequired[Annotated[Names, BeforeValidator(names_in)]]
    limits: NotRequired[Annotated[CallerLimits, Few]]


class SamplingBody(Body):
    """What the bodies of a chat and of a completion have in common."""

    model: str = Field(description="A name that /v1/models lists.")
    max_tokens: Count | None = Field(None, description="Most ids that are sampled for a choice.")
    temperature: float | None = Field(
        None,
        ge=0,
        le=2,
        description="0 takes the most probable id. Default: the checkpoint's, else 1.",
    )
    top_p: float | None = Field(
        None, gt=0, le=1, description="Keeps the most probable ids of this total probability."
    )
    top_k: Whole | None = Field(
        None,
        ge=0,
        le=2**31 - 1,
        description="Keeps so many of the most probable ids; 0 keeps all.",
    )
    n: Whole = Field(1, ge=1, le=128, description="Choices. Choice i has the seed + i.")
    seed: Whole | None = Field(
        None,
        ge=-(2**63),
        le=2**63 - 1,
        description="The draws are a function of the seed and the position. Default: random.",
    )
    stop: Stops = Field([], description="Ends the content before the first of these texts.")
    stream: bool = Field(False, description="Server-sent events instead of one answer.")
    stream_options: StreamOptions = {}
    ignore_eos: bool = Field(False, description="Goes on past the end of the text, to the limit.")
    return_token_ids: bool = Field(
        False, description="Adds prompt_token_ids and each choice's token_ids."
    )
    frequency_penalty: float = Field(0, ge=0, le=0, description=UNSUPPORTED)
    presence_penalty: float = Field(0, ge=0, le=0, description=UNSUPPORTED)
    logit_bias: Json = Field({}, max_length=0, description=UNSUPPORTED)

    def with_defaults(self, defaults: Json) -> Self:
        """Returns the body with `defaults` where it says nothing."""
        unsaid = {name: value for name, value in defaults.items() if getattr(self, name) is None}
        return self.model_copy(update=unsaid)


class ChatRequest(SamplingBody):
    """A conversation to go on with."""

    messages: Annotated[Many[Message], Field(min_length=1, max_length=4096)]
    max_completion_tokens: Count | None = Field(
        None, description="As max_tokens, and wins over it."
    )
    logprobs: bool = Field(
        False, description="Log-probabilities of the sampled ids, as they were drawn."
    )
    top_logprobs: Top = Field(
        0, description="The most probable ids at each position; needs logprobs."
    )
    tools: Annotated[
        list[Annotated[Tool, WrapValidator(as_given)]], Field(max_length=128, fail_fast=True)
    ] = []
    tool_choice: Literal["auto", "none", "required"] | ToolChoice = Field(
        "auto", description="All but none is enforced by a grammar, arguments by the schema."
    )
    parallel_tool_calls: bool = Field(True, description="False ends the answer at its first call.")
    response_format: Annotated[AnyFormat | SchemaFormat, Field(discriminator="type")] = {
        "type": "text"
    }
    chat_template_kwargs: Annotated[TemplateSettings, Few] = {}
    metadata: Annotated[Metadata, Few] = {}
    functions: list[Any] = Field([], max_length=0, description="Not supported: use tools.")

    @model_validator(mode="after")
    def _settle(self):
        """Leaves the tools that may be called, and one limit of tokens."""
        self.max_tokens = self.max_completion_tokens or self.max_tokens
        if self.tool_choice == "none":
            self.tools = []
        elif isinstance(self.tool_choice, dict):
            name = self.tool_choice["function"]["name"]
            self.tools = [tool for tool in self.tools if tool["function"]["name"] == name]
        return self

    @property
    def choices(self) -> int:
        """How many choices it asks for."""
        return self.n

    @property
    def most_probable(self) -> int | None:
        """How many ids each position's log-probabilities are of, beside its own; None: no logs."""
        return self.top_logprobs if self.logprobs else None

    def prompts(self, tokenizer: Tokenizer) -> list[list[int]]:
        """Returns the ids of its one prompt. UserError if it has tools that are not served."""
        if self.tools:
            chat.require_tools(tokenizer)
        return [chat.encode(tokenizer, self.messages, self.tools, **self.chat_template_kwargs)]

    def form(self) -> Form | None:
        """Returns the form that its answers are held to, None for none. UserError."""
        required = self.tool_choice not in ("auto", "none")
        require(self.tools or not required, "tool_choice: tools has no such function")
        described = self.response_format.get("json_schema", {"schema": {"type": "object"}})
        plain = required or self.response_format["type"] == "text"
        schema = None if plain else described["schema"]
        if not self.tools and schema is None:
            return None
        thinks = self.chat_template_kwargs != SILENT
        return Form(self.tools, schema, required, bool(described.get("strict")), thinks)


class CompletionRequest(SamplingBody):
    """Texts or ids to go on with."""

    prompt: Prompt | Annotated[list[Prompt], Field(min_length=1, fail_fast=True)] = Field(
        description="Text, ids, or a list of several prompts; text without special tokens."
    )
    max_tokens: Count | None = Field(16, description="Most ids that are sampled for a choice.")
    logprobs: Top | None = Field(
        None, description="Log-probabilities of the sampled and of so many most probable ids."
    )
    echo: Literal[False] = Field(False, description=UNSUPPORTED)
    best_of: Whole = Field(1, ge=1, le=1, description=UNSUPPORTED)
    suffix: Literal[""] = Field("", description=UNSUPPORTED)
    tools: ClassVar[tuple] = ()
    parallel_tool_calls: ClassVar[bool] = True

    @property
    def choices(self) -> int:
        """How many choices it asks for, of all prompts together."""
        return self.n * len(self._several())

    @property
    def most_probable(self) -> int | None:
        """How many ids each position's log-probabilities are of, beside its own; None: no logs."""
        return self.logprobs

    def prompts(self, tokenizer: Tokenizer) -> list[list[int]]:
        """Returns the ids of its prompts."""
        bos = tokenizer.bos_ids
        return [bos + tokenizer.encode(p) if isinstance(p, str) else p for p in self._several()]

    def form(self) -> None:
        """Returns no form: a text is held to none."""

    def _several(self):
        one = isinstance(self.prompt, str) or isinstance(self.prompt[0], int)
        return [self.prompt] if one else self.prompt


AnyRequest = ChatRequest | CompletionRequest


# --- sampled ids as chunks


def require_values(body: ChatRequest, why: str, **allowed: Sequence[Any]) -> None:
    """Raises UserError unless the body's fields have one of the values that are `allowed`."""
    for name, values in allowed.items():
        right = " or ".join(dumps(value).decode() for value in values)
        require(getattr(body, name) in values, f"{name}: {why}; it must be {right}")


def as_choices(
    body: AnyRequest, prompts: list[list[int]], guide: Guide | None
) -> list[tuple[list[int], SamplingParams]]:
    """Returns (ids, SamplingParams) of each choice. Choice i of a prompt has the seed + i."""
    params = SamplingParams(
        **{name: getattr(body, name) for name in SAMPLING},
        max_tokens=body.max_tokens,
        top_logprobs=body.most_probable or 0,
        guide=guide,
    )
    seed = secrets.randbits(62) if body.seed is None else body.seed
    choices = []
    for ids in prompts:
        for i in range(body.n):
            choices.append((ids, replace(params, seed=seed + i)))
    return choices


@dataclass
class Choice:
    """One choice as it is sampled: turns the ids of its request into the chunks of a stream.

    `count` is how many ids it has. `finish_reason` is set once it has ended: a stop may end it
    before its ids end.
    """

    body: AnyRequest
    index: int
    tokenizer: Tokenizer
    prompt: Sequence[int]
    count: int = 0
    finish_reason: str | None = None

    def __post_init__(self) -> None:
        self._calls = 0  # how many tool calls it has
        self._held = ""  # content that may begin a stop
        self._is_chat = isinstance(self.body, ChatRequest)
        self._many = self.body.parallel_tool_calls
        self._thinks = chat.opens_thinking(self.tokenizer, self.prompt)
        has_tools = bool(self.body.tools)
        self._stream = TurnStream(self.tokenizer, has_tools, self._is_chat, self._thinks)

    def feed(self, request: SampledRequest, ended: str | None) -> Json | None:
        """Returns the chunk of what is new, None if nothing is; `ended`: why nothing follows."""
        start = self.count
        end = len(request.logprobs)
        if self.finish_reason or not (ended or end > start):
            return None
        delta = {} if start else {"role": "assistant"}
        ids = request.ids[request.prompt_tokens : request.prompt_tokens + end]
        step = end if self._many and not self.body.stop else 1  # an id may be the end
        while self.count < end and not self.finish_reason:
            part = ids[self.count : self.count + step]
            self.count += len(part)
            self._take(delta, self._stream.feed(*part))
        if ended and not self.finish_reason:
            self._take(delta, self._stream.finish(), final=True)
            self.finish_reason = self.finish_reason or ended
        if self._calls and self.finish_reason == "stop":
            self.finish_reason = "tool_calls"
        chunk = {"index": self.index, "finish_reason": self.finish_reason}
        if self._is_chat:
            chunk["delta"] = delta
        else:
            chunk["text"] = delta.get("content", "")
        new = slice(start, self.count)
        if self.body.most_probable is not None:
            chunk["logprobs"] = self._logprobs(
                ids[new], request.logprobs[new], request.top_logprobs[new]
            )
        if self.body.return_token_ids:
            chunk["token_ids"] = ids[new]
        return chunk

    def _take(self, delta, parts, final=False):
        """Adds the parts of a turn to the delta: content up to the first stop."""
        content = self._held
        for kind, text in parts:
            if kind == "reasoning":
                merge(delta, {"reasoning_content": text})
            elif kind == "content":
                content += text
            elif (call := self._stream.parser.calls[self._calls]).error:
                content += f"{CALL}\n{text}\n{CALL_END}"
                del self._stream.parser.calls[self._calls]
            else:
                function = {"name": call.name, "arguments": dumps(call.arguments).decode()}
                about = {"index": self._calls, "id": f"call_{secrets.token_hex(12)}"}
                merge(delta, {"tool_calls": [about | {"type": "function", "function": function}]})
                self._calls += 1
                self.finish_reason = None if self._many else "stop"
        stops = self.body.stop
        places = [content.find(stop) for stop in stops if stop in content]
        held = 0 if final else max(map(len, stops), default=1) - 1
        end = min(places, default=max(0, len(content) - held))
        if places:
            self.finish_reason = "stop"
        self._held = content[end:]
        if end:
            merge(delta, {"content": content[:end]})

    def _logprobs(self, ids, logprobs, top_logprobs):
        """Returns the log-probabilities of ids in the form of a chat, or of a completion."""
        entries = []
        for token, logprob, most_probable in zip(ids, logprobs, top_logprobs, strict=True):
            entry = self._named(token, logprob)
            entry["top_logprobs"] = [self._named(*pair) for pair in most_probable]
            entries.append(entry)
        if self._is_chat:
            return {"content": entries}
        return {
            "tokens": [entry["token"] for entry in entries],
            "token_logprobs": [entry["logprob"] for entry in entries],
            "top_logprobs": [
                {top["token"]: top["logprob"] for top in entry["top_logprobs"]} for entry in entries
            ],
        }

    def _named(self, token, logprob):
        raw = self.tokenizer.bytes_of(token)
        text = raw.decode("utf-8", "replace")
        return {"token": text, "logprob": max(logprob, LEAST), "bytes": list(raw)}


def merge(whole: Json, chunk: Json) -> None:
    """Adds a chunk to what came before it: texts and lists are joined."""
    for key, value in chunk.items():
        old = whole.get(key)
        if old and isinstance(value, dict):
            merge(old, value)
        else:
            whole[key] = old + value if old and isinstance(value, str | list) else value


def usage(prompt: int, sampled: int, cached: int = 0) -> Json:
    """Returns OpenAI's count of tokens."""
    return {
        "prompt_tokens": prompt,
        "completion_tokens": sampled,
        "total_tokens": prompt + sampled,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


# --- chunks of an answer


async def sampled(
    service: Service,
    tokenizer: Tokenizer,
    body: AnyRequest,
    prompts: list[tuple[list[int], SamplingParams]],
) -> AsyncIterator[Json]:
    """Yields the chunks of an answer of the model alone, whose choices are sampled from `prompts`.

    The last is the usage.
    """
    choices = [Choice(body, i, tokenizer, ids) for i, (ids, _) in enumerate(prompts)]
    first = {}  # what the first chunk has beside its choices
    if body.return_token_ids:
        first["prompt_token_ids"] = prompts[0][0]
    with service.admitted(len(choices)):
        async with aclosing(service.sample(prompts)) as news:
            async for pairs in news:
                chunks = [choice.feed(*pair) for choice, pair in zip(choices, pairs, strict=True)]
                chunks = [chunk for chunk in chunks if chunk]
                if chunks:
                    yield first | {"choices": chunks}
                    first = {}
                if all(choice.finish_reason for choice in choices):  # a stop, before the ids end
                    break
    prompt = sum(len(ids) for ids, _ in prompts[:: body.n])
    count = sum(choice.count for choice in choices)
    cached = sum(request.cached_tokens or 0 for request, _ in pairs)
    yield {"choices": [], "usage": usage(prompt, count, cached)}


async def orchestrated(attempt: ServedAttempt, streams: bool) -> AsyncIterator[Json]:
    """Yields the chunks of an attempt: what happens as it comes, the answer, then the usage.

    If it `streams`, the content of each turn comes as it is sampled, before it is known whether a
    call follows; else the answer alone is content. A chunk is empty where the attempt is silent.
    """
    yield _chunk({"role": "assistant"})
    async with aclosing(attempt.follow()) as news:
        async for kind, payload in news:
            if kind == "reasoning":
                yield _chunk({"reasoning_content": payload})
            elif kind == "content" and streams:
                yield _chunk({"content": payload})
            elif kind == "call":
                yield _chunk({}, call=payload)
            elif kind == "result":
                yield _chunk({}, result=asdict(payload))
            elif kind == "silence":
                yield {}
    t = attempt.trajectory
    report = {name: getattr(t, name) for name in REPORTED}
    if t.answer and "answer" in (known := attempt.env.task.data):
        report |= {"right": t.outcome > 0, "expected": known["answer"]}
    rest = attempt.rest() if streams else t.answer
    delta = {"content": rest} if rest else {}
    reason = "stop" if t.status == "answered" else "length"
    yield _chunk(delta, reason, turns=[asdict(turn) for turn in t.turns], **report)
    count = sum(t.sampled)
    counts = len(t.ids) - count, count
    if attempt.counted:  # by an endpoint; the ids are another tokenizer's
        counts = attempt.counted["read"], attempt.counted["written"]
    yield {"choices": [], "usage": usage(*counts)}


def _chunk(delta, reason=None, **extension):
    """Returns a chunk of a chat; `extension` are fields that OpenAI's API does not have."""
    chunk = {"choices": [{"index": 0, "delta": delta, "finish_reason": reason}]}
    if extension:
        chunk["nanorchestra"] = extension
    return chunk


# --- what it writes


class Problem(TypedDict):
    """What is wrong with a request; `param` is the field."""

    message: str
    type: Literal["invalid_request_error", "server_error"]
    param: str | None
    code: str | None


class Refusal(TypedDict):
    """The body of an error."""

    error: Problem


# For /openapi.json, in place of FastAPI's own status 422.
ERRORS = {
    "4XX": {"model": Refusal, "description": "The request is wrong; param names the field."},
    "5XX": {"model": Refusal, "description": "The model, a tool or the server failed."},
}


def refusal(error: Exception) -> tuple[int, Refusal]:
    """Returns the status for an exception, and OpenAI's form of it."""
    status, line, field = problem_of(error)
    kind = "invalid_request_error" if status < 500 else "server_error"
    code = error.code if isinstance(error, UserError) else None
    return status, {"error": {"message": line, "type": kind, "param": field, "code": code}}


async def refuse(request: Request, error: Exception) -> Response:
    """Returns the response for an exception."""
    status, body = refusal(error)
    # Uvicorn closes the connection after an exception that is not ours: a client must not reuse it.
    return JSONResponse(body, status, {"connection": "close"} if status == 500 else None)


def answer(body: AnyRequest, chunks: AsyncIterator[Json]) -> Response:
    """Returns the response of the chunks, at once or as a stream; its end closes them."""
    kind = "text_completion"
    if isinstance(body, ChatRequest):
        kind = "chat.completion.chunk" if body.stream else "chat.completion"
    head = {"id": secrets.token_hex(12), "created": int(time.time())}
    head |= {"model": body.model, "object": kind}
    if body.stream:
        parts = events(head, chunks, body.stream_options.get("include_usage", False))
        media = "text/event-stream"
    else:
        parts, media = joined(head, chunks), "application/json"
    return Parts(parts, media_type=media, background=BackgroundTask(chunks.aclose))


async def joined(head: Json, chunks: AsyncIterator[Json]) -> AsyncIterator[bytes]:
    """Yields one answer of all chunks."""
    choices = {}
    async for chunk in chunks:
        for choice in chunk.get("choices", ()):
            merge(choices, {choice["index"]: choice})
        head |= chunk
    for choice in choices.values():
        if delta := choice.pop("delta", None):
            choice["message"] = {"content": None} | delta
            for call in delta.get("tool_calls", ()):
                del call["index"]
    yield dumps(head | {"choices": [choices[index] for index in sorted(choices)]})


async def events(head: Json, chunks: AsyncIterator[Json], has_usage: bool) -> AsyncIterator[bytes]:
    """Yields the chunks as server-sent events; an error after the first is the last event."""
    begin, has_begun = dumps(head)[:-1], False
    try:
        async for chunk in chunks:
            if not chunk:
                yield KEEP_ALIVE
            elif has_usage or "usage" not in chunk:
                yield b"data: %b,%b\n\n" % (begin, dumps(chunk)[1:])
            has_begun = True
        yield b"data: [DONE]\n\n"
    except Exception as error:
        if not has_begun:
            raise
        if not isinstance(error, REFUSED):
            logging.exception("an answer failed")
        yield b"data: %b\n\n" % dumps(refusal(error)[1])


class Parts(StreamingResponse):
    """A body in parts. It begins with the first, so that an error before it has its own status."""

    async def stream_response(self, send: Send) -> None:
        """Sends the parts; a client that leaves ends this."""
        held = []

        async def late(message):
            held.append(message)
            while "body" in message and held:
                await send(held.pop(0))

        await super().stream_response(late)


# --- the routes

# The bearer token of a request, "" without one.
BEARER = HTTPBearer(auto_error=False)
Credentials = Annotated[HTTPAuthorizationCredentials | None, Depends(BEARER)]


class Server(uvicorn.Server):
    """Serves the engine of a rollout as the model `name`, and the rollout as NAME+tools.

    A model without Qwen3's markers is served alone; of a model behind an endpoint only the rollout.

    world: what NAME+tools is asked. defaults: parameters where a body has none. host: where it
    listens. key: "" to serve every client. record: is called with each attempt that has ended.
    has_mcp: the tool of MCP is at /mcp.
    """

    def __init__(
        self,
        rollout: Rollout,
        name: str,
        world: Questions,
        defaults: Json,
        host: str = "127.0.0.1",
        key: str = "",
        record: Record | None = None,
        has_mcp: bool = False,
    ):
        self.rollout, self.world = rollout, world
        if rollout.engine is None:
            context = rollout.settings.context_tokens
            self.limits = Limits(rollout.tokenizer.vocab_size, context, context)
        else:
            self.limits = rollout.engine.limits
        self.defaults = defaults | {"max_tokens": self.limits.context}
        self.host, self.key = host, key
        self.service, self.alone = Service(rollout.engine, record), name
        # The first is what a client takes that asks for none: the one that does most.
        self.models = [name + SERVED] if rollout.tokenizer.markers else []
        if rollout.engine is not None:
            self.models.append(name)
        self.grammars = Grammars(rollout.tokenizer)
        route, lifespan = None, None
        if has_mcp:
            from nanorchestra.serving.mcp import http_route, tool_server

            tool = tool_server(self.service, rollout, world, defaults, name)
            route, lifespan = http_route(tool, self._check_client)
        most_bytes = (1 << 16) + 32 * self.limits.context
        app = Application(refuse, host, most_bytes, lifespan)
        key_needed = [Depends(self._check_key)]
        app.get("/")(self._page)
        app.get("/page.json", include_in_schema=False, dependencies=key_needed)(self._page_facts)
        app.get("/health")(self._health)
        app.get("/v1/models")(self._list_models)
        for path, complete in ((CHAT, self._chat), ("/v1/completions", self._continue)):
            app.post(path, responses=ERRORS, dependencies=key_needed)(complete)
        if has_mcp:
            app.router.routes.append(route)
        self.has_mcp = has_mcp
        config = uvicorn.Config(
            app, ws="none", log_level="warning", timeout_graceful_shutdown=int(DRAIN_S) + 5
        )
        super().__init__(config)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Lets what runs go on to its end, or to the deadline."""
        asyncio.get_running_loop().call_later(DRAIN_S, self.service.end)
        await super().shutdown(sockets)
        self.service.close()

    async def _check_key(self, credentials: Credentials) -> None:
        """Raises HTTPException if the client may not ask."""
        given = credentials.credentials if credentials else ""
        if self.key and not secrets.compare_digest(given.encode(), self.key.encode()):
            raise HTTPException(401, "the API key is missing or wrong")

    async def _check_client(self, request: Request) -> None:
        """Raises HTTPException if the client may not ask."""
        await self._check_key(await BEARER(request))

    async def _page(self) -> HTMLResponse:
        """A page to chat."""
        return HTMLResponse(PAGE, headers={"content-security-policy": PAGE_POLICY})

    async def _page_facts(self) -> JSONResponse:
        """What the page knows of the models and the tools: no more than who may ask."""
        return JSONResponse({"models": self.models} | self.world.facts())

    async def _health(self) -> JSONResponse:
        """Answers while the server lives."""
        return JSONResponse({"status": "ok"})

    async def _list_models(self) -> JSONResponse:
        """The models."""
        model = {"object": "model", "created": 0, "owned_by": "nanorchestra"}
        models = [model | {"id": name} for name in self.models]
        return JSONResponse({"object": "list", "data": models})

    async def _chat(self, body: ChatRequest) -> Response:
        """Answers a conversation: NAME samples the model, NAME+tools runs the server's tools."""
        body = self._checked(body)
        if body.model == self.alone:
            return await self._sample(body)
        return await self._orchestrate(body)

    async def _continue(self, body: CompletionRequest) -> Response:
        """Continues texts or ids."""
        body = self._checked(body)
        require(body.model == self.alone, f"model: {body.model} needs {CHAT}")
        return await self._sample(body)

    def _checked(self, body: AnyRequest) -> AnyRequest:
        """Returns a body with the server's defaults, once all that is cheap is checked.

        Raises UserError or HTTPException for one that this server does not serve.
        """
        body = body.with_defaults(self.defaults)
        if body.model not in self.models:
            raise HTTPException(404, f"model: it must be {' or '.join(self.models)}")
        is_bare = isinstance(body, ChatRequest) and body.model == self.alone and not body.tools
        require(
            not (self.world.alone and is_bare),
            f"model: {self.alone} knows only its world's tools, and babbles without any; ask "
            f"for {self.models[0]}",
        )
        self.service.check_room(body.choices)
        return body

    async def _sample(self, body: AnyRequest) -> Response:
        """Answers by the model alone."""
        prompts = await asyncio.to_thread(self._prompts, body)
        form = body.form()
        guide = None if form is None else await self.grammars.guide(form)
        choices = as_choices(body, prompts, guide)
        return answer(body, sampled(self.service, self.rollout.tokenizer, body, choices))

    async def _orchestrate(self, body: ChatRequest) -> Response:
        """Answers by an attempt at the last message."""
        *before, last = body.messages
        right = "NAME+tools runs the server's own alone; with NAME the client runs those that it "
        require(not body.tools, f"tools: {right}brings")
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
        if self.rollout.engine is None:  # it has its own other settings
            why = "an endpoint is given temperature and seed alone"
            require_values(body, why, top_p=(1.0,), top_k=(0,), ignore_eos=(False,))
        alone = body.model_copy(update={"messages": [last]})
        await asyncio.to_thread(self._prompts, alone)  # which must fit
        seed = secrets.randbits(62) if body.seed is None else body.seed
        env = self.world.open(last["content"], preference_of(body.metadata), seed)
        handed = Preference.of("", body.metadata.get("limits", {}), "metadata.limits")
        env.task = replace(env.task, preference=env.task.preference.stricter(handed))
        if before and not env.task.data:  # else it is a world's task, which stands alone
            env.messages[:0] = before
            await asyncio.to_thread(self._prompts, body)
        sampling = {name: getattr(body, name) for name in SAMPLING}
        states_seed = body.seed is not None
        attempt = ServedAttempt(self.service, self.rollout, env, seed, sampling, states_seed)
        return answer(body, orchestrated(attempt, body.stream))

    def _prompts(self, body: AnyRequest) -> list[list[int]]:
        """Returns the ids of the prompts of a body. UserError if they do not fit the context."""
        prompts = body.prompts(self.rollout.tokenizer)
        for ids in prompts:
            self.limits.check_length(len(self.limits.check_ids(ids)), sampled=1)
        return prompts


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
    return Preference.parse(wish, "metadata").stricter(limits)


def page_policy(page: str) -> str:
    """Returns the Content-Security-Policy of a page: its own style and script, this server alone.

    No text can become markup: the script may not assign any.
    """
    allowed = {}
    for tag in ("style", "script"):
        text = page.partition(f"<{tag}>")[2].partition(f"</{tag}>")[0]
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        allowed[tag] = f"{tag}-src 'sha256-{digest}'"
    return (
        f"default-src 'none'; connect-src 'self'; img-src data:; {allowed['style']}; "
        f"{allowed['script']}; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'"
    )


PAGE_POLICY = page_policy(PAGE)


def serve_http(server: Server, port: int) -> None:
    """Listens until SIGTERM or SIGINT. UserError if it cannot."""
    listening = listen(server.host, port)
    place = address(listening)
    more = f", MCP at {place}/mcp" if server.has_mcp else ""
    told = f"{' and '.join(server.models)} at {place}/v1, the page at {place}/{more}"
    serve(server, listening, told)
