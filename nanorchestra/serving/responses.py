"""OpenAI's Responses API as a translation: of requests into chats, of a chat's chunks into events.

A request becomes the body of a chat completion, which is checked and answered as any other. The
Response that is not streamed is the one that the last event holds. Nothing is stored. No torch.
"""

import base64
import secrets
import time
from collections.abc import AsyncIterator, Iterator

from nanorchestra.errors import UserError, require
from nanorchestra.schemas import Json
from nanorchestra.serving.protocol import (
    KEEP_ALIVE,
    KEEP_S,
    SILENT,
    checked,
    completed,
    dumps,
    merge,
    nothing_yet,
    parsed,
)

ITEMS = "nothing is stored here: send the earlier items in input"
OPAQUE = "reasoning.encrypted_content"  # to include
LOGPROBS = "/v1/chat/completions gives log-probabilities, /v1/responses none"
UNSERVED = {
    "store": "nothing is stored here: it must be false or absent",
    "previous_response_id": ITEMS,
    "conversation": ITEMS,
    "background": "an answer comes with its request: it must be false or absent",
    "prompt": "no prompts are stored here: send instructions and input",
    "top_logprobs": LOGPROBS,
}
# Fields that a chat has too, with the same meaning.
SHARED = (
    *("model", "temperature", "top_p", "top_k", "seed", "stop", "ignore_eos", "stream", "user"),
    *("parallel_tool_calls", "chat_template_kwargs", "metadata", "return_token_ids"),
)
PREFIX = {"reasoning": "rs", "message": "msg", "function_call": "fc"}  # of the ids of items
PART = {"reasoning": "reasoning_text", "message": "output_text"}  # that holds the text of an item


def read_request(raw: bytes, name: str, defaults: Json) -> Json:
    """Returns the body of the chat that a request asks for, as `read_body` does. UserError.

    The body's "request" is the request itself, checked by the form `name`.
    """
    body = parsed(raw)
    if isinstance(body, dict):
        for field, problem in UNSERVED.items():
            require(not body.get(field), f"{field}: {problem}")
    request = checked(body, name)
    chat = completed(checked(as_chat(request), "ChatRequest"), defaults)
    return chat | {"request": request}


def as_chat(request: Json) -> Json:
    """Returns the body of the chat completion that a checked request asks for. UserError."""
    require("message.output_text.logprobs" not in request["include"], f"include: {LOGPROBS}")
    body = {name: request[name] for name in SHARED if name in request}
    body["messages"] = _messages(request)
    body["tools"] = [_function(i, tool) for i, tool in enumerate(request["tools"])]
    choice = request["tool_choice"]
    if isinstance(choice, dict):
        choice = {"type": "function", "function": {"name": choice["name"]}}
    body["tool_choice"] = choice
    if "max_output_tokens" in request:
        body["max_completion_tokens"] = request["max_output_tokens"]
    if request["reasoning"].get("effort") == "none":
        body["chat_template_kwargs"] = SILENT
    format = request["text"].get("format") or {"type": "text"}
    body["response_format"] = {"type": format["type"]}
    if format["type"] == "json_schema":
        body["response_format"]["json_schema"] = _given(format, "name", "schema", "strict")
    return body


def _messages(request) -> list[Json]:
    """Returns the messages of a chat: those of the assistant are whole turns."""
    messages = []
    if instructions := request.get("instructions"):
        messages.append({"role": "system", "content": instructions})
    items, calls = request["input"], set()
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    for i, item in enumerate(items):
        kind = item.get("type", "message")
        if kind == "message" and item["role"] != "assistant":
            messages.append({"role": item["role"], "content": _text(item["content"])})
        elif kind == "function_call_output":
            call = item["call_id"]
            problem = f"no function_call before it has {call[:80]!r}"
            require(call in calls, f"input[{i}].call_id: {problem}")
            message = {"role": "tool", "tool_call_id": call, "content": _text(item["output"])}
            messages.append(message)
        elif kind == "item_reference":
            # A turn may lack its reasoning: clients that refer to it send the rest.
            is_reasoning = item["id"].startswith(PREFIX["reasoning"])
            problem = "nothing is stored here: send the item itself, as clients do with store false"
            require(is_reasoning, f"input[{i}]: {problem}")
        else:
            if kind == "function_call":
                calls.add(item["call_id"])
            _add_to_turn(messages, kind, item, i)
    require(messages, "input: it has no message")
    return messages


