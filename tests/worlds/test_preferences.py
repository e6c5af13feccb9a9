"""Weights without words get words, and typed words stay as they are."""

from __future__ import annotations

from nanorchestra.records import Preference
from worlds.preferences import worded


def test_weights_become_words():
    weights = worded(Preference.parse("cost=1 latency=0.5 gpt-5=-1 usd=0.05", "it"))
    said = "Spend as little as you can. Do not take too long. Do not use gpt-5."
    assert weights.words == f"{said} Spend at most $0.05."
    assert worded(Preference()) == Preference()


def test_words_set_no_weight_and_no_limit():
    typed = Preference.parse("Be cheap, and never use gpt-5.", "it")
    assert worded(typed) == Preference("Be cheap, and never use gpt-5.")
    beside = Preference.parse("Be quick. latency=0.3 gpt-5=-1", "it")
    assert worded(beside).text == "Be quick." and worded(beside).latency == 0.3
