"""The protocol of worlds: where tasks come from, and the environments of attempts at them.

A world may also demonstrate its tasks, in lessons.
"""

from dataclasses import dataclass
from typing import Any, Literal, Protocol

from nanorchestra.agent.environment import Environment
from nanorchestra.records import Task, ToolCall, ToolResult

# "all": every task of a world that has an end, offered as held-out ones are.
Split = Literal["train", "held_out", "all"]


class World(Protocol):
    """Gives tasks, and an environment for each attempt at one.

    A task is a function of the world's seed, its split and its index, so every rank and a resumed
    run have the same. A task states the user's preference and the bounds of cost and latency, from
    which its reward is computed.
    """

    name: str

    def size(self, split: Split) -> int | None:
        """Returns how many different tasks a split has; None: without end."""

    def task(self, split: Split, index: int) -> Task:
        """Returns a task; an index beyond the size begins anew."""

    def environment(self, task: Task, seed: int) -> Environment:
        """Returns one attempt at a task; `seed` decides what simulated experts say."""


@dataclass(frozen=True)
class Lesson:
    """One demonstrated turn: a thought, then a call or a message.

    `result` is the answer of the tool or of the user; None after the last message. `logprob` is the
    teacher's log-probability of the turn, in nats: of what it chose, the form being given.
    """

    thought: str
    content: str = ""
    call: ToolCall | None = None
    result: ToolResult | None = None
    logprob: float = 0.0


def demonstrates(world: Any) -> bool:
    """Returns whether a world demonstrates its tasks; of a mixture, whether one of its worlds does.

    Such a world has lesson(index, most_tools=0) -> (Environment, Iterable[Lesson]): an environment,
    and a teacher's turns in it, which act as they are iterated over. most_tools: tools on offer at
    most, 0 for no limit.
    """
    mixed = getattr(world, "worlds", None)
    if mixed is not None:
        return any(demonstrates(part) for part in mixed.values())
    return hasattr(world, "lesson")
