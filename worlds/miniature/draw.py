"""Random draws of the miniature: numbers, prices, and the four kinds of questions.

Every function takes its generator and draws in a fixed order, so that a task is a function of its
seed. Numbers and facts are split between training and held-out tasks, so that a held-out question
has none that was trained on.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
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
)


@dataclass(frozen=True)
class Question:
    """A question in words with its answer.

    `kind` is a key of DRAW_QUESTION, `difficulty` "easy" or "hard". `solution` is what the fitting
    tool needs, `tables` the records that it reads.
    """

    words: str
    kind: str
    difficulty: str
    subject: str
    answer: str
    solution: Any = None
    tables: dict[str, dict[str, Any]] = field(default_factory=dict)


def draw_number(rng: random.Random, low: int, high: int, split: str) -> int:
    """Returns a whole number of the split, uniform in low .. high."""
    while not _belongs(number := rng.randint(low, high), split):
        pass
    return number


def draw_amount(rng: random.Random, ranges: list[Any], unit: int, split: str | None) -> int:
    """Returns a price or latency: log-uniform in the usual range, or in the high one times `unit`.

    `ranges` is the usual range, the high range, and the probability of the high one. The number
    (before the unit) is one of the split; None: any.
    """
    usual, high, share = ranges
    (low, top), scale = (high, unit) if rng.random() < share else (usual, 1)
    while True:
        number = round(low * (top / low) ** rng.random())
        if split is None or _belongs(number, split):
            return number * scale


def draw_wrong(rng: random.Random, answer: str) -> list[str]:
    """Returns eight wrong answers, from which a simulated expert draws its mistakes."""
    numbers = map(str, rng.sample(range(1, 1000), 9))
    return [number for number in numbers if number != answer][:8]


def _belongs(number, split):
    """True if a number is one of the split's: a scattered fifth of the integers is held out."""
    return (number * 2654435761 % 2**32 // 2**16 % 5 == 0) == (split == HELD_OUT)


def _asked_facts(split):
    """The facts asked in a split; the rest of the corpus is there to be confused with."""
    asked = [fact for fact in corpus()[0] if fact["subject"].split()[0] in ASKED_SUBJECTS]
    return [fact for i, fact in enumerate(asked) if _belongs(i, split)]


def _phrase(rng, split, kind, **values):
    return rng.choice(QUESTIONS[split][kind]).format(**values)


def _knowledge(rng, split, difficulty):
    """The code of a made-up case, which only experts know."""
    subject, n = rng.choice(SUBJECTS), draw_number(rng, 100, 999, split)
    words = _phrase(rng, split, "knowledge", subject=subject, difficulty=difficulty, n=n)
    answer = str(draw_number(rng, 10, 99, split))
    return Question(words, "knowledge", difficulty, subject, answer)


def _arithmetic(rng, split, difficulty):
    if difficulty == "easy":
        a, sign = draw_number(rng, 10, 99, split), rng.choice("+-")
        b = draw_number(rng, 10, 99, split)
        answer = a + b if sign == "+" else a - b
    else:
        a, sign, b = draw_number(rng, 100, 999, split), "*", draw_number(rng, 3, 9, split)
        answer = a * b
    expression = f"{a} {sign} {b}"
    words = _phrase(rng, split, "arithmetic", expression=expression)
    return Question(words, "arithmetic", difficulty, "arithmetic", str(answer), expression)


def _lookup(rng, split, difficulty):
    easy = difficulty == "easy"
    facts = _asked_facts(split)
    fact = rng.choice([f for f in facts if (f["relation"] in EASY_RELATIONS) == easy])
    relation, subject = fact["relation"], fact["subject"]
    words = _phrase(rng, split, "lookup", relation=relation, subject=subject)
    solution = f"{relation} of {subject}"
    return Question(words, "lookup", difficulty, "lookup", fact["value"], solution)


def _chain(rng, split, difficulty):
    """Records that refer to each other, two or three tables deep, with rows beside the path."""
    names = rng.choice(CHAINS)[: 2 if difficulty == "easy" else 3]
    wanted = rng.choice(FIELDS)
    ids = [draw_number(rng, 100, 999, split) for _ in names]
    answer = draw_number(rng, 10, 99, split)
    tables: dict[str, dict[str, Any]] = {}
    columns, values = [*names[1:], wanted], [*ids[1:], answer]
    for name, row, column, value in zip(names, ids, columns, values, strict=True):
        low, high = (10, 99) if column == wanted else (100, 999)
        rows = {row, *(draw_number(rng, 100, 999, split) for _ in range(2))}
        tables[name] = {
            str(n): {column: value if n == row else rng.randint(low, high)} for n in rows
        }
    path = chain_path(names)
    words = _phrase(rng, split, "chain", field=wanted, path=path, table=names[0], n=ids[0])
    solution = [names[0], ids[0]]
    return Question(words, "chain", difficulty, "chain", str(answer), solution, tables)


def chain_path(names: Sequence[str]) -> str:
    """Returns the words for the tables behind the first: "agent of the customer of"."""
    return " of the ".join(reversed(names[1:])) + " of"


DRAW_QUESTION: dict[str, Callable[[random.Random, str, str], Question]] = {
    "knowledge": _knowledge,
    "arithmetic": _arithmetic,
    "lookup": _lookup,
    "chain": _chain,
}
