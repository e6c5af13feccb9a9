"""Words and weights of a preference say the same, and a ban in words is a ban."""

from __future__ import annotations

import random

import pytest

from nanorchestra.errors import UserError
from nanorchestra.records import Preference
from worlds import preferences
from worlds.bans import bans_in, unknown_ban
from worlds.miniature.ask import PLAIN
from worlds.miniature.language import HELD_OUT, TRAIN, draw_sentence
from worlds.miniature.names import draw_names
from worlds.wording import described, tool_words, understood, weights_in, words_for

SAID = preferences.PHRASES
NAMES = ["search", "gpt-5", "gpt-5-mini"]
LABELS = [*NAMES, "code", "web search", "proprietary", "open", "expert", "OpenAI", "large"]


def test_every_phrase_that_policies_are_trained_on_is_understood():
    usual = {"outcome": 1.0, "cost": 0.0, "latency": 0.0}
    for split in ("train", "held_out"):
        for what in usual:
            for weight, phrases in SAID[what].items():
                for text in phrases[split]:
                    expected = tuple((usual | {what: float(weight)}).values())
                    assert weights_in(text) == expected, text
        for text in SAID["tool"]["-1.0"][split]:
            assert bans_in(text.format(tool="gpt-5"), LABELS) == ["gpt-5"], text
        for text in SAID["tool"]["1.0"][split]:
            assert not bans_in(text.format(tool="gpt-5"), LABELS), text


WISHES = ("right", "cheap", "fast", "balanced")


@pytest.mark.parametrize("split", [TRAIN, HELD_OUT])
def test_little_of_what_users_of_the_miniature_say_is_misread(split):
    """Some states no weight by these rules, which is said where it is typed."""
    rng, count = random.Random(0), 150
    for name in WISHES:
        said = [draw_sentence(rng, f"wish_{name}", split) for _ in range(count)]
        read = [_wish(text) for text in filter(None, said)]  # a balance may go without saying
        assert read.count(name) >= 0.5 * len(read)
        assert read.count(name) + read.count(None) >= 0.8 * len(read)


@pytest.mark.parametrize("split, missed", [(TRAIN, 0.1), (HELD_OUT, 0.25)])
def test_most_bans_of_users_of_the_miniature_are_understood(split, missed):
    rng, count = random.Random(0), 150
    wrong = []
    for alias in draw_names(rng, count, False):
        text = draw_sentence(rng, "ban", split, alias=alias, what="large")
        names = [f"large {alias}", alias, "large", "medium"]
        bans = bans_in(text, names)
        named = {f"large {alias}", alias} if alias in text else {"large"}
        if not bans or {*bans} - named or unknown_ban(text, names):
            wrong.append((text, bans))
    assert len(wrong) <= missed * count, wrong if split == TRAIN else len(wrong)


def _wish(text):
    weights = weights_in(text)
    return Preference("", *weights).name if weights else None


def test_the_words_that_are_put_in_place_of_a_preference_say_the_same():
    for name in WISHES:
        assert _wish(PLAIN[name]) == name
    assert bans_in(PLAIN["ban"].format(tool="large a-1"), ["large", "large a-1"]) == ["large a-1"]


ORDINARY = (
    "The answer may have large, medium and small parts.",
    "There is no small talk in this code.",
    "Do not use small print or large letters.",
    "The code should not be changed.",
    "Avoid large, slow steps.",
    "Do not call me at home.",
    "Open the door without a search warrant.",
    "Leave the code as it is.",
    "Nothing in the search history is private.",
    "The web is not a book; ignore web addresses.",
    "Any question but open ones is welcome.",
    "An expert is someone who knows; search for one.",
)


@pytest.mark.parametrize("text", ORDINARY)
def test_ordinary_text_bans_nothing(text):
    assert not bans_in(text, LABELS + ["medium", "small"])


@pytest.mark.parametrize(
    "text",
    [
        "Under no circumstances consult kafe-3.",
        "the medium called kafe-3 is off limits",
        "Anything but kafe-3, please.",
        'medium "kafe-3"? no!',
        "kafe-3 (medium) fails, so don't use it",
        "Leave kafe-3, the medium one, out of this.",
        "medium (kafe-3) mustn't be asked.",
        "I don't want the medium kafe-3 to be used.",
    ],
)
def test_a_ban_of_one_tool_is_no_ban_of_its_kind(text):
    assert bans_in(text, ["medium", "kafe-3", "large"]) == ["kafe-3"]
    assert bans_in(text, ["medium", "kafe-3", "medium kafe-3", "large"])[0].endswith("kafe-3")


