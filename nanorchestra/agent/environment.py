"""The environment of an attempt: first messages, tools, the execution of calls, the score.

`ToolEnvironment` is the one most worlds need: tools, a question and a grade for the answer. A tool
never raises into the loop: an exception becomes an error observation, which the policy can act on.
A call is prepared before it runs, so that the loop knows the most that it can cost.
"""

import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import islice
from typing import Protocol

from nanorchestra.errors import WorldError
from nanorchestra.evidence import Evidence
from nanorchestra.records import Task, ToolCall, ToolResult, Trajectory
from nanorchestra.schemas import Json, argument_error
from nanorchestra.tools.failures import failed, is_infrastructure
from nanorchestra.tools.http import EndpointError
from nanorchestra.tools.limits import (
    Allowance,
    PreparedCall,
    RefusedError,
    Tool,
    refused_call,
    within,
)
from nanorchestra.tools.threads import in_thread

RESULT_CHARS = 16_000  # of texts without spaces
WORD = re.compile(r"\S+")
NOTE_CHARS = 80  # of a note at most
PIECE_CHARS = 1 << 20
NOTE = re.compile(r"\n\[[\d,]+ of (?P<whole>[\d,]+) (?:words|characters)\]\Z")


class Environment(Protocol):
    """One attempt at one task. `tools` are OpenAI function objects, `kinds` maps some to a kind.

    `evidence` are the findings of the attempt. `prompt` are the ids of messages and tools, empty if
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

    def prepare(self, call: ToolCall, allowance: Allowance) -> PreparedCall:
        """Returns a call as it may be made; never raises for what the policy wrote.

        A call that cannot be made within the allowance runs to a refused_call, for nothing.
        """

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

    def prepare(self, call: ToolCall, allowance: Allowance) -> PreparedCall:
        """Returns a call as it may be made under an allowance, smaller if need be."""
        if problem := self._problem(call):
            return refused_call(problem)
        try:
            tool = within(self.by_name[call.name], call.arguments, allowance)
        except RefusedError as error:
            return refused_call(str(error))
        return PreparedCall(lambda: self._run(tool, call), tool.most_usd(call.arguments))

    def _problem(self, call) -> str | None:
        """Returns why a call cannot be run; None if it can."""
        if call.error:
            return call.error
        if call.name not in self.by_name:
            return f"no tool named {call.name!r}; the tools are {', '.join(self.by_name)}"
        problem = argument_error(call.arguments, self.by_name[call.name].parameters)
        return problem and f"{call.name}: {problem}"

    async def _run(self, tool, call) -> ToolResult:
        """Runs a call of `tool`, which keeps to its allowance."""
        if tool.blocking:
            return await in_thread(observed, tool, call, tool.result_words)
        return observed(tool, call, tool.result_words)

    async def reply(self, content: str) -> None:
        """Returns None: the first message without a call is the answer."""

    def score(self, answer: str) -> float:
        """Returns the grade of the answer."""
        return self._grade(answer)


def observed(tool: Tool, call: ToolCall, words: int) -> ToolResult:
    """Returns the result of a call, cut to `words` words; whatever the tool raises is one too.

    A cancellation, an interrupt or a panic that a tool raises is no ordinary exception: out of the
    tool's thread it would end other attempts, or the process. Ctrl-C reaches the main thread alone.
    """
    try:
        result = tool.call(call.arguments)
        return replace(result, content=shortened(result.content, words))
    except BaseException as error:
        in_main = threading.current_thread() is threading.main_thread()
        if in_main and isinstance(error, KeyboardInterrupt):
            raise
        return failed(call.name, error)


def score_answer(env: Environment, t: Trajectory) -> None:
    """Fills in the outcome of a trajectory's answer, and how it was judged; may wait for a judge.

    A judge that does not answer is a failure of the infrastructure, whatever its status: the
    policy has not chosen it.
    """
    try:
        t.outcome = env.score(t.answer)
    except Exception as error:
        failed = isinstance(error, EndpointError) or is_infrastructure(error)
        if isinstance(error, WorldError) or not failed:
            raise
        t.status = "infrastructure"
        problem = f"Error: the judge did not answer ({error})"
        t.turns[-1].results[-1:] = [ToolResult(problem, error=True, infrastructure=True)]
    t.verdict = env.verdict


def shortened(text: str, words: int, chars: int = RESULT_CHARS) -> str:
    """Returns the beginning of a text, with a note of how much it is: "[1,200 of 3,000 words]".

    A text of fewer words and characters is returned as it is. One that was shortened before is told
    by its note, which then counts what the whole text had.
    """
    note = NOTE.search(text, max(0, len(text) - NOTE_CHARS))
    body = text[: note.start()] if note else text
    begun = islice(WORD.finditer(body, 0, chars + 1), words)
    ends = [match.end() for match in begun if match.end() <= chars]
    if len(body.rstrip()) == (ends[-1] if ends else 0):  # all words fit
        return text if len(body) <= chars else body.rstrip()
    if ends:
        whole = note["whole"] if note else f"{count_words(body):,}"
        return f"{body[: ends[-1]]}\n[{len(ends):,} of {whole} words]"
    whole = note["whole"] if note else f"{len(body):,}"  # one word fills the room
    return f"{body[:chars]}\n[{min(chars, len(body)):,} of {whole} characters]"


def count_words(text: str) -> int:
    """Returns the number of words, counted in pieces: all words of 50 MB at once fill 1 GB."""
    count, inside = 0, False
    for start in range(0, len(text), PIECE_CHARS):
        piece = text[start : start + PIECE_CHARS]
        count += len(piece.split())
        if inside and not piece[0].isspace():  # a word that the piece before began
            count -= 1
        inside = not piece[-1].isspace()
    return count


def function_schema(tool: Tool) -> Json:
    """Returns the OpenAI function object that stands in the prompt for `tool`."""
    function = {
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.parameters,
    }
    return {"type": "function", "function": function}
