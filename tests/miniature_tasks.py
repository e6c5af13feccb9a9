"""Tasks and attempts of the miniature."""

from worlds.miniature.world import Miniature


def tasks_of(split, count, seed=0, **options):
    """The first tasks of a split."""
    world = Miniature(seed, None, **options)
    return [world.task(split, index) for index in range(count)]


def environment(task, seed, sandbox):
    """One attempt at a task."""
    return Miniature(0, sandbox).environment(task, seed)
