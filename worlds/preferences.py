"""Draws what users prefer, in words and as weights.

preferences.json holds the weights and the phrases. Phrases of the split "held_out" never occur in
"train".
"""

import random
from collections.abc import Sequence
from pathlib import Path

from nanorchestra.files import read_json
from nanorchestra.records import Preference

_TABLES = read_json(Path(__file__).with_suffix(".json"))
WEIGHTS = [tuple(weights) for weights in _TABLES["weights"]]  # of outcome, cost and latency
PHRASES = _TABLES["phrases"]  # "outcome", "cost", "latency" or "tool" -> weight -> split -> phrases
DEFAULTS = (("outcome", 1.0), ("cost", 0.0), ("latency", 0.0))  # of what is not mentioned


def draw(rng: random.Random, tools: Sequence[str], split: str) -> Preference:
    """Returns a preference over the tools named, in words of the split.

    The text has a sentence for each weight that is not the default, in any order. Up to two tools
    are named, each to be used or to be avoided.
    """
    weights = rng.choice(WEIGHTS)
    count = min(len(tools), rng.choice((0, 0, 1, 1, 2)))
    tool_weights = {}
    for tool in rng.sample(list(tools), count):
        tool_weights[tool] = rng.choice((-1.0, 1.0))
    stated = []  # (phrases, tool) of each sentence
    for (name, default), weight in zip(DEFAULTS, weights, strict=True):
        # That the answer must be right may be said, or go without saying.
        if weight != default or (name == "outcome" and rng.random() < 0.5):
            stated.append((PHRASES[name][str(weight)][split], ""))
    for tool, weight in tool_weights.items():
        stated.append((PHRASES["tool"][str(weight)][split], tool))
    rng.shuffle(stated)
    text = " ".join(sentence(rng, phrases, tool) for phrases, tool in stated)
    return Preference(text, *weights, tools=tool_weights)


def sentence(rng: random.Random, phrases: Sequence[str], tool: str = "") -> str:
    """Returns one of the phrases, with the name of the tool where it says {tool}."""
    return rng.choice(phrases).format(tool=tool)
