"""Draws the experts that a task offers, and the prices of its price schedule.

offers.json holds the experts, the schedules and the tool that asks an expert. Experts and schedules
of the split "held_out" never occur in "train".
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
DESCRIPTIONS = _TABLES["descriptions"]  # forms of an expert's description
CALL_EXPERT = _TABLES["tool"]  # the function that asks an expert
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
        input_usd, output_usd = scheduled(schedule, model, PRICES[model])
        seconds = round(expert["seconds"] * rng.uniform(0.7, 1.4))
        form, skill = rng.choice(DESCRIPTIONS), rng.choice(expert["words"])
        drawn.append(
            {
                "alias": alias,
                "model": model,
                "description": form.format(
                    alias=alias, skill=skill, input=input_usd, output=output_usd, seconds=seconds
                ),
                "usd": [input_usd, output_usd],
                "latency_s": float(seconds),
                "skill": expert["skill"],
            }
        )
    return drawn


def scheduled(schedule: int | None, model: str, price: Price) -> list[float]:
    """Returns the input and output price of a model under a schedule, in USD per million tokens.

    A schedule multiplies the list prices of a model by a factor of its own; None leaves them.
    """
    factor = 1.0
    if schedule is not None:
        factor = random.Random(f"schedule/{schedule}/{model}").uniform(0.4, 2.5)
    return [float(f"{usd * factor:.2g}") for usd in price]
