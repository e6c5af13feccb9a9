"""Draws the words and numbers that a seed may choose in a domain, and puts them into its file."""

import random
import re
from datetime import date, timedelta
from types import SimpleNamespace
from typing import Any

from worlds.toolscale.program import Json


class Words(SimpleNamespace):
    """What the seed chose for a domain: `business`, `today`, a value for each of its choices.

    `data` is the domain's file with all of it filled in.
    """


def draw_words(blueprint: Json, rng: random.Random) -> Words:
    """Returns the words of a domain. Its `days` are dates as many days from today as they say."""
    w = Words(business=blueprint["business"])
    today = date(2026, rng.randint(1, 12), rng.randint(1, 28))
    w.today = today.isoformat()
    for name, values in blueprint.get("choices", {}).items():
        setattr(w, name, rng.choice(values))
    for name, count in blueprint.get("days", {}).items():
        setattr(w, name, day(w.today, int(expand(count, vars(w)))))
    w.data = expand(blueprint, vars(w))
    return w


def day(today: str, count: int) -> str:
    """Returns the date so many days after today, or before it."""
    return (date.fromisoformat(today) + timedelta(count)).isoformat()


def expand(template: Any, words: Json) -> Any:
    """Returns the template with every `<name>` replaced by that word.

    A string that is nothing but a `<name>` becomes the value itself: a number, list or object.
    """
    if isinstance(template, dict):
        return {expand(key, words): expand(value, words) for key, value in template.items()}
    if isinstance(template, list):
        return [expand(value, words) for value in template]
    if not isinstance(template, str):
        return template
    if whole := re.fullmatch(r"<(\w+)>", template):
        return words[whole[1]]
    return re.sub(r"<(\w+)>", lambda match: str(words[match[1]]), template)
