"""The environment of an attempt: first messages, tools, the execution of calls, the score.

`ToolEnvironment` is the one most worlds need: tools, a question and a grade for the answer. A tool
never raises into the loop: an exception becomes an error observation, which the policy can act on.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

from nanorchestra.evidence import Evidence
from nanorchestra.records import Task, ToolCall, ToolResult
from nanorchestra.schemas import Json, argument_error
from nanorchestra.tools.failures import is_infrastructure
from nanorchestra.tools.http import in_daemon
from nanorchestra.tools.models import most_usd

MAX_OBSERVATION_CHARS = 16_000


class Tool(Protocol):
    """What the orchestrator may call under `name`; `parameters` is the JSON schema of `call`.

    `kind` says what is behind the name ("code", "search", "expert", ...). A tool of kind "answer"
    gives the final answer: its first result that is no error ends the attempt. A `blocking` call
    runs in a thread, so that it does not hold up other attempts. A tool with a field `evidence`
    has the attempt's there.
    """

    name: str
    kind: str
    description: str
    parameters: Json
    blocking: bool

    def call(self, arguments: Json) -> ToolResult:
        """Returns the observation and its price."""


class Environment(Protocol):
    """One attempt at one task. `tools` are OpenAI function objects, `kinds` maps some to a kind.

    `evidence` is what the attempt has found. `prompt` are the ids of messages and tools, empty if
    they are not encoded yet. `verdict` is a word for how `score` judged the answer, "" if there is
    nothing to say.
    """

    task: Task
    messages: list[Json]
    tools: list[Json]
    kinds: dict[str, str]
    evidence: Evidence
    prompt: Sequence[int]
    verdict: str

    def most_usd(self, call: ToolCall) -> float:
        """Returns the most US dollars that a call can cost, as far as is known."""

    async def execute(self, call: ToolCall) -> ToolResult:
        """Returns the observation of one call; never raises for what the policy wrote."""

    async def reply(self, content: str) -> ToolResult | None:
        """Returns the user's reply to a message without calls; None if it is the answer."""

    def score(self, answer: str) -> float:
        """Returns the outcome in [0, 1]; it may wait for a judge, and raise EndpointError."""


class ToolEnvironment:
    """A question, the tools to answer it with, and `grade(answer) -> outcome in [0, 1]`."""

    verdict, prompt = "", ()

    def __init__(
        self, task: Task, tools: Sequence[Tool], grade: Callable[[str], float] = lambda answer: 0.0
    ):
        self.task, self._grade = task, grade
        self.evidence = Evidence(task.question)
        self.by_name = {
            tool.name: replace(tool, evidence=self.evidence) if hasattr(tool, "evidence") else tool
            for tool in tools
        }
        self.tools = [function_schema(tool) for tool in tools]
        self.kinds = {tool.name: tool.kind for tool in tools}
        words = " ".join(filter(None, (task.question, task.preference.words)))
        self.messages = [{"role": "user", "content": words}]

    def most_usd(self, call: ToolCall) -> float:
        """Returns the most US dollars of a call; 0 if it cannot be run."""
        return 0.0 if self._problem(call) else most_usd(self.by_name[call.name], call.arguments)

    def _problem(self, call) -> str | None:
        """Returns why a call cannot be run; None if it can."""
        if call.error:
            return call.error
        if call.name not in self.by_name:
            return f"no tool named {call.name!r}; the tools are {', '.join(self.by_name)}"
        problem = argument_error(call.arguments, self.by_name[call.name].parameters)
        return problem and f"{call.name}: {problem}"

    async def execute(self, call: ToolCall) -> ToolResult:
        """Runs one call. A call that cannot be run returns the reason, and costs nothing."""
        if problem := self._problem(call):
            return refused(problem)
        tool = self.by_name[call.name]
        try:
            if tool.blocking:
                result = await in_thread(tool.call, call.arguments)
            else:
                result = tool.call(call.arguments)
        except Exception as error:  # whatever a tool raises is an observation
            problem = f"Error: {call.name} failed: {type(error).__name__}: {error}"
            return ToolResult(problem, error=True, infrastructure=is_infrastructure(error))
        if len(result.content) <= MAX_OBSERVATION_CHARS:
            return result
        return replace(result, content=result.content[:MAX_OBSERVATION_CHARS] + "\n[cut]")

    async def reply(self, content: str) -> None:
        """Returns None: the first message without a call is the answer."""

    def score(self, answer: str) -> float:
        """Returns the grade of the answer."""
        return self._grade(answer)


def refused(problem: str) -> ToolResult:
    """Returns the observation of a call that is not run."""
    return ToolResult(f"Error: {problem}", error=True, refused=True)


def function_schema(tool: Tool) -> Json:
    """Returns the OpenAI function object that stands in the prompt for `tool`."""
    function = {
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.parameters,
    }
    return {"type": "function", "function": function}


async def in_thread(call: Callable[[Any], Any], argument: Any) -> Any:
    """Returns `call(argument)` from a daemon thread."""
    return await asyncio.wrap_future(in_daemon(lambda: call(argument)))
