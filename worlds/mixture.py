"""Which world every task of a run comes from: worlds with weights, mixed evenly. Pure; it knows the worlds by name only.

The places of a run are counted 0, 1, 2, ... through the warm start and GRPO. Place i belongs to the world into whose share of [0, 1) the number
(u + i * (sqrt(5) - 1) / 2) mod 1 falls, with u drawn from the seed: of any n places in a row a world gets its share, give or take one or two
(Weyl's equidistribution; the golden ratio has the smallest discrepancy). The world's own tasks come in their order.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter

from nanorchestra.errors import UserError

_GOLDEN = (math.sqrt(5) - 1) / 2


def parse_mixture(text: str, where: str) -> dict[str, float]:
    """{"miniature": 0.99, "data/": 0.01} of "miniature=0.99, data/=0.01"; weights add up to 1, one that is not given counts as 1. UserError."""
    weights: dict[str, float] = {}
    for entry in text.split(","):
        name, equals, number = (
            (part.strip() for part in entry.rpartition("="))
            if "=" in entry
            else (entry.strip(), "", "1")
        )
        try:
            weight = float(number)
        except ValueError:
            weight = math.nan
        if not 0 < weight < math.inf:
            raise UserError(
                f"{where} is {text!r}: the weight of {name!r} is {number!r}; it must be a number above 0"
            )
        if not name or name in weights:
            raise UserError(
                f"{where} is {text!r}: {f'{name!r} is there twice' if name else 'an entry has no world'}; it must be like 'miniature=0.9, data/=0.1'"
            )
        weights[name] = weight
    return {name: weight / sum(weights.values()) for name, weight in weights.items()}


class Mixture:
    """`weights`: world -> share, adding up to 1. A world's n-th place is its task n, whatever else is mixed in, so that none comes twice before all have."""

    def __init__(self, weights: dict[str, float], seed: int):
        self.weights, self.start = weights, random.Random(f"{seed}/mixture").random()
        self._ends = list(itertools.accumulate(weights.values()))
        self._places: list[tuple[str, int]] = []  # all from 0 up to the furthest that was asked for
        self._had: Counter[str] = Counter()

    def places(self, count: int, start: int = 0) -> list[tuple[str, int]]:
        """(world, number of the task in it) of the places start .. start + count; a pure function of them, the weights and the seed."""
        for place in range(len(self._places), start + count):
            point = (self.start + place * _GOLDEN) % 1
            name = next(
                (name for name, end in zip(self.weights, self._ends) if point < end),
                list(self.weights)[-1],
            )
            self._places.append((name, self._had[name]))
            self._had[name] += 1
        return self._places[start : start + count]
