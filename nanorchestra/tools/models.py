"""Language models offered as tools: endpoints, experts with prices, what a run may spend on them.

What an expert cannot do is an observation, never an exception. What it has cost is counted also
where it has failed.
"""

from __future__ import annotations

import math
import os
import threading
import time
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from nanorchestra.records import Price, ToolResult, arguments_schema
from nanorchestra.tools.experts import EndpointError, chat_completion, count_tokens


class Spending:
    """US dollars that the experts of a run may cost together; thread-safe.

    Invariant: what is spent and what open calls can cost at most is never above `most`.
    """

    def __init__(self, most: float = math.inf):
        self.most, self.spent, self._open, self._lock = most, 0.0, 0.0, threading.Lock()

    def reserve(self, usd: float) -> bool:
        """Returns whether a call that costs `usd` at most fits, and keeps that much for it."""
        with self._lock:
            fits = self.spent + self._open + usd <= self.most
            self._open += usd if fits else 0.0
        return fits

    def settle(self, reserved: float, spent: float) -> None:
        """Replaces what was kept for a call by what it has cost."""
        with self._lock:
            self._open -= reserved
            self.spent += spent


@dataclass(frozen=True)
class Endpoint:
    """An OpenAI-compatible server; `key_variable` "" if it needs no key.

    A call waits until fewer than `concurrency` are open, then takes `timeout_s` seconds at most.
    """

    base_url: str
    key_variable: str = ""
    timeout_s: float = 600.0
    concurrency: int = 16

    @cached_property
    def free(self) -> threading.Semaphore:
        """Counts the calls that may still begin."""
        return threading.Semaphore(self.concurrency)

    def complete(self, body: dict[str, Any]) -> tuple[dict[str, Any], tuple[int, int]]:
        """Returns a message and its tokens, as `chat_completion` does. EndpointError."""
        if self.key_variable and not os.environ.get(self.key_variable, "").strip():
            raise EndpointError(f"the environment variable {self.key_variable} is not set")
        return chat_completion(
            self.base_url, body, key_variable=self.key_variable, timeout_s=self.timeout_s
        )


@dataclass(frozen=True)
class Expert:
    r"""A language model with its price.

    A `reasoning` model has a fixed temperature, and its limit is named max_completion_tokens.
    `code_tokens` and `context_tokens` bound what it reads in a published role. `boxed`: it marks
    its answer by \boxed{}, not by tags. `note` and `latency_s` are told to the policy.
    """

    endpoint: Endpoint
    model: str
    price: Price
    spending: Spending
    reasoning: bool = False
    temperature: float | None = None
    max_tokens: int = 4096
    code_tokens: int = 12_000
    context_tokens: int = 24_000
    boxed: bool = False
    note: str = ""
    latency_s: float = 0.0

    def most_usd(self, text: str) -> float:
        """Returns the US dollars of the longest reply to `text`."""
        return self.price.cost(count_tokens(text) + 100, self.max_tokens)

    def ask(self, text: str, name: str) -> ToolResult:
        """Returns the reply to one message; the policy knows this expert as `name`."""
        limit = "max_completion_tokens" if self.reasoning else "max_tokens"
        body = {"model": self.model, "messages": [{"role": "user", "content": text}]}
        body[limit] = self.max_tokens
        if self.temperature is not None and not self.reasoning:
            body["temperature"] = self.temperature
        most, usd = self.most_usd(text), 0.0
        if not self.spending.reserve(most):
            problem = f"Error: {name} could cost ${most:.2g}, more than the run has left to spend"
            return ToolResult(problem, error=True, alias=name)
        try:
            with self.endpoint.free:
                start = time.monotonic()
                result = self._complete(body, name)
            usd = self.price.cost(result.input_tokens, result.output_tokens)
            return replace(result, cost_usd=usd, latency_s=time.monotonic() - start, alias=name)
        finally:
            self.spending.settle(most, usd)

    def _complete(self, body: dict[str, Any], name: str) -> ToolResult:
        """Returns the reply to a request, without cost and latency."""
        try:
            message, tokens = self.endpoint.complete(body)
        except EndpointError as error:
            problem, tokens, retries = f"did not answer: {error}", error.tokens, error.retries
        else:
            text, retries = message["content"].rpartition("</think>")[2].strip(), message["retries"]
            problem = "" if text else self._emptiness(message)
        if problem:
            text = f"Error: {name} {problem}".replace(self.model, name)
        return ToolResult(
            text, 0.0, 0.0, bool(problem), False, *tokens, alias=name, retries=retries
        )

    def _emptiness(self, message: dict[str, Any]) -> str:
        """Returns why a message has no content."""
        if refusal := message.get("refusal"):
            return f"refused: {refusal[:200]}"
        if message["finish_reason"] == "length":
            return f"reached its limit of {self.max_tokens} tokens before an answer"
        reasoning = message.get("reasoning") or message.get("reasoning_content")
        return "reasoned, but gave no answer" if reasoning else "gave an empty answer"


@dataclass
class ExpertTool:
    """An expert for a task that the policy writes."""

    name: str
    description: str
    expert: Expert
    kind, blocking = "expert", True
    parameters = arguments_schema(task="string")

    def most_usd(self, arguments: dict[str, Any]) -> float:
        """Returns the US dollars of the longest answer."""
        return self.expert.most_usd(arguments["task"])

    def call(self, arguments: dict[str, Any]) -> ToolResult:
        """Returns the expert's answer to the task."""
        return replace(self.expert.ask(arguments["task"], self.name), alias="")
