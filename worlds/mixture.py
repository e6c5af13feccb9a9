"""A mixture of worlds: a shuffled deck of tasks, drawn from a seed."""

import random
from collections.abc import Iterable
from functools import lru_cache

from nanorchestra.agent.environment import Environment
from nanorchestra.agent.lessons import Lesson
from nanorchestra.agent.world import Split, World, demonstrates
from nanorchestra.records import Task

CARDS = 1000  # of a deck


class Mixture:
    """A world whose tasks come from several worlds, each by its share.

    Place i of a split is card i of a row of decks. A deck has CARDS cards, of each world by its
    share, one at least, and is shuffled from the seed and its number. The tasks of a world are
    numbered by its cards, so each world goes through its tasks in order.
    """

    def __init__(self, name: str, worlds: dict[str, World], shares: dict[str, float], seed: int):
        self.name = name
        self.worlds = worlds  # by name
        self.seed = seed
        self.cards = _cards(shares)
        self._deck = lru_cache(maxsize=4)(self._shuffled)

    def _shuffled(self, number: int) -> list[str]:
        """Returns deck `number`: names of worlds."""
        deck = []
        for name, count in self.cards.items():
            deck += [name] * count
        random.Random(f"{self.seed}/mixture/{number}").shuffle(deck)
        return deck

    def place(self, index: int) -> tuple[World, int]:
        """Returns the world of a place, and the index of the task in that world."""
        number, card = divmod(index, CARDS)
        deck = self._deck(number)
        name = deck[card]
        return self.worlds[name], number * self.cards[name] + deck[:card].count(name)

    def size(self, split: Split) -> int | None:
        """Returns how many different tasks the worlds have together; None: without end."""
        sizes = [world.size(split) for world in self.worlds.values()]
        return None if None in sizes else sum(sizes)

    def task(self, split: Split, index: int) -> Task:
        """Returns the task of a place."""
        world, index = self.place(index)
        return world.task(split, index)

    def environment(self, task: Task, seed: int) -> Environment:
        """Returns one attempt at a task, in the world that it is of."""
        return self.worlds[task.world].environment(task, seed)

    def lesson(self, index: int, most_tools: int = 0) -> tuple[Environment, Iterable[Lesson]]:
        """Returns a lesson of the place's world, or of the next place whose world demonstrates.

        With a limit of tools only the miniature's, if it is among the worlds: the long texts of a
        domain would dominate the loss while the model learns to copy.
        """
        taught = [name for name, world in self.worlds.items() if demonstrates(world)]
        if most_tools and "miniature" in taught:
            taught = ["miniature"]
        for place in range(index, index + CARDS):
            world, number = self.place(place)
            if world.name in taught:
                return world.lesson(number, most_tools)
        raise ValueError(f"{self.name}: none of its worlds demonstrates")


def _cards(shares: dict[str, float]) -> dict[str, int]:
    """Returns the cards of each world in a deck, by the largest remainders."""
    cards = {name: max(1, int(share * CARDS)) for name, share in shares.items()}
    by_remainder = sorted(shares, key=lambda name: int(shares[name] * CARDS) - shares[name] * CARDS)
    largest = max(cards, key=cards.get)
    for name in by_remainder[: max(0, CARDS - sum(cards.values()))]:
        cards[name] += 1
    cards[largest] += CARDS - sum(cards.values())  # what shares below one card have taken
    return cards
