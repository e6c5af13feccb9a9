"""Draws what users prefer, in words and as a vector, and the experts that a task offers.

preferences.json holds phrasings, experts, price schedules and the tool that asks an expert. The
phrasings, experts and schedules of the split "held_out" never occur in "train".
"""

import random
from collections.abc import Sequence
from pathlib import Path

from nanorchestra.files import read_json
from nanorchestra.records import Preference, Price
from nanorchestra.schemas import Json
from reward import PRICES

TABLES = read_json(Path(__file__).with_suffix(".json"))
OFFERED = 3  # experts of a task
DEFAULTS = (("outcome", 1.0), ("cost", 0.0), ("latency", 0.0))  # of what is not mentioned


def draw(rng: random.Random, tools: Sequence[str], split: str) -> Preference:
    """Returns a preference over the tools named, in words of the split.

    The text has a sentence for each weight, in any order.
    """
    outcome, cost, latency = weights = rng.choice(TABLES["wishes"])
    named = rng.sample(list(tools), min(len(tools), rng.choice((0, 0, 1, 1, 2))))
    preferred = {tool: rng.choice((-1.0, 1.0)) for tool in named}
    said = [
        (what, weight, "")
        for (what, usual), weight in zip(DEFAULTS, weights, strict=True)
        if weight != usual or what == "outcome" and rng.random() < 0.5
    ]
    said += [("tool", weight, tool) for tool, weight in preferred.items()]
    rng.shuffle(said)
    text = " ".join(
        rng.choice(TABLES["phrases"][what][str(weight)][split]).format(tool=tool)
        for what, weight, tool in said
    )
    return Preference(text, outcome, cost, latency, preferred)


def catalogue(rng: random.Random, split: str) -> list[Json]:
    """Returns OFFERED experts of the split as a task offers them.

    Each has alias, model (which the policy does not see), description, skill (the share of turns
    that its simulation does right), latency_s, and usd per million tokens of input and of output:
    the model's list prices times a factor of the task's price schedule.
    """
    schedule, experts = rng.choice(TABLES["schedules"][split]), TABLES["experts"][split]
    offered = []
    for number, model in enumerate(rng.sample(sorted(experts), OFFERED), 1):
        alias, expert, price = f"expert-{number}", experts[model], PRICES[model]
        given, sampled = scheduled(schedule, model, price)
        latency = round(expert["seconds"] * rng.uniform(0.7, 1.4))
        description, skill = rng.choice(TABLES["descriptions"]), rng.choice(expert["words"])
        description = description.format(
            alias=alias, skill=skill, input=given, output=sampled, seconds=latency
        )
        offered.append(
            {
                "alias": alias,
                "model": model,
                "description": description,
                "usd": [given, sampled],
                "latency_s": float(latency),
                "skill": expert["skill"],
            }
        )
    return offered


def scheduled(schedule: int | None, model: str, price: Price) -> list[float]:
    """Returns the input and output price of a model under a schedule, in USD per million tokens.

    None: the list prices.
    """
    factor = 1.0
    if schedule is not None:
        factor = random.Random(f"schedule/{schedule}/{model}").uniform(0.4, 2.5)
    return [float(f"{usd * factor:.2g}") for usd in price]


def kind_of(wish: Preference) -> str:
    """Returns the name of a preference in summaries."""
    if wish.cost == wish.latency:
        return "balanced" if wish.cost else "right"
    return "cheap" if wish.cost > wish.latency else "fast"
