"""Says the weights of a preference in words: the reward holds weights, the policy reads words."""

import math
from dataclasses import replace

from nanorchestra.records import Preference
from worlds import preferences


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
    for (name, default), weight in zip(preferences.DEFAULTS, weights, strict=True):
        rounded = math.floor(2 * weight / largest + 0.5) / 2
        if name == "outcome" and rounded == 0.0:
            rounded = 0.5  # the least that has words
        if rounded != default:
            sentences.append(preferences.PHRASES[name][str(rounded)]["train"][0])
    return " ".join(sentences)


def tool_words(tools: dict[str, float]) -> str:
    """Returns a sentence for the weight of each tool that has one."""
    sentences = []
    for tool, weight in tools.items():
        if weight:
            sign = str(math.copysign(1.0, weight))
            phrase = preferences.PHRASES["tool"][sign]["train"][0]
            sentences.append(phrase.format(tool=tool))
    return " ".join(sentences)