@pytest.mark.parametrize(
    "text, weights, bans",
    [
        ("keep the cost low", (1.0, 1.0, 0.0), []),
        ("I'm in a hurry", (1.0, 0.0, 1.0), []),
        ("quick", (1.0, 0.0, 1.0), []),
        ("As cheap as possible, speed does not matter", (1.0, 1.0, 0.0), []),
        ("I need it right away.", (1.0, 0.0, 1.0), []),
        ("don't use the large model", None, ["large"]),
        ("No proprietary models, please.", None, ["proprietary"]),
        ("Never use web search or gpt-5 mini", None, ["web search", "gpt-5-mini"]),
        ("No OpenAI or web search.", None, ["OpenAI", "web search"]),
        ("Never use web search, code it", None, ["web search"]),
        ("Don’t ask gpt-5-mini", None, ["gpt-5-mini"]),
        ("Answer in French; I have no code yet.", None, []),
        ("Do not search too long.", (1.0, 0.0, 0.5), []),
        ("", None, []),
        ("Never use `gpt-5`, code, or web search.", None, ["gpt-5", "web search", "code"]),
        ("never, ever use: 'gpt-5'", None, ["gpt-5"]),
        ("dont query gpt-5, gpt-5-mini", None, ["gpt-5", "gpt-5-mini"]),
        ("Use gpt-5-mini, not gpt-5.", None, ["gpt-5"]),
        ("The large model must not be used.", None, ["large"]),
        ("No OpenAI and no code", None, ["OpenAI", "code"]),
        *(
            (harmless, None, [])
            for harmless in (
                "Say so if there is no answer, expert.",
                "I do not want an expert opinion in French.",
                "Don't leave open questions.",
                "Avoid open questions and code duplication.",
                "Do not use large numbers, code blocks or search engines' words.",
                "Leave the search for later.",
                "There is no rush, no hurry.",
                "I'm not in a hurry; slow is fine, speed is unimportant.",
                "The price doesn't matter, ignore the cost: unlimited budget, money is no problem",
            )
        ),
        ("be fast, not cheap", (1.0, 0.0, 1.0), []),
        ("I prefer accuracy over speed", (1.0, 0.0, 0.0), []),
    ],
)
def test_words_of_ones_own(text, weights, bans):
    assert (weights_in(text), sorted(bans_in(text, LABELS))) == (weights, sorted(bans))


def test_weights_become_words_and_back():
    for weights in preferences.WEIGHTS:
        text = words_for(tuple(weights))
        assert (weights_in(text) or (1.0, 0.0, 0.0)) == tuple(weights), text
    assert words_for((3.0, 0.0, 1.6)) == "Do not take too long."
    assert tool_words({"gpt-5": -2.0}) == "Do not use gpt-5."


def test_what_is_given_in_one_form_is_completed_in_the_other():
    only_weights = understood("", {"cost": 1, "latency": 0.5}, "it", NAMES, LABELS)
    assert only_weights.text == "Spend as little as you can. Do not take too long."
    only_words = understood("Be cheap. Never use OpenAI.", {}, "it", NAMES, LABELS)
    assert (only_words.cost, only_words.never) == (1.0, ["OpenAI"])
    assert only_words.text == only_words.words == "Be cheap. Never use OpenAI."
    both = understood("Be quick.", {"latency": 0.3, "gpt-5": -1}, "it", NAMES, LABELS)
    assert (both.text, both.latency) == ("Be quick. Do not use gpt-5.", 0.3)
    limits = understood(
        "", {"usd": 0.05, "never": ["proprietary", "Web-Search"]}, "it", NAMES, LABELS
    )
    assert limits.words == "Never call proprietary models, Web-Search. Spend at most $0.05."
    assert described(both) == "weights: right answer 1, short time 0.3, gpt-5 -1"


@pytest.mark.parametrize(
    "vector, problem",
    [
        ({"banana": 3}, "it: there is no banana; weights are outcome, cost, latency and those of"),
        ({"never": ["banana"]}, "it: there is no banana to ban; there are search, gpt-5"),
        ({"proprietary": -1}, "it: there is no proprietary; weights"),
    ],
)
def test_an_unknown_name_is_refused_with_those_that_there_are(vector, problem):
    with pytest.raises(UserError, match=problem):
        understood("", vector, "it", NAMES, LABELS)
