"""OpenAI's API: bodies are checked and become requests of the engine, sampled ids become answers.

openapi.json, which the server publishes, has the forms and the defaults of the bodies. No torch.
"""

import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nanorchestra.engine.guide import Form, Guide
from nanorchestra.engine.sequence import Request, SamplingParams
from nanorchestra.engine.stream import TurnStream
from nanorchestra.errors import UserError, require
from nanorchestra.files import read_json
from nanorchestra.model import chat
from nanorchestra.model.parser import CALL, CALL_END, THINK, THINK_END
from nanorchestra.model.tokenizer import Tokenizer
from nanorchestra.schemas import Json, levels, schema_error

OPENAPI = read_json(Path(__file__).with_name("openapi.json"))
COMPACT = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))
LEAST = -9999.0  # stands for minus infinity, which is no JSON
SILENT = {"enable_thinking": False}
KEEP_ALIVE = b": still at work\n\n"  # a comment in a stream, which clients ignore
VALUES = 20_000  # JSON values in a body, beside prompts: checking one takes up to 50 us
SAMPLING = ("temperature", "top_p", "top_k", "ignore_eos")


def read_body(raw: bytes, name: str, defaults: Json) -> Json:
    """Returns a body of the form `name` in openapi.json, completed by defaults. UserError.

    The defaults of openapi.json go before `defaults`. The body has the fields of that form alone.
    """
    return completed(checked(parsed(raw), name), defaults)


def parsed(raw: bytes) -> Any:
    """Returns the JSON of a body. UserError if it is none: NaN, infinity, half a surrogate pair."""
    try:
        body = json.loads(raw.decode())
        dumps(body, "strict")
    except (ValueError, RecursionError) as error:
        raise UserError(f"body: not JSON: {str(error)[:200]}") from None
    return body


def checked(body: Any, name: str) -> Json:
    """Returns the fields of the form `name` in openapi.json, with its defaults. UserError.

    A field that is null is left out, and an integer is an int.
    """
    if isinstance(body, dict):
        body = {key: value for key, value in body.items() if value is not None}
    forms = OPENAPI["components"]
    properties = forms["schemas"][name]["properties"]
    if isinstance(body, dict):
        beside_prompts = [value for key, value in body.items() if key != "prompt"]
        count = sum(map(len, levels(beside_prompts)))
        require(count <= VALUES, f"body: it has more than {VALUES} values")
        body = {key: value for key, value in body.items() if key in properties}
    schema = {"$ref": f"#/components/schemas/{name}", "components": forms}
    problem = schema_error(body, schema, first=True)
    require(not problem, problem)
    for key, value in body.items():
        if isinstance(value, float) and properties[key].get("type") == "integer":
            body[key] = int(value)  # 1.0 is an integer in JSON
    own = {key: field["default"] for key, field in properties.items() if "default" in field}
    return own | body


def completed(body: Json, defaults: Json) -> Json:
    """Returns a checked body of a chat or a completion in one form, with `defaults`.

    Content is text, `stop` a list, and `tools` are those that may be called.
    """
    body = defaults | body
    if isinstance(body["stop"], str):
        body["stop"] = [body["stop"]]
    for message in body.get("messages", ()):
        content = message.get("content") or ""
        if not isinstance(content, str):
            content = "".join(part["text"] for part in content)
        role = message["role"].replace("developer", "system")
        message |= {"role": role, "content": content}
    body.setdefault("logprobs", False)  # of a completion it is a number, and 0 asks for some
    choice, tools = body.get("tool_choice"), body.get("tools", [])
    if isinstance(choice, dict):
        tools = [t for t in tools if t["function"]["name"] == choice["function"]["name"]]
    body["tools"] = [] if choice == "none" else tools
    return body


def count_choices(body: Json) -> int:
    """Returns how many choices a body asks for, of all prompts together."""
    prompts = body.get("prompt")
    single = not isinstance(prompts, list) or isinstance(prompts[0], int)
    return body["n"] * (1 if single else len(prompts))


