"""Turns typed questions and preferences into tasks of the miniature.

A question is put in the world's own words. A preference stays as it is typed: nano reads it. The
codes and records that its experts and tools are said to know are made up from the question: the
same question has the same answer every time.
"""

import random
import re
from collections.abc import Collection
from pathlib import Path

from nanorchestra.errors import UserError, require
from nanorchestra.files import read_toml
from nanorchestra.records import Preference, Task, banned
from nanorchestra.schemas import Json
from worlds.bans import bans_in, unknown_ban
from worlds.miniature.draw import arithmetic, chain, draw_wrong, knowledge, lookup
from worlds.miniature.language import TRAIN
from worlds.miniature.offers import Offer, corpus, is_expert, title
from worlds.miniature.tables import (
    CHAINS,
    FIELDS,
    NOUNS,
    PREFERENCES,
)
from worlds.miniature.world import make_task
from worlds.wording import WEIGHED, weights_in

_DATA = read_toml(Path(__file__).with_suffix(".toml"))
EXAMPLES: list[str] = _DATA["examples"]
LINE_UP: list[Offer] = _DATA["line_up"]
PLAIN: dict[str, str] = _DATA["plain"]  # sentences for questions, weights and bans
CASE = rf"(?:(easy|hard) )?({'|'.join(map(' '.join, NOUNS.items()))}) ([1-9]\d\d)(?:.*code)?"
PRODUCT_OR_SUM = r"([1-9]\d\d) ?(\*) ?([1-9])|([1-9]\d) ?([+-]) ?([1-9]\d)"
ROW = rf"({'|'.join(FIELDS)}) of ([a-z ]+) ([1-9]\d\d)"
LONGEST = 200  # characters of a preference, more than any that nano has been trained on
PATHS = {" of ".join(reversed(chain[:k])): chain[:k] for chain in CHAINS for k in (2, 3)}


class OutsideError(UserError):
    """A question that is none of the miniature's."""

    code = "outside_the_world"


def as_task(question: str, preference_text: str, vector: Json) -> Task:
    """Returns the task that a typed question is, with LINE_UP on offer.

    UserError if it is of none of the four kinds, or its numbers are longer or shorter than the
    world's: nano has learnt to copy only those; or if the preference, a text and a vector, is none.
    """
    plain = " ".join(question.casefold().split()).rstrip(" .?!")
    plain = re.sub("^(in )?(what is )?(the )?((value|code) of )?(the )?", "", plain).replace(
        " of the ", " of "
    )
    asked = _case(plain) or _arithmetic(plain) or _lookup(plain) or _chain(plain)
    if not asked:
        examples = ", ".join(map(repr, EXAMPLES))
        raise OutsideError(f"outside the miniature's world: {question[:60]!r}; ask like {examples}")
    records = asked.kind == "chain"  # as in the world: no records without tables
    tools = [t for t in LINE_UP if is_expert(t) or (t["what"] == "records") == records]
    preference = as_preference(preference_text, vector, tools)
    text = PLAIN[asked.kind].format(**asked.values)
    wrong = draw_wrong(random.Random(text), asked, TRAIN)
    return make_task(f"asked/{text}", text, asked, wrong, tools, preference)


def as_preference(text: str, vector: Json, offers: Collection[Offer]) -> Preference:
    """Returns the preference that words and a vector state.

    nano reads the words as they are typed; weights beside them, or alone, are said in their place,
    by the sentence of the nearest of its four preferences. Bans that the words do not state get a
    sentence each. Bans in words are enforced, too: a tool may be named by its alias or by what it
    is ("large"). The weights are those of the nearest of the four, for the record: of words, as
    `weights_in` understands them. UserError for what nano has not learnt.
    """
    names = [offer["name"] for offer in LINE_UP]  # of which a task offers some
    kinds = [offer["what"] for offer in LINE_UP]
    bans = [*names, *kinds, *map(title, LINE_UP)]
    given = Preference.of(text, vector, "preference", names, bans)
    favoured = [name for name, weight in given.tools.items() if weight > 0]
    require(
        not favoured,
        f"preference: {favoured} have weights above 0; nano has learnt to avoid tools, not to "
        "favour one",
    )
    forbidden = [*given.never, *given.avoided, *bans_in(text, bans)]
    unknown = unknown_ban(text, bans)
    known = ", ".join(map(title, LINE_UP))
    require(not unknown, f"preference: there is no {unknown[:60]!r} to ban; there are {known}")
    require(
        len(text) <= LONGEST,
        f"preference: has {len(text):,} characters; nano reads {LONGEST} at most",
    )
    words = " ".join(text.split())
    if words and words[-1] not in ".!?":
        words += "."
    sentences = [words] if words else []
    stated = weights_in(text)
    if WEIGHED & {*vector}:
        stated = given.outcome, given.cost, given.latency
        sentences = [PLAIN[Preference("", *stated).name]]
    weights = PREFERENCES[Preference("", *stated).name if stated else "balanced"][1]
    avoided = [
        offer for offer in offers if banned([offer["name"], offer["what"], title(offer)], forbidden)
    ]
    said = bans_in(" ".join(sentences), [*kinds, *map(title, LINE_UP)])  # as nano knows them
    unsaid = [offer for offer in avoided if not banned([offer["what"], title(offer)], said)]
    sentences += [PLAIN["ban"].format(tool=title(offer)) for offer in unsaid]
    return Preference(
        " ".join(sentences),
        *weights,
        tools={offer["name"]: -sum(weights) for offer in avoided},
        never=[offer["name"] for offer in avoided],
        usd=given.usd,
        seconds=given.seconds,
    )


def _made_up(what, low, high):
    return random.Random(f"made up/{what}").randint(low, high)


def _case(plain):
    if match := re.fullmatch(CASE, plain):
        difficulty, (subject, noun), n = match[1] or "easy", match[2].split(), match[3]
        return knowledge(subject, int(n), difficulty, _made_up(f"{subject} {noun} {n}", 10, 99))


def _arithmetic(plain):
    if match := re.fullmatch(PRODUCT_OR_SUM, plain):
        a, sign, b = filter(None, match.groups())
        return arithmetic(int(a), sign, int(b))


def _lookup(plain):
    questions = (lookup(fact) for fact in corpus()[0])
    return next((question for question in questions if question.solution == plain), None)


def _chain(plain):
    """Makes up the records on the path: the same row says the same in every question."""
    match = re.fullmatch(ROW, plain)
    if not match or match[2] not in PATHS:
        return None
    wanted, names, n = match[1], PATHS[match[2]], match[3]
    value, tables = n, {}
    for name, following in zip(names, [*names[1:], wanted], strict=True):
        row, digits = value, (10, 99) if following == wanted else (100, 999)
        value = _made_up(f"{name} {row} {following}", *digits)
        tables[name] = {str(row): {following: value}}
    return chain(names, int(n), wanted, value, tables)
