"""The protocol of worlds: where tasks come from, and the environments of attempts at them."""

from collections.abc import Iterable
from typing import Any, Literal, Protocol

from nanorchestra.agent.environment import Environment
from nanorchestra.agent.lessons import Lesson
from nanorchestra.records import Task

Split = Literal["train", "held_out", "all"]


class World(Protocol):
    name: str

    def size(self, split: Split) -> int | None: ...
    def task(self, split: Split, index: int) -> Task: ...
    def environment(self, task: Task, seed: int) -> Environment: ...
    def lesson(self, index, most_tools=0) -> tuple[Environment, Iterable[Lesson]] | None: ...


def demonstrates(world: Any) -> bool:
    return hasattr(world, "lesson")
