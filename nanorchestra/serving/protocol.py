"""OpenAI's API: its bodies, which become requests of the engine; sampled ids become answers.

pydantic checks the bodies. /openapi.json, which the server publishes, is made of these types. No
torch.
"""

import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import (
    Annotated,
    Any,
    ClassVar,
    Literal,
    NotRequired,  # pydantic needs it before Python 3.12
    Self,
    TypeVar,
)

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    WrapValidator,
    model_validator,
)
from typing_extensions import TypedDict

from nanorchestra.engine.guide import Form, Guide
from nanorchestra.engine.sequence import Request, SamplingParams
from nanorchestra.engine.stream import TurnStream
from nanorchestra.errors import require
from nanorchestra.model import chat
from nanorchestra.model.parser import CALL, CALL_END, THINK, THINK_END
from nanorchestra.model.tokenizer import Tokenizer
from nanorchestra.records import Limit
from nanorchestra.schemas import Json

T = TypeVar("T")
COMPACT = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))
LEAST = -9999.0  # stands for minus infinity, which is no JSON
SILENT = {"enable_thinking": False}
KEEP_ALIVE = b": still at work\n\n"  # a comment in a stream, which clients ignore
SAMPLING = ("temperature", "top_p", "top_k", "ignore_eos")


def dumps(value: Any, errors: str = "replace") -> bytes:
    """Returns compact JSON in UTF-8. ValueError for NaN, infinity, "strict" also for surrogates."""
    return COMPACT.encode(value).encode(errors=errors)


def whole(value: Any) -> Any:
    """Returns 1 for 1.0, which is an integer in JSON; anything else as it is."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Whole = Annotated[int, BeforeValidator(whole)]
Many = Annotated[list[T], Field(fail_fast=True)]  # a list that is all wrong has one error


class Body(BaseModel):
    """The body of a request. A text is no number; a field that is null has its default."""

    model_config = ConfigDict(strict=True)

    @model_validator(mode="before")
    @classmethod
    def _check_json(cls, body):
        """Leaves out what is null. ValueError for NaN, infinity or half a surrogate pair."""
        try:
            dumps(body, "strict")
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"is not JSON: {error}") from None
        if isinstance(body, dict):
            return {name: value for name, value in body.items() if value is not None}
        return body


def text_of(content: Any) -> str:
    """Returns the content of a message as text."""
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def as_given(value: Any, check: Any) -> Any:
    """Returns a checked value as the client wrote it, in its order: the prompt has it like that."""
    check(value)
    return value


def json_in(value: Any) -> Any:
    """Returns the JSON object or array in a text: OpenAI's clients send metadata as texts."""
    if isinstance(value, str) and value.lstrip()[:1] in ("{", "["):
        try:
            value = json.loads(value)
            dumps(value, "strict")
        except (ValueError, RecursionError):
            raise ValueError(f"is {value[:80]!r}, which is not JSON") from None
    return value


def names_in(value: Any) -> Any:
    """Returns the names in a text: a JSON array, or with commas."""
    value = json_in(value)
    return [name.strip() for name in value.split(",")] if isinstance(value, str) else value


def few(value: Any) -> Any:
    """Raises ValueError for an object of many names, each of which might be an error."""
    if isinstance(value, dict) and len(value) > MOST_NAMES:
        raise ValueError(f"has {len(value)} names, {MOST_NAMES} at most")
    return value


MOST_NAMES = 16  # in metadata
Short = Annotated[str, Field(max_length=512)]
Words = Annotated[str, Field(max_length=2_000)]
Few = BeforeValidator(few)
Names = Annotated[list[Short], Field(max_length=64)]
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


class Vector(TypedDict, extra_items=Any):
    """Weights and limits, whose text are the words."""

    text: NotRequired[Words]


class Metadata(TypedDict, extra_items=Short):
    """The preference of NAME+tools: a line, as after /prefer, or a vector; limits beside it.

    JSON may come as a text. `limits` are those of a caller that is an orchestrator itself. Other
    names belong to the client.
    """

    preference: NotRequired[Annotated[Words | Vector, BeforeValidator(json_in)]]
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
        ge=-1,
        le=2**31 - 1,
        description="Keeps so many of the most probable ids; 0 or -1 keeps all.",
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
    user: str = Field("", description="Has no effect.")

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


class Usage(TypedDict):
    """How many tokens were read and sampled."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: dict[Literal["cached_tokens"], int]
    completion_tokens_details: dict[Literal["reasoning_tokens"], int]


class AnswerChoice(TypedDict):
    """One choice: a message of a chat, or the text of a completion."""

    index: int
    finish_reason: Literal["stop", "length", "tool_calls"]
    message: NotRequired[Json]
    text: NotRequired[str]
    logprobs: NotRequired[Json]
    token_ids: NotRequired[list[int]]


class Answer(TypedDict):
    """What a chat or a completion is answered.

    With NAME+tools `nanorchestra` has status, cost_usd, latency_s, calls, and the turns with their
    calls and results.
    """

    id: str
    object: Literal["chat.completion", "text_completion"]
    created: int
    model: str
    choices: list[AnswerChoice]
    usage: Usage
    prompt_token_ids: NotRequired[list[int]]
    nanorchestra: NotRequired[Json]


class Problem(TypedDict):
    """What is wrong with a request; `param` is the field."""

    message: str
    type: Literal["invalid_request_error", "server_error"]
    param: str | None
    code: str | None


class Refusal(TypedDict):
    """The body of an error."""

    error: Problem


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

    def feed(self, request: Request, ended: str | None) -> Json | None:
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

    def reasoning(self, request: Request) -> int:
        """Returns how many of its ids are reasoning."""
        if not self._is_chat:
            return 0
        ids = request.ids[request.prompt_tokens :][: self.count]
        return reasoning_tokens(self.tokenizer, ids, self._thinks)

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


def nothing_yet() -> Json:
    """Returns a chunk without news: a stream writes a comment for it."""
    return {"choices": []}


def usage(prompt: int, sampled: int, cached: int = 0, reasoning: int = 0) -> Usage:
    """Returns OpenAI's count of tokens."""
    counts = {"prompt_tokens": prompt, "completion_tokens": sampled}
    details = {
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {"reasoning_tokens": reasoning},
    }
    return counts | {"total_tokens": prompt + sampled} | details


def reasoning_tokens(tokenizer: Tokenizer, ids: Sequence[int], thinks: bool = False) -> int:
    """Returns how many ids of a turn are its reasoning, tags included: those up to </think>.

    With `thinks` the turn begins within it.
    """
    text = tokenizer.text_bytes(ids)
    if not thinks and not text.lstrip().startswith(THINK.encode()):
        return 0
    before, end, _ = text.partition(THINK_END.encode())
    left, count = len(before) + len(end), 0
    while left > 0:
        left -= len(tokenizer.text_bytes(ids[count : count + 1]))
        count += 1
    return count
