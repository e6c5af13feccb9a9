"""Fixed strategies for the miniature, which a trained policy must beat; and `perfect`, the ceiling.

A router is a generator: it yields an offer and a call, receives the result, and returns its answer.
Routers play in the same environments as the policy and are scored and billed in the same way, but
pay for no tokens of their own.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Generator, Sequence
from itertools import permutations
from typing import Any, NamedTuple

from nanorchestra.agent.environment import ToolEnvironment
from nanorchestra.records import Task, ToolCall, ToolResult, Trajectory
from nanorchestra.tools.sandbox import Sandbox
from reward import task_reward
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

Play = Generator[tuple[Offer, ToolCall], ToolResult, str]
Router = Callable[[Task, random.Random], Play]
Plan = tuple[Offer, ...]


def evaluate_routers(
    tasks: Sequence[Task], seed: int, sandbox: Sandbox
) -> dict[str, dict[str, Any]]:
    """Returns the summary of every router on the tasks, by its name."""
    summaries = {}
    for name, router in ROUTERS.items():
        attempts = [play(router, environment(task, seed, sandbox), seed) for task in tasks]
        summaries[name] = summarise(tasks, attempts)
    return summaries


def play(router: Router, env: ToolEnvironment, seed: int) -> Trajectory:
    """Returns one attempt by a router, scored and billed like the policy's."""
    task = env.task
    trajectory = Trajectory(task.id, seed, 0, [], [], [], [])
    moves = router(task, random.Random(f"router/{task.id}/{seed}"))
    result = None
    while True:
        try:
            offer, call = moves.send(result)
        except StopIteration as stop:
            trajectory.answer = stop.value
            break
        result = env.by_name[offer["name"]].call(call.arguments)
        trajectory.cost_usd += result.cost_usd
        trajectory.latency_s += result.latency_s
        trajectory.calls[call.name] = trajectory.calls.get(call.name, 0) + 1
    trajectory.outcome = env.score(trajectory.answer)
    return score(task, trajectory)


def use(
    task: Task, offer: Offer
) -> Generator[tuple[Offer, ToolCall], ToolResult, tuple[str, bool]]:
    """Uses one tool, following a chain of records to its end. Returns (answer, sure)."""
    row = None
    while True:
        result = yield offer, call_for(task, offer, row)
        reading = read_result(task, offer, result)
        row = reading.next_row
        if row is None:
            return reading.answer or "", reading.sure


def _until_sure(task: Task, order: Sequence[Offer]) -> Play:
    """Uses tools in order until one is sure, and gives the last answer."""
    answer = ""
    for offer in order:
        answer, sure = yield from use(task, offer)
        if sure:
            break
    return answer


def _experts(task: Task) -> list[Offer]:
    return [offer for offer in task.data["tools"] if is_expert(offer)]


def _price(offer: Offer) -> int:
    return offer["price"]


def _strength(offer: Offer) -> int:
    family = "specialist" if offer["what"] in SUBJECTS else offer["what"]
    return ("small", "specialist", "medium", "large").index(family)


def strongest(task: Task, rng: random.Random) -> Play:
    """Asks the strongest expert on offer, once."""
    return _until_sure(task, [max(_experts(task), key=_strength)])


def cheapest(task: Task, rng: random.Random) -> Play:
    """Asks the cheapest expert on offer, once."""
    return _until_sure(task, [min(_experts(task), key=_price)])


def cascade(task: Task, rng: random.Random) -> Play:
    """Asks experts from the cheapest up, until one is sure."""
    return _until_sure(task, sorted(_experts(task), key=_price))


def at_random(task: Task, rng: random.Random) -> Play:
    """Uses random tools among those that can answer the question, until one gives an answer."""
    tools = [offer for offer in task.data["tools"] if is_expert(offer) or fits(offer, task)]
    answer = ""
    for offer in rng.sample(tools, len(tools)):
        answer, _ = yield from use(task, offer)
        if answer:
            break
    return answer


def rule(task: Task, rng: random.Random) -> Play:
    """Takes the tool that fits the question, else experts by preference; never a forbidden tool.

    right: the specialist, else the strongest, and a second opinion if it is unsure. cheap: from the
    cheapest up until one is sure. fast: the fastest. balanced: the specialist, else the middle one
    by price.
    """
    allowed = [o for o in task.data["tools"] if o["name"] not in task.preference.avoided]
    experts = [offer for offer in allowed if is_expert(offer)]
    for offer in allowed:
        if fits(offer, task):
            answer, _ = yield from use(task, offer)
            if answer:
                return answer
    return (yield from _until_sure(task, _by_preference(task, experts)))


def _by_preference(task: Task, experts: list[Offer]) -> list[Offer]:
    if not experts:
        return []
    subject, by_price = task.data["subject"], sorted(experts, key=_price)
    specialist = [offer for offer in experts if offer["what"] == subject]
    wish = task.data["wish"]
    if wish == "right":
        others = [offer for offer in experts if offer not in specialist]
        return (specialist + sorted(others, key=_strength, reverse=True))[:2]
    if wish == "cheap":
        return by_price
    if wish == "fast":
        return [min(experts, key=lambda offer: offer["latency"])]
    return specialist or [by_price[len(by_price) // 2]]


def perfect(task: Task, rng: random.Random) -> Play:
    """Follows the best plan of a player who knows every hidden skill: a ceiling, no rival."""
    return _until_sure(task, best_plan(task))


def best_plan(task: Task) -> Plan:
    """Returns the plan of highest expected reward: at most three tools, used until one is sure."""
    tools = [offer for offer in task.data["tools"] if is_expert(offer) or fits(offer, task)]
    plans = [plan for length in (1, 2, 3) for plan in permutations(tools, length)]
    return max(plans, key=lambda plan: _expected_reward(task, plan, 0.0, 0.0, {}))


class _Attempt(NamedTuple):
    outcome: float
    cost_usd: float
    latency_s: float
    calls: dict[str, int]


def _expected_reward(
    task: Task, plan: Plan, cost: float, latency: float, calls: dict[str, int]
) -> float:
    """The expected reward of a plan after a cost in US dollars, a latency in seconds, calls."""
    offer, rest = plan[0], plan[1:]
    needed = len(task.data["tables"]) if offer["what"] == "records" else 1
    cost += expected_cost(offer, task.data["difficulty"]) * needed
    latency += offer["latency"] * needed
    calls = calls | {offer["name"]: 1}
    total = 0.0
    for probability, right, sure in _outcomes(task, offer):
        if rest and not sure:
            value = _expected_reward(task, rest, cost, latency, calls)
        else:
            attempt = _Attempt(right, cost, latency, calls)
            value = task_reward(attempt, task.preference, task_bounds(task))
        total += probability * value
    return total


def _outcomes(task: Task, offer: Offer) -> list[tuple[float, float, bool]]:
    """(probability, right, sure) of what one use may bring."""
    if not is_expert(offer):
        return [(1.0, 1.0, True)]
    s = skill(offer["what"], task.data["subject"], task.data["difficulty"])
    return [
        (s.right * (1 - s.unsure_if_right), 1.0, True),
        (s.right * s.unsure_if_right, 1.0, False),
        ((1 - s.right) * (1 - s.unsure_if_wrong), 0.0, True),
        ((1 - s.right) * s.unsure_if_wrong, 0.0, False),
    ]


ROUTERS: dict[str, Router] = {
    "strongest": strongest,
    "cheapest": cheapest,
    "cascade": cascade,
    "random": at_random,
    "rule": rule,
    "perfect": perfect,
}
