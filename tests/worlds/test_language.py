"""The miniature's language: drawn, split before training, and free of what would give it away."""

from __future__ import annotations

import random
import re

import pytest

from worlds.miniature import language
from worlds.miniature.language import GRAMMAR, HELD_OUT, TRAIN, draw_sentence
from worlds.miniature.names import draw_names
from worlds.miniature.tables import KINDS, PREFERENCES, SKILLS

VALUES = {
    "wish": {},
    "ban": {"what": "medium", "alias": "ka-fe"},
    "knowledge": {"difficulty": "hard", "subject": "law", "noun": "trial", "n": 372},
    "arithmetic": {"expression": "417 * 6"},
    "lookup": {"relation": "mass", "subject": "element 79"},
    "chain": {"field": "age", "path": "customer", "table": "order", "n": 512},
}
NAMES = [*(f"wish_{name}" for name in PREFERENCES), *KINDS, "ban"]


def sentences(name, split, count=300):
    rng = random.Random(f"{name}/{split}")
    values = VALUES.get(name, {})
    return [draw_sentence(rng, name, split, **values) for _ in range(count)]


@pytest.mark.parametrize("name", NAMES)
def test_sentences_are_many_whole_and_say_what_the_task_says(name):
    for split in (TRAIN, HELD_OUT):
        drawn = sentences(name, split)
        if split == TRAIN and name.startswith("wish"):
            assert len(set(drawn)) > 200
        for text in drawn:
            assert not re.search(r"[<>\[\]{}|]|  |\s$|^\s", text), text
            assert not re.search(r"\b[aA] [aeiou](?!ne\b)", text), text
            for word in VALUES.get(name, {}).values():
                if word not in ("hard", "ka-fe"):  # which have other words, or need not be said
                    assert str(word) in text.casefold(), text


def test_no_sentence_of_training_has_an_entry_that_is_held_out(monkeypatch):
    shown = {TRAIN: set(), HELD_OUT: set()}
    choice = random.Random.choice

    for split, entries in shown.items():

        def noted(self, options, entries=entries):
            chosen = choice(self, options)
            entries.add(chosen)
            return chosen

        monkeypatch.setattr(random.Random, "choice", noted)
        for name in NAMES:
            sentences(name, split)
    new = {"lines": set(), "words": set()}
    for section, entries in new.items():
        for name in GRAMMAR[section]:
            trained, held = language._entries(name)
            assert trained[:3] == GRAMMAR[section][name][:3]
            entries.update(held)
    assert len(new["lines"]) > 50 and len(new["words"]) > 15
    assert not shown[TRAIN] & (new["lines"] | new["words"])
    assert new["lines"] & shown[HELD_OUT] and not new["words"] & shown[HELD_OUT]


def test_aliases_have_any_shape_and_none_says_a_kind():
    names = {held: draw_names(random.Random(1), 3000, held) for held in (False, True)}
    assert not set(names[False]) & set(names[True])
    for drawn in names.values():
        assert all(re.fullmatch(r"[A-Za-z0-9_-]{2,64}", name) for name in drawn)
        for kind in (*SKILLS, "code", "search", "records"):
            assert not any(kind in name.casefold().split("-") for name in drawn)
        for shape in (r"tool-", r"^[a-z]+$", r"[A-Z]", r"_", r"(?i)^(gpt|llama|palm)[-_]", r"\d"):
            assert sum(bool(re.search(shape, name)) for name in drawn) > 20, shape
