"""The user's hard limits hold whatever the policy writes, and refused calls count as none."""

from __future__ import annotations

from dataclasses import replace

import pytest
from scripted import ANSWER, SETTINGS, EchoTool, call, echoing, play

from nanorchestra.errors import UserError
from nanorchestra.records import Preference, ToolResult

TWO = call("a").replace("<|im_end|>", "") + "\n" + call("b").split("\n\n")[1]


class Priced(EchoTool):
    """Says what it can cost: what it does cost."""

    def most_usd(self, arguments):
        return 0.25


def limited(tokenizer, script, tool=None, settings=SETTINGS, **wish):
    env = echoing(tool or Priced())
    task = replace(env.task, preference=Preference(**wish))
    env = type(env)(task, list(env.by_name.values()), lambda answer: float(answer == "42"))
    (t,), engine = play(tokenizer, script, envs=[env], settings=settings)
    contents = [result.content for turn in t.turns for result in turn.results]
    return t, contents, engine, env.messages[0]["content"]


def test_a_forbidden_tool_is_not_called_and_a_refused_call_earns_no_weight(nano_tokenizer):
    t, contents, _, prompt = limited(nano_tokenizer, [call(), ANSWER], never=["echo"])
    assert contents == ["Error: the user forbids echo"] and "Never call echo." in prompt
    assert t.calls == {} and t.cost_usd < 0.01 and t.outcome == 1
    chooser = Priced()
    choices = {"type": "string", "enum": ["orion", "vega"]}
    chooser.parameters = chooser.parameters | {"properties": {"text": choices}}
    turns = [call("orion"), call("vega"), ANSWER]
    by_choice = limited(nano_tokenizer, turns, chooser, never=["Orion"])
    assert by_choice[1] == ["Error: the user forbids Orion", "vega"]
    wrong = call().replace("text", "words")
    for refused, says in ((call(name="nothing"), "no tool"), (wrong, "unexpected")):
        t, contents, _, _ = limited(nano_tokenizer, [refused, ANSWER])
        assert says in contents[0] and t.calls == {}
    t, contents, _, _ = limited(
        nano_tokenizer, [TWO, ANSWER], settings=replace(SETTINGS, calls_per_turn=1)
    )
    assert "calls in one turn: at most 1" in contents[1] and t.calls == {"echo": 1}


def test_no_call_begins_that_could_cost_more_than_the_user_allows(nano_tokenizer):
    for usd, calls in ((0.2, 0), (0.3, 1), (0.6, 2)):
        t, contents, _, prompt = limited(nano_tokenizer, [TWO, ANSWER], usd=usd)
        assert t.calls.get("echo", 0) == calls and t.cost_usd <= usd and t.status == "answered"
        refused = [text for text in contents if "Error: refused echo: up to $0.25, $0" in text]
        assert len(refused) == 2 - calls
        assert f"Spend at most ${usd:g}." in prompt
    assert limited(nano_tokenizer, [call()] * 3, usd=1e-9)[0].status == "user_limit"


def test_a_call_is_given_up_in_time_for_an_answer(nano_tokenizer):
    t, contents, _, prompt = limited(nano_tokenizer, [call(), ANSWER], seconds=2.0)  # 2 s, virtual
    assert "was given up" in contents[0] and t.latency_s <= 2 and t.status == "answered"
    assert "Answer within 2 seconds." in prompt and t.cost_usd > 0.25  # its cost is known
    tool = Priced(blocking=True, seconds=1.5, result=ToolResult("late", 0.25, 0.0))
    t, contents, _, _ = limited(nano_tokenizer, [call(), ANSWER], tool, seconds=0.8)  # waited for
    assert "was given up" in contents[0] and 0.25 < t.cost_usd < 0.26 and t.calls == {"echo": 1}
    _, _, engine, _ = limited(nano_tokenizer, [ANSWER], seconds=0.5)
    assert engine.params[0][1] == 50  # tokens of 10 ms


def test_a_preference_is_a_line_of_words_and_a_vector():
    wish = Preference.parse("Be quick. latency=1 gpt-5=-1 never=python usd=0.05 accuracy=2", "it")
    assert wish == Preference(
        "Be quick.", 2.0, 0.0, 1.0, {"gpt-5": -1.0}, never=["python"], usd=0.05
    )
    Preference.parse('never="GPT 5",a', "it").check_names("it", ["a", "b"], ["gpt-5"])


@pytest.mark.parametrize(
    "line, problem",
    [
        ("cost=much", "it: cost is 'much'; it should be a valid number"),
        ("cost=-1", "it: cost is -1; it should be greater than or equal to 0"),
        ("usd=0", "it: usd is 0; it should be greater than 0"),
        ("usd=1 usd=2", "it: usd= is stated twice"),
        ("search=NaN", "it: tools.search is nan; it should be a finite number"),
        ("banana=3", "there is no banana; weights are outcome, cost, latency and those of a, b"),
        ("never=gtp-5", "no gtp-5 to ban; there are a, b, gpt-5; did you mean gpt-5[?]$"),
        ("gpt-5=-1", "it: there is no gpt-5; weights"),
    ],
)
def test_a_wrong_preference_is_one_line(line, problem):
    with pytest.raises(UserError, match=problem):
        Preference.parse(line, "it").check_names("it", ["a", "b"], ["gpt-5"])


def test_what_is_stated_twice_holds_in_its_stricter_form():
    line = 'Be quick. never=a usd=2 never=python,"web search",b-c cost=1'
    wish = Preference.parse(line, "it")
    assert (wish.text, wish.cost, wish.usd) == ("Be quick.", 1, 2)
    assert wish.never == ["a", "python", "web search", "b-c"]
    stricter = wish.stricter(Preference("Slow.", never=["d"], usd=0.5, seconds=9))
    assert stricter == replace(wish, never=[*wish.never, "d"], usd=0.5, seconds=9)
    assert wish.stricter(Preference(usd=3)) == wish
