"""Draws what users prefer, in words and as a vector, and the experts that a task offers.

preferences.json holds phrasings, experts and price schedules. Those of the split "held_out" never
occur in "train".
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

from nanorchestra.files import read_json
from nanorchestra.records import Preference
from reward import PRICES
from worlds.toolscale.shapes import Json

SPLITS = ("train", "held_out")
TABLES = read_json(Path(__file__).with_suffix(".json"))
DEFAULTS = {"outcome": 1.0, "cost": 0.0, "latency": 0.0}  # of what the words do not mention


def draw(rng: random.Random, tools: Sequence[str]) -> Preference:
    """Returns a preference over the tools named; `text` is empty (see `write`)."""
    outcome, cost, latency = rng.choice(TABLES["wishes"])
    named = rng.sample(list(tools), min(len(tools), rng.choice((0, 0, 1, 1, 2))))
    weights = {tool: rng.choice((-1.0, 1.0)) for tool in named}
    return Preference("", outcome, cost, latency, weights)


def write(preference: Preference, rng: random.Random, split: str) -> str:
    """Returns the preference in words of the split: a sentence for each weight, in any order."""
    said = [
        (what, getattr(preference, what), "")
        for what, usual in DEFAULTS.items()
        if getattr(preference, what) != usual or what == "outcome" and rng.random() < 0.5
    ]
    said += [("tool", weight, tool) for tool, weight in preference.tools.items()]
    rng.shuffle(said)
    return " ".join(
        rng.choice(TABLES["phrases"][what][str(weight)][split]).format(tool=tool)
        for what, weight, tool in said
    )


def catalogue(rng: random.Random, split: str, count: int = 3) -> list[Json]:
    """Returns `count` experts of the split as a task offers them.

    Each has alias, model (which the policy does not see), description, skill (the share of turns
    that its simulation does right), latency_s, and prices in US dollars per million tokens: the
    model's list prices times a factor of the task's price schedule.
    """
    schedule = rng.choice(TABLES["schedules"][split])
    experts = TABLES["experts"][split]
    models = rng.sample(sorted(experts), min(count, len(experts)))
    return [
        _offer(rng, f"expert-{number}", model, experts[model], schedule)
        for number, model in enumerate(models, 1)
    ]


def _offer(rng: random.Random, alias: str, model: str, expert: Json, schedule: int) -> Json:
    factor = random.Random(f"schedule/{schedule}/{model}").uniform(0.4, 2.5)
    price = PRICES[model]
    given, sampled = (
        float(f"{list_price * factor:.2g}")
        for list_price in (price.input_per_million, price.output_per_million)
    )
    latency = round(expert["seconds"] * rng.uniform(0.7, 1.4))
    description = rng.choice(TABLES["descriptions"])
    skill = rng.choice(expert["words"])
    return {
        "alias": alias,
        "model": model,
        "description": description.format(
            alias=alias, skill=skill, input=given, output=sampled, seconds=latency
        ),
        "input_per_million": given,
        "output_per_million": sampled,
        "latency_s": float(latency),
        "skill": expert["skill"],
        "schedule": schedule,
    }
