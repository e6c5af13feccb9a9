"""Turns typed questions and wishes into tasks of the miniature, in the world's own words.

nano has learnt only these words. The codes and records that its experts and tools are said to know
are made up from the question: the same question has the same answer every time.
"""

import random
import re
from collections.abc import Iterable
from pathlib import Path

from nanorchestra.errors import require
from nanorchestra.files import read_toml
from nanorchestra.records import Preference, Task
from worlds.miniature.draw import arithmetic, chain, draw_wrong, knowledge, lookup
from worlds.miniature.offers import Offer, corpus, is_expert, title
from worlds.miniature.tables import (
    CHAINS,
    FIELDS,
    NOUNS,
    PHRASES,
    PREFERENCES,
    QUESTIONS,
    TRAIN,
)
from worlds.miniature.world import make_task

_DATA = read_toml(Path(__file__).with_suffix(".toml"))
EXAMPLES: list[str] = _DATA["examples"]
LINE_UP: list[Offer] = _DATA["line_up"]
BAN = r"\b(?:avoid|never|not|no)(?: \w+){0,2}? "  # before a tool's name
CASE = rf"(?:(easy|hard) )?({'|'.join(map(' '.join, NOUNS.items()))}) ([1-9]\d\d)(?:.*code)?"
PRODUCT_OR_SUM = r"([1-9]\d\d) ?(\*) ?([1-9])|([1-9]\d) ?([+-]) ?([1-9]\d)"
ROW = rf"({'|'.join(FIELDS)}) of ([a-z ]+) ([1-9]\d\d)"
PATHS = {" of ".join(reversed(chain[:k])): chain[:k] for chain in CHAINS for k in (2, 3)}


def as_task(question: str, wish: str) -> Task:
    """Returns the task that a typed question is, with LINE_UP on offer.

    UserError if it is of none of the four kinds, or its numbers are longer or shorter than the
    world's: nano has learnt to copy only those.
    """
    said = " ".join(question.casefold().split()).rstrip(" .?!")
    said = re.sub("^(in )?(what is )?(the )?((value|code) of )?(the )?", "", said).replace(
        " of the ", " of "
    )
    asked = _case(said) or _arithmetic(said) or _lookup(said) or _chain(said)
    examples = ", ".join(map(repr, EXAMPLES))
    require(asked, f"outside the miniature's world: {question[:60]!r}; ask like {examples}")
    records = asked.kind == "chain"  # as in the world: no records without tables
    tools = [t for t in LINE_UP if is_expert(t) or (t["what"] == "records") == records]
    name, preference = as_preference(wish, tools)
    text = QUESTIONS[TRAIN][asked.kind][0].format(**asked.values)
    wrong = draw_wrong(random.Random(text), asked, TRAIN)
    return make_task(f"asked/{text}", text, asked, wrong, tools, name, preference)


def as_preference(wish: str, offers: Iterable[Offer]) -> tuple[str, Preference]:
    """Returns the preference that a typed wish states, and its name.

    It is named by its first letters ("cheaply", "balance"), balanced and unsaid if there is none; a
    tool is forbidden if its name follows "avoid", "not", "never" or "no".
    """
    said = wish.casefold()
    named = next((name for name in PREFERENCES if re.search(rf"\b{name[:5]}", said)), "")
    name = named or "balanced"
    weights = PREFERENCES[name][1]
    avoided = [o for o in offers if re.search(rf"{BAN}{o['name']}\b", said)]
    bans = [PHRASES[TRAIN]["avoid"][0].format(title(offer)) for offer in avoided]
    text = " ".join([*PHRASES[TRAIN].get(named, [])[:1], *bans])
    return name, Preference(text, *weights, {o["name"]: -sum(weights) for o in avoided})


def _made_up(what, low, high):
    return random.Random(f"made up/{what}").randint(low, high)


def _case(said):
    if match := re.fullmatch(CASE, said):
        difficulty, (subject, noun), n = match[1] or "easy", match[2].split(), match[3]
        return knowledge(subject, int(n), difficulty, _made_up(f"{subject} {noun} {n}", 10, 99))


def _arithmetic(said):
    if match := re.fullmatch(PRODUCT_OR_SUM, said):
        a, sign, b = filter(None, match.groups())
        return arithmetic(int(a), sign, int(b))


def _lookup(said):
    found = (lookup(fact) for fact in corpus()[0])
    return next((question for question in found if question.solution == said), None)


def _chain(said):
    """Makes up the records on the path: the same row says the same in every question."""
    match = re.fullmatch(ROW, said)
    if not match or match[2] not in PATHS:
        return None
    wanted, names, n = match[1], PATHS[match[2]], match[3]
    value, tables = n, {}
    for name, following in zip(names, [*names[1:], wanted], strict=True):
        row, digits = value, (10, 99) if following == wanted else (100, 999)
        value = _made_up(f"{name} {row} {following}", *digits)
        tables[name] = {str(row): {following: value}}
    return chain(names, int(n), wanted, value, tables)
