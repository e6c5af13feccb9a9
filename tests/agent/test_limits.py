"""The user's hard limits hold whatever the policy writes, and refused calls count as none."""

from __future__ import annotations

import asyncio
import math
import time
from dataclasses import replace

import pytest
from openai_server import openai_server, said
from scripted import ANSWER, SETTINGS, EchoTool, call, echoing, play

from nanorchestra.agent.limits import UserLimits
from nanorchestra.agent.numbering import in_attempt
from nanorchestra.errors import UserError
from nanorchestra.records import Preference, Price, ToolCall, Trajectory, Turn
from nanorchestra.tools.endpoint import Endpoint
from nanorchestra.tools.models import Expert, ExpertTool
from nanorchestra.tools.replies import store_of
from nanorchestra.tools.roles import RoleTool
from nanorchestra.tools.spending import Spending

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


def test_a_refused_call_earns_no_weight_and_a_choice_can_be_banned(nano_tokenizer):
    t, contents, _, prompt = limited(nano_tokenizer, [call(), ANSWER], never=["echo"])
    assert contents == ["Error: the user forbids echo"] and "Never call echo." in prompt
    assert t.calls == {} and t.cost_usd < 0.01 and t.outcome == 1
    chooser = Priced()
    choices = {"type": "string", "enum": ["orion", "vega"]}
    chooser.parameters = chooser.parameters | {"properties": {"text": choices}}
    turns = [call("orion"), call("vega"), ANSWER]
    by_choice = limited(nano_tokenizer, turns, chooser, never=["Orion"])
    assert by_choice[1] == ["Error: the user forbids Orion", "vega"]
    t, contents, _, _ = limited(nano_tokenizer, [call(name="nothing"), ANSWER])
    assert "no tool" in contents[0] and t.calls == {}
    once = replace(SETTINGS, calls_per_turn=1)
    t, contents, _, _ = limited(nano_tokenizer, [TWO, ANSWER], settings=once)
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
    _, _, engine, _ = limited(nano_tokenizer, [ANSWER], seconds=0.5)
    assert engine.params[0][1] == 50  # tokens of 10 ms


def asked(endpoint, calls, spending=None, **limits):
    """The results of a turn's calls of an expert."""
    expert = Expert("e", endpoint, "m", Price(1, 10), spending or Spending())
    env = echoing(ExpertTool("e", "d", expert))
    env.task = replace(env.task, preference=Preference(**limits))
    user_limits = UserLimits(env, Trajectory("t", 0), Price(0, 0))
    made = [ToolCall("e", {"task": f"{number}?"}) for number in range(calls)]
    return asyncio.run(user_limits.execute(made, calls))


def test_of_calls_side_by_side_each_gets_its_share_and_none_takes_all_that_is_left():
    """The first took all that was left where its share bought fewer than 256 tokens."""
    with openai_server() as server:
        for usd, answered in ((0.009, 3), (0.007, 2), (0.004, 1), (0.002, 0)):
            server.bodies.clear()
            results = asked(Endpoint(server.url), 3, usd=usd)
            assert [result.error for result in results].count(False) == answered
            tokens = [body["max_tokens"] for body in server.bodies]
            assert all(256 <= each <= max(256, usd / 3 * 1e5) for each in tokens)


def test_a_call_that_was_given_up_is_neither_sent_nor_paid_afterwards():
    """The one that waits for a place, the one that waits for its next try, and the one under way.

    The connection of the last ends with the user's seconds: the server need not write on.
    """
    with openai_server() as server:
        server.answer = lambda body: time.sleep(1.0) or said("42")
        spending = Spending()
        alone = Endpoint(server.url, concurrency=1)
        results = asked(alone, 2, spending=spending, seconds=0.5)
        assert all("was given up after 0.5 s, the" in result.content for result in results)
        assert not any(result.infrastructure for result in results)
        assert alone.free.acquire(timeout=0.3), "its place is free again at once"
        alone.free.release()
        time.sleep(1.2)
        assert len(server.bodies) == 1 and spending.spent < 0.001, "no more than its input"
        server.status, server.answer = 500, lambda body: said("42")
        started = time.monotonic()
        (result,) = asked(Endpoint(server.url), 1, seconds=0.5)
        assert result.infrastructure and time.monotonic() - started < 0.5
        assert len(server.bodies) == 2, "no try is left within the user's seconds"


def test_a_replay_gives_up_the_calls_that_the_recording_gave_up(tmp_path):
    """One was under way, and one was never sent; each counts at its most, and is no failure."""
    with openai_server() as server:
        server.answer = lambda body: time.sleep(0.5) or said("42")
        alone = Endpoint(server.url, concurrency=1)

        def turn(word, seconds=0.3):
            with in_attempt(7):
                replies = store_of(f"{word}:{tmp_path}", "--experts")
                return asked(alone, 2, Spending(replies=replies), seconds=seconds)

        recorded = turn("record")
        time.sleep(0.3)
        assert [result.cost_usd > 0.04 for result in recorded] == [True] * 2
        assert turn("replay") == recorded and len(server.bodies) == 1
        for seconds in (0.6, None):  # under which the calls might have had a reply
            for result in turn("replay", seconds):
                assert result.infrastructure and result.latency_s < math.inf
                assert "the recording gave it up after 0.3 s; record it again" in result.content


class Broken(Expert):
    """An expert that raises."""

    def ask(self, text, name):
        raise RuntimeError("broken")


def test_a_call_of_a_role_counts_as_one_of_its_expert_however_it_ends(nano_tokenizer):
    """One that was given up, or whose tool had raised, counted as a call of the role."""
    with openai_server() as server:
        server.answer = lambda body: time.sleep(0.4) or said("42")
        rest = "strong", Endpoint(server.url), "m", Price(1, 10), Spending()
        cases = ((Expert, 0.3, "given up"), (Expert, None, "42"), (Broken, None, "broken"))
        for make, seconds, says in cases:
            env = echoing(RoleTool("answer", "d", {"answer-1": make(*rest)}))
            env.evidence.tokenizer = nano_tokenizer
            env.task = replace(env.task, preference=Preference(seconds=seconds))
            t, made = Trajectory("t", 0), [ToolCall("answer", {"model": "answer-1"})]
            results = asyncio.run(UserLimits(env, t, Price(0, 0)).execute(made, 1))
            t.add_calls(Turn(0, 0, "stop"), made, results)
            assert says in results[0].content and t.calls == {"answer-1": 1}


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
