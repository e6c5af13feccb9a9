"""An environment of your own: one class, whose public methods are the tools.

    python train.py --task.world examples/make24.py --dry-run
    python evaluate.py --world examples/make24.py --policy MODEL@URL --tasks 20

docs/worlds.md explains it.
"""

import random
import re


class Make24:
    """The user wants a number as the sum of some of four others."""

    def reset(self, seed: int) -> str:
        """Draws the task, which has a solution."""
        rng = random.Random(seed)
        self.numbers = [rng.randint(1, 9) for _ in range(4)]
        self.target = sum(rng.sample(self.numbers, rng.randint(2, 4)))
        return f"Which of {self.numbers} add up to {self.target}? Answer like 3 + 4."

    def add(self, numbers: list[int]) -> int:
        """Adds some of the user's numbers."""
        if not numbers or any(numbers.count(n) > self.numbers.count(n) for n in numbers):
            raise ValueError(f"the numbers are {self.numbers}")
        return sum(numbers)

    def reward(self, answer: str) -> float:
        """1 for numbers that add up to the target, a tenth less for each step that they miss it."""
        try:
            total = self.add([int(number) for number in re.findall("[0-9]+", answer.split("=")[0])])
        except ValueError:  # other numbers than the user's, or none
            return 0.0
        return max(0.0, 1.0 - abs(self.target - total) / 10)
