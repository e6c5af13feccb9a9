"""Draws the experts that a task offers, and the prices of its price schedule.

offers.json holds the experts and the schedules. Those of the split "held_out" never occur in
"train".
"""

import random
from pathlib import Path

from nanorchestra.files import read_json
from nanorchestra.records import Price
from nanorchestra.schemas import Json
from reward import PRICES

_TABLES = read_json(Path(__file__).with_suffix(".json"))
EXPERTS = _TABLES["experts"]  # split -> model -> skill, seconds and words
OTHERS = _TABLES["others"]  # skill and seconds of any other model
SCHEDULES = _TABLES["schedules"]  # split -> numbers of price schedules
DESCRIPTIONS = _TABLES["descriptions"]  # forms of an expert's description, and of its seconds
COUNT = 3  # experts of a task


def draw_experts(rng: random.Random, split: str) -> list[Json]:
    """Returns COUNT experts of the split as a task offers them.

    Each has alias, model (which the policy does not see), description, skill (the share of turns
    that its simulation does right), latency_s, and usd per million tokens of input and of output:
    the model's list prices under the task's schedule.
    """
    schedule, experts = rng.choice(SCHEDULES[split]), EXPERTS[split]
    drawn = []
    for number, model in enumerate(rng.sample(sorted(experts), COUNT), 1):
        alias, expert = f"expert-{number}", experts[model]
        price = scheduled(schedule, model, PRICES[model])
        seconds = round(expert["seconds"] * rng.uniform(0.7, 1.4))
        form, skill = rng.choice(DESCRIPTIONS), rng.choice(expert["words"])
        drawn.append(
            {
                "alias": alias,
                "model": model,
                "description": describe(form, alias, skill, price, seconds),
                "usd": list(price),
                "latency_s": float(seconds),
                "skill": expert["skill"],
            }
        )
    return drawn


def call_expert(experts: list[Json]) -> Json:
    """Returns the function object of the tool that asks one of the experts."""
    alias = {
        "type": "string",
        "enum": [expert["alias"] for expert in experts],
        "description": " ".join(expert["description"] for expert in experts),
    }
    parameters = {"type": "object", "properties": {"expert": alias}, "required": ["expert"]}
    function = {"name": "call_expert", "description": "Lets an expert do this turn."}
    return {"type": "function", "function": function | {"parameters": parameters}}


def describe(form: list[str], alias: str, skill: str, price: Price, latency_s: float) -> str:
    """Returns what the policy reads about an expert: its words, its price, its usual seconds.

    `form` is one of DESCRIPTIONS. A `latency_s` of 0 is not known, and nothing is said of it.
    """
    text, seconds = form
    return text.format(
        alias=alias,
        skill=skill,
        input=price.input_per_million,
        output=price.output_per_million,
        latency=seconds.format(round(latency_s)) if latency_s else "",
    )


def scheduled(schedule: int, model: str, price: Price) -> Price:
    """Returns the price of a model under a schedule, which multiplies it by a factor of its own."""
    factor = random.Random(f"schedule/{schedule}/{model}").uniform(0.4, 2.5)
    return Price(*(float(f"{usd * factor:.2g}") for usd in price))
