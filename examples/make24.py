"""An environment of your own: one class, whose public methods are the tools.

    python train.py --task.world examples/make24.py --dry-run
    python evaluate.py --world examples/make24.py --policy MODEL@URL --tasks 20

docs/worlds.md explains it.
"""

import random


class Make24:
    """The user wants a number from four others."""

    def reset(self, seed: int) -> str:
        """Draws the task."""
        rng = random.Random(seed)
        self.numbers = [rng.randint(1, 9) for _ in range(4)]
        self.target = rng.randint(10, 40)
        return f"Come as near to {self.target} as you can by adding some of {self.numbers}."

    def add(self, numbers: list[int]) -> int:
        """Adds some of the user's numbers."""
        if any(numbers.count(n) > self.numbers.count(n) for n in numbers):
            raise ValueError(f"the numbers are {self.numbers}")
        return sum(numbers)

    def reward(self, answer: str) -> float:
        """Partial credit: a tenth less for each step that the sum is away."""
        return max(0.0, 1.0 - abs(self.target - int(answer)) / 10) if answer.isdigit() else 0.0
