"""The environment of an attempt: first messages, tools, the execution of calls, the score.

`ToolEnvironment` is the one most worlds need: tools, a question and a grade for the answer. The way
of a call is in tool.py.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from nanorchestra.agent.evidence import Evidence
from nanorchestra.agent.failures import EndpointError, is_infrastructure
from nanorchestra.agent.tool import Allowance, PreparedCall, Tool, prepare, refused
from nanorchestra.errors import WorldError
from nanorchestra.records import Task, ToolCall, ToolResult, Trajectory
from nanorchestra.schemas import Json

ANSWER = "answer"  # kind of a tool that gives the final answer


class Environment(Protocol):
    """One attempt at one task. `tools` are OpenAI function objects, `kinds` maps some to a kind.

    `evidence` are the findings of the attempt. `prompt` are the ids of messages and tools, empty if
    they are not encoded yet. `blocking`: whether `score` may wait for a judge; it then runs in a
    thread and does not hold up other attempts. `verdict` is a word for how `score` judged the
    answer, "" if there is nothing to say.
    """

    task: Task
    messages: list[Json]
    tools: list[Json]
    kinds: dict[str, str]
    evidence: Evidence
    prompt: Sequence[int]
    blocking: bool
    verdict: str

    def prepare(self, call: ToolCall, allowance: Allowance) -> PreparedCall:
        """Returns a call as it may be made under an allowance. Raises RefusedError, no other."""

    async def reply(self, content: str) -> ToolResult | None:
        """Returns the user's reply to a message without calls; None if it is the answer."""

    def score(self, answer: str) -> float:
        """Returns the outcome in [0, 1]; a judge may raise EndpointError."""


class ToolEnvironment:
    """A question, the tools to answer it with, and `grade(answer) -> outcome in [0, 1]`."""

    verdict, prompt, blocking = "", (), False

    def __init__(
        self, task: Task, tools: Sequence[Tool], grade: Callable[[str], float] = lambda answer: 0.0
    ):
        self.task, self._grade = task, grade
        self.evidence = Evidence(task.question)
        self.by_name = {tool.name: tool.for_attempt(self.evidence) for tool in tools}
        self.tools = [tool.schema for tool in tools]
        self.kinds = {tool.name: tool.kind for tool in tools}
        words = " ".join(filter(None, (task.question, task.preference.words)))
        self.messages = [{"role": "user", "content": words}]

    def prepare(self, call: ToolCall, allowance: Allowance) -> PreparedCall:
        """Returns a call as it may be made under an allowance. Raises RefusedError, no other."""
        return prepare(self.by_name, call, allowance)

    async def reply(self, content: str) -> ToolResult | None:
        """Returns None: the first message without a call is the answer, unless a tool gives it."""
        if ANSWER in self.kinds.values():
            return refused("no tool was called; call one of the tools")
        return None

    def score(self, answer: str) -> float:
        """Returns the grade of the answer."""
        return self._grade(answer)


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
