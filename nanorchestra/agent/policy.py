"""A model behind any OpenAI-compatible endpoint as the policy: it attempts the tasks of a run in their environments, and is recorded as our own is.

What it says comes as text and is written as the ids that our policy would have had to sample to say it (chat.encode_assistant); those are parsed and
run by the loop in nanorchestra/agent/loop.py. So a warm start can imitate what was right (nanorchestra/training/trajectories.py). The
log-probabilities of these ids are unknown, and None: GRPO cannot learn from them. Nothing here computes with a model.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import Any

import requests

from nanorchestra.agent.environment import in_thread
from nanorchestra.agent.loop import Limits, PolicyPrice, Rollout, Unavailable
from nanorchestra.config import RolloutSection
from nanorchestra.engine.request import Completion
from nanorchestra.errors import UserError
from nanorchestra.model import chat
from nanorchestra.model.parser import THINK, THINK_END
from nanorchestra.records import Price, ToolCall, Trajectory
from nanorchestra.tools.experts import EndpointError, chat_completion, is_base_url

PARALLEL, PATIENCE = (
    16,
    400.0,
)  # requests at a time; seconds for one turn with its three tries, however the server drips


def check_endpoint(section: RolloutSection) -> None:
    """UserError if a model behind an endpoint is asked for that cannot be had."""
    url, model = section.endpoint, section.model
    if bool(url) != bool(model):
        raise UserError(
            f"rollout.endpoint is {url!r} and rollout.model {model!r}; both are needed, or none"
        )
    if not url:
        return
    if not section.only:
        raise UserError(
            f"rollout.endpoint is {url!r}, whose attempts have no log-probabilities for GRPO; record them with --rollouts N, then imitate them "
            "with --warm_start.trajectories RUN"
        )
    if not is_base_url(url):
        raise UserError(
            f"rollout.endpoint is {url!r}; it must be a base URL such as http://localhost:8000/v1, without a key: that comes from OPENAI_API_KEY"
        )
    try:
        requests.get(
            f"{url.rstrip('/')}/models", timeout=10, stream=True
        ).close()  # whatever it answers, somebody is there
    except (
        requests.RequestException,
        ValueError,
    ) as error:  # ValueError: a name that none can have, "a..b"
        raise UserError(
            f"rollout.endpoint: nobody answers at {url} ({type(error).__name__})"
        ) from None


@dataclass
class Conversation:
    """What the endpoint is sent: all of it, every turn."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]

    def append(self, ids: list[int]) -> None:
        """Ids are the loop's to count."""

    def close(self) -> None:
        pass