def _add_to_turn(messages, kind, item, i):
    """Adds an item to the assistant's turn, which is reasoning, then a text, then calls."""
    in_turn = bool(messages) and messages[-1]["role"] == "assistant"
    if in_turn and kind != "function_call":  # neither follows a text or a call
        in_turn = not messages[-1].keys() & {"content", "tool_calls"}
    if not in_turn:
        messages.append({"role": "assistant"})
    turn = messages[-1]
    if kind == "reasoning":
        text = _text(item.get("content") or "")
        merge(turn, {"reasoning_content": text or _unsealed(item.get("encrypted_content"), i)})
    elif kind == "message":
        turn["content"] = _text(item["content"])
    else:
        function = _given(item, "name", "arguments")
        call = {"id": item["call_id"], "type": "function", "function": function}
        merge(turn, {"tool_calls": [call]})


def _unsealed(content, i) -> str:
    """Returns the reasoning that a client has sent back without reading it."""
    try:
        return base64.b64decode(content or "", validate=True).decode()
    except ValueError:
        problem = "is not what this server gave; leave the item out"
        raise UserError(f"input[{i}].encrypted_content: {problem}") from None


def _text(content) -> str:
    """Returns the text of a content, which is one or has parts."""
    if isinstance(content, str):
        return content
    return "".join(part["text"] for part in content)


def _function(i, tool) -> Json:
    """Returns a tool in the form of a chat."""
    kind = tool["type"]
    require(kind == "function", f"tools[{i}].type: {kind[:80]!r} is not served: only functions are")
    function = _given(tool, "name", "description", "parameters", "strict")
    return {"type": "function", "function": function}


def _given(fields, *names) -> Json:
    """Returns those of the fields that have a value."""
    return {name: fields[name] for name in names if fields.get(name) is not None}


