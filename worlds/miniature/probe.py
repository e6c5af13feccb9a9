"""Measures whether a policy reacts to prices: tasks with another price of the large expert."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import fmean

from nanorchestra.agent.environment import Environment
from nanorchestra.agent.loop import Rollout
from nanorchestra.records import Task
from worlds.evaluation import evaluate
from worlds.miniature.offers import bounds
from worlds.miniature.tables import EXPENSIVE_CENTS

COUNT = 120
FACTORS = {"tenth": 0.1, "same": 1.0, "tenfold": 10.0}


def price_probe(
    rollout: Rollout, tasks: Sequence[Task], seed: int, make: Callable[[Task, int], Environment]
) -> dict[str, float]:
    """Returns the share of attempts that ask the large expert, by the factor on its price.

    Probed are the first COUNT tasks that weigh cost and allow a large expert; {} if there
    are none.
    """
    probed = [task for task in tasks if task.preference.cost > 0 and _large(task)][:COUNT]
    shares: dict[str, float] = {}
    for label, factor in FACTORS.items() if probed else ():
        attempts = evaluate(rollout, [with_price(task, factor) for task in probed], seed, make)
        pairs = zip(probed, attempts, strict=True)
        shares[label] = fmean(_large(task) in attempt.calls for task, attempt in pairs)
    return shares


def with_price(task: Task, factor: float) -> Task:
    """Returns the task with another price of the large expert, in the prompt and on the bill.

    Prices are rounded to whole cents below a dollar, and to whole dollars above, as prompts quote
    them.
    """
    tools = []
    for offer in task.data["tools"]:
        if offer["what"] == "large":
            cents = max(1, round(offer["price"] * factor))
            offer = offer | {"price": cents if cents < EXPENSIVE_CENTS else round(cents, -2)}
        tools.append(offer)
    limits = bounds(tools, task.data["difficulty"])
    return replace(task, data=task.data | {"tools": tools, "bounds": limits})


def _large(task: Task) -> str | None:
    """The name of the large expert, if it is on offer and not forbidden."""
    names = {offer["what"]: offer["name"] for offer in task.data["tools"]}
    return names.get("large") if names.get("large") not in task.preference.avoided else None
