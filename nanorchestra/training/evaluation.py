"""Evaluates the weights of a run on held-out tasks: before, during and after GRPO."""

from __future__ import annotations

import time
from typing import Any

from nanorchestra.records import Task, Trajectory
from nanorchestra.training.run import TrainingRun
from nanorchestra.training.sampling import DividedRollout

DOMAIN_TASKS = 24  # held-out tasks of domains that are mixed in with the miniature
MIDWAY_TASKS = 64  # held-out tasks of an evaluation during training, at most


def evaluate(run: TrainingRun, name: str) -> dict[str, Any]:
    """Returns the held-out summary of the present weights; records the attempts as phase `name`."""
    worlds = run.worlds
    tasks = worlds.held_out(run.config.evaluation.tasks)
    others = worlds.held_out_domains(DOMAIN_TASKS)
    rollout, trajectories = _attempts(run, tasks + others, name)
    for task, trajectory in zip(tasks + others, trajectories, strict=True):
        run.record_trajectory(name, task, trajectory)
    summary = worlds.summarise(tasks, trajectories[: len(tasks)])
    if others:
        summary["domains"] = worlds.summarise(others, trajectories[len(tasks) :])
    if name == "after":
        summary["price_x10"] = worlds.price_probe(rollout, tasks)
    return summary


def evaluate_midway(run: TrainingRun) -> None:
    """Evaluates after every evaluation.every steps and after the last, on tasks of its own.

    Writes a row of phase "evaluation", and model-best/ if the reward is the best so far. Training
    continues as if there had been no evaluation.
    """
    settings, step, start = run.config.evaluation, run.progress.step, time.monotonic()
    if not settings.every or (step % settings.every and step < run.config.grpo.steps):
        return
    tasks = run.worlds.held_out(min(MIDWAY_TASKS, settings.tasks), settings.tasks)
    summary = run.worlds.summarise(tasks, _attempts(run, tasks, f"step {step}")[1])
    run.engine.update_weights()  # the next step finds no cached pages of these attempts
    means = {name: value for name, value in summary.items() if not isinstance(value, dict)}
    seconds = time.monotonic() - start
    run.record({"phase": "evaluation", "step": step, **means, "seconds": seconds})
    reward, best = summary["reward"], run.progress.best
    if best is None or reward > best["reward"]:
        run.progress.best = {"step": step, "reward": reward}
        run.export(run.folder.path / "model-best")


def _attempts(
    run: TrainingRun, tasks: list[Task], name: str
) -> tuple[DividedRollout, list[Trajectory]]:
    """One attempt at each task with the present weights, and the rollout that makes more."""
    run.engine.wake()
    run.publish()
    rollout = DividedRollout(run.rollout(run.config.evaluation.temperature), run.ranks)
    share = -(-len(tasks) // run.ranks.world)
    with run.bar(share, f"held-out tasks, {name}", unit="task") as bar:
        return rollout, run.worlds.evaluate(rollout, tasks, lambda _: bar.update())
