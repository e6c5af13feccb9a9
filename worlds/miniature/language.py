"""How users of the miniature talk: sentences of a grammar, language.toml and wishes.toml.

There are thousands of clauses for each wish and millions of sentences, so that none can be learnt
by heart. They are split by the hashes of the grammar's entries, so before any training:

    train       trained lines and words alone
    held_out    trained words, and at least one line that training never shows

One word in ten is in neither.
"""

import random
import re
import zlib
from functools import cache
from pathlib import Path
from typing import Any

from nanorchestra.files import read_toml

TRAIN, HELD_OUT = "train", "held_out"  # the splits
GRAMMAR = read_toml(Path(__file__).with_suffix(".toml"))
GRAMMAR["lines"] |= read_toml(Path(__file__).with_name("wishes.toml"))["lines"]
ALWAYS = 3  # the first entries of a list, which training always shows
ONE_OF = {"lines": 5, "words": 10}  # one entry of so many is new
PART = re.compile(r"<([a-z_]+)>|\[([^\[\]]*)\]")
CAPITALS = 0.75  # of the sentences begin with a capital letter


def draw_sentence(rng: random.Random, name: str, split: str, **values: Any) -> str:
    """Returns a sentence of the split: an entry of `name`, with what it refers to drawn as well.

    `values` are filled in where the grammar has their names in braces.
    """
    text, is_new = _expanded(rng, name, split, values)
    while split == HELD_OUT and not is_new:
        text, is_new = _expanded(rng, name, split, values)
    text = re.sub(r" +(?=[ .,:!?]|$)", "", text)  # where an alternative was nothing
    text = re.sub(r"\b([Aa]) (?=[aeiou](?!ne\b))", r"\1n ", text)
    if rng.random() >= CAPITALS:
        return text
    starts = [match.end() for match in re.finditer(r"^|[.!?] ", text)]
    for start in starts:
        if not text.startswith(str(values.get("alias")), start):  # an alias stays as it is
            text = text[:start] + text[start : start + 1].upper() + text[start + 1 :]
    return text


def _expanded(rng, name, split, values) -> tuple[str, bool]:
    """Returns a sentence, and whether an entry that training never shows is in it."""
    text, is_new = f"<{name}>", False
    while part := PART.search(text):
        if part[1]:
            trained, new = _entries(part[1])
            held_out = split == HELD_OUT and part[1] in GRAMMAR["lines"]
            shown = trained + new if held_out else trained
            entry = rng.choice(shown)
            is_new |= entry in new
            chosen = entry.format(**values)
        else:
            chosen = rng.choice(part[2].split("|"))
        text = text[: part.start()] + chosen + text[part.end() :]
    return text, is_new


@cache
def _entries(name: str) -> tuple[list[str], list[str]]:
    """Returns the entries of a list that training shows, and those that it never shows."""
    (section,) = (section for section, lists in GRAMMAR.items() if name in lists)
    entries = GRAMMAR[section][name]
    if section not in ONE_OF:
        return entries, []
    others = {entry for entry in entries[ALWAYS:] if not _said_elsewhere(entry, entries)}
    others -= {*entries[:ALWAYS]}
    by_hash = sorted(others, key=lambda entry: (zlib.crc32(entry.encode()), entry))
    new = by_hash[: len({*entries}) // ONE_OF[section]]
    return [entry for entry in entries if entry not in new], new


def _said_elsewhere(entry, entries) -> bool:
    """Returns whether another list says an entry too, or another entry of its own list."""
    if _all_entries().count(entry) == entries.count(entry):
        return False  # a quick answer for most entries
    before = r"\b" if entry[:1].isalnum() else ""
    after = r"\b" if entry[-1:].isalnum() else ""
    said = re.findall(before + re.escape(entry) + after, _all_entries())
    return len(said) > entries.count(entry)


@cache
def _all_entries() -> str:
    """Returns all entries of the grammar, one per line."""
    lists = [entries for section in GRAMMAR.values() for entries in section.values()]
    return "\n".join(entry for entries in lists for entry in entries)