def as_prompts(body: Json, tokenizer: Tokenizer) -> list[list[int]]:
    """Returns the ids of the prompts of a body. UserError if it has tools that are not served."""
    if "messages" in body:
        if body["tools"]:
            chat.require_tools(tokenizer)
        template = body["chat_template_kwargs"]
        return [chat.encode(tokenizer, body["messages"], body["tools"], **template)]
    prompts = body["prompt"]
    if isinstance(prompts, str) or isinstance(prompts[0], int):
        prompts = [prompts]
    bos = tokenizer.bos_ids
    return [bos + tokenizer.encode(p) if isinstance(p, str) else p for p in prompts]


def form_of(body: Json) -> Form | None:
    """Returns the form that a body holds its answers to, None for none. UserError."""
    if "messages" not in body:
        return None
    tools, format, required = body["tools"], body["response_format"], False
    if body["tool_choice"] not in ("auto", "none"):
        require(tools, "tool_choice: tools has no such function")
        required = True
    described = format.get("json_schema", {"schema": {"type": "object"}})
    schema = None if required or format["type"] == "text" else described["schema"]
    if not tools and schema is None:
        return None
    thinks = body["chat_template_kwargs"] != SILENT
    return Form(tools, schema, required, described.get("strict", False), thinks)


def as_choices(
    body: Json, prompts: list[list[int]], guide: Guide | None
) -> list[tuple[list[int], SamplingParams]]:
    """Returns (ids, SamplingParams) of each choice. Choice i of a prompt has the seed + i."""
    params = SamplingParams(
        **{name: body[name] for name in SAMPLING},
        max_tokens=body.get("max_completion_tokens", body["max_tokens"]),
        top_logprobs=body.get("top_logprobs", int(body["logprobs"])),
        guide=guide,
    )
    seed = body.get("seed", secrets.randbits(62))
    choices = []
    for ids in prompts:
        for i in range(body["n"]):
            choices.append((ids, replace(params, seed=seed + i)))
    return choices


@dataclass
class Choice:
    """One choice as it is sampled: turns the ids of its request into the chunks of a stream.

    `count` is how many ids it has. `finish_reason` is set once it has ended: a stop may end it
    before its ids end.
    """

    body: Json
    index: int
    tokenizer: Tokenizer
    prompt: Sequence[int]
    count: int = 0
    finish_reason: str | None = None

    def __post_init__(self) -> None:
        self._calls = 0  # how many tool calls it has
        self._held = ""  # content that may begin a stop
        self._is_chat = "messages" in self.body
        self._many = self.body.get("parallel_tool_calls", True)
        self._thinks = chat.opens_thinking(self.tokenizer, self.prompt)
        has_tools = bool(self.body["tools"])
        self._stream = TurnStream(self.tokenizer, has_tools, self._is_chat, self._thinks)

    def feed(self, request: Request, ended: str | None) -> Json | None:
        """Returns the chunk of what is new, None if nothing is; `ended`: why nothing follows."""
        start = self.count
        end = len(request.logprobs)
        if self.finish_reason or not (ended or end > start):
            return None
        delta = {} if start else {"role": "assistant"}
        ids = request.ids[request.prompt_tokens : request.prompt_tokens + end]
        step = end if self._many and not self.body["stop"] else 1  # an id may be the end
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
        if self.body["logprobs"] is not False:
            chunk["logprobs"] = self._logprobs(
                ids[new], request.logprobs[new], request.top_logprobs[new]
            )
        if self.body["return_token_ids"]:
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
        stops = self.body["stop"]
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


def usage(prompt: int, sampled: int, cached: int = 0, reasoning: int = 0) -> Json:
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


def dumps(value: Any, errors: str = "replace") -> bytes:
    """Returns compact JSON in UTF-8. ValueError for NaN, infinity, "strict" also for surrogates."""
    return COMPACT.encode(value).encode(errors=errors)