class ResponseWriter:
    """Writes the chunks of a chat as a Response or its events. `response` is it so far.

    Its output is the turn in order: reasoning, the message, calls. One item is open at a time.
    """

    def __init__(self, body: Json):
        request = body["request"]
        self.response = {
            "id": f"resp_{secrets.token_hex(12)}",
            "object": "response",
            "created_at": int(time.time()),
            "status": "in_progress",
            "completed_at": None,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": request.get("instructions"),
            "max_output_tokens": request.get("max_output_tokens"),
            "metadata": request.get("metadata", {}),
            "model": body["model"],
            "output": [],
            "parallel_tool_calls": body["parallel_tool_calls"],
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None} | request["reasoning"],
            "store": False,
            "temperature": body["temperature"],
            "text": {"format": {"type": "text"}} | request["text"],
            "tool_choice": request["tool_choice"],
            "tools": request["tools"],
            "top_p": body["top_p"],
            "truncation": "disabled",
            "usage": None,
            "user": request.get("user"),
        }
        self._is_opaque = OPAQUE in request["include"]
        self._count = 0  # of events
        self._item: Json | None = None  # the open one, as it was opened
        self._texts: list[str] = []  # of the open item
        self._calls: list[Json] = []  # of the turn, in the form of a chat

    async def stream(self, chunks: AsyncIterator[Json]) -> AsyncIterator[bytes]:
        """Yields the events as server-sent events, those of a chunk at once.

        While there are none, as while a call is sampled, a comment comes each KEEP_S.
        """
        sent = time.monotonic()
        async for chunk in chunks:
            part = b"".join(map(named, self.feed(chunk)))
            if part or chunk == nothing_yet() or time.monotonic() - sent > KEEP_S:
                yield part or KEEP_ALIVE
                sent = time.monotonic()

    async def whole(self, chunks: AsyncIterator[Json]) -> AsyncIterator[bytes]:
        """Yields the Response alone, once it is complete."""
        async for chunk in chunks:
            for _ in self.feed(chunk):
                pass
        yield dumps(self.response)

    def failed(self, error: Json) -> bytes:
        """Returns the last event of a stream that an error ends, which is one of OpenAI's form."""
        code = "server_error" if error["type"] == "server_error" else "invalid_prompt"
        error = {"code": code, "message": error["message"]}
        self.response |= {"status": "failed", "error": error}
        return named(self._event("response.failed", response=self.response))

    def feed(self, chunk: Json) -> Iterator[Json]:
        """Yields the events of the next chunk. An event is valid until the next is asked for."""
        if not self._count:
            yield self._event("response.created", response=self.response)
            yield self._event("response.in_progress", response=self.response)
        extension = chunk.get("nanorchestra", {})
        for choice in chunk["choices"]:
            delta = choice["delta"]
            yield from self._grow("reasoning", delta.get("reasoning_content", ""))
            yield from self._grow("reasoning", _line(extension), nanorchestra=extension)
            yield from self._grow("message", delta.get("content", ""))
            self._calls += delta.get("tool_calls", [])
            if "token_ids" in choice:
                merge(self.response, {"token_ids": choice["token_ids"]})
            if reason := choice["finish_reason"]:
                yield from self._end(reason)
        if "prompt_token_ids" in chunk:
            self.response["prompt_token_ids"] = chunk["prompt_token_ids"]
        if "turns" in extension:
            self.response["nanorchestra"] = extension
        if "usage" in chunk:
            self.response["usage"] = _usage(chunk["usage"])
            yield self._event(f"response.{self.response['status']}", response=self.response)

    def _grow(self, kind, delta, **extension):
        """Yields the events of more text, of the open item or of one that it opens."""
        if not delta:
            return
        if self._item is None or self._item["type"] != kind:
            yield from self._close("completed")
            item = {"summary": []} if kind == "reasoning" else {"role": "assistant"}
            yield self._open(kind, content=[], **item)
            yield self._inside("response.content_part.added", part=_part(kind, ""))
        self._texts.append(delta)
        yield self._inside(f"response.{PART[kind]}.delta", delta=delta, **extension)

    def _close(self, status):
        """Yields the events that end the open item with text."""
        if self._item is None:
            return
        kind, text = self._item["type"], "".join(self._texts)
        yield self._inside(f"response.{PART[kind]}.done", text=text)
        yield self._inside("response.content_part.done", part=_part(kind, text))
        fields = {"content": [_part(kind, text)]}
        if kind == "reasoning" and self._is_opaque:
            fields["encrypted_content"] = base64.b64encode(text.encode()).decode()
        yield self._done(status, **fields)
        self._texts = []

    def _end(self, reason):
        """Yields the events of the end of a turn: of the open item, and of the calls."""
        status = "incomplete" if reason == "length" else "completed"
        yield from self._close(status)
        for call in self._calls:
            name, arguments = call["function"]["name"], call["function"]["arguments"]
            yield self._open("function_call", call_id=call["id"], name=name, arguments="")
            about = "response.function_call_arguments"
            yield self._inside(f"{about}.delta", delta=arguments)
            yield self._inside(f"{about}.done", name=name, arguments=arguments)
            yield self._done("completed", arguments=arguments)
        self.response["status"] = status
        if status == "incomplete":
            self.response["incomplete_details"] = {"reason": "max_output_tokens"}
        else:
            self.response["completed_at"] = int(time.time())

    def _open(self, kind, **fields):
        """Returns the event of a new item."""
        name = f"{PREFIX[kind]}_{secrets.token_hex(12)}"
        self._item = {"id": name, "type": kind, "status": "in_progress", **fields}
        index = len(self.response["output"])
        return self._event("response.output_item.added", output_index=index, item=self._item)

    def _done(self, status, **fields):
        """Returns the event of an item that is complete, and adds it to the output."""
        item, index = self._item | {"status": status, **fields}, len(self.response["output"])
        self.response["output"].append(item)
        self._item = None
        return self._event("response.output_item.done", output_index=index, item=item)

    def _inside(self, kind, /, **fields):
        """Returns an event inside the open item."""
        place = {"item_id": self._item["id"], "output_index": len(self.response["output"])}
        if "content" in self._item:
            place["content_index"] = 0
        if kind.startswith("response.output_text."):
            place["logprobs"] = []
        return self._event(kind, **place, **fields)

    def _event(self, kind, /, **fields):
        event = {"type": kind, "sequence_number": self._count, **fields}
        self._count += 1
        return event


def named(event: Json) -> bytes:
    """Returns an event as a server-sent event of its name."""
    return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), dumps(event))


def _part(kind, text) -> Json:
    """Returns the part that holds the text of an item."""
    part = {"type": PART[kind], "text": text}
    return part if kind == "reasoning" else part | {"annotations": [], "logprobs": []}


def _line(extension) -> str:
    """Returns a call or a result of the loop in the server as lines of its reasoning."""
    if "call" in extension:
        return f"\ncall {extension['call']}\n"
    if "result" in extension:
        return f"result {extension['result']['content']}\n"
    return ""


def _usage(usage) -> Json:
    """Returns the count of tokens of a chat as the Responses API names it."""
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": usage["completion_tokens_details"],
        "total_tokens": usage["total_tokens"],
    }
