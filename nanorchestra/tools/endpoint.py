"""An OpenAI-compatible server, and the way of a chat to it: a recorded reply, or one that is paid.

A request waits for its place among the open calls, then its dollars are reserved, then it is sent.
No torch.
"""

import json
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, Any

from pydantic import Field
from typing_extensions import TypedDict

from nanorchestra.agent.threads import abandoned
from nanorchestra.schemas import Json
from nanorchestra.tools.http import MOST_REQUESTS, Reply, count_tokens, post
from nanorchestra.tools.spending import Charge, Spending, UnpaidError

TIMEOUT_S = 600.0  # of a call
LEAST_S = 0.02  # that a request has left; with fewer it is not sent
TEXTS = "reasoning", "reasoning_content", "content", "refusal"  # fields of a message
STREAMED = {"stream": True, "stream_options": {"include_usage": True}}

# Is told of a message as it comes, by a message that has the next words of a text, or a whole call.
OnPart = Callable[[Json], None]


class Function(TypedDict):
    """The function of a call; its arguments are whatever the model writes."""

    name: str


class Call(TypedDict):
    """A call of a tool."""

    function: Function


class Message(TypedDict, total=False):
    """An assistant's message, with content in any form."""

    reasoning: str | None
    reasoning_content: str | None
    refusal: str | None
    tool_calls: list[Call] | None


class Choice(TypedDict):
    """One answer to a request."""

    message: Message


class ChatReply(TypedDict):
    """What must be right in an OpenAI chat completion; there is more, which may be wrong."""

    choices: Annotated[list[Choice], Field(min_length=1)]


class CallPart(TypedDict, total=False):
    """A call, or what follows of its arguments."""

    index: int | None
    id: str | None
    function: dict[str, Any] | None


class MessagePart(TypedDict, total=False):
    """What follows of a message."""

    reasoning: str | None
    reasoning_content: str | None
    refusal: str | None
    tool_calls: list[CallPart] | None


class PartOfChoice(TypedDict, total=False):
    """What follows of an answer."""

    delta: MessagePart | None
    finish_reason: str | None


class ChatEvent(TypedDict, total=False):
    """What must be right in an event of a chat completion; the last one has no choices."""

    choices: list[PartOfChoice] | None


def _is_whole(arguments: Any) -> bool:
    """Returns whether the arguments of a call are an object, or the whole text of one."""
    if not isinstance(arguments, str):
        return True
    try:
        return isinstance(json.loads(arguments), dict)
    except ValueError:
        return False


@dataclass
class StreamedChat:
    """Joins the events of a chat completion, and tells of its message as it comes.

    A call is told once it is whole: when another one begins, or at the end.
    """

    on_part: OnPart
    form = ChatEvent

    def __post_init__(self) -> None:
        self.ended = False
        self._finish_reason: str | None = None
        self._texts: dict[str, list[str]] = {name: [] for name in TEXTS}  # of the message
        self._calls: list[Json] = []
        self._ids: list[str] = []  # of the calls
        self._places: dict[int | None, int] = {}  # of the calls, by the index that was stated last
        self._told: set[int] = set()
        self._reply: Json = {}  # what the reply has beside its choice

    @property
    def text(self) -> str:
        """What the model has written so far, as the JSON of a message; "" if that is nothing."""
        message = self._message()
        return json.dumps(message) if message else ""

    def add(self, event: Json) -> None:
        """Takes the next event."""
        stated = {name: value for name, value in event.items() if value is not None}
        for choice in stated.pop("choices", ())[:1]:
            delta = choice.get("delta") or {}
            texts = {name: _text(delta.get(name)) for name in TEXTS}
            for name, text in texts.items():
                self._texts[name].append(text)
            if any(texts.values()):
                self.on_part(texts)
            for part in delta.get("tool_calls") or ():
                self._add_call(part)
            if reason := choice.get("finish_reason"):
                self._finish_reason, self.ended = reason, True
        self._reply |= stated

    def whole(self) -> Json:
        """Returns the completion as it would have come without events."""
        self._tell_calls(last=True)
        choice = {"message": self._message(), "finish_reason": self._finish_reason}
        return self._reply | {"choices": [choice]}

    def _message(self) -> Json:
        joined = {name: "".join(texts) for name, texts in self._texts.items()}
        message: Json = {name: text for name, text in joined.items() if text}
        if self._calls:
            message["tool_calls"] = [{"function": function} for function in self._calls]
        return message

    def _add_call(self, part):
        """Begins a call, or goes on with the arguments of one.

        A part belongs to the call of its index, without one to the last call. There it begins
        another call only by a name, beside another id or after whole arguments: some servers number
        all calls 0, give each part an id, or repeat the name.
        """
        function, index = part.get("function") or {}, part.get("index")
        name, arguments = function.get("name") or "", function.get("arguments") or ""
        stated = part.get("id") or ""
        place = self._places.get(index) if index is not None else len(self._calls) - 1
        begins = place is None or place < 0
        if not begins and name:
            known = self._ids[place]
            other = bool(stated and known and stated != known)
            nameless = index is None and not stated
            whole = bool(arguments) and _is_whole(self._calls[place]["arguments"])
            begins = other or nameless or whole
        if begins:
            self._tell_calls()
            place = len(self._calls)
            self._calls.append({"name": name, "arguments": ""})
            self._ids.append(stated)
            self._places[index] = place
        call = self._calls[place]
        if isinstance(arguments, str) and isinstance(call["arguments"], str):
            call["arguments"] += arguments
        elif arguments:
            call["arguments"] = arguments

    def _tell_calls(self, last=False):
        """Tells the calls that are whole, at the `last` time all that were not told."""
        for place, call in enumerate(self._calls):
            if place not in self._told and (last or _is_whole(call["arguments"])):
                self._told.add(place)
                self.on_part({"tool_calls": [{"function": call}]})


