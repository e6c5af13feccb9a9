"""The records that travel through the house: Task, ToolCall, ToolResult, Turn, Trajectory. Plain data, no behaviour, no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class ToolCall:
    """One tool invocation as the policy wrote it. `error` says why it cannot be run (bad JSON, no name, ...), else None."""

    name: str
    arguments: dict[str, Any]
    raw: str = ""
    error: str | None = None


@dataclass(frozen=True)
class ParsedTurn:
    """One assistant turn, taken apart. `truncated` is true when the turn ended inside its reasoning or inside a call."""

    reasoning: str
    content: str
    calls: tuple[ToolCall, ...]
    truncated: bool = False

    @property
    def well_formed(self) -> bool:
        """True if nothing was cut off and every call is JSON with a name and an object of arguments."""
        return not self.truncated and all(call.error is None for call in self.calls)


@dataclass(frozen=True)
class ToolResult:
    """What a call returned. Cost in US dollars, latency in seconds; tokens are those of an expert, 0 for other tools.

    `infrastructure` marks a failure that is not the policy's: the attempt is left out of its group.
    """

    content: str
    cost_usd: float = 0.0
    latency_s: float = 0.0
    error: bool = False
    infrastructure: bool = False
    input_tokens: int = 0
    output_tokens: int = 0
    alias: str = ""  # who did it, where the call's name does not say: the expert behind call_expert


@dataclass(frozen=True)
class Preference:
    """What the user wants: in words (it stands in the prompt) and as weights (they stand in the reward).

    `tools` maps a tool's name to its weight: negative to avoid the tool, positive to favour it.
    """

    text: str = ""
    outcome: float = 1.0
    cost: float = 0.0
    latency: float = 0.0
    tools: dict[str, float] = field(default_factory=dict)

    @property
    def avoided(self) -> tuple[str, ...]:
        return tuple(name for name, weight in self.tools.items() if weight < 0)


@dataclass(frozen=True)
class Task:
    """One problem to practise on. `data` is the world's own: tools offered, gold answer, hidden facts. JSON throughout."""

    id: str
    question: str
    preference: Preference
    data: dict[str, Any]


@dataclass
class Turn:
    """One sampling of the policy and what its calls brought back. `start:end` are the sampled ids within Trajectory.ids, which were drawn
    after `context:start`: the whole trajectory so far, or a prompt of the turn's own."""

    start: int
    end: int
    finish_reason: str
    calls: list[ToolCall] = field(default_factory=list)
    results: list[ToolResult] = field(default_factory=list)
    context: int = 0
    advantage: float | None = None  # of its ids, where turns have shares of their own


@dataclass
class Trajectory:
    """All turns of one attempt at a task. The four lists have one entry per id; only ids with sampled[i] enter the loss. Where every turn has
    a prompt of its own, the ids are prompt and turn, prompt and turn, ... A log-probability is None where a model behind an endpoint wrote the id.

    trainer_logprobs: what the trainer makes of the sampled ids, in their order, before its update; empty where it did not train on them.
    status: "answered", "turn_limit", "token_limit" (a cut), or "infrastructure" (no fault of the policy: left out of its group).
    """

    task_id: str
    seed: int
    prompt_length: int
    ids: list[int]
    sampled: list[bool]
    logprobs: list[float | None]
    weight_versions: list[int]
    turns: list[Turn] = field(default_factory=list)
    status: str = "answered"
    answer: str = ""
    well_formed: bool = True
    outcome: float = 0.0
    cost_usd: float = 0.0
    latency_s: float = 0.0
    calls: dict[str, int] = field(default_factory=dict)
    reward: float = 0.0
    advantage: float = 0.0
    trainer_logprobs: list[float] = field(default_factory=list)
