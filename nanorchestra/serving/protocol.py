"""OpenAI's API: bodies are checked and become requests of the engine, sampled ids become answers.

openapi.json, which the server publishes, has the forms and the defaults of the bodies. No torch.
"""

from __future__ import annotations

import json
import secrets
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import best_match

from nanorchestra.engine.request import SamplingParams
from nanorchestra.engine.stream import TextStream, TurnStream
from nanorchestra.files import read_json
from nanorchestra.model import chat
from nanorchestra.model.parser import CALL, CALL_END
from nanorchestra.model.tokenizer import Tokenizer
from nanorchestra.serving.grammar import Form
from nanorchestra.serving.service import ApiError

OPENAPI = read_json(Path(__file__).with_name("openapi.json"))
LEAST = -9999.0  # stands for minus infinity, which is no JSON
SILENT = {"enable_thinking": False}
SAMPLING = ("temperature", "top_p", "top_k", "ignore_eos")


def read_body(raw: bytes, name: str, given: dict[str, Any]) -> dict[str, Any]:
    """Returns a body of the form `name` in openapi.json, over the defaults and `given`. ApiError.

    The message names the field.
    """
    try:
        body = json.loads(raw.decode())
        dumps(body, "strict")  # refuses what is no JSON: NaN, infinity, half a surrogate pair
    except (ValueError, RecursionError) as error:
        raise ApiError(f"body: not JSON: {str(error)[:200]}") from None
    if isinstance(body, dict):
        body = {key: value for key, value in body.items() if value is not None}
    schema = {"$ref": f"#/components/schemas/{name}", "components": OPENAPI["components"]}
    if error := best_match(Draft202012Validator(schema).iter_errors(body)):
        where = error.json_path.lstrip("$.") or "body"
        raise ApiError(f"{where}: {error.message[-300:]}", param=where)
    known = OPENAPI["components"]["schemas"][name]["properties"].items()
    return given | {key: field["default"] for key, field in known if "default" in field} | body


