"""Evaluates the weights of a run on held-out tasks: before and after GRPO."""

from __future__ import annotations

from typing import Any

from nanorchestra.training.run import TrainingRun
from nanorchestra.training.sampling import DividedRollout

DOMAIN_TASKS = 24  # held-out tasks of domains that are mixed in with the miniature


def evaluate(run: TrainingRun, name: str) -> dict[str, Any]:
    """Returns the held-out summary of the present weights; records the attempts as phase `name`."""
    worlds = run.worlds
    tasks = worlds.held_out(run.config.evaluation.tasks)
    others = worlds.held_out_domains(DOMAIN_TASKS)
    run.engine.wake()
    run.publish()
    rollout = DividedRollout(run.rollout(run.config.evaluation.temperature), run.ranks)
    share = -(-len(tasks + others) // run.ranks.world)
    with run.bar(share, f"held-out tasks, {name}", unit="task") as bar:
        trajectories = worlds.evaluate(rollout, tasks + others, lambda _: bar.update())
    for task, trajectory in zip(tasks + others, trajectories, strict=True):
        run.record_trajectory(name, task, trajectory)
    summary = worlds.summarise(tasks, trajectories[: len(tasks)])
    if others:
        summary["domains"] = worlds.summarise(others, trajectories[len(tasks) :])
    if name == "after":
        summary["price_x10"] = worlds.price_probe(rollout, tasks)
    return summary
