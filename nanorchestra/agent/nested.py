"""An orchestrator as an expert of another orchestrator."""

from __future__ import annotations

import functools
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nanorchestra.agent.environment import Tool, ToolEnvironment
from nanorchestra.agent.load import load_rollout
from nanorchestra.agent.loop import Limits, Rollout
from nanorchestra.records import Preference, Task, ToolResult, arguments_schema, part

MAX_CONTEXT = 16_384  # tokens of a conversation


@dataclass
class Orchestrator:
    """Another orchestrator as an expert: a checkpoint at `model`, with `tools` of its own.

    Its tools are those of its catalogue, itself among them while `depth` is above 1. The checkpoint
    is loaded at the first call, once for each depth, and works on one task at a time.
    """

    name: str
    description: str
    model: str
    tools: list[Tool] = field(default_factory=list)
    depth: int = 1
    turns: int = 10
    kind, blocking = "expert", True
    parameters = arguments_schema(task="string")

    def call(self, arguments: dict[str, Any]) -> ToolResult:
        """Returns its answer to the task, with the cost of its tokens and of all its calls."""
        task = Task(self.name, arguments["task"], Preference(), {})
        env = ToolEnvironment(task, self.tools, grade=lambda answer: 0.0)
        rollout, free = _loaded(self.model, self.turns, self.depth)
        with free:
            (attempt,) = rollout.run([env], [0])
        text = attempt.answer or f"Error: {self.name} found no answer ({attempt.status})"
        return ToolResult(
            text,
            attempt.cost_usd,
            attempt.latency_s,
            error=not attempt.answer,
            parts=[
                part(call.name, call.arguments, result)
                for turn in attempt.turns
                for call, result in zip(turn.calls, turn.results, strict=False)
            ],
        )


@functools.cache
def _loaded(model: str, turns: int, depth: int) -> tuple[Rollout, threading.Lock]:
    """Returns a checkpoint for the orchestrators of one depth, and the lock of its user."""
    limits = Limits(turns, turn_tokens=MAX_CONTEXT, context_tokens=MAX_CONTEXT)
    return load_rollout(Path(model), limits, 0.0, 1), threading.Lock()
