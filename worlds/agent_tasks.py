"""Tasks that only an agent knows: each is a seed and a split, and the agent reports the reward."""

import random
from dataclasses import dataclass

from nanorchestra.agent.environment import ToolEnvironment
from nanorchestra.agent.world import Split
from nanorchestra.records import Task

PREFIX = "agent:"


class AgentEnvironment(ToolEnvironment):
    """An attempt that the agent scores."""

    needs_reward = True


@dataclass(frozen=True)
class AgentTasks:
    """Tasks without end for the agent that `name` names."""

    name: str
    seed: int

    def size(self, split: Split) -> None:
        """Returns None: every seed is another task."""

    def task(self, split: Split, index: int) -> Task:
        """Returns the task of one seed; "all" is "held_out"."""
        part = "train" if split == "train" else "held_out"
        seed = random.Random(f"{self.seed}/{part}/{index}").getrandbits(32)
        return Task(
            f"{part}-{self.seed}-{index}",
            f"Task {seed} of the agent.",
            world=self.name,
            kind="agent",
            data={"seed": seed, "split": part},
        )

    def environment(self, task: Task, seed: int) -> AgentEnvironment:
        """Returns one attempt at a task."""
        return AgentEnvironment(task, [])
