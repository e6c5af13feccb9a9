"""Random draws of the miniature: numbers, prices, and the four kinds of questions.

Every function takes its generator and draws in a fixed order, so that a task is a function of its
seed. Numbers and facts are split between training and held-out tasks, so that a held-out question
has none that was trained on.
"""

from __future__ import annotations

import operator
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from worlds.miniature.offers import corpus
from worlds.miniature.tables import (
    ASKED_SUBJECTS,
    CHAINS,
    EASY_RELATIONS,
    FIELDS,
    HELD_OUT,
    QUESTIONS,
    SUBJECTS,
    Range,
)

OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul}


def belongs(number: int, split: str) -> bool:
    """Returns true if a number is one of the split's; a scattered fifth is held out."""
    return (number * 2654435761 % 2**32 // 2**16 % 5 == 0) == (split == HELD_OUT)


def draw_number(rng: random.Random, low: int, high: int, split: str) -> int:
    """Returns a whole number of the split, uniform in low .. high."""
    while not belongs(number := rng.randint(low, high), split):
        pass
    return number


def draw_amount(
    rng: random.Random, ranges: tuple[Range, Range, float], unit: int, split: str | None
) -> int:
    """Returns a price or latency: log-uniform in the usual range, or in the high one times `unit`.

    The third entry of `ranges` is the probability of the high range. The number (before the unit)
    is one of the split; None: any.
    """
    usual, high, share = ranges
    (low, top), scale = (high, unit) if rng.random() < share else (usual, 1)
    while True:
        number = round(low * (top / low) ** rng.random())
        if split is None or belongs(number, split):
            return number * scale


@dataclass(frozen=True)
class Question:
    """A question in words with its answer.

    `solution` is what the fitting tool needs, `tables` the records that it reads.
    """

    words: str
    subject: str
    answer: str
    solution: Any = None
    tables: dict[str, dict[str, Any]] = field(default_factory=dict)


def _knowledge(rng: random.Random, split: str, difficulty: str) -> Question:
    """Only an expert can answer: the code of a made-up case."""
    subject, n = rng.choice(SUBJECTS), draw_number(rng, 100, 999, split)
    words = rng.choice(QUESTIONS[split]["knowledge"])
    words = words.format(subject=subject, difficulty=difficulty, n=n)
    return Question(words, subject, str(draw_number(rng, 10, 99, split)))


def _arithmetic(rng: random.Random, split: str, difficulty: str) -> Question:
    if difficulty == "easy":
        a, sign = draw_number(rng, 10, 99, split), rng.choice("+-")
        b = draw_number(rng, 10, 99, split)
    else:
        a, sign, b = draw_number(rng, 100, 999, split), "*", draw_number(rng, 3, 9, split)
    expression = f"{a} {sign} {b}"
    words = rng.choice(QUESTIONS[split]["arithmetic"]).format(expression=expression)
    return Question(words, "arithmetic", str(OPERATORS[sign](a, b)), expression)


@lru_cache(maxsize=2)
def _facts(split: str) -> tuple[dict[str, str], ...]:
    """The facts asked in a split; the rest of the corpus is there to be confused with."""
    asked = [fact for fact in corpus()[0] if fact["subject"].split()[0] in ASKED_SUBJECTS]
    return tuple(fact for i, fact in enumerate(asked) if belongs(i, split))


def _lookup(rng: random.Random, split: str, difficulty: str) -> Question:
    easy = difficulty == "easy"
    fact = rng.choice([f for f in _facts(split) if (f["relation"] in EASY_RELATIONS) == easy])
    words = rng.choice(QUESTIONS[split]["lookup"])
    words = words.format(relation=fact["relation"], subject=fact["subject"])
    return Question(words, "lookup", fact["value"], f"{fact['relation']} of {fact['subject']}")


def _chain(rng: random.Random, split: str, difficulty: str) -> Question:
    """Records that refer to each other, two or three tables deep, with rows beside the path."""
    names = rng.choice(CHAINS)[: 2 if difficulty == "easy" else 3]
    last_field = rng.choice(FIELDS)
    ids = [draw_number(rng, 100, 999, split) for _ in names]
    answer = draw_number(rng, 10, 99, split)
    fields, values = [*names[1:], last_field], [*ids[1:], answer]
    tables: dict[str, dict[str, Any]] = {}
    for name, number, following, value in zip(names, ids, fields, values, strict=True):
        low, high = (10, 99) if following == last_field else (100, 999)
        numbers = {number, *(draw_number(rng, 100, 999, split) for _ in range(2))}
        tables[name] = {
            str(n): {following: value if n == number else rng.randint(low, high)} for n in numbers
        }
    path = " of the ".join(reversed(names[1:])) + " of"
    words = rng.choice(QUESTIONS[split]["chain"])
    words = words.format(field=last_field, path=path, table=names[0], n=ids[0])
    return Question(words, "chain", str(answer), [names[0], ids[0]], tables)


DRAW_QUESTION: dict[str, Callable[[random.Random, str, str], Question]] = {
    "knowledge": _knowledge,
    "arithmetic": _arithmetic,
    "lookup": _lookup,
    "chain": _chain,
}
