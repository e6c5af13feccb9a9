"""Opens worlds. A stand-in until the World protocol is merged: delete this file then."""

from nanorchestra.agent.environment import Environment
from nanorchestra.config import TaskSection
from nanorchestra.records import Task
from nanorchestra.tools.sandbox import Sandbox
from nanorchestra.tools.spending import Spending
from worlds.mixture import Worlds
from worlds.world import Split, World


class WorldsAdapter:
    """worlds.mixture.Worlds as a World."""

    def __init__(self, settings: TaskSection, seed: int, sandbox: Sandbox, spending: Spending):
        self.name = settings.world
        self.worlds = Worlds(settings, seed, sandbox, spending)

    def size(self, split: Split) -> int | None:
        """Returns how many different tasks a split has; None: without end."""
        if not self.worlds.domains:
            return None
        names = ["train", "held_out"] if split == "all" else [split]
        sizes = []
        for world in self.worlds.domains.values():
            sizes.append(sum(len(world.splits[name]) for name in names))
        return min(sizes)

    def task(self, split: Split, index: int) -> Task:
        """Returns task `index` of a split, round and round."""
        if split != "all":
            return self.worlds.tasks(1, index, split)[0]
        (world,) = self.worlds.domains.values()
        held_out = world.splits["held_out"]
        world.splits["held_out"] = [*world.splits["train"], *held_out]
        task = world.task("held_out", index)
        world.splits["held_out"] = held_out
        return task

    def environment(self, task: Task, seed: int) -> Environment:
        """Returns the environment of one attempt."""
        return self.worlds.environment(task, seed)


def open_world(
    settings: TaskSection, seed: int, sandbox: Sandbox, spending: Spending | None = None
) -> World:
    """Returns the world that task.world names. UserError."""
    return WorldsAdapter(settings, seed, sandbox, spending)
