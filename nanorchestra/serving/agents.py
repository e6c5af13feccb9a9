"""Agents that are not ours: a Python function that plays an attempt.

It is told where to ask the policy, and what the task is; agent_rollout.py answers it. It returns a
reward, an answer, or nothing.
"""

import asyncio
import inspect
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from typing_extensions import TypedDict

from nanorchestra.agent.threads import in_daemon
from nanorchestra.errors import UserError, require
from nanorchestra.files import import_file
from nanorchestra.schemas import Json
from nanorchestra.tools.http import post

MODEL = "policy"  # its name for agents
CALLS_S = 3600.0  # that a function waits for its calls


class Results(TypedDict):
    """The reply to calls."""

    results: list[Json]


class AgentFailure(Exception):  # noqa: N818
    """The agent itself failed, not the policy. The message is one line."""


@dataclass(frozen=True)
class AttemptHandle:
    """What an agent's function is given: where it asks the policy, and the task.

    `task` has id, question, messages, tools (OpenAI's function objects), seed and split.
    """

    base_url: str
    api_key: str
    task: Json
    model: str = MODEL

    @property
    def url(self) -> str:
        """The address of the attempt."""
        return f"{self.base_url}/attempts/{self.api_key}"

    def call(self, calls: list[Json]) -> list[Json]:
        """Runs calls of the task's tools side by side; returns their results, in order.

        A call has "name" and "arguments", a result "content", "error", "cost_usd", "latency_s".
        """
        body = {"calls": calls}
        reply = post(f"{self.url}/calls", body, Results, "", CALLS_S, most_requests=1)
        if reply.problem:
            raise AgentFailure(f"calls: {reply.problem}")
        return reply.content["results"]


@dataclass(frozen=True)
class AgentFunction:
    """A function, or coroutine function, of an AttemptHandle, in a thread of its own.

    It returns a reward from 0 to 1, an answer, one of these as {"reward": ...} or
    {"answer": ...}, or None.
    """

    name: str
    function: Callable[[AttemptHandle], Any]

    async def run(self, attempt: AttemptHandle) -> Json:
        """Returns {"reward": R}, {"answer": TEXT}, or {}. AgentFailure."""

        def call():
            said = self.function(attempt)
            return asyncio.run(said) if inspect.isawaitable(said) else said

        try:
            said = await asyncio.wrap_future(in_daemon(call))
        except asyncio.CancelledError:
            raise
        except (Exception, SystemExit) as error:
            text = " ".join(f"{type(error).__name__}: {error}".split())
            file, lines = self.name.partition(":")[0], []
            for frame in traceback.extract_tb(error.__traceback__):
                if Path(frame.filename).name == file:
                    lines.append(frame.lineno)
            line = f", line {lines[-1]}" if lines else ""
            raise AgentFailure(f"{self.name}{line}: {text}"[:500]) from None
        if isinstance(said, dict):
            return said
        if said is None:
            return {}
        return {"answer": said} if isinstance(said, str) else {"reward": said}


def load_agent(text: str) -> AgentFunction:
    """Returns the agent that FILE.py:FUNCTION names. UserError."""
    file, _, name = text.rpartition(":")
    is_function = file.endswith(".py") and name.isidentifier()
    require(is_function, f"task.agent is {text!r}; it must be FILE.py:FUNCTION")
    path = Path(file).resolve()
    require(path.is_file(), f"task.agent: {file}: no such file")
    try:
        module = import_file(path, "agent")
    except (Exception, SystemExit) as error:
        text = " ".join(f"{type(error).__name__}: {error}".split())
        raise UserError(f"task.agent: {file}: {text}") from None
    function = getattr(module, name, None)
    require(callable(function), f"task.agent: {file}: it has no function {name!r}")
    return AgentFunction(f"{path.name}:{name}", function)
