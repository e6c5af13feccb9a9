"""Evaluates the weights of a run on held-out tasks: before and after GRPO."""

from __future__ import annotations

from typing import Any

from nanorchestra.training.run import TrainingRun
from nanorchestra.training.sampling import DividedRollout


def evaluate(run: TrainingRun, name: str) -> dict[str, Any]:
    """Returns the held-out summary of the present weights; records the attempts as phase `name`."""
    worlds = run.worlds
    tasks = worlds.held_out(run.config.evaluation.tasks)
    run.engine.wake()
    run.publish()
    rollout = DividedRollout(run.rollout(run.config.evaluation.temperature), run.ranks)
    share = -(-len(tasks) // run.ranks.world)
    with run.bar(share, f"held-out tasks, {name}", unit="task") as bar:
        trajectories = worlds.evaluate(rollout, tasks, lambda _: bar.update())
    for task, trajectory in zip(tasks, trajectories, strict=True):
        run.record_trajectory(name, task, trajectory)
    return worlds.summarise(tasks, trajectories)
