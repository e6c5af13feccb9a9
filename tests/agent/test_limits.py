"""The user's hard limits hold whatever the policy writes, and refused calls count as none.

What each kind of tool does under them is in test_every_tool.py.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from scripted import ANSWER, SETTINGS, EchoTool, both, call, echoing, play

from nanorchestra.errors import UserError
from nanorchestra.records import Preference

TWO = both(call("a"), call("b"))


class Priced(EchoTool):
    """Says what it can cost: what it does cost."""

    def most_usd(self, arguments):
        return 0.25


def limited(tokenizer, script, settings=SETTINGS, **wish):
    env = echoing(Priced())
    task = replace(env.task, preference=Preference(**wish))
    env = type(env)(task, list(env.by_name.values()), lambda answer: float(answer == "42"))
    (t,), engine = play(tokenizer, script, envs=[env], settings=settings)
    contents = [result.content for turn in t.turns for result in turn.results]
    return t, contents, engine, env.messages[0]["content"]


def test_a_refused_call_counts_as_none(nano_tokenizer):
    t, contents, _, prompt = limited(nano_tokenizer, [call(), ANSWER], never=["Echo"])
    assert contents == ["Error: the user forbids Echo"] and "Never call Echo." in prompt
    assert t.calls == {} and t.cost_usd < 0.01 and t.outcome == 1
    once = replace(SETTINGS, calls_per_turn=1)
    t, contents, _, _ = limited(nano_tokenizer, [TWO, ANSWER], settings=once)
    assert "calls in one turn: at most 1" in contents[1] and t.calls == {"echo": 1}


def test_no_call_begins_that_could_cost_more_than_the_user_allows(nano_tokenizer):
    scripts = [TWO, ANSWER], [call("a"), call("b"), ANSWER]
    for script, (usd, calls) in itertools.product(scripts, ((0.2, 0), (0.3, 1), (0.6, 2))):
        t, contents, _, prompt = limited(nano_tokenizer, script, usd=usd)
        assert t.calls.get("echo", 0) == calls and t.cost_usd <= usd and t.status == "answered"
        refused = [text for text in contents if "Error: refused echo: up to $0.25, $0" in text]
        assert len(refused) == 2 - calls
        assert f"Spend at most ${usd:g}." in prompt
    assert limited(nano_tokenizer, [call()] * 3, usd=1e-9)[0].status == "user_limit"


def test_a_call_is_given_up_in_time_for_an_answer(nano_tokenizer):
    t, contents, _, prompt = limited(nano_tokenizer, [call(), ANSWER], seconds=2.0)  # 2 s, virtual
    assert "was given up" in contents[0] and t.latency_s <= 2 and t.status == "answered"
    assert "Answer within 2 seconds." in prompt and t.cost_usd > 0.25  # its cost is known
    _, _, engine, _ = limited(nano_tokenizer, [ANSWER], seconds=0.5)
    assert engine.params[0][1] == 50  # tokens of 10 ms


def test_a_preference_is_a_line_of_words_and_a_vector():
    line = 'Be quick. latency=1 gpt-5=-1 never=a usd=2 never="GPT 5",b-c accuracy=2'
    wish = Preference.parse(line, "it")
    bans = ["a", "GPT 5", "b-c"]
    assert wish == Preference("Be quick.", 2.0, 0.0, 1.0, {"gpt-5": -1.0}, never=bans, usd=2)
    stricter = wish.stricter(Preference("Slow.", never=["d"], usd=0.5, seconds=9))
    assert stricter == replace(wish, never=[*bans, "d"], usd=0.5, seconds=9)


def test_a_wrong_preference_is_one_line():
    for line, problem in (
        ("cost=-1", "it: cost is -1; it should be greater than or equal to 0"),
        ("never=gtp-5", "no gtp-5 to ban; there are a, b, gpt-5; did you mean gpt-5[?]$"),
        ("gpt-5=-1", "it: there is no gpt-5; weights"),
    ):
        with pytest.raises(UserError, match=problem):
            Preference.parse(line, "it").check_names("it", ["a", "b"], ["gpt-5"])
