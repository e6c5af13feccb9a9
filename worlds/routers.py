"""Fixed strategies for the miniature, which a trained policy must beat; and `perfect`, the ceiling.

A router gives the order of the tools to use; they are used until one is sure. Routers play in the
same environments as the policy and are scored and billed in the same way, but pay for no tokens of
their own.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import permutations
from typing import Any, NamedTuple

from nanorchestra.agent.environment import ToolEnvironment
from nanorchestra.records import Task, Trajectory
from nanorchestra.tools.sandbox import Sandbox
from reward import task_reward
from tools import Skill
from worlds.evaluation import score, summarise, task_bounds
from worlds.miniature.offers import (
    Offer,
    call_for,
    expected_cost,
    fits,
    is_expert,
    read_result,
    skill,
)
from worlds.miniature.tables import SUBJECTS
from worlds.miniature.world import environment

Router = Callable[[Task, random.Random], list[Offer]]


def evaluate_routers(
    tasks: Sequence[Task], seed: int, sandbox: Sandbox
) -> dict[str, dict[str, Any]]:
    """Returns the summary of every router on the tasks, by its name."""
    summaries = {}
    for name, router in ROUTERS.items():
        attempts = []
        for task in tasks:
            order = router(task, random.Random(f"router/{task.id}/{seed}"))
            attempts.append(play(order, environment(task, seed, sandbox), seed))
        summaries[name] = summarise(tasks, attempts)
    return summaries


def play(order: Sequence[Offer], env: ToolEnvironment, seed: int = 0) -> Trajectory:
    """Returns one scored attempt that uses tools in order until one is sure.

    A chain of records is followed to its end; anything else is one call.
    """
    task = env.task
    trajectory = Trajectory(task.id, seed, 0, [], [], [], [])
    for offer in order:
        row, name = None, offer["name"]
        while True:
            result = env.by_name[name].call(call_for(task, offer, row).arguments)
            trajectory.cost_usd += result.cost_usd
            trajectory.latency_s += result.latency_s
            trajectory.calls[name] = trajectory.calls.get(name, 0) + 1
            reading = read_result(task, offer, result)
            row = reading.next_row
            if row is None:
                break
        trajectory.answer = reading.answer or ""
        if reading.sure:
            break
    trajectory.outcome = env.score(trajectory.answer)
    return score(task, trajectory)


def strongest(task: Task, rng: random.Random) -> list[Offer]:
    """Asks the strongest expert on offer."""
    return [max(_experts(task), key=_strength)]


def cheapest(task: Task, rng: random.Random) -> list[Offer]:
    """Asks the cheapest expert on offer."""
    return cascade(task, rng)[:1]


def cascade(task: Task, rng: random.Random) -> list[Offer]:
    """Asks experts from the cheapest up."""
    return sorted(_experts(task), key=_price)


def at_random(task: Task, rng: random.Random) -> list[Offer]:
    """Uses random tools among those that can answer the question, until the first expert."""
    tools = _usable(task)
    tools = rng.sample(tools, len(tools))
    first = next(i for i, offer in enumerate(tools) if is_expert(offer))
    return tools[: first + 1]


def rule(task: Task, rng: random.Random) -> list[Offer]:
    """Uses the tool that fits the question, then experts by preference; never a forbidden tool.

    right: the specialist, else the strongest, and a second opinion. cheap: from the cheapest up.
    fast: the fastest. balanced: the specialist, else the middle one by price.
    """
    allowed = [offer for offer in _usable(task) if offer["name"] not in task.preference.avoided]
    fitting = [offer for offer in allowed if fits(offer, task)]
    experts = [offer for offer in allowed if is_expert(offer)]
    by_price = sorted(experts, key=_price)
    specialist = [offer for offer in experts if offer["what"] == task.data["subject"]]
    others = [offer for offer in experts if offer not in specialist]
    middle = len(experts) // 2
    choices = {
        "right": (specialist + sorted(others, key=_strength, reverse=True))[:2],
        "cheap": by_price,
        "fast": sorted(experts, key=lambda offer: offer["latency"])[:1],
        "balanced": specialist or by_price[middle : middle + 1],
    }
    return fitting + choices[task.data["wish"]]


def perfect(task: Task, rng: random.Random) -> list[Offer]:
    """Follows the best order of at most three tools, knowing every hidden skill: a ceiling."""
    tools = _usable(task)
    plans = [plan for length in (1, 2, 3) for plan in permutations(tools, length)]
    return list(max(plans, key=lambda plan: _expected_reward(task, plan)))


ROUTERS: dict[str, Router] = {
    "strongest": strongest,
    "cheapest": cheapest,
    "cascade": cascade,
    "random": at_random,
    "rule": rule,
    "perfect": perfect,
}


def _usable(task: Task) -> list[Offer]:
    return [offer for offer in task.data["tools"] if is_expert(offer) or fits(offer, task)]


def _experts(task: Task) -> list[Offer]:
    return [offer for offer in task.data["tools"] if is_expert(offer)]


def _price(offer: Offer) -> int:
    return offer["price"]


def _strength(offer: Offer) -> int:
    family = "specialist" if offer["what"] in SUBJECTS else offer["what"]
    return ("small", "specialist", "medium", "large").index(family)


class _Attempt(NamedTuple):
    outcome: float
    cost_usd: float
    latency_s: float
    calls: dict[str, int]


def _expected_reward(task: Task, plan: Sequence[Offer]) -> float:
    """The expected reward of using tools in order until one is sure. A wrong answer earns 0."""
    data, reached, expected = task.data, 1.0, 0.0
    attempt = _Attempt(1.0, 0.0, 0.0, {})
    for offer in plan:
        calls = len(data["tables"]) if offer["what"] == "records" else 1
        attempt = _Attempt(
            1.0,
            attempt.cost_usd + expected_cost(offer, data["difficulty"]) * calls,
            attempt.latency_s + offer["latency"] * calls,
            attempt.calls | {offer["name"]: calls},
        )
        known = Skill(1.0, 0.0, 0.0)
        if is_expert(offer):
            known = skill(offer["what"], data["subject"], data["difficulty"])
        unsure = known.right * known.unsure_if_right
        ends = known.right if offer is plan[-1] else known.right - unsure
        expected += reached * ends * task_reward(attempt, task.preference, task_bounds(task))
        reached *= unsure + (1 - known.right) * known.unsure_if_wrong
    return expected
