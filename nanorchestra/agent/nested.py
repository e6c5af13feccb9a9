"""An orchestrator as an expert of another orchestrator.

It works under the allowance of its caller: the same bans, and dollars and seconds that are part of
what the caller may spend. So a limit holds for a whole tree. Its own time is virtual, as that of
the caller's tokens, so the wait for another task's end is not part of it.
"""

import functools
import math
import threading
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from nanorchestra.agent.environment import Tool, ToolEnvironment
from nanorchestra.agent.load import load_rollout
from nanorchestra.agent.loop import AttemptLimits, Rollout
from nanorchestra.errors import UserError, require
from nanorchestra.model.hub import is_model, local_model, names_model
from nanorchestra.records import RESULT_WORDS, Preference, Task, ToolResult, part
from nanorchestra.schemas import Json, arguments_schema
from nanorchestra.tools.allowance import UNLIMITED, Allowance, too_dear
from nanorchestra.tools.devices import current, device_named
from nanorchestra.tools.failures import failed

MAX_CONTEXT = 16_384  # tokens of a conversation
WAIT_S = 600.0  # for the end of another task
_LOADING = threading.Lock()  # two threads that ask first would load twice


@dataclass
class Orchestrator:
    """Another orchestrator as an expert: a checkpoint `model`, with `tools` of its own.

    `model` is a user's word for it, and then where it lies; one of the hub is downloaded at once.
    Its tools are those of its catalogue, and itself while `depth` is above 1. The checkpoint is
    loaded by `load`, else at the first call, once for each depth, and works on one task at a time.
    `device` is where; None: this thread's GPU, else the CPU. `allowance` is what its caller leaves
    to it; without one, what it can cost has no bound. UserError unless `model` is a checkpoint.
    """

    name: str
    description: str
    model: str
    tools: list[Tool] = field(default_factory=list)
    depth: int = 1
    turns: int = 10
    allowance: Allowance = UNLIMITED
    result_words: int = RESULT_WORDS
    device: torch.device | None = None
    kind, blocking = "expert", True
    parameters = arguments_schema(task="string")

    def __post_init__(self) -> None:
        wrong = f"{self.name}: model is {self.model!r}; it must be a checkpoint or a hub id"
        require(names_model(self.model), wrong)
        path = local_model(self.model)
        require(is_model(path), wrong)
        self.model = str(path)
        self.device = self.device or device_named()  # before a thread with another one calls it

    def load(self) -> None:
        """Loads the checkpoint for each depth, before other engines take the memory. UserError."""
        for depth in range(1, self.depth + 1):
            _loaded(self.model, self.turns, depth, self.device)

    def within(self, arguments: Json, allowance: Allowance) -> "Orchestrator":
        """Returns the orchestrator with its caller's bans and share of the dollars."""
        usd = min(allowance.usd, allowance.share)
        if usd <= 0:
            raise too_dear(self.name, math.inf, usd)
        return replace(self, allowance=replace(allowance, usd=usd))

    def most_usd(self, arguments: Json) -> float:
        """Returns the US dollars that its caller leaves to it."""
        return self.allowance.usd

    def preference(self) -> Preference:
        """Returns what its caller's user wants, as far as it concerns its own tools."""
        usd, seconds = self.allowance.usd, self.allowance.seconds
        wanted = self.allowance.preference
        names = {tool.name for tool in self.tools}
        own = {name: weight for name, weight in wanted.tools.items() if name in names}
        return replace(
            wanted,
            tools=own,
            usd=usd if usd < math.inf else None,
            seconds=seconds if seconds < math.inf else None,
        )

    def call(self, arguments: Json) -> ToolResult:
        """Returns its answer to the task, with the cost of its tokens and of all its calls.

        Where it cannot work, the infrastructure has failed: its task is text, whatever it says.
        """
        try:
            return self._answer(arguments["task"])
        except Exception as error:
            return failed(self.name, error, infrastructure=True)

    def _answer(self, text) -> ToolResult:
        task = Task(self.name, text, self.preference())
        inner = [replace(self, depth=self.depth - 1)] if self.depth > 1 else []
        env = ToolEnvironment(task, [*self.tools, *inner])
        rollout, free = _loaded(self.model, self.turns, self.depth, self.device)
        if not free.acquire(timeout=WAIT_S):
            raise TimeoutError(f"it worked on other tasks for {WAIT_S:g} s")
        try:
            with current(self.device):
                (attempt,) = rollout.run([env], [0])
        finally:
            free.release()
        made = (pair for t in attempt.turns for pair in zip(t.calls, t.results, strict=False))
        parts = [part(call.name, call.arguments, result) for call, result in made]
        why = f"{attempt.status}: {attempt.failure}" if attempt.failure else attempt.status
        return ToolResult(
            attempt.answer or f"Error: {self.name} has no answer ({why})",
            attempt.cost_usd,
            attempt.latency_s,
            error=not attempt.answer,
            infrastructure=attempt.status == "infrastructure",
            parts=parts,
        )


def _loaded(model, turns, depth, device) -> tuple[Rollout, threading.Lock]:
    """Returns a checkpoint for the orchestrators of one depth, and the lock of its user."""
    with _LOADING, current(device):
        return _load(model, turns, depth, device)


@functools.cache
def _load(model, turns, depth, device) -> tuple[Rollout, threading.Lock]:
    limits = AttemptLimits(turns, turn_tokens=MAX_CONTEXT, context_tokens=MAX_CONTEXT)
    options = {"device": device, "least_pool": True}
    try:
        rollout = load_rollout(Path(model), limits, {"temperature": 0.0}, 1, **options)
    except torch.OutOfMemoryError:
        raise UserError(f"{model}: it does not fit in the free memory of {device}") from None
    return rollout, threading.Lock()
