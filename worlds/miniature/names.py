"""Aliases of tools, of any shape: made-up words, ordinary words, letters, names of real models.

Training and held-out tasks share no alias, and no word or maker of models either.
"""

import random
import string
import zlib
from functools import cache
from pathlib import Path

from nanorchestra.files import read_toml
from worlds.miniature.tables import FITTING_TOOL, SKILLS

_PARTS = read_toml(Path(__file__).with_suffix(".toml"))
SHAPES = {"syllables": 5, "words": 2, "letters": 3, "model": 2}  # shape -> its share
JOINTS = ("-", "-", "_", "")
CAPITALS = 0.06  # of the aliases are in capitals
KINDS = (*SKILLS, *FITTING_TOOL.values())  # words that the world says itself


def draw_names(rng: random.Random, count: int, held_out: bool) -> list[str]:
    """Returns different aliases of letters, digits, hyphens and underscores, of one side or other.

    None contains a word of KINDS.
    """
    names: list[str] = []
    while len(names) < count:
        (shape,) = rng.choices(list(SHAPES), list(SHAPES.values()))
        name = _DRAW[shape](rng, held_out)
        if rng.random() < CAPITALS:
            name = name.upper()
        says_kind = any(kind in name.casefold() for kind in KINDS)
        if is_held_out(name) == held_out and name not in names and not says_kind:
            names.append(name)
    return names


def is_held_out(part: object) -> bool:
    """Returns whether a name, a word or a number is of held-out tasks: a scattered fifth is."""
    return zlib.crc32(f"split {part}".encode()) % 5 == 0


@cache
def _of(kind: str, held_out: bool) -> list[str]:
    return [part for part in _PARTS[kind] if is_held_out(part) == held_out]


def _syllables(rng, held_out):
    parts = []
    for _ in range(rng.choice((1, 2, 2, 3))):
        onset, vowels, coda = (rng.choice(_PARTS[part]) for part in ("onsets", "vowels", "codas"))
        parts.append(onset + vowels + coda)
    name = rng.choice(("", "", "-", "_")).join(parts)
    return _dressed(rng, name.capitalize() if rng.random() < 0.2 else name)


def _words(rng, held_out):
    words = [rng.choice(_of("words", held_out)) for _ in range(rng.choice((1, 1, 2, 2, 3)))]
    joint = rng.choice(JOINTS)
    if not joint or rng.random() < 0.2:
        words = [word.capitalize() for word in words]
    return _dressed(rng, joint.join(words))


def _letters(rng, held_out):
    letters = string.ascii_lowercase + rng.choice(("", string.digits, string.ascii_uppercase))
    parts = [
        "".join(rng.choices(letters, k=rng.randint(3, 6))) for _ in range(rng.choice((1, 1, 2)))
    ]
    return rng.choice(JOINTS).join(parts)


def _model(rng, held_out):
    parts = [rng.choice(_of("makers", held_out))]
    parts += [rng.choice(_PARTS["versions"]), rng.choice(_PARTS["editions"])]
    joint = rng.choice(JOINTS[:3])
    return joint.join(part.capitalize() if joint == "_" else part for part in parts if part)


def _dressed(rng, name):
    """Returns a name with what people put before or after it, often nothing."""
    return rng.choice(_PARTS["before"]) + name + rng.choice(_PARTS["after"])


_DRAW = {"syllables": _syllables, "words": _words, "letters": _letters, "model": _model}
