"""Attempts at held-out tasks, scored and summarised alike for a policy and for fixed routers.

A world states in `task.data` what the score needs: `bounds` of cost and latency, `kind` of
question, and `wish`, the name of the preference.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from statistics import fmean, stdev
from typing import Any

from nanorchestra.agent.environment import Environment
from nanorchestra.agent.loop import Rollout
from nanorchestra.errors import UserError
from nanorchestra.records import Task, Trajectory
from reward import Bounds, preference_score, reward_parts, task_reward

RETRIES = 2  # of attempts that failed for reasons of the infrastructure
Pairs = Sequence[tuple[Task, Trajectory]]


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
    places, trajectories, retried = list(range(len(tasks))), {}, 0
    for again in range(1 + RETRIES):
        environments = [make(i) for i in places]
        played = rollout.run(environments, [seeds[i] for i in places], on_done) if places else []
        trajectories |= zip(places, played, strict=True)
        retried += len(places) if again else 0
        places = [i for i, t in sorted(trajectories.items()) if t.status == "infrastructure"]
        on_done = None
    return [score(task, trajectories[i]) for i, task in enumerate(tasks)], retried


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

    `failed` counts the attempts that the infrastructure failed; no mean includes them. UserError if
    all of them did.
    """
    pairs = [
        (task, trajectory)
        for task, trajectory in zip(tasks, trajectories, strict=True)
        if trajectory.status != "infrastructure"
    ]
    if not pairs:
        raise UserError(
            f"held-out tasks: all {len(tasks)} attempts failed for reasons of the infrastructure; "
            "see that the tools and endpoints answer"
        )

    def split(key: str) -> dict[str, dict[str, float]]:
        groups: dict[str, list[tuple[Task, Trajectory]]] = {}
        for task, trajectory in pairs:
            groups.setdefault(task.data[key], []).append((task, trajectory))
        return {
            name: {"tasks": len(members)} | means(members)
            for name, members in sorted(groups.items())
        }

    right = sum(trajectory.outcome for _, trajectory in pairs)
    spent = sum(trajectory.cost_usd for _, trajectory in pairs)
    return {
        "tasks": len(tasks),
        "failed": len(tasks) - len(pairs),
        **means(pairs),
        **obedience(pairs),
        "cost_per_correct_usd": spent / right if right else None,
        "by_preference": split("wish"),
        "by_kind": split("kind"),
    }


def measure(
    tasks: Sequence[Task], trajectories: Sequence[Trajectory], group_size: int
) -> dict[str, Any]:
    """Returns means over a training step's attempts, for its row of metrics.

    Also `group_std`, the mean spread of reward within a group; calls per attempt by what is behind
    the alias; and how attempts ended. No mean includes attempts that the infrastructure failed,
    unless there are no others.
    """
    groups = [
        [t.reward for t in trajectories[i : i + group_size] if t.status != "infrastructure"]
        for i in range(0, len(tasks), group_size)
    ]
    spreads = [stdev(group) for group in groups if len(group) > 1]
    statuses = Counter(t.status for t in trajectories)
    everything = list(zip(tasks, trajectories, strict=True))
    pairs = [(task, t) for task, t in everything if t.status != "infrastructure"] or everything
    calls: Counter[str] = Counter()
    parts: Counter[str] = Counter()
    for task, trajectory in pairs:
        behind = {offer["name"]: offer["what"] for offer in task.data["tools"]}
        for name, count in trajectory.calls.items():
            calls[behind.get(name, "unknown")] += count
        paid = reward_parts(trajectory, task.preference, task_bounds(task))
        for part, value in paid.items():
            parts[part] += value / len(pairs)
    return {
        **means(pairs),
        **obedience(pairs),
        "reward_parts": dict(parts),
        "turns": fmean(len(t.turns) for _, t in pairs),
        "group_std": fmean(spreads) if spreads else 0.0,
        "calls": {name: count / len(pairs) for name, count in sorted(calls.items())},
        "statuses": {name: count / len(tasks) for name, count in sorted(statuses.items())},
    }


def means(pairs: Pairs) -> dict[str, float]:
    """Returns the means of reward, accuracy in 0..1, cost in US dollars and latency in seconds."""
    return {
        "reward": fmean(t.reward for _, t in pairs),
        "accuracy": fmean(t.outcome for _, t in pairs),
        "cost_usd": fmean(t.cost_usd for _, t in pairs),
        "latency_s": fmean(t.latency_s for _, t in pairs),
    }


def obedience(pairs: Pairs) -> dict[str, float | None]:
    """Returns the mean preference score, and how many attempts used a forbidden tool.

    `avoided_rate` is a share of the tasks that forbid a tool, and None if there are none;
    `well_formed` is the share of attempts without a malformed call.
    """
    scores = [preference_score(t, task.preference, task_bounds(task)) for task, t in pairs]
    used = [
        any(t.calls.get(name) for name in task.preference.avoided)
        for task, t in pairs
        if task.preference.avoided
    ]
    return {
        "preference": fmean(scores),
        "avoided_rate": fmean(used) if used else None,
        "well_formed": fmean(t.well_formed for _, t in pairs),
    }
