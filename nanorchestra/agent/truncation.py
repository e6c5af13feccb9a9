"""Cuts a result to what the policy reads, with a note of how much the whole text was.

A result is cut by its tool's words first, and again where the context or the user's dollars have no
room for so much: the second note counts the whole text too, as it reads the first.
"""

import re
from itertools import islice

RESULT_CHARS = 16_000  # of texts without spaces
WORD = re.compile(r"\S+")
NOTE_CHARS = 80  # of a note at most
NOTE = re.compile(r"\n\[[\d,]+ of (?P<whole>[\d,]+) (?:words|characters)\]\Z")


def shortened(text: str, words: int, chars: int = RESULT_CHARS) -> str:
    """Returns the beginning of a text, with a note of how much it is: "[1,200 of 3,000 words]".

    A text of fewer words and characters is returned as it is. One that was shortened before is told
    by its note, which then counts what the whole text had.
    """
    note = NOTE.search(text, max(0, len(text) - NOTE_CHARS))
    body = text[: note.start()] if note else text
    begun = islice(WORD.finditer(body, 0, chars + 1), words)
    ends = [match.end() for match in begun if match.end() <= chars]
    if len(body.rstrip()) == (ends[-1] if ends else 0):  # all words fit
        return text if len(body) <= chars else body.rstrip()
    if ends:
        whole = note["whole"] if note else f"{sum(1 for _ in WORD.finditer(body)):,}"
        return f"{body[: ends[-1]]}\n[{len(ends):,} of {whole} words]"
    whole = note["whole"] if note else f"{len(body):,}"  # one word fills the room
    return f"{body[:chars]}\n[{min(chars, len(body)):,} of {whole} characters]"
