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

from nanorchestra.records import Task, ToolCall, ToolResult

MAX_OBSERVATION_CHARS = 16_000
_JSON_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "object": (dict,),
    "array": (list,),
    "null": (type(None),),
}


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


def check_arguments(arguments: Any, parameters: dict[str, Any]) -> str | None:
    """What is wrong with `arguments` under the JSON schema `parameters` (type, required, properties, enum), or None."""
    if not isinstance(arguments, dict):
        return f"arguments must be an object, not {type(arguments).__name__}"
    properties = parameters.get("properties", {})
    for name in parameters.get("required", ()):
        if name not in arguments:
            return f"argument {name!r} is missing"
    for name, value in arguments.items():
        if name not in properties:
            return f"unknown argument {name!r}; expected {', '.join(properties) or 'none'}"
        wanted = properties[name].get("type")
        if wanted and (
            not isinstance(value, _JSON_TYPES[wanted])
            or (isinstance(value, bool) and wanted != "boolean")
        ):
            return f"argument {name!r} must be a JSON {wanted}, not {value!r}"
        if "enum" in properties[name] and value not in properties[name]["enum"]:
            return f"argument {name!r} must be one of {properties[name]['enum']}, not {value!r}"
    return None


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
        problem = check_arguments(call.arguments, tool.parameters)
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
