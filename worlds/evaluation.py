"""Attempts at held-out tasks, scored and summarised alike for a policy and for fixed routers.

A world states in `task.data` what the score needs: `bounds` of cost and latency, `kind` of
question, and `wish`, the name of the preference.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from statistics import fmean, stdev
from typing import Any

from nanorchestra.agent.environment import Environment
from nanorchestra.agent.loop import Rollout
from nanorchestra.errors import require
from nanorchestra.records import Task, Trajectory
from reward import Bounds, preference_score, reward_parts, task_reward

Interval = tuple[float, float, float]  # a mean, the ends of its 95% interval
RETRIES = 2  # of attempts that failed for reasons of the infrastructure


def task_bounds(task: Task) -> Bounds:
    """Returns the bounds of a task's cost and latency, known before any attempt."""
    return Bounds(*task.data["bounds"])


def score(task: Task, trajectory: Trajectory) -> Trajectory:
    """Fills in the trajectory's reward in its absolute form, and returns the trajectory."""
    trajectory.reward = task_reward(trajectory, task.preference, task_bounds(task))
    return trajectory


def attempt(
    rollout: Rollout,
    tasks: Sequence[Task],
    seeds: Sequence[int],
    make: Callable[[int], Environment],
    on_done: Callable[[Trajectory], Any] | None = None,
) -> tuple[list[Trajectory], int]:
    """Returns one scored attempt of the policy at each task, and how many were repeated.

    make(i) is the environment of attempt i. Attempts that the infrastructure failed are repeated,
    RETRIES times at most.
    """
    trajectories = rollout.run([make(i) for i in range(len(tasks))], list(seeds), on_done)
    retried = 0
    for _ in range(RETRIES):
        failed = [i for i, t in enumerate(trajectories) if t.status == "infrastructure"]
        if not failed:
            break
        retried += len(failed)
        again = rollout.run([make(i) for i in failed], [seeds[i] for i in failed])
        for i, trajectory in zip(failed, again, strict=True):
            trajectories[i] = trajectory
    return list(map(score, tasks, trajectories)), retried


def evaluate(
    rollout: Rollout,
    tasks: Sequence[Task],
    seed: int,
    make: Callable[[Task, int], Environment],
    on_done: Callable[[Trajectory], Any] | None = None,
) -> list[Trajectory]:
    """Returns one scored attempt at each task, in the environment make(task, seed)."""
    seeds = [seed * 1_000_003 + i for i in range(len(tasks))]
    return attempt(rollout, tasks, seeds, lambda i: make(tasks[i], seed), on_done)[0]


def summarise(tasks: Sequence[Task], trajectories: Sequence[Trajectory]) -> dict[str, Any]:
    """Returns means per task: over all tasks, by preference, and by kind of question.

    `failed` counts the attempts that the infrastructure failed; no mean includes them. `verdicts`
    are the shares of how a judge decided. UserError if all attempts failed.
    """
    pairs = _finished(tasks, trajectories)
    require(
        pairs,
        f"held-out tasks: all {len(tasks)} attempts failed for reasons of the infrastructure; "
        "see that the tools and endpoints answer",
    )

    def split(key: str) -> dict[str, dict[str, float | None]]:
        groups = defaultdict(list)
        for pair in pairs:
            groups[pair[0].data[key]].append(pair)
        return {
            name: {"tasks": len(group)} | means(group) for name, group in sorted(groups.items())
        }

    scores = means(pairs)
    right = scores["accuracy"]
    return {
        "tasks": len(tasks),
        "failed": len(tasks) - len(pairs),
        **scores,
        "reward_interval": interval([t.reward for _, t in pairs])[1:],
        "cost_per_correct_usd": scores["cost_usd"] / right if right else None,
        "by_preference": split("wish"),
        "by_kind": split("kind"),
        "verdicts": _shares(Counter(t.verdict for _, t in pairs if t.verdict), len(pairs)),
    }


def interval(values: Sequence[float]) -> Interval:
    """Returns the mean and its 95% interval (mean, low, high), normal, 1.96 standard errors."""
    if len(values) < 2:
        return (fmean(values or [math.nan]), -math.inf, math.inf)
    mean, error = fmean(values), stdev(values) / len(values) ** 0.5
    return mean, mean - 1.96 * error, mean + 1.96 * error


def measure(
    tasks: Sequence[Task], trajectories: Sequence[Trajectory], group_size: int
) -> dict[str, Any]:
    """Returns means over a training step's attempts, for its row of metrics.

    Also `group_std`, the mean spread of reward within a group; calls per attempt by what is behind
    the alias; how attempts ended, and how a judge decided. No mean includes attempts that the
    infrastructure failed, unless there are no others.
    """
    pairs = _finished(tasks, trajectories) or list(zip(tasks, trajectories, strict=True))
    groups = [
        [t.reward for t in trajectories[i : i + group_size] if t.status != "infrastructure"]
        for i in range(0, len(tasks), group_size)
    ]
    spreads = [stdev(group) for group in groups if len(group) > 1]
    calls: Counter[str] = Counter()
    parts: Counter[str] = Counter()
    for task, trajectory in pairs:
        offers = task.data["tools"]
        behind = {offer["name"]: offer["what"] for offer in offers}
        for offer in offers:  # questions.py: the experts of a tool that offers several
            behind |= {name: spec["what"] for name, spec in offer.get("models", {}).items()}
        for name, count in trajectory.calls.items():
            calls[behind.get(name, "unknown")] += count
        parts.update(reward_parts(trajectory, task.preference, task_bounds(task)))
    statuses = Counter(trajectory.status for trajectory in trajectories)
    return {
        **means(pairs),
        "reward_parts": {name: value / len(pairs) for name, value in parts.items()},
        "turns": fmean(len(t.turns) for _, t in pairs),
        "group_std": fmean(spreads) if spreads else 0.0,
        "calls": _shares(calls, len(pairs)),
        "statuses": _shares(statuses, len(tasks)),
        "verdicts": _shares(Counter(t.verdict for _, t in pairs if t.verdict), len(pairs)),
    }


def means(pairs: Sequence[tuple[Task, Trajectory]]) -> dict[str, float | None]:
    """Returns the means: accuracy in 0..1, cost in US dollars, latency in seconds, and others.

    `avoided_rate` is the share of attempts that used a forbidden tool among the tasks that forbid
    one, None if there are none; `well_formed` the share without a malformed call.
    """
    used = [
        any(t.calls.get(name) for name in task.preference.avoided)
        for task, t in pairs
        if task.preference.avoided
    ]
    return {
        "reward": fmean(t.reward for _, t in pairs),
        "accuracy": fmean(t.outcome for _, t in pairs),
        "cost_usd": fmean(t.cost_usd for _, t in pairs),
        "latency_s": fmean(t.latency_s for _, t in pairs),
        "preference": fmean(
            preference_score(t, task.preference, task_bounds(task)) for task, t in pairs
        ),
        "avoided_rate": fmean(used) if used else None,
        "well_formed": fmean(t.well_formed for _, t in pairs),
    }


def _finished(tasks, trajectories):
    """The attempts that the infrastructure did not fail, with their tasks."""
    pairs = zip(tasks, trajectories, strict=True)
    return [(task, t) for task, t in pairs if t.status != "infrastructure"]


def _shares(counts, total):
    return {name: count / total for name, count in sorted(counts.items())}
