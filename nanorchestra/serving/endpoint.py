"""A model behind an OpenAI-compatible endpoint as the policy.

Its messages come as text. Each is recorded as the ids that our policy would have sampled to say the
same (chat.encode_assistant), and the loop parses and runs these. The ids' log-probabilities are
unknown, None. A turn that is followed is shown as it comes. No torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from nanorchestra.agent.context import Prompt
from nanorchestra.agent.loop import Attempt, Rollout
from nanorchestra.agent.threads import in_thread
from nanorchestra.config import RolloutSection
from nanorchestra.engine.sequence import Completion, OnToken
from nanorchestra.errors import require
from nanorchestra.model import chat
from nanorchestra.model.parser import THINK, THINK_END
from nanorchestra.records import ParsedTurn, Price, ToolCall, Trajectory
from nanorchestra.schemas import Json, bounded_json
from nanorchestra.tools.endpoint import Endpoint
from nanorchestra.tools.http import Reply
from nanorchestra.tools.models import TEMPLATE_TOKENS, most_tokens
from nanorchestra.tools.spending import Charge, Spending


class EndpointRollout(Rollout):
    """Plays attempts of `model`, "MODEL@URL", under the limits of our policy.

    Its tokens cost `price`, as the server counts them. Its latency is measured, request by request.
    `spending` bounds what it costs. An attempt that only repeats itself ends, before all its turns
    are paid for. The server's own temperature holds unless one is given. UserError unless URL is a
    base URL.
    """

    def __init__(
        self,
        model: str,
        price: Price,
        tokenizer: Any,
        settings: RolloutSection,
        spending: Spending,
        temperature: float | None = None,
    ):
        name, _, url = model.partition("@")
        require(
            name and re.fullmatch(r"https?://[^\s@?#]+", url),
            f"{model}: must be MODEL@ and a base URL such as http://localhost:8000/v1, without a "
            "key: that comes from OPENAI_API_KEY",
        )

        self.name = name
        params = self._params(temperature, states_seed=False)
        free = {"price": Price(0.0, 0.0), "seconds_per_token": 0.0}
        super().__init__(None, tokenizer, params, settings, **free, ends_repeats=True)
        self.server = Endpoint(url, "OPENAI_API_KEY")
        self.endpoint_price, self.spending = price, spending

    def sampling(self, temperature: float | None, states_seed: bool) -> EndpointRollout:
        """Returns it with a temperature, None for the server's, and each attempt's seed or none."""
        rollout = copy(self)
        rollout.params = self._params(temperature, states_seed)
        return rollout

    def _params(self, temperature, states_seed) -> Callable[[int, int], Json]:
        """Returns what makes the fields of a request beside its messages and tools.

        What is not given is not sent: servers of some models refuse any.
        """

        def params(seed, max_tokens):
            fields = {"model": self.name, "max_completion_tokens": max_tokens}
            if temperature is not None:
                fields["temperature"] = temperature
            if states_seed:
                fields["seed"] = seed % 2**31
            return fields

        return params

    def bill_ids(self, t: Trajectory) -> None:
        """Does nothing: each request is billed by the tokens that the server counts."""

    def open(self, attempt: Attempt, prompt: Prompt) -> EndpointConversation:
        """Opens a conversation that begins with the messages of a prompt."""
        return EndpointConversation(self, attempt, list(prompt.messages))


@dataclass
class EndpointConversation:
    """An attempt as the endpoint knows it: every request carries the whole conversation."""

    rollout: EndpointRollout
    attempt: Attempt
    messages: list[Json]

    @property
    def tools(self) -> list[Json]:
        """The tools of the attempt."""
        return self.attempt.env.tools

    def prices(self) -> tuple[float, float]:
        """Returns the most US dollars of the next request, and those of each token it asks for."""
        price = self.rollout.endpoint_price
        return price.cost(self._most_tokens(), 0), price.cost(0, 1)

    def _most_tokens(self) -> int:
        """Returns the most tokens that the next request can have, with the words about its tools.

        The punctuation of a message in JSON is longer than its marks in a template.
        """
        template = TEMPLATE_TOKENS if self.tools else 0
        return most_tokens(json.dumps([self.messages, self.tools])) + template

    def append(self, ids: list[int], role: str, contents: list[str]) -> None:
        """Adds observations, each for its call, or the user's reply."""
        calls = self.messages[-1].get("tool_calls", [{}])  # a reply answers no call
        for call, content in zip(calls, contents, strict=True):
            message = {"role": role, "content": content}
            if call:
                message["tool_call_id"] = call["id"]
            self.messages.append(message)

    def close(self) -> None:
        """Does nothing: the server keeps no state."""

    async def sample(self, params: Json, on_token: OnToken | None = None) -> Completion:
        """Returns the next turn, and adds its cost and its seconds to the trajectory.

        finish_reason "error": there is none, and `text` says why. "length" without ids: the user's
        time is over. With `on_token` the attempt shows the text of the turn as it comes: its ids
        are known when all of it has come.
        """
        rollout, user = self.rollout, self.attempt.user_limits
        max_tokens = params["max_completion_tokens"]
        charge = self._charge(self._most_tokens(), max_tokens)
        body, seconds = self._request(params), user.seconds_left()
        ask = partial(rollout.server.ask, body, rollout.spending, charge, seconds)
        if on_token is None:
            reply = await in_thread(ask)
        else:
            with ShownTurn(self.attempt.show) as shown:
                reply = await in_thread(ask, shown.tell)
                if not (reply.problem or shown.has_begun):  # a recorded one, or of no stream
                    shown.add(read(reply.content))
        t = self.attempt.trajectory
        t.policy_usd += charge.price_of(reply)
        t.latency_s += reply.seconds
        read_tokens, written = reply.tokens
        self.attempt.counted.update(read=read_tokens, written=written)
        if reply.problem:
            if reply.given_up and reply.seconds >= seconds or user.seconds_left() <= 0:
                return _completion([], "length")
            who = f"{params['model']} at {rollout.server.base_url}"
            return _completion([], "error", f"Error: {who} failed ({reply.problem})")
        tokenizer = rollout.tokenizer
        turn = read(reply.content)
        whole = chat.encode_assistant(tokenizer, turn.reasoning, turn.content, turn.calls)
        ids = whole
        if reply.content["finish_reason"] == "length":
            ids = whole[:-1]  # a message that was cut has no end
        ids = ids[:max_tokens]
        self._record(reply.content, chat.parse(tokenizer, ids))
        return _completion(ids, "stop" if len(ids) == len(whole) else "length")

    def _request(self, params) -> Json:
        """Returns the body of the next request, which carries the whole conversation."""
        body = params | {"messages": self.messages}
        if self.tools:
            body["tools"] = self.tools
        return body

    def _charge(self, most_read: int, most_sampled: int) -> Charge:
        """Returns what a request can cost whose tokens are bounded.

        A reply is paid for also if the attempt does not wait for it.
        """
        price = self.rollout.endpoint_price

        def price_of(reply: Reply) -> float:
            read, sampled = reply.tokens
            return price.cost(min(read, most_read), min(sampled, most_sampled))

        return Charge("policy", price.cost(most_read, most_sampled), price_of)

    def _record(self, message: Json, parsed: ParsedTurn):
        """Appends a message as the loop parses it, with the server's own field of reasoning."""
        turn = {"role": "assistant", "content": parsed.content}
        if parsed.reasoning:
            field = "reasoning" if message.get("reasoning") else "reasoning_content"
            turn[field] = parsed.reasoning
        calls = []
        for number, call in enumerate(parsed.calls):
            # No server takes arguments of no object; nine letters and digits suit all as an id.
            function = {"name": call.name or "unknown", "arguments": json.dumps(call.arguments)}
            name = f"call{len(self.messages):03}{number:02}"
            calls.append({"id": name, "type": "function", "function": function})
        if calls:
            turn["tool_calls"] = calls
        self.messages.append(turn)


