"""Which tasks come more often: those that the policy sometimes solves. Pure; it knows tasks by their places in the run's order, and by their buckets.

With a success rate p, the outcomes within a group vary by p (1 - p), and that is what GRPO learns from: "sampling for learnability" (arXiv 2408.15099; for
language models arXiv 2502.12272). A bucket's weight is max(floor, 4 p (1 - p)), so that at worst its tasks come `floor` times as often as
those of a bucket that succeeds half of the time.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import fmean

MEMORY = 16  # groups over which a rate is a mean, the newest counting most


@dataclass
class Curriculum:
    """Draws places; dataclasses.asdict is its state, Curriculum(**state) goes on exactly.

    The run's order is walked from `place` on. A place is taken with the weight of its bucket as probability, by a draw from (seed, place); given is
    then the bucket's oldest place that was not given yet. So the share of a bucket is its share of the order times its weight, every bucket of the order
    keeps coming, and within a bucket no task comes twice before all came once.
    """

    seed: int
    floor: float
    place: int = 0
    rates: dict[str, list[float]] = field(
        default_factory=dict
    )  # bucket -> [success rate, groups seen]; 1/2 until there are some
    left: dict[str, list[int]] = field(
        default_factory=dict
    )  # bucket -> places walked past and not given yet, oldest first

    def draw(self, count: int, bucket: Callable[[int], str]) -> list[int]:
        """The next `count` places; `bucket(place)` says which bucket its task is of."""
        drawn: list[int] = []
        while len(drawn) < count:
            name = bucket(self.place)
            self.left.setdefault(name, []).append(self.place)
            if random.Random(f"{self.seed}/curriculum/{self.place}").random() < self.weight(name):
                drawn.append(self.left[name].pop(0))
            self.place += 1
        return drawn

    def learn(self, bucket: str, outcomes: Sequence[float]) -> None:
        """Takes in a group's outcomes, each in 0..1."""
        rate, groups = self.rates.get(bucket, (0.5, 0))
        self.rates[bucket] = [rate + (fmean(outcomes) - rate) / min(groups + 2, MEMORY), groups + 1]

    def weight(self, bucket: str) -> float:
        """In floor..1."""
        rate = self.rates.get(bucket, (0.5,))[0]
        return max(self.floor, 4 * rate * (1 - rate))

    def weights(self) -> dict[str, float]:
        return {bucket: self.weight(bucket) for bucket in sorted(self.left)}
