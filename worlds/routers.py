"""Fixed strategies for the miniature, which a trained policy must beat; and `perfect`, the ceiling.

A router gives the order of the tools to use; they are used until one is sure. Routers play in the
same environments as the policy and are scored and billed in the same way, but pay for no tokens of
their own.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from itertools import permutations
from typing import Any

from nanorchestra.agent.environment import ToolEnvironment
from nanorchestra.records import Task, Trajectory
from nanorchestra.tools.sandbox import Sandbox
from tools import Skill
from worlds.evaluation import score, summarise
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

STRENGTHS = ("small", *SUBJECTS, "medium", "large")


def evaluate_routers(
    tasks: Sequence[Task], seed: int, sandbox: Sandbox
) -> dict[str, dict[str, Any]]:
    """Returns the summary of every router on the tasks, by its name."""
    attempts: dict[str, list[Trajectory]] = defaultdict(list)
    for task in tasks:
        for name, order in orders(task, random.Random(f"router/{task.id}/{seed}")).items():
            attempts[name].append(play(order, environment(task, seed, sandbox), seed))
    return {name: summarise(tasks, played) for name, played in attempts.items()}


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


def orders(task: Task, rng: random.Random) -> dict[str, Sequence[Offer]]:
    """Returns the tools that each router uses, in order; docs/worlds.md describes the routers."""
    usable = [offer for offer in task.data["tools"] if is_expert(offer) or fits(offer, task)]
    by_price = _experts(usable, "price")
    shuffled = rng.sample(usable, len(usable))
    first_expert = next(i for i, offer in enumerate(shuffled) if is_expert(offer))
    plans = [plan for length in (1, 2, 3) for plan in permutations(usable, length)]
    return {
        "strongest": _strongest(usable)[:1],
        "cheapest": by_price[:1],
        "cascade": by_price,
        "random": shuffled[: first_expert + 1],
        "rule": _rule(task, usable),
        "perfect": max(plans, key=lambda plan: _expected_reward(task, plan)),
    }


def _rule(task: Task, usable: list[Offer]) -> list[Offer]:
    """The tool that fits the question, then experts by preference; never a forbidden tool."""
    allowed = [offer for offer in usable if offer["name"] not in task.preference.avoided]
    by_price = _experts(allowed, "price")
    specialist = [offer for offer in by_price if offer["what"] == task.data["subject"]]
    others = [offer for offer in _strongest(allowed) if offer not in specialist]
    middle = len(by_price) // 2
    choices = {
        "right": (specialist + others)[:2],
        "cheap": by_price,
        "fast": _experts(allowed, "latency")[:1],
        "balanced": specialist or by_price[middle : middle + 1],
    }
    return [offer for offer in allowed if fits(offer, task)] + choices[task.data["wish"]]


def _experts(offers: list[Offer], key: str) -> list[Offer]:
    """The experts from the lowest price or latency up."""
    return sorted(filter(is_expert, offers), key=lambda offer: offer[key])


def _strongest(offers: list[Offer]) -> list[Offer]:
    """The experts from the strongest down."""
    experts = filter(is_expert, offers)
    return sorted(experts, key=lambda offer: STRENGTHS.index(offer["what"]), reverse=True)


def _expected_reward(task: Task, plan: Sequence[Offer]) -> float:
    """The expected reward of using tools in order until one is sure. A wrong answer earns 0."""
    data, reached, expected = task.data, 1.0, 0.0
    attempt = Trajectory(task.id, 0, 0, [], [], [], [], outcome=1.0)
    for offer in plan:
        calls = len(data["tables"]) if offer["what"] == "records" else 1
        attempt.cost_usd += expected_cost(offer, data["difficulty"]) * calls
        attempt.latency_s += offer["latency"] * calls
        attempt.calls[offer["name"]] = calls
        known = Skill(1.0, 0.0, 0.0)
        if is_expert(offer):
            known = skill(offer["what"], data["subject"], data["difficulty"])
        unsure = known.right * known.unsure_if_right
        ends = known.right if offer is plan[-1] else known.right - unsure
        expected += reached * ends * score(task, attempt).reward
        reached *= unsure + (1 - known.right) * known.unsure_if_wrong
    return expected
