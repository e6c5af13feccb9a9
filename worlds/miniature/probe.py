"""Measures whether a policy reacts to prices: tasks with another price of the large expert."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

from nanorchestra.agent.loop import Rollout
from nanorchestra.records import Task
from nanorchestra.tools.sandbox import Sandbox
from worlds.evaluation import evaluate
from worlds.miniature.offers import Offer, bounds

FACTORS = {"tenth": 0.1, "same": 1.0, "tenfold": 10.0}


def price_probe(
    rollout: Rollout, tasks: Sequence[Task], seed: int, sandbox: Sandbox, count: int = 120
) -> dict[str, float]:
    """Returns the share of attempts that ask the large expert, by the factor on its price.

    Probed are the first `count` of the tasks that weigh cost and allow a large expert; {} if there
    are none.
    """
    probed = [task for task in tasks if task.preference.cost > 0 and _allowed_large(task)][:count]
    if not probed:
        return {}
    names = [_allowed_large(task)["name"] for task in probed]
    shares = {}
    for label, factor in FACTORS.items():
        changed = [with_price(task, "large", factor) for task in probed]
        attempts = evaluate(rollout, changed, seed, sandbox)
        shares[label] = fmean(name in t.calls for name, t in zip(names, attempts, strict=True))
    return shares


def with_price(task: Task, what: str, factor: float) -> Task:
    """Returns the task with another price of every tool of a kind, in the prompt and on the bill.

    Prices are rounded to whole cents below a dollar, and to whole dollars above, as prompts quote
    them.
    """

    def change(cents: int) -> int:
        cents = max(1, round(cents * factor))
        return cents if cents < 100 else round(cents, -2)

    tools = [
        offer | {"price": change(offer["price"])} if offer["what"] == what else offer
        for offer in task.data["tools"]
    ]
    limits = bounds(tools, task.data["difficulty"])
    return replace(task, data=task.data | {"tools": tools, "bounds": limits})


def _allowed_large(task: Task) -> Offer | None:
    for offer in task.data["tools"]:
        if offer["what"] == "large" and offer["name"] not in task.preference.avoided:
            return offer
    return None
