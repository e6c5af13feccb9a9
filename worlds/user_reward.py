"""A reward of a user's own: one function that pays the attempts of a group.

    def frugal(group):
        return group.outcomes - 10 * group.costs_usd

`--task.reward my_reward.py:frugal` names it; docs/worlds.md has a complete file. It takes the place
of the equations in reward.py: what it returns is logged, recorded, and made into advantages. In an
evaluation each attempt is a group of its own.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from nanorchestra.errors import WorldError
from nanorchestra.files import import_function, own_code, read_text
from nanorchestra.records import Preference, Task, Trajectory


@dataclass(frozen=True)
class AttemptGroup:
    """What a reward function is given: the n attempts at one task that are compared.

    Arrays are float64 [n]. `outcomes` are 0 for wrong to 1 for right. `calls` has the number of
    calls of each tool by its name, for each attempt. `rewards` are those of reward.py, which the
    function may add to. Attempts that the infrastructure failed are not among them.
    """

    question: str
    preference: Preference
    outcomes: np.ndarray
    costs_usd: np.ndarray
    latencies_s: np.ndarray
    calls: list[dict[str, int]]
    answers: list[str]
    rewards: np.ndarray


@dataclass(frozen=True)
class UserReward:
    """A function of an AttemptGroup. `name` is FILE.py:FUNCTION, `source` the text of the file."""

    name: str
    function: Callable[[AttemptGroup], Any]
    source: str

    def __call__(
        self, task: Task, attempts: Sequence[Trajectory], rewards: np.ndarray
    ) -> np.ndarray:
        """Returns the reward [n] of each attempt at a task. UserError for what is no reward."""
        if not attempts:
            return np.zeros(0)
        group = AttemptGroup(
            task.question,
            task.preference,
            np.array([attempt.outcome for attempt in attempts], dtype=float),
            np.array([attempt.cost_usd for attempt in attempts], dtype=float),
            np.array([attempt.latency_s for attempt in attempts], dtype=float),
            [dict(attempt.calls) for attempt in attempts],
            [attempt.answer for attempt in attempts],
            np.array(rewards, dtype=float),
        )
        file = self.name.rpartition(":")[0]
        paid = own_code(lambda: self.function(group), self.name, file)
        try:
            values = np.array(paid, dtype=float)
        except (TypeError, ValueError):
            values = np.array(np.nan)
        n = len(attempts)
        if values.shape != (n,) or not np.isfinite(values).all():
            text = " ".join(f"{paid!r:.80}".split())
            right = f"it must return {n} finite numbers, one for each attempt of the group"
            raise WorldError(f"{self.name}: it returned {text}; {right}")
        return values


def load_reward(name: str, task: Task) -> UserReward | None:
    """Returns the reward that FILE.py:FUNCTION names, None for "". UserError.

    It is tried on two made-up attempts at `task`, a right one and a wrong one that cost more.
    """
    if not name:
        return None
    function = import_function(name, "task.reward")
    reward = UserReward(name, function, read_text(name.rpartition(":")[0]))
    tool = next(iter(task.offers), "tool")
    attempts = [
        Trajectory(task.id, 0, answer="42", outcome=1.0, calls_usd=0.01, latency_s=5.0),
        Trajectory(task.id, 1, answer="", calls_usd=0.02, latency_s=9.0, calls={tool: 1}),
    ]
    reward(task, attempts, np.array([1.0, 0.0]))
    return reward