@dataclass(frozen=True)
class Endpoint:
    """An OpenAI-compatible server; `key_variable` "" if it needs no key.

    `headers` are sent with each request: the name of a header, and "$NAME" for the value of that
    environment variable. `concurrency` calls are open at a time, and others wait; a call takes
    `timeout_s` seconds at most, its wait included, and makes `most_requests` at most, where one
    fails for a while. A copy with other settings shares the open calls.
    """

    base_url: str
    key_variable: str = ""
    timeout_s: float = TIMEOUT_S
    concurrency: int = 16
    most_requests: int = MOST_REQUESTS
    headers: dict[str, str] = field(default_factory=dict, hash=False)
    free: threading.Semaphore | None = field(default=None, repr=False, compare=False)

    @property
    def header_variables(self) -> dict[str, str]:
        """The environment variable of each header."""
        return {name: value.removeprefix("$") for name, value in self.headers.items()}

    def __post_init__(self) -> None:
        if self.free is None:
            object.__setattr__(self, "free", threading.Semaphore(self.concurrency))

    def ask(
        self,
        body: Json,
        spending: Spending,
        charge: Charge,
        seconds: float = math.inf,
        on_part: OnPart | None = None,
    ) -> Reply:
        """Returns the reply to a chat: a recorded one, or one that is asked for and paid.

        `body` is the request's JSON (model, messages, ...). The content of the reply is as
        `complete` returns it. `seconds`: after which the user gives the call up, if these are fewer
        than `timeout_s`. `on_part` is told of a reply that is asked for as it comes, in another
        thread. UserError if the reply cannot be recorded.
        """
        request = {"url": self.base_url.rstrip("/"), "body": body}
        paid = partial(self._paid, body, spending, charge, seconds, on_part)
        try:
            return spending.replies.get(request, paid, min(self.timeout_s, seconds))
        except UnpaidError as error:
            return Reply(problem=str(error))

    def _paid(self, body, spending, charge, seconds, on_part) -> Reply:
        """Waits until the endpoint is free, then reserves the dollars, asks, and pays.

        A call that was given up while it waited is not sent. UnpaidError if the run has too few
        dollars left.
        """
        start = time.monotonic()
        timeout_s = min(self.timeout_s, seconds)
        by_user = seconds < self.timeout_s
        is_free = self.free.acquire(timeout=timeout_s)
        try:
            waited = time.monotonic() - start
            if not is_free or abandoned() or timeout_s - waited < LEAST_S:
                problem = f"calls open: {self.concurrency}, and none ended in {timeout_s:g} s"
                return Reply(problem=problem, seconds=timeout_s, waited=timeout_s, given_up=by_user)
            with spending.reserved(charge) as bill:
                reply = self.complete(body, timeout_s - waited, on_part)
                bill.usd = charge.price_of(reply)
        finally:
            if is_free:
                self.free.release()
        total = waited + reply.seconds
        late = bool(reply.problem) and total >= timeout_s
        return replace(
            reply, seconds=total, waited=waited + reply.waited, given_up=late and by_user
        )

    def complete(self, body: Json, timeout_s: float, on_part: OnPart | None = None) -> Reply:
        """Returns an assistant's message as content, with its `finish_reason`.

        `on_part` is told of it as it comes, if the server sends it so.

        `cost_usd` is there if an orchestrator says what all that it called has cost. Content in
        parts is joined to text. Tokens are estimated where the reply does not state them.
        """
        reply = post(
            f"{self.base_url.rstrip('/')}/chat/completions",
            body | (STREAMED if on_part else {}),
            ChatReply,
            self.key_variable,
            timeout_s,
            self.header_variables,
            self.most_requests,
            StreamedChat(on_part) if on_part else None,
        )
        if reply.problem:
            return reply
        choice, usage = reply.content["choices"][0], reply.content.get("usage")
        usage = usage if isinstance(usage, dict) else {}
        tokens = (
            _tokens(usage.get("prompt_tokens"), [body.get("messages"), body.get("tools")]),
            _tokens(usage.get("completion_tokens"), choice["message"]),
        )
        message = choice["message"] | {
            "content": _text(choice["message"].get("content")),
            "finish_reason": choice.get("finish_reason"),
        }
        if (usd := _stated_usd(reply.content)) is not None:
            message["cost_usd"] = usd
        return replace(reply, content=message, tokens=tokens)


def _stated_usd(reply) -> float | None:
    """Returns what a reply of an orchestrator says that it has cost; None if it says no number."""
    report = reply.get("nanorchestra")
    usd = report.get("cost_usd") if isinstance(report, dict) else None
    is_number = isinstance(usd, int | float) and not isinstance(usd, bool)
    return usd if is_number and usd >= 0 else None


def _tokens(stated, part) -> int:
    """Returns the stated tokens of a part of a request or reply, estimated if that is no number."""
    known = isinstance(stated, int) and not isinstance(stated, bool) and stated > 0
    return stated if known else count_tokens(json.dumps(part, ensure_ascii=False))


def _text(content) -> str:
    """Returns content as text: a string, null, a number, or a list of parts."""
    if isinstance(content, list):
        return "".join(map(_text, content))
    if isinstance(content, dict):
        content = content.get("text")
    return "" if content is None else str(content)
