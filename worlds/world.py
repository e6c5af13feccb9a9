"""What a world is. Stands in for the file of helper `world` until the merge."""

from typing import Literal, Protocol

from nanorchestra.agent.environment import Environment
from nanorchestra.records import Task

Split = Literal["train", "held_out", "all"]


class World(Protocol):
    """Gives tasks, and an environment for each attempt at one."""

    name: str

    def size(self, split: Split) -> int | None:
        """Returns how many different tasks a split has; None: without end."""

    def task(self, split: Split, index: int) -> Task:
        """Returns task `index` of a split, round and round."""

    def environment(self, task: Task, seed: int) -> Environment:
        """Returns the environment of one attempt."""