class EndpointRollout(Rollout):
    """Attempts of `section.model` at `section.endpoint`, under the limits of our policy: a turn with more of our ids is cut. Its tokens cost what
    `section` says, as the server counts them; its time is that of our policy for the same ids, on the run's clock."""

    def __init__(self, section: RolloutSection, tokenizer, limits: Limits):
        def params(seed: int, budget: int) -> dict[str, Any]:
            return {
                "seed": seed % 2**31,
                "temperature": section.temperature,
                "max_completion_tokens": budget,
            }

        super().__init__(
            None,
            tokenizer,
            params,
            limits,
            PolicyPrice(0.0, 0.0),
            rebuild=section.context == "rebuild",
        )
        self.url, self.model, self.usd = (
            section.endpoint,
            section.model,
            Price(section.input_usd_per_million, section.output_usd_per_million),
        )

    async def _run(self, *arguments) -> list[Trajectory]:
        self._free, self._bills = asyncio.Semaphore(PARALLEL), {}
        return await super()._run(*arguments)

    async def _attempt(self, index: int, *arguments) -> Trajectory:
        self._bills[index] = 0.0
        trajectory = await super()._attempt(index, *arguments)
        trajectory.cost_usd += self._bills[index]
        return trajectory

    def _open(self, start, prompt: list[int]) -> Conversation:
        return Conversation(list(start.messages), start.tools)

    def _give(
        self, session: Conversation, trajectory: Trajectory, ids: list[int], role: str, contents
    ) -> None:
        names = (
            [{"tool_call_id": call["id"]} for call in session.messages[-1]["tool_calls"]]
            if role == "tool"
            else [{}]
        )
        session.messages += [
            {"role": role, "content": content} | name
            for name, content in zip(names, contents, strict=True)
        ]
        super()._give(session, trajectory, ids, role, contents)

    async def _sample(
        self, index: int, session: Conversation, params: dict[str, Any], on_token
    ) -> Completion:
        body = {"model": self.model, "messages": session.messages, **params} | (
            {"tools": session.tools} if session.tools else {}
        )
        try:
            async with self._free:
                message, tokens = await asyncio.wait_for(
                    in_thread(lambda body: chat_completion(self.url, body), body), PATIENCE
                )
            self._bills[index] += self.usd.cost(*tokens)
            return self._said(session, message, params["max_completion_tokens"])
        except (
            EndpointError,
            TimeoutError,
            ValueError,
            RecursionError,
        ) as error:  # ValueError: less than no tokens
            raise Unavailable(
                f"Error: {self.model} at {self.url} did not answer as it should ({str(error) or 'in time'})"
            ) from None

    def _said(self, session: Conversation, message: dict[str, Any], budget: int) -> Completion:
        """The turn in ids, at most `budget` of them; and in the conversation, as the loop will read these ids."""
        shown, reasoning, content, calls = read(message)
        ids = chat.encode_assistant(self.tokenizer, reasoning, content, calls)
        whole = len(ids)
        ids = ids[
            : min(budget, whole - (message["finish_reason"] == "length"))
        ]  # what was cut off has no end
        parsed = chat.parse(self.tokenizer, ids)
        said = shown | {"role": "assistant", "content": shown["content"] + parsed.content}
        if parsed.calls:  # servers refuse arguments that are no JSON; ids of nine letters and digits suit all of them
            said["tool_calls"] = [
                {
                    "id": f"call{len(session.messages):03}{k:02}",
                    "type": "function",
                    "function": {
                        "name": call.name or "unknown",
                        "arguments": json.dumps(call.arguments),
                    },
                }
                for k, call in enumerate(parsed.calls)
            ]
        session.messages.append(said)
        return Completion(
            0,
            0,
            ids,
            [None] * len(ids),
            "",
            "stop" if len(ids) == whole else "length",
            [-1] * len(ids),
            [],
        )


def read(message: dict[str, Any]) -> tuple[dict[str, str], str, str, list[ToolCall]]:
    """An assistant's message -> (what it is to be shown of its reasoning, and how, in the next turn; reasoning; content; calls). EndpointError.

    Reasoning has a field of its own, or it stands before </think> in the content. Arguments that are no JSON stay text.
    """
    try:
        field = next(
            (name for name in ("reasoning_content", "reasoning") if message.get(name)), None
        )
        content, reasoning, shown = (
            message.get("content") or "",
            field and message[field] or "",
            {"content": ""},
        )
        if field:
            shown[field] = reasoning
        elif THINK_END in content:
            before, _, content = content.partition(THINK_END)
            reasoning, shown["content"] = before.split(THINK)[-1], before + THINK_END + "\n\n"
        calls = [
            ToolCall(call["function"]["name"], _arguments(call["function"].get("arguments") or {}))
            for call in message.get("tool_calls") or ()
        ]
    except (KeyError, TypeError, AttributeError) as error:
        raise EndpointError(
            f"no message of an assistant: {type(error).__name__}: {error}"
        ) from None
    if not all(
        isinstance(text, str) for text in (content, reasoning, *(call.name for call in calls))
    ):
        raise EndpointError(
            "no message of an assistant: its content, reasoning and names of tools must be text"
        )
    return shown, reasoning, content, calls


def _arguments(given: Any) -> Any:
    try:
        return json.loads(given) if isinstance(given, str) else given
    except (ValueError, RecursionError):
        return given
