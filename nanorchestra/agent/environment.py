"""What the agent loop acts in: an Environment gives the first messages and the tools of a task, executes calls, scores the answer.

`ToolEnvironment` is the one most worlds need: a set of tools, a question, an answer that can be checked. A tool never raises into the
loop: what it throws becomes an error observation, and a failure that is not the policy's fault is marked as infrastructure.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from dataclasses import replace
from typing import Any, Callable, Protocol, Sequence

from jsonschema import Draft202012Validator
from jsonschema.exceptions import best_match

from nanorchestra.records import Task, ToolCall, ToolResult

MAX_OBSERVATION_CHARS = 16_000


class Tool(Protocol):
    """One thing the orchestrator may call. `kind` names what it is behind its alias; `blocking` calls are run in a thread."""

    name: str
    kind: str
    description: str
    parameters: dict[str, Any]
    blocking: bool

    def call(self, arguments: dict[str, Any]) -> ToolResult: ...


class Environment(Protocol):
    """One attempt at one task. `tools` are OpenAI function objects, `kinds` says of some what they are ("code", "search", "expert"), by name;
    `execute` never raises for what the policy wrote.

    `reply` is the user's answer to a message without a call; None: the conversation is over, and the message is the answer.
    """

    task: Task
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    kinds: dict[str, str]

    async def execute(self, call: ToolCall) -> ToolResult: ...

    async def reply(self, content: str) -> ToolResult | None: ...

    def score(self, answer: str) -> float: ...


def function_schema(tool: Tool) -> dict[str, Any]:
    """The OpenAI function object that stands in the prompt for `tool`."""
    return {
        "type": "function",
        "function": {
            "name": tool.name,
            "description": tool.description,
            "parameters": tool.parameters,
        },
    }


def schema_error(value: Any, schema: dict[str, Any]) -> str | None:
    """Returns what is wrong with `value` under a JSON schema, in one line; None if nothing is."""
    error = best_match(Draft202012Validator(schema).iter_errors(value))
    if error is None:
        return None
    message = error.message
    if len(message) > 300:  # it begins with the value
        message = f"{message[:100]} ... {message[-200:]}"
    where = error.json_path.removeprefix("$").removeprefix(".")
    return f"{where}: {message}" if where else message


def argument_error(arguments: Any, parameters: dict[str, Any]) -> str | None:
    """Returns why a tool with these `parameters` cannot take `arguments`; None if it can.

    Arguments that the schema does not name are errors.
    """
    strict = {"type": "object", "additionalProperties": False}
    return schema_error(arguments, strict | parameters)


class ToolEnvironment:
    """A question, the tools to answer it with, and `grade(answer) -> outcome in [0, 1]`."""

    def __init__(
        self,
        task: Task,
        tools: Sequence[Tool],
        grade: Callable[[str], float],
        system: str | None = None,
    ):
        self.task = task
        self.by_name = {tool.name: tool for tool in tools}
        self.tools = [function_schema(tool) for tool in tools]
        self.kinds = {tool.name: tool.kind for tool in tools}
        self.messages = [{"role": "system", "content": system}] if system else []
        words = " ".join(part for part in (task.question, task.preference.text) if part)
        self.messages.append({"role": "user", "content": words})
        self._grade = grade

    async def execute(self, call: ToolCall) -> ToolResult:
        """Runs one call. A call that cannot be run returns an error that says what was wrong and costs nothing."""
        if call.error is not None:
            return ToolResult(f"Error: {call.error}", error=True)
        tool = self.by_name.get(call.name)
        if tool is None:
            return ToolResult(
                f"Error: no tool named {call.name!r}; the tools are {', '.join(self.by_name)}",
                error=True,
            )
        problem = argument_error(call.arguments, tool.parameters)
        if problem is not None:
            return ToolResult(f"Error: {call.name}: {problem}", error=True)
        try:
            result = (
                await in_thread(tool.call, call.arguments)
                if tool.blocking
                else tool.call(call.arguments)
            )
        except Exception as error:  # whatever a tool throws must reach the policy as an observation, never the loop
            return ToolResult(
                f"Error: {call.name} failed: {type(error).__name__}: {error}",
                error=True,
                infrastructure=True,
            )
        if len(result.content) > MAX_OBSERVATION_CHARS:
            result = replace(result, content=result.content[:MAX_OBSERVATION_CHARS] + "\n[cut]")
        return result

    async def reply(self, content: str) -> None:
        """Nobody answers: the first message without a call is the answer."""

    def score(self, answer: str) -> float:
        return self._grade(answer)


async def in_thread(call: Callable[[Any], Any], argument: Any) -> Any:
    """asyncio.to_thread, but on a daemon thread: who stops an attempt (Ctrl-C) need not wait for the slowest endpoint, nor does the exit."""
    loop = asyncio.get_running_loop()
    future = loop.create_future()

    def settle(setter: Callable[[Any], None], value: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(lambda: future.done() or setter(value))

    def work() -> None:
        try:
            settle(future.set_result, call(argument))
        except Exception as error:
            settle(future.set_exception, error)

    threading.Thread(target=work, daemon=True).start()
    return await future
