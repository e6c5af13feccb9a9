"""Fixed strategies for the miniature, which a trained policy must beat; and `perfect`, the ceiling.

A router gives the order of the tools to use; they are used until one is sure. Routers play in the
same environments as the policy and are scored and billed in the same way, but pay for no tokens of
their own.
"""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import permutations

from nanorchestra.agent.environment import Environment
from nanorchestra.records import Preference, Task, ToolCall, Trajectory, Turn
from nanorchestra.tools.http import EndpointError
from nanorchestra.tools.roles import final_answer
from nanorchestra.tools.sandbox import Sandbox
from tools import Skill
from worlds.evaluation import score
from worlds.judge import normalise
from worlds.miniature.offers import (
    Offer,
    Reading,
    call_for,
    expected_cost,
    fits,
    is_expert,
    read_result,
    skill,
)
from worlds.miniature.tables import PREFERENCES, SPECIALISTS
from worlds.miniature.world import environment

AVERAGE_WISH = [  # weights of outcome, cost and latency over all users
    sum(share * weights[i] for share, weights in PREFERENCES.values()) for i in range(3)
]
TURNS = 40  # of a conversation at most
STRENGTHS = ("small", *SPECIALISTS.values(), "medium", "large")


def play_routers(tasks: Sequence[Task], seed: int, sandbox: Sandbox) -> dict[str, list[Trajectory]]:
    """Returns the attempts of every router at the tasks, by its name."""
    attempts: dict[str, list[Trajectory]] = defaultdict(list)
    for task in tasks:
        for name, order in orders(task, random.Random(f"router/{task.id}/{seed}")).items():
            attempts[name].append(play(order, environment(task, seed, sandbox), seed))
    return attempts


def play(order: Sequence[Offer], env: Environment, seed: int = 0) -> Trajectory:
    """Returns one scored attempt that uses tools in order until one is sure.

    A chain of records is followed to its end, as a conversation is; anything else is one call.
    Offers of other worlds than the miniature state the `arguments` of their call.
    """
    task, said = env.task, []
    trajectory = Trajectory(task.id, seed, 0, [], [], [], [])
    for offer in order:
        row, name = None, offer["name"]
        while True:
            known = offer.get("arguments")
            call = call_for(task, offer, row) if known is None else ToolCall(name, known)
            talks = hasattr(env, "over")
            tool = None if talks else env.by_name[name]
            result = asyncio.run(env.execute(call)) if talks else tool.call(call.arguments)
            trajectory.turns.append(Turn(0, 0, "stop", [call], [result]))
            trajectory.cost_usd += result.cost_usd
            trajectory.latency_s += result.latency_s
            used = result.alias or name
            trajectory.calls[used] = trajectory.calls.get(used, 0) + 1
            if known is None:
                reading = read_result(task, offer, result)
            else:
                said.append(normalise(final_answer(result.content)))
                failed = result.error or talks and "Error: " in result.content
                sure = env.over if talks else not failed and said.count(said[-1]) > 1
                again = talks and not sure and len(said) < TURNS
                again &= not failed or offer is order[-1]
                reading = Reading("", result.content, sure, ("", 0) if again else None)
            row = reading.next_row
            if row is None:
                break
        trajectory.answer = reading.answer or ""
        if reading.sure:
            break
    try:
        trajectory.outcome = env.score(trajectory.answer)
    except EndpointError:
        trajectory.status = "infrastructure"
    trajectory.verdict = env.verdict
    return score(task, trajectory)


def orders(task: Task, rng: random.Random) -> dict[str, Sequence[Offer]]:
    """Returns the tools that each router uses, in order; docs/worlds.md describes the routers."""
    usable = [offer for offer in task.data["tools"] if is_expert(offer) or fits(offer, task)]
    allowed = [offer for offer in usable if offer["name"] not in task.preference.avoided]
    by_price = sorted(filter(is_expert, usable), key=lambda offer: offer["price"])
    shuffled = rng.sample(usable, len(usable))
    by_wish = sorted(allowed or usable, key=lambda offer: _rank(task, offer))
    return {
        "strongest": [max(by_price, key=_strength)],
        "cheapest": by_price[:1],
        "cascade": by_price,
        "random": shuffled[:1],
        "teacher": [offer for offer in shuffled if offer in allowed] or usable,
        "sense": by_wish[:1],
        "until_sure": by_wish,
        "no_wish": informed_order(without_wish(task))[:2],
        "no_prices": informed_order(without_prices(task))[:2],
        "informed": informed_order(task)[:2],
        "perfect": max(_plans(usable), key=lambda plan: _expected_reward(task, plan)),
    }


def informed_order(task: Task) -> list[Offer]:
    """Returns the tools from the highest expected reward of a single call down.

    It looks up the hidden skills, which are the same in all tasks, so that a policy can learn them.
    """
    usable = [offer for offer in task.data["tools"] if is_expert(offer) or fits(offer, task)]
    return sorted(usable, key=lambda offer: -_expected_reward(task, [offer]))


def without_wish(task: Task) -> Task:
    """Returns the task as one sees it who reads a ban, but not what matters to the user."""
    bans = dict.fromkeys(task.preference.tools, -sum(AVERAGE_WISH))
    return replace(task, preference=Preference(task.preference.text, *AVERAGE_WISH, bans))


def without_prices(task: Task) -> Task:
    """Returns the task as one sees it who reads a ban, but neither prices nor latencies."""
    bans = dict.fromkeys(task.preference.tools, -1.0)
    return replace(task, preference=Preference(task.preference.text, 1.0, 0.0, 0.0, bans))


def _rank(task: Task, offer: Offer) -> tuple[bool, float]:
    """Orders tools by what the prompt says: the fitting tool, then as the user's wish."""
    tools, wish = task.data["tools"], task.data["wish"]
    price = offer["price"] / max(tool["price"] for tool in tools)
    latency = offer["latency"] / max(tool["latency"] for tool in tools)
    specialist = offer["what"] == SPECIALISTS.get(task.data["subject"])
    badness = {
        "right": -len(STRENGTHS) if specialist else -_strength(offer),
        "cheap": price,
        "fast": latency,
        "balanced": price + latency,
    }
    return not fits(offer, task), badness[wish]


def _strength(offer: Offer) -> int:
    """The place of an expert among those that names suggest to be weaker."""
    return STRENGTHS.index(offer["what"]) if is_expert(offer) else 0


def _plans(usable: Sequence[Offer]) -> list[tuple[Offer, ...]]:
    return [plan for length in (1, 2, 3) for plan in permutations(usable, length)]


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
