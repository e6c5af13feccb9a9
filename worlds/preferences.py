"""What users prefer, drawn or stated, in words and as weights.

The reward holds weights, the policy reads words. preferences.json holds the weights and the
phrases. Phrases of the split "held_out" never occur in "train".
"""

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from nanorchestra.config import DRAWN
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


def of_setting(line: str) -> Preference | None:
    """Returns the preference of task.preference; None if each task draws another. UserError."""
    return None if line == DRAWN else worded(Preference.parse(line, "task.preference"))


def worded(preference: Preference) -> Preference:
    """Returns a preference of weights alone with the sentences that policies were trained on.

    Words that are there are the user's, and stay as they are.
    """
    if preference.text:
        return preference
    weights = preference.outcome, preference.cost, preference.latency
    sentences = [words_for(weights), tool_words(preference.tools)]
    return replace(preference, text=" ".join(filter(None, sentences)))


def words_for(weights: tuple[float, float, float]) -> str:
    """Returns sentences for the weights of outcome, cost and latency.

    Weights count by their ratio to the largest, rounded to 0, 1/2 or 1.
    """
    largest = max(*weights, 1e-9)
    sentences = []
    for (name, default), weight in zip(DEFAULTS, weights, strict=True):
        rounded = math.floor(2 * weight / largest + 0.5) / 2
        if name == "outcome" and rounded == 0.0:
            rounded = 0.5  # the least that has words
        if rounded != default:
            sentences.append(PHRASES[name][str(rounded)]["train"][0])
    return " ".join(sentences)


def tool_words(tools: dict[str, float]) -> str:
    """Returns a sentence for the weight of each tool that has one."""
    sentences = []
    for tool, weight in tools.items():
        if weight:
            sign = str(math.copysign(1.0, weight))
            phrase = PHRASES["tool"][sign]["train"][0]
            sentences.append(phrase.format(tool=tool))
    return " ".join(sentences)
