"""Turns typed questions into tasks of the desk.

What its records and experts know is made up from the text of a question: the same question has the
same answer every time.
"""

import math
import random
import re
from dataclasses import replace

from nanorchestra.errors import UserError, require
from nanorchestra.records import Preference, Task
from worlds.desk import FIELDS, KINDS, SUBJECT, TABLES, WISHES, draw_trail, make_task, matters_of

EXAMPLES = [
    "What is the code of order 512?",
    "What is the rank of trial 372? Keep it cheap.",
    "What is the age of customer 845? Be quick.",
    "What is 47 * 6?",
]
WORDS = [*TABLES, *matters_of("train")]
ROW = re.compile(rf"({'|'.join(FIELDS)}) of (?:the )?({'|'.join(WORDS)}) ([1-9]\d\d)")
PRODUCT = re.compile(r"([1-9]\d) ?\* ?([3-9])")
SENTENCES = {
    text: Preference(text, *weights) for weights, texts in WISHES.values() for text in texts
}


class OutsideError(UserError):
    """A question that is none of the desk's."""

    code = "outside_the_world"


def as_task(question: str, preference: Preference) -> Task:
    """Returns the task that a typed question is; a wish at its end counts before `preference`.

    OutsideError for another question: nano has learnt to copy only numbers of the world's length.
    UserError for a wish that nano has not read.
    """
    plain, _, wish = _plain(question).partition("? ")
    if wish:
        preference = replace(preference, text=wish)
    plain = re.sub("^(what is )?(the )?", "", plain.rstrip(" ?"))
    row, product = ROW.fullmatch(plain), PRODUCT.fullmatch(plain)
    if row:
        field, word, number = row.groups()
        text = f"What is the {field} of {word} {number}?"
        kind, trail, answer = _drawn(random.Random(f"trail/{text}"), word, field)
        trail[0] = word, int(number)
    elif product:
        factors = int(product[1]), int(product[2])
        text = f"What is {factors[0]} * {factors[1]}?"
        field, kind, trail, answer = "", "product", [factors], math.prod(factors)
    else:
        examples = ", ".join(map(repr, EXAMPLES))
        raise OutsideError(f"outside the world of the desk: {question[:60]!r}; ask like {examples}")
    rng = random.Random(f"asked/{text}")
    task = make_task(rng, f"asked/{text}", kind, "train", field, trail, answer)
    return replace(task, question=text, preference=as_preference(preference))


def as_preference(given: Preference) -> Preference:
    """Returns a stated preference in a sentence that nano knows, with its weights.

    The name of a wish, and weights without words, get its first sentence. UserError for others.
    """
    require(
        not given.tools,
        f"preference: {', '.join(given.tools)} has a weight; the desk has none: write never=NAME",
    )
    known = {_plain(text): preference for text, preference in SENTENCES.items()}
    for preference in reversed(SENTENCES.values()):
        known[preference.name] = preference
    text = _plain(given.text) or given.name
    right = f"it knows {', '.join(WISHES)}, {', '.join(SENTENCES)}"
    require(text in known, f"preference: nano has not learnt {text[:60]!r}; {right}")
    return replace(known[text], never=given.never, usd=given.usd, seconds=given.seconds)


def _plain(text: str) -> str:
    """Returns a text in lower case, with single spaces and no full stop at its end."""
    return " ".join(text.casefold().split()).rstrip(".! ")


def _drawn(rng: random.Random, word: str, field: str) -> tuple[str, list, int]:
    """Returns a kind of question that begins with a word, a trail of it and the answer."""
    if word in SUBJECT:
        return "matter", *draw_trail(rng, "matter", "train", field)
    kinds = [kind for kind, (_, lengths, _) in KINDS.items() if 0 not in lengths]
    kind = rng.choice(kinds)
    while True:
        trail, answer = draw_trail(rng, kind, "train", field)
        if word not in dict(trail[1:]):
            return kind, trail, answer
