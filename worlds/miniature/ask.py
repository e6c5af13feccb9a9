"""Turns typed questions and preferences into tasks of the miniature.

A question is put in the world's own words. The words of a preference stay as they are typed: nano
reads them, and nothing else does. The codes and records that its experts and tools are said to know
are made up from the question: the same question has the same answer every time.
"""

import random
import re
from collections.abc import Collection
from pathlib import Path

from nanorchestra.errors import UserError, require
from nanorchestra.files import read_toml
from nanorchestra.records import Preference, Task, banned
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

_DATA = read_toml(Path(__file__).with_suffix(".toml"))
EXAMPLES: list[str] = _DATA["examples"]
LINE_UP: list[Offer] = _DATA["line_up"]
PLAIN: dict[str, str] = _DATA["plain"]  # sentences for questions, weights and bans
CASE = rf"(?:(easy|hard) )?({'|'.join(map(' '.join, NOUNS.items()))}) ([1-9]\d\d)(?:.*code)?"
PRODUCT_OR_SUM = r"([1-9]\d\d) ?(\*) ?([1-9])|([1-9]\d) ?([+-]) ?([1-9]\d)"
ROW = rf"({'|'.join(FIELDS)}) of ([a-z ]+) ([1-9]\d\d)"
UNWEIGHED = (1.0, 0.0, 0.0)  # the weights of a preference that states none
LONGEST = 200  # characters of a preference, more than any that nano has been trained on
PATHS = {" of ".join(reversed(chain[:k])): chain[:k] for chain in CHAINS for k in (2, 3)}


class OutsideError(UserError):
    """A question that is none of the miniature's."""

    code = "outside_the_world"


def as_task(question: str, preference: Preference) -> Task:
    """Returns the task that a typed question is, with LINE_UP on offer.

    UserError if it is of none of the four kinds, or its numbers are longer or shorter than the
    world's: nano has learnt to copy only those; or if the preference is none that nano knows.
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
    text = PLAIN[asked.kind].format(**asked.values)
    wrong = draw_wrong(random.Random(text), asked, TRAIN)
    known = as_preference(preference, tools)
    return make_task(f"asked/{text}", text, asked, wrong, tools, known)


def as_preference(given: Preference, offers: Collection[Offer]) -> Preference:
    """Returns a stated preference as nano knows it.

    Its words stay as they are typed. Weights without words get the sentence of the nearest of
    nano's four preferences. Those four are also the weights for the record: the nearest to the
    weights that are stated, else "balanced". A tool that `never` names, by its alias or by what it
    is ("large"), gets the sentence that nano was trained on. UserError for what nano has not
    learnt.
    """
    names = [offer["name"] for offer in LINE_UP]  # of which a task offers some
    kinds = [offer["what"] for offer in LINE_UP]
    given.check_names("preference", names, [*kinds, *map(title, LINE_UP)])
    require(
        not given.tools,
        f"preference: {', '.join(given.tools)} has a weight; nano has learnt to obey bans, not to "
        "weigh a tool: write never=NAME",
    )
    require(
        len(given.text) <= LONGEST,
        f"preference: has {len(given.text):,} characters; nano reads {LONGEST} at most",
    )
    weighed = (given.outcome, given.cost, given.latency) != UNWEIGHED
    name = given.name if weighed else "balanced"
    sentences = []
    if given.text:
        sentences.append(given.text if given.text[-1] in ".!?" else f"{given.text}.")
    elif weighed:
        sentences.append(PLAIN[name])
    forbidden = []
    for offer in offers:
        if banned([offer["name"], offer["what"], title(offer)], given.never):
            sentences.append(PLAIN["ban"].format(tool=title(offer)))
            forbidden.append(offer["name"])
    weights = PREFERENCES[name][1]
    return Preference(
        " ".join(sentences),
        *weights,
        tools=dict.fromkeys(forbidden, -sum(weights)),
        never=forbidden,
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
