"""What a training run asks of the worlds it practises in. worlds/mixture.py answers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch

from nanorchestra.agent.environment import Environment
from nanorchestra.agent.loop import Rollout
from nanorchestra.model.qwen3 import Qwen3
from nanorchestra.records import Price, Task, Trajectory
from nanorchestra.training.lessons import Lesson


class Practice(Protocol):
    """Tasks, environments, demonstrations and rewards. All are functions of their arguments."""

    price: Price

    def tasks(self, count: int, start: int) -> list[Task]:
        """Returns the training tasks start .. start + count."""

    def lesson_tasks(self, count: int, start: int, most_tools: int = 0) -> list[Task]:
        """Returns tasks to demonstrate, with `most_tools` tools on offer at most (0: no limit)."""

    def held_out(self, count: int, start: int = 0) -> list[Task]:
        """Returns the held-out tasks that the run is judged by."""

    def held_out_domains(self, count: int) -> list[Task]:
        """Returns held-out tasks of the domains that are mixed in with the miniature."""

    def samples(self) -> Iterable[Task]:
        """Returns some training tasks of every world."""

    def environment(self, task: Task, seed: int) -> Environment:
        """Returns the environment of one attempt at a task."""

    def teach(self, env: Environment) -> Iterable[Lesson]:
        """Returns a demonstration, which acts in `env` as it is iterated over."""

    def texts(self, count: int) -> Iterable[str]:
        """Returns about `count` demonstrations as text, for a tokenizer to be trained on."""

    def initialise(self, model: Qwen3, generator: torch.Generator) -> None:
        """Adds to the random weights of the miniature's model what it could not learn in time."""

    def score(self, task: Task, trajectory: Trajectory) -> None:
        """Writes on the trajectory its reward in absolute form, comparable between tasks."""

    def group_rewards(self, task: Task, members: Sequence[Trajectory], bounds: str) -> list[float]:
        """Returns the rewards that the group's advantages are computed from."""

    def measure(
        self, tasks: Sequence[Task], trajectories: Sequence[Trajectory], group_size: int
    ) -> dict[str, Any]:
        """Returns means over a step's attempts, for its row of metrics."""

    def evaluate(
        self, rollout: Rollout, tasks: Sequence[Task], on_done: Callable[[Trajectory], Any]
    ) -> list[Trajectory]:
        """Returns one scored attempt at each held-out task."""

    def summarise(
        self, tasks: Sequence[Task], trajectories: Sequence[Trajectory]
    ) -> dict[str, Any]:
        """Returns means over held-out attempts."""

    def price_probe(self, rollout: Rollout, tasks: Sequence[Task]) -> dict[str, float]:
        """Returns how often the policy asks the large expert, by the factor on its price."""

    def routers(self, tasks: Sequence[Task]) -> dict[str, dict[str, Any]]:
        """Returns the summary of each fixed router at these tasks; {} if none can play them."""

    def tools(self, task: Task) -> list[dict[str, Any]]:
        """Returns name, kind and description of the tools on offer, for the records."""
