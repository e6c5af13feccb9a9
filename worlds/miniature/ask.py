"""Turns typed questions and wishes into tasks of the miniature, in the world's own words.

nano has learnt only these words. The codes and records that its experts and tools are said to know
are made up from the question: the same question has the same answer every time.
"""

from __future__ import annotations

import operator
import random
import re
import tomllib
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

from nanorchestra.errors import UserError
from nanorchestra.records import Preference, Task
from worlds.miniature.draw import Question
from worlds.miniature.offers import Offer, bounds, corpus, is_expert, title
from worlds.miniature.tables import (
    CHAINS,
    EASY_RELATIONS,
    FIELDS,
    HELD_OUT,
    PHRASES,
    PREFERENCES,
    QUESTIONS,
    SUBJECTS,
    TRAIN,
)

_DATA = tomllib.loads(Path(__file__).with_name("ask.toml").read_text(encoding="utf-8"))
EXAMPLES: list[str] = _DATA["examples"]
LINE_UP: list[Offer] = _DATA["line_up"]
BAN = r"\b(?:avoid|away|never|not|don't|without|leave|no)(?: \w+){0,3}? "  # before a tool's name
# What stands for a template's part; for others, any text.
PARTS = {"n": r"[1-9]\d\d", "difficulty": "easy|hard", "path": ".+ of", "table": r"\w+"}
SUM = r"([1-9]\d) ?([+-]) ?([1-9]\d)|([1-9]\d\d) ?(\*) ?([1-9])"
OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul}


def as_task(question: str, wish: str) -> Task:
    """Returns the task that a typed question is, with LINE_UP on offer.

    UserError if it is of none of the four kinds, or its numbers are longer or shorter than the
    world's: nano has learnt to copy only those.
    """
    said = " ".join(question.casefold().split()).rstrip(" .?!")
    for kind, values in _matches(said):
        if found := _READERS[kind](**values):
            break
    else:
        examples = ", ".join(map(repr, EXAMPLES))
        raise UserError(f"outside the miniature's world: {question[:60]!r}; ask like {examples}")
    difficulty, asked = found
    numbers = map(str, random.Random(asked.words).sample(range(1, 1000), 9))
    records = kind == "chain"  # as in the world: no records without tables
    tools = [t for t in LINE_UP if is_expert(t) or (t["what"] == "records") == records]
    name, preference = as_preference(wish, tools)
    data = {
        "kind": kind,
        "subject": asked.subject,
        "difficulty": difficulty,
        "answer": asked.answer,
        "tools": tools,
        "tables": asked.tables,
        "solution": asked.solution,
        "wish": name,
        "bounds": bounds(tools, difficulty),
        "wrong": [number for number in numbers if number != asked.answer][:8],
    }
    return Task(f"asked/{asked.words}", asked.words, preference, data)


def as_preference(wish: str, offers: Iterable[Offer]) -> tuple[str, Preference]:
    """Returns the preference that a typed wish states, by key words, and its name."""
    said = wish.casefold()
    fitting = (w["name"] for w in _DATA["wishes"] if re.search(rf"\b(?:{w['pattern']})", said))
    name = next(fitting, "balanced")
    weights = PREFERENCES[name][1]
    avoided = [o for o in offers if re.search(rf"{BAN}(?:\w+ )??{o['name']}\b", said)]
    bans = [PHRASES[TRAIN]["avoid"][0].format(title(offer)) for offer in avoided]
    text = " ".join([PHRASES[TRAIN][name][0], *bans])
    banned = dict.fromkeys((offer["name"] for offer in avoided), -sum(weights))
    return name, Preference(text, *weights, tools=banned)


def _matches(said):
    """Yields (kind, values) of the templates that a question fits."""
    for source in (QUESTIONS[TRAIN], QUESTIONS[HELD_OUT], _DATA["questions"]):
        for kind, templates in source.items():
            for template in templates:
                pattern = re.sub(
                    r"\\{(\w+)\\}", _group, re.escape(template.casefold().rstrip(".?"))
                )
                if match := re.fullmatch(pattern, said):
                    yield kind, match.groupdict()


def _group(match):
    return f"(?P<{match[1]}>{PARTS.get(match[1], '.+?')})"


def _made_up(what, low, high):
    return str(random.Random(f"made up/{what}").randint(low, high))


def _words(kind, **values):
    return QUESTIONS[TRAIN][kind][0].format(**values)


def _knowledge(subject, n, difficulty="easy"):
    if subject in SUBJECTS:
        words = _words("knowledge", subject=subject, difficulty=difficulty, n=n)
        return difficulty, Question(words, subject, _made_up(f"{subject} case {n}", 10, 99))


def _arithmetic(expression):
    if match := re.fullmatch(SUM, expression):
        a, sign, b = filter(None, match.groups())
        solution, value = f"{a} {sign} {b}", OPERATORS[sign](int(a), int(b))
        words = _words("arithmetic", expression=solution)
        difficulty = "hard" if sign == "*" else "easy"
        return difficulty, Question(words, "arithmetic", str(value), solution)


def _lookup(relation, subject):
    for fact in corpus()[0]:
        if (fact["relation"], fact["subject"]) == (relation, subject):
            difficulty = "easy" if relation in EASY_RELATIONS else "hard"
            words, solution = _words("lookup", **fact), f"{relation} of {subject}"
            return difficulty, Question(words, "lookup", fact["value"], solution)


def _chain(field, path, table, n):
    """Makes up the records on the path: the same row says the same in every question."""
    hops = [table, *reversed(re.findall(r"(\w+) of", path))]
    if field not in FIELDS or tuple(hops) not in {c[:k] for c in CHAINS for k in (2, 3)}:
        return None
    key, tables = n, {}
    for name, following in pairwise([*hops, field]):
        digits = (10, 99) if following == field else (100, 999)
        value = _made_up(f"{name} {key} {following}", *digits)
        tables[name] = {key: {following: int(value)}}
        key = value
    way = " of the ".join(reversed(hops[1:])) + " of"
    words = _words("chain", field=field, path=way, table=table, n=n)
    return "hard" if hops[2:] else "easy", Question(words, "chain", key, [table, int(n)], tables)


_READERS: dict[str, Any] = {
    "knowledge": _knowledge,
    "arithmetic": _arithmetic,
    "lookup": _lookup,
    "chain": _chain,
}