class ShownTurn:
    """Shows a turn as it comes, as the text that our policy would have sampled.

    `tell` may be called from other threads; what it tells after the end of the block is not shown.
    """

    def __init__(self, show: Callable[[str], None]):
        self._show = show
        self._loop = asyncio.get_running_loop()
        self._section = ""  # of the turn: "", "reasoning", or "content" with its calls
        self._is_over = False

    def __enter__(self) -> ShownTurn:
        return self

    def __exit__(self, *error: object) -> None:
        self._is_over = True

    @property
    def has_begun(self) -> bool:
        """Whether anything was shown."""
        return bool(self._section)

    def tell(self, part: Json) -> None:
        """Shows what has come of a message, from another thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: nothing waits for it
            self._loop.call_soon_threadsafe(self._add_part, part)

    def _add_part(self, part):
        if not self._is_over:
            self.add(_parts(part))

    def add(self, turn: ParsedTurn) -> None:
        """Shows what has come of a turn."""
        text = ""
        if turn.reasoning and self._section != "content":
            text += turn.reasoning if self._section else f"{THINK}\n{turn.reasoning}"
            self._section = "reasoning"
        if turn.content or turn.calls:
            text += f"\n{THINK_END}\n\n" if self._section == "reasoning" else ""
            text += turn.content
            calls = [(call.name, call.arguments) for call in turn.calls]
            text += "".join(chat.call_pieces(calls, after_content=True))
            self._section = "content"
        self._show(text)


def read(message: Json) -> ParsedTurn:
    """Returns a message as the parts of a turn.

    Reasoning has a field of its own, or stands before </think> in the content. Arguments that are
    not JSON stay text.
    """
    turn = _parts(message)
    if turn.reasoning or THINK_END not in turn.content:
        return turn
    before, _, content = turn.content.partition(THINK_END)
    return replace(turn, reasoning=before.split(THINK)[-1].strip(), content=content)


def _parts(message: Json) -> ParsedTurn:
    """Returns the fields of a message, or of what has come of it."""
    content = message.get("content") or ""
    reasoning = message.get("reasoning") or message.get("reasoning_content") or ""
    calls = []
    for call in message.get("tool_calls") or ():
        arguments = call["function"].get("arguments") or {}
        if isinstance(arguments, str):
            with contextlib.suppress(ValueError):
                arguments = bounded_json(arguments)
        calls.append(ToolCall(call["function"]["name"], arguments))
    return ParsedTurn(reasoning, content, tuple(calls))


def _completion(ids, finish_reason, text="") -> Completion:
    """Returns a Completion of ids whose log-probabilities and weight version are unknown."""
    unknown = [None] * len(ids)
    return Completion(0, 0, ids, unknown, text, finish_reason, [-1] * len(ids))
