"""A mixture of worlds: the world of each task is drawn by its share."""

import random
from collections.abc import Iterable, Sequence

from nanorchestra.agent.environment import Environment
from nanorchestra.agent.world import Lesson, Split, World, demonstrates
from nanorchestra.records import Task


class Mixture:
    """A world whose tasks come from several worlds, each by its share.

    Task i of a split is task i of one of the worlds, which is drawn from the seed and i.
    """

    def __init__(self, name: str, worlds: dict[str, World], shares: dict[str, float], seed: int):
        self.name = name
        self.worlds = worlds  # by name
        self.shares = shares
        self.seed = seed

    def _drawn(self, names: Sequence[str], index: int) -> World:
        """Returns the world of a place, one of those named."""
        rng = random.Random(f"{self.seed}/mixture/{index}")
        (name,) = rng.choices(names, [self.shares[name] for name in names])
        return self.worlds[name]

    def size(self, split: Split) -> int | None:
        """Returns how many different tasks the worlds have together; None: without end."""
        sizes = [world.size(split) for world in self.worlds.values()]
        return None if None in sizes else sum(sizes)

    def task(self, split: Split, index: int) -> Task:
        """Returns the task of a place."""
        return self._drawn(list(self.worlds), index).task(split, index)

    def environment(self, task: Task, seed: int) -> Environment:
        """Returns one attempt at a task, in the world that it is of."""
        return self.worlds[task.world].environment(task, seed)

    def lesson(self, index: int, most_tools: int = 0) -> tuple[Environment, Iterable[Lesson]]:
        """Returns a lesson of a world that demonstrates."""
        taught = [name for name, world in self.worlds.items() if demonstrates(world)]
        return self._drawn(taught, index).lesson(index, most_tools)
