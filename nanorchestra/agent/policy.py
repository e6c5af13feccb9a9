"""A model behind an OpenAI-compatible endpoint as the policy.

Its messages come as text. Each is recorded as the ids that our policy would have sampled to say the
same (chat.encode_assistant), and the loop parses and runs these. So a warm start can imitate what
was right (training/trajectories.py). The ids' log-probabilities are unknown, None: GRPO cannot
train on them. No torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from dataclasses import dataclass
from typing import Any

from nanorchestra.agent.environment import in_thread
from nanorchestra.agent.loop import Attempt, Limits, Rollout
from nanorchestra.config import RolloutSection
from nanorchestra.engine.request import Completion
from nanorchestra.errors import require
from nanorchestra.model import chat
from nanorchestra.model.parser import THINK, THINK_END
from nanorchestra.records import Price, ToolCall, Trajectory
from nanorchestra.tools.experts import EndpointError, chat_completion, is_base_url

PARALLEL = 16  # requests at a time
TURN_SECONDS = 400.0  # for a turn with its retries, however slowly the server sends


def check_endpoint(section: RolloutSection) -> None:
    """Raises UserError if the settings ask for an endpoint that cannot be used."""
    url, model = section.endpoint, section.model
    require(
        bool(url) == bool(model),
        f"rollout.endpoint is {url!r} and rollout.model {model!r}; both are needed, or none",
    )
    if not url:
        return
    require(
        section.only,
        f"rollout.endpoint is {url!r}, whose attempts have no log-probabilities for GRPO; record "
        "them with --rollouts N, then imitate them with --warm_start.trajectories RUN",
    )
    require(
        is_base_url(url),
        f"rollout.endpoint is {url!r}; it must be a base URL such as http://localhost:8000/v1, "
        "without a key: that comes from OPENAI_API_KEY",
    )


class EndpointRollout(Rollout):
    """Plays attempts of `section.model` at `section.endpoint`, under the limits of our policy.

    Its tokens cost what `section` says, as the server counts them. Its latency is that of our
    policy for the same ids.
    """

    def __init__(self, section: RolloutSection, tokenizer: Any, limits: Limits):
        def params(seed: int, budget: int) -> dict[str, Any]:
            sampling = {"seed": seed % 2**31, "temperature": section.temperature}
            return sampling | {"max_completion_tokens": budget}

        rebuild = section.context == "rebuild"
        super().__init__(None, tokenizer, params, limits, Price(0.0, 0.0), rebuild=rebuild)
        self.url, self.model = section.endpoint, section.model
        self.bill = Price(section.input_usd_per_million, section.output_usd_per_million)

    def open(self, attempt: Attempt, start: Any, prompt: list[int]) -> EndpointConversation:
        """Opens a conversation that begins with the messages of `start`."""
        return EndpointConversation(self, attempt.trajectory, list(start.messages), start.tools)

    async def _run(self, *arguments: Any) -> list[Trajectory]:
        self.free = asyncio.Semaphore(PARALLEL)
        return await super()._run(*arguments)


@dataclass
class EndpointConversation:
    """An attempt as the endpoint knows it: every request carries the whole conversation."""

    rollout: EndpointRollout
    trajectory: Trajectory
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]

    def append(self, ids: list[int], role: str, contents: list[str]) -> None:
        """Adds observations, each for its call, or the user's reply."""
        calls = self.messages[-1].get("tool_calls", [{}])
        for call, content in zip(calls, contents, strict=True):
            message = {"role": role, "content": content}
            self.messages.append(message | ({"tool_call_id": call["id"]} if call else {}))

    def close(self) -> None:
        """Does nothing: the server keeps no state."""

    async def sample(self, params: dict[str, Any], on_token: Any = None) -> Completion:
        """Returns the next turn. finish_reason "error": there is none, and `text` says why."""
        model, url = self.rollout.model, self.rollout.url
        body = {"model": model, "messages": self.messages} | params
        if self.tools:
            body["tools"] = self.tools
        try:
            async with self.rollout.free:
                answer = in_thread(lambda body: chat_completion(url, body), body)
                message, tokens = await asyncio.wait_for(answer, TURN_SECONDS)
        except (EndpointError, TimeoutError) as error:
            problem = str(error) or f"no answer in {TURN_SECONDS:g} s"
            return _completion([], "error", f"Error: {model} at {url} failed ({problem})")
        self.trajectory.cost_usd += self.rollout.bill.cost(*tokens)
        return self._record(message, params["max_completion_tokens"])

    def _record(self, message: dict[str, Any], budget: int) -> Completion:
        """Returns a message as ids, at most `budget`, and appends it as the loop will parse it."""
        tokenizer, (field, reasoning, content, calls) = self.rollout.tokenizer, read(message)
        whole = chat.encode_assistant(tokenizer, reasoning, content, calls)
        cut = message["finish_reason"] == "length"
        ids = whole[: min(budget, len(whole) - cut)]  # a message that was cut has no end
        parsed = chat.parse(tokenizer, ids)
        said: dict[str, Any] = {"role": "assistant", "content": parsed.content}
        if reasoning:
            said[field] = reasoning
        if parsed.calls:
            said["tool_calls"] = [
                {
                    # Nine letters and digits suit all servers; none takes arguments of no object.
                    "id": f"call{len(self.messages):03}{k:02}",
                    "type": "function",
                    "function": {"name": c.name or "unknown", "arguments": json.dumps(c.arguments)},
                }
                for k, c in enumerate(parsed.calls)
            ]
        self.messages.append(said)
        return _completion(ids, "stop" if len(ids) == len(whole) else "length")


def read(message: dict[str, Any]) -> tuple[str, str, str, list[ToolCall]]:
    """Returns (the field of the reasoning, reasoning, content, calls) of a message.

    Reasoning has a field of its own, or stands before </think> in the content. Arguments that are
    not JSON stay text.
    """
    field = "reasoning" if message.get("reasoning") else "reasoning_content"
    content, reasoning = message.get("content") or "", message.get(field) or ""
    if not reasoning and THINK_END in content:
        before, _, content = content.partition(THINK_END)
        reasoning = before.split(THINK)[-1].strip()
    calls = []
    for call in message.get("tool_calls") or ():
        arguments = call["function"].get("arguments") or {}
        if isinstance(arguments, str):
            with contextlib.suppress(ValueError, RecursionError):
                arguments = json.loads(arguments)
        calls.append(ToolCall(call["function"]["name"], arguments))
    return field, reasoning, content, calls


def _completion(ids: list[int], finish_reason: str, text: str = "") -> Completion:
    """Returns a Completion of ids whose log-probabilities and weight version are unknown."""
    unknown = [None] * len(ids)
    return Completion(0, 0, ids, unknown, text, finish_reason, [-1] * len(ids))
