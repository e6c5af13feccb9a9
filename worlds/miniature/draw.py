"""The four kinds of questions, and random draws: of questions, numbers, prices, answers.

Every draw takes its generator and draws in a fixed order, so that a task is a function of its seed.
Numbers and facts are split between training and held-out tasks, so that a held-out task has none
that was trained on.
"""

import operator
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from worlds.miniature.language import HELD_OUT, draw_sentence
from worlds.miniature.names import is_held_out
from worlds.miniature.offers import corpus
from worlds.miniature.tables import (
    ASKED,
    CHAINS,
    EASY_RELATIONS,
    FIELDS,
    NOUNS,
    SUBJECTS,
)

OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul}


@dataclass(frozen=True)
class Question:
    """A question with its answer; `values` are filled into a sentence of its kind.

    `kind` is a key of DRAW_QUESTION, `difficulty` "easy" or "hard". `solution` is what the fitting
    tool needs, `tables` the records that it reads.
    """

    values: dict[str, Any]
    kind: str
    difficulty: str
    subject: str
    answer: str
    solution: Any = None
    tables: dict[str, dict[str, Any]] = field(default_factory=dict)

    def phrased(self, rng: random.Random, split: str) -> str:
        """Returns the question in a sentence of the split."""
        return draw_sentence(rng, self.kind, split, **self.values)


def knowledge(subject: str, n: int, difficulty: str, code: int) -> Question:
    """Returns the question for the code of a made-up case, which only experts know."""
    values = {"subject": subject, "noun": NOUNS[subject], "difficulty": difficulty, "n": n}
    return Question(values, "knowledge", difficulty, subject, str(code))


def arithmetic(a: int, sign: str, b: int) -> Question:
    """Returns the question for a sum, a difference, or a product, which is hard."""
    expression, answer = f"{a} {sign} {b}", str(OPERATORS[sign](a, b))
    difficulty, values = "hard" if sign == "*" else "easy", {"expression": expression}
    return Question(values, "arithmetic", difficulty, "arithmetic", answer, expression)


def lookup(fact: dict[str, str]) -> Question:
    """Returns the question for a fact of the corpus."""
    difficulty = "easy" if fact["relation"] in EASY_RELATIONS else "hard"
    solution = f"{fact['relation']} of {fact['subject']}"
    return Question(fact, "lookup", difficulty, "lookup", fact["value"], solution)


def chain(
    names: Sequence[str], n: int, wanted: str, answer: int, tables: dict[str, Any]
) -> Question:
    """Returns the question for a field at the end of a path through tables, from row n on."""
    path = " of the ".join(reversed(names[1:])) + " of"
    values = {"field": wanted, "path": path, "table": names[0], "n": n}
    difficulty = "hard" if names[2:] else "easy"
    return Question(values, "chain", difficulty, "chain", str(answer), [names[0], n], tables)


def draw_number(rng: random.Random, low: int, high: int, split: str) -> int:
    """Returns a whole number of the split, uniform in low .. high."""
    while not _belongs(number := rng.randint(low, high), split):
        pass
    return number


def draw_terms(rng: random.Random, prices: list[int], latencies: list[int]) -> dict[str, int]:
    """Returns a price and a latency within these limits; who is faster asks for more.

    The price is log-uniform, and so is nearly the latency, in the opposite place of its range.
    """
    place = rng.random()
    other = min(1.0, max(0.0, 1 - place + rng.uniform(-0.3, 0.3)))
    (low, high), (least, most) = prices, latencies
    price, latency = low * (high / low) ** place, least * (most / least) ** other
    return {"price": round(price), "latency": round(latency)}


def draw_wrong(rng: random.Random, question: Question, split: str) -> list[str]:
    """Returns up to eight wrong answers, from which a simulated expert draws its mistakes.

    They differ from the right one in nothing but truth: slips in an operand, values of other facts
    of the same relation, other codes and values of the split.
    """
    right = question.answer
    if question.kind == "arithmetic":
        a, sign, b = question.solution.split()
        slips = [n for n in range(-30, 31) if n]
        made = [OPERATORS[sign](int(a) + slip, int(b)) for slip in rng.sample(slips, 8)]
    elif question.kind == "lookup":
        relation = question.solution.partition(" of ")[0]
        alike = [fact["value"] for fact in _asked_facts(split) if fact["relation"] == relation]
        others = sorted({int(value) for value in alike if value != right})
        made = rng.sample(others, min(8, len(others)))
    else:
        made = [draw_number(rng, 10, 99, split) for _ in range(8)]
    return [str(number) for number in made if str(number) != right]


def _belongs(key, split):
    return is_held_out(key) == (split == HELD_OUT)


@cache
def _asked_facts(split):
    """The facts asked in a split; the rest of the corpus is there to be confused with."""
    kinds = [(fact["subject"].split()[0], fact) for fact in corpus()[0]]
    numbered = [(kind, fact) for kind, fact in kinds if kind in ASKED]
    return [
        fact
        for i, (kind, fact) in enumerate(numbered)
        if _belongs(i, split) and fact["relation"] == ASKED[kind]
    ]


def _knowledge(rng, split, difficulty):
    subject, n = rng.choice(SUBJECTS), draw_number(rng, 100, 999, split)
    return knowledge(subject, n, difficulty, draw_number(rng, 10, 99, split))


def _arithmetic(rng, split, difficulty):
    if difficulty == "hard":
        return arithmetic(draw_number(rng, 100, 999, split), "*", rng.randint(3, 9))
    a, sign = draw_number(rng, 10, 99, split), rng.choice("+-")
    return arithmetic(a, sign, draw_number(rng, 10, 99, split))


def _lookup(rng, split, difficulty):
    easy = difficulty == "easy"
    facts = [f for f in _asked_facts(split) if (f["relation"] in EASY_RELATIONS) == easy]
    return lookup(rng.choice(facts))


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
    return chain(names, ids[0], wanted, answer, tables)


DRAW_QUESTION: dict[str, Callable[[random.Random, str, str], Question]] = {
    "knowledge": _knowledge,
    "arithmetic": _arithmetic,
    "lookup": _lookup,
    "chain": _chain,
}
