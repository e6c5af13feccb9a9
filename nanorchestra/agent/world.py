"""The protocol of worlds: where tasks come from, and the environments of attempts at them."""

from collections.abc import Iterable
from typing import Any, Literal, Protocol

from nanorchestra.agent.environment import Environment
from nanorchestra.agent.lessons import Lesson
from nanorchestra.records import Task

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


class Teacher(Protocol):
    """A world that also demonstrates its tasks, for a warm start."""

    def lesson(self, index: int, most_tools: int = 0) -> tuple[Environment, Iterable[Lesson]]:
        """Returns an environment, and a teacher's turns in it; they act as they are iterated over.

        most_tools: tools on offer at most, 0 for no limit.
        """


def demonstrates(world: Any) -> bool:
    """Returns whether a world is a Teacher, too; of a mixture, whether one of its worlds is."""
    mixed = getattr(world, "worlds", None)
    if mixed is not None:
        return any(demonstrates(part) for part in mixed.values())
    return hasattr(world, "lesson")
