"""An orchestrator as an expert of another orchestrator."""

import functools
import threading
from dataclasses import dataclass, field, replace
from pathlib import Path

from nanorchestra.agent.environment import Tool, ToolEnvironment
from nanorchestra.agent.load import load_rollout
from nanorchestra.agent.loop import Limits, Rollout
from nanorchestra.errors import require
from nanorchestra.records import Preference, Task, ToolResult, part
from nanorchestra.schemas import Json, arguments_schema

MAX_CONTEXT = 16_384  # tokens of a conversation


@dataclass
class Orchestrator:
    """Another orchestrator as an expert: a checkpoint at `model`, with `tools` of its own.

    Its tools are those of its catalogue, and itself while `depth` is above 1. The checkpoint is
    loaded at the first call, once for each depth, and works on one task at a time.
    """

    name: str
    description: str
    model: str
    tools: list[Tool] = field(default_factory=list)
    depth: int = 1
    turns: int = 10
    kind, blocking = "expert", True
    parameters = arguments_schema(task="string")

    def __post_init__(self) -> None:
        require(
            (Path(self.model) / "config.json").exists(),
            f"{self.name}: model is {self.model!r}; it must be a checkpoint's directory",
        )

    def call(self, arguments: Json) -> ToolResult:
        """Returns its answer to the task, with the cost of its tokens and of all its calls."""
        task = Task(self.name, arguments["task"], Preference(), {})
        inner = [replace(self, depth=self.depth - 1)] if self.depth > 1 else []
        env = ToolEnvironment(task, [*self.tools, *inner])
        rollout, free = _loaded(self.model, self.turns, self.depth)
        with free:
            (attempt,) = rollout.run([env], [0])
        made = (pair for t in attempt.turns for pair in zip(t.calls, t.results, strict=False))
        parts = [part(call.name, call.arguments, result) for call, result in made]
        text = attempt.answer or f"Error: {self.name} found no answer ({attempt.status})"
        spent = attempt.cost_usd, attempt.latency_s
        failed = attempt.status == "infrastructure"
        error = failed or not attempt.answer
        return ToolResult(text, *spent, error=error, infrastructure=failed, parts=parts)


@functools.cache
def _loaded(model, turns, depth) -> tuple[Rollout, threading.Lock]:
    """Returns a checkpoint for the orchestrators of one depth, and the lock of its user."""
    limits = Limits(turns, turn_tokens=MAX_CONTEXT, context_tokens=MAX_CONTEXT)
    return load_rollout(Path(model), limits, {"temperature": 0.0}, 1), threading.Lock()