def messages_of(body: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the messages as the chat template takes them."""
    messages = []
    for message in body["messages"]:
        content = message.get("content") or ""
        if not isinstance(content, str):
            content = "".join(part["text"] for part in content)
        role = message["role"].replace("developer", "system")
        messages.append(message | {"role": role, "content": content})
    return messages


def as_choices(body: dict[str, Any], tokenizer: Tokenizer) -> list[tuple]:
    """Returns (ids, SamplingParams, Form or None) of each choice of a body.

    Choice i of a prompt has the seed + i. UserError if a tool or a schema is wrong.
    """
    tools, guided, form = (), False, ({}, None)
    if "prompt" in body:
        prompts = body["prompt"]
        if isinstance(prompts, str) or isinstance(prompts[0], int):
            prompts = [prompts]
        prompts = [tokenizer.encode(p) if isinstance(p, str) else p for p in prompts]
    else:
        tools, guided, form = _wanted(body)
        thinking = body["chat_template_kwargs"].get("enable_thinking")
        messages = messages_of(body)
        prompts = [chat.encode(tokenizer, messages, tools, enable_thinking=thinking)]
    given = {name: body[name] for name in SAMPLING} | {
        "max_tokens": body.get("max_completion_tokens", body["max_tokens"]),
        "top_logprobs": body.get("top_logprobs", body["logprobs"]),
        "tools": tuple(tool["function"]["name"] for tool in tools),
    }
    seed = body.get("seed", secrets.randbits(62))
    return [
        (ids, SamplingParams(**given, seed=seed + i), Form(tokenizer, *form) if guided else None)
        for ids in prompts
        for i in range(body["n"])
    ]


def _wanted(body):
    """The tools on offer, whether a form is to be kept, and the arguments of Form."""
    choice, format, tools = body["tool_choice"], body["response_format"], body["tools"]
    if isinstance(choice, dict):
        tools = [t for t in tools if t["function"]["name"] == choice["function"]["name"]]
    forced = choice not in ("auto", "none")
    if forced and not tools:
        raise ApiError("tool_choice: tools has no such function", param="tool_choice")
    tools = [] if choice == "none" else tools
    described = format.get("json_schema", {"schema": {"type": "object"}})
    schema = None if forced or format["type"] == "text" else described["schema"]
    form = tools, schema, described.get("strict"), body["chat_template_kwargs"] != SILENT
    return tools, forced or schema is not None, form


class Choice:
    """One choice as it is sampled: turns its ids into the chunks of a stream.

    `finish_reason` is set once it has ended: by a stop before its ids end. `count`: its ids.
    """

    def __init__(self, body: dict[str, Any], index: int, tokenizer: Tokenizer):
        self.body, self.index, self.tokenizer = body, index, tokenizer
        self.finish_reason: str | None = None
        self.count = self._calls = 0
        self._held, stops = "", body["stop"]  # held: content that may begin a stop
        self._stops = [stops] if isinstance(stops, str) else stops
        self._is_chat, self._many = "messages" in body, body.get("parallel_tool_calls", True)
        kind = TurnStream if self._is_chat else TextStream
        self._stream = kind(
            tokenizer, body.get("tool_choice") != "none" and bool(body.get("tools"))
        )

    def feed(self, sampled: list[tuple], ended: str | None = None) -> dict[str, Any]:
        """Returns the chunk of sampled (id, logprob, most probable ones).

        The last ones come with the reason why they `ended`.
        """
        delta, taken = {} if self.count else {"role": "assistant"}, []
        whole = self._many and not self._stops  # else an id may be the end
        for part in [sampled] if whole else [[each] for each in sampled]:
            if not self.finish_reason:
                taken += part
                self._take(delta, self._stream.feed(*(token for token, *_ in part)))
        if ended and not self.finish_reason:
            self._take(delta, self._stream.finish()[0], final=True)
            self.finish_reason = self.finish_reason or ended
        if self._calls and self.finish_reason == "stop":
            self.finish_reason = "tool_calls"
        self.count += len(taken)
        chunk = {"index": self.index, "finish_reason": self.finish_reason, "logprobs": None}
        chunk |= {"delta": delta} if self._is_chat else {"text": delta.get("content", "")}
        if self.body["logprobs"]:
            chunk["logprobs"] = self._logprobs(taken)
        if self.body["return_token_ids"]:
            chunk["token_ids"] = [token for token, *_ in taken]
        return chunk

    def _take(self, delta, parts, final=False):
        """Adds the parts of a turn to the delta: content up to the first stop."""
        content = self._held
        for kind, text in parts:
            if kind == "reasoning":
                merge(delta, {"reasoning_content": text})
            elif kind == "content":
                content += text
            elif (call := self._stream.calls[self._calls]).error:
                content += f"{CALL}\n{text}\n{CALL_END}"
                del self._stream.calls[self._calls]
            else:
                merge(delta, {"tool_calls": [_tool_call(self._calls, call)]})
                self._calls += 1
                self.finish_reason = None if self._many else "stop"
        end = min((content.find(stop) for stop in self._stops if stop in content), default=None)
        if end is not None:
            self.finish_reason = "stop"
        elif not final:
            begun = (s[:n] for s in self._stops for n in range(1, len(s)))
            end = len(content) - max((len(b) for b in begun if content.endswith(b)), default=0)
        self._held = "" if end is None else content[end:]
        if content[:end]:
            merge(delta, {"content": content[:end]})

    def _logprobs(self, sampled):
        named = [self._named(*token[:2]) for token in sampled]
        tops = [[self._named(*pair) for pair in top] for *_, top in sampled]
        if self._is_chat:
            pairs = zip(named, tops, strict=True)
            return {"content": [one | {"top_logprobs": top} for one, top in pairs]}
        return {
            "tokens": [one["token"] for one in named],
            "token_logprobs": [one["logprob"] for one in named],
            "top_logprobs": [{one["token"]: one["logprob"] for one in top} for top in tops],
        }

    def _named(self, token, logprob):
        raw = self.tokenizer.bytes_of(token)
        text = raw.decode("utf-8", "replace")
        return {"token": text, "logprob": max(logprob, LEAST), "bytes": list(raw)}


def _tool_call(index, call):
    function = {"name": call.name, "arguments": dumps(call.arguments).decode()}
    name = f"call_{secrets.token_hex(12)}"
    return {"index": index, "id": name, "type": "function", "function": function}


def merge(whole: dict[str, Any], chunk: dict[str, Any]) -> None:
    """Adds a chunk to what came before it: texts and lists are joined."""
    for key, value in chunk.items():
        old = whole.get(key)
        if old and isinstance(value, dict):
            merge(old, value)
        else:
            whole[key] = old + value if old and isinstance(value, str | list) else value


def as_answer(choice: dict[str, Any]) -> dict[str, Any]:
    """Returns a choice that is not streamed, of its merged chunks."""
    if delta := choice.pop("delta", None):
        choice["message"] = {"role": "assistant", "content": None} | delta
        for call in delta.get("tool_calls", ()):
            del call["index"]
    return choice


def dumps(value: Any, errors: str = "replace") -> bytes:
    """Returns compact JSON in UTF-8. ValueError for NaN, infinity, "strict" also for surrogates."""
    compact = {"separators": (",", ":"), "ensure_ascii": False, "allow_nan": False}
    return json.dumps(value, **compact).encode(errors=errors)
