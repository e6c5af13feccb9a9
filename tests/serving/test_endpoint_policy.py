"""A model behind an endpoint as the policy: a scripted server answers, or misbehaves."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
import threading
import time
from dataclasses import replace
from functools import partial
from itertools import zip_longest

import pytest
from openai_server import DONE, openai_server, said, told
from scripted import ANSWER, SETTINGS, EchoTool, call, echoing, play

from nanorchestra.agent.loop import Attempt
from nanorchestra.model import chat
from nanorchestra.records import Price, ToolResult
from nanorchestra.serving import endpoint
from nanorchestra.tools import http
from nanorchestra.tools.spending import Spending
from nanorchestra.training.trajectories import to_row
from worlds.desk import Desk, teach

KEY = "sk-secret/key"
HI = ("echo", '{"text":"hi"}')


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.setattr(http.random, "uniform", lambda *_: 0.0)  # no wait between the tries
    with openai_server() as served:
        yield served


def script(*replies):
    """Answers turn by turn of one conversation."""
    return lambda body: replies[sum(m["role"] == "assistant" for m in body["messages"])]


def run(server, tokenizer, *envs, on_event=None, **changes):
    envs = envs or [echoing()]
    price, model = Price(3.0, 5.0), f"big@{server.url}"
    settings = replace(SETTINGS, **changes)
    rollout = endpoint.EndpointRollout(model, price, tokenizer, settings, Spending())
    return rollout.run(envs, list(range(len(envs))), on_event=on_event)


def test_a_recorded_attempt_is_the_conversation_that_the_endpoint_had(
    server, nano_tokenizer, sandbox
):
    """An endpoint does the desk's tasks as the teacher does; sampled is what it wrote."""
    world = Desk(0, sandbox)
    tasks = [world.task("train", index) for index in range(8)]
    lessons = {}
    for task in tasks:
        env = world.environment(task, 0)
        lessons[env.messages[-1]["content"]] = task, teach(env, random.Random(task.id))

    def solve(body):
        task, turns = lessons[body["messages"][0]["content"]]
        lesson = turns[sum(message["role"] == "assistant" for message in body["messages"])]
        if lesson.call is None:
            return said(lesson.content, reasoning_content=lesson.thought)
        asked = (lesson.call.name, json.dumps(lesson.call.arguments))
        return said(None, [asked], "tool_calls", reasoning_content=lesson.thought)

    server.answer = solve
    envs = [world.environment(task, 0) for task in tasks]
    trajectories = run(server, nano_tokenizer, *envs, context_tokens=9999)
    rendered = set()
    for body in server.bodies:
        last = solve(body)["choices"][0]["message"]
        rendered.add(chat.render([*body["messages"], last], body["tools"], False))
        asked = [c["id"] for m in body["messages"] for c in m.get("tool_calls", ())]
        answered = [m["tool_call_id"] for m in body["messages"] if m["role"] == "tool"]
        assert asked == answered and len(set(asked)) == len(asked)
        assert not body.keys() & {"temperature", "seed", "stream"}, "none of them was given"
    for t in trajectories:
        assert t.status == "answered" and t.well_formed
        assert nano_tokenizer.decode(t.ids) + "\n" in rendered
        wrote = [i for i, sampled in enumerate(t.sampled) if sampled]
        assert wrote == [i for turn in t.turns for i in range(turn.start, turn.end)]
        assert [i for i, logprob in enumerate(t.logprobs) if logprob is None] == wrote
    assert all(headers["Authorization"] == f"Bearer {KEY}" for headers in server.headers)


def test_a_policy_that_only_repeats_itself_is_not_paid_for_to_the_last_turn(server, nano_tokenizer):
    def asked(*texts):
        calls = [said(None, [("echo", json.dumps({"text": text}))]) for text in texts]
        server.answer, before = script(*calls, said("42")), len(server.bodies)
        (t,) = run(server, nano_tokenizer)
        return t, len(server.bodies) - before

    t, requests = asked("a", *["b"] * 9)
    assert (t.status, t.answer, requests, t.calls) == ("turn_limit", "", 4, {"echo": 4})
    t, requests = asked("a", "a", "b", "b", "a", "a")
    assert (t.status, t.answer, requests) == ("answered", "42", 7), "it has tried something else"
    counts = itertools.count()

    class Poll(EchoTool):
        def call(self, arguments):
            return ToolResult(f"{next(counts)} of 4 done")

    server.answer = script(*[said(None, [HI])] * 5, said("42"))
    (t,) = run(server, nano_tokenizer, echoing(Poll()))
    assert (t.status, t.calls) == ("answered", {"echo": 5}), "each result was another"
    ours, _ = play(nano_tokenizer, [call("a")] * 4 + [ANSWER], envs=[echoing()])
    assert ours[0].status == "answered", "a policy that is trained learns it from its reward"


THINK = "<think>\n{}\n</think>\n\n"
CALL = '<tool_call>\n{{"name": "{}", "arguments": {}}}\n</tool_call>'
GOOD = CALL.format("echo", '{"text": "hi"}')


@pytest.mark.parametrize(
    "reply, text",
    [
        (said(None, [("echo", "hello")]), THINK.format("") + CALL.format("echo", "hello")),
        (said("", [("shout", "")]), THINK.format("") + CALL.format("shout", "{}")),
        (said("", [("echo", {"text": "hi"})], reasoning="Hm."), THINK.format("Hm.") + GOOD),
        (said("<think>\nHm.\n</think>\n\nSo.", [HI]), THINK.format("Hm.") + "So.\n" + GOOD),
        (said("Hm.\n</think>\n\n", [HI, HI]), THINK.format("Hm.") + GOOD + "\n" + GOOD),
    ],
)
def test_a_turn_is_what_our_policy_would_have_said(server, nano_tokenizer, reply, text):
    """Also one with a bad call: the same error is observed, and the history stays valid JSON."""
    server.answer = script(reply, said("42", reasoning_content="t"))
    (theirs,) = run(server, nano_tokenizer)
    ((ours,), _) = play(nano_tokenizer, [text + "<|im_end|>", ANSWER])
    assert nano_tokenizer.decode(theirs.ids) == nano_tokenizer.decode(ours.ids)
    assert [turn.results for turn in theirs.turns] == [turn.results for turn in ours.turns]
    for name in ("status", "answer", "well_formed", "outcome"):
        assert getattr(theirs, name) == getattr(ours, name)
    results = theirs.turns[0].results
    assistant, *observed = server.bodies[-1]["messages"][-1 - len(results) :]
    assert [m["content"] for m in observed] == [result.content for result in results] != []
    for asked in assistant["tool_calls"]:
        assert isinstance(json.loads(asked["function"]["arguments"]), dict)
    message = reply["choices"][0]["message"]
    field = "reasoning" if "reasoning" in message else "reasoning_content"
    thought = "Hm." if "Hm." in text else None
    assert assistant.get(field) == thought and "Hm." not in assistant["content"]


def renumbered(events, index):
    """Events whose calls have all one index, or neither index nor id, as some servers send them."""
    for event in events:
        for choice in event["choices"] if isinstance(event, dict) else ():
            for part in choice["delta"].get("tool_calls", ()):
                part["index"] = index
                if index is None:
                    part.pop("id", None)
        yield event


def parts_of_calls(event):
    choices = event["choices"] if isinstance(event, dict) else ()
    return [part for choice in choices for part in choice["delta"].get("tool_calls", ())]


def with_an_id_for_each_part(events):
    for number, event in enumerate(events):
        for part in parts_of_calls(event):
            part["id"] = f"call-{number}"
        yield event


def with_the_name_in_each_part(events):
    names = {}
    for event in events:
        for part in parts_of_calls(event):
            name = part["function"].get("name") or names[part["index"]]
            names[part["index"]] = part["function"]["name"] = name
        yield event


def interleaved(events):
    """The parts of two calls by turns."""
    events, of_call = list(events), {0: [], 1: []}
    for event in events:
        for part in parts_of_calls(event):
            of_call[part["index"]].append(event)
    turns = zip_longest(*of_call.values())
    mixed = iter([event for pair in turns for event in pair if event is not None])
    yield from (next(mixed) if parts_of_calls(event) else event for event in events)


def cut_off(events):
    """Events whose last one has no end of line and no end mark, before the connection breaks."""
    *first, last = [event for event in events if event is not DONE]
    yield from first
    yield f"data: {json.dumps(last)}".encode()
    yield b""


def on_the_wire(events):
    """Events as bytes with comments, names and CRLF, cut anywhere."""
    lines = [b": at work\r\n\r\n"]
    for event in events:
        data = event if isinstance(event, bytes) else f"data:{json.dumps(event)}\n\n".encode()
        lines.append(b"event: chunk\r\n" + data.replace(b"\n", b"\r\n"))
    whole = b"".join(lines)
    yield from (whole[i : i + 50] for i in range(0, len(whole), 50))


TWO = [("echo", '{"text": "hi"}'), ("echo", '{"text": "h\u00f6"}')]


@pytest.mark.parametrize(
    "events",
    [
        partial(told, size=1),
        lambda reply: renumbered(told(reply, size=999), None),
        lambda reply: renumbered(told(reply), 0),
        lambda reply: with_an_id_for_each_part(told(reply, size=1)),
        lambda reply: with_the_name_in_each_part(told(reply, size=3)),
        lambda reply: interleaved(told(reply, size=3)),
        lambda reply: cut_off(told(reply)),
        lambda reply: on_the_wire(told(reply)),
        lambda reply: (event for event in told(reply) if event is not DONE),
        lambda reply: reply,  # a server that knows no streams
    ],
    ids=[
        "pieces",
        "whole calls",
        "one index",
        "an id a part",
        "a name a part",
        "interleaved",
        "cut off",
        "on the wire",
        "no end mark",
        "no stream",
    ],
)
@pytest.mark.parametrize(
    "message",
    [
        {"content": "I look.", "calls": TWO, "reasoning": "Hm."},
        {"content": "<think>\nHm.\n</think>\n\nI look.", "calls": TWO[:1]},
        {"content": 'I look.\n<tool_call>\n{"name": "echo", "arguments": {}}\n</tool_call>'},
        {"calls": [("echo", "no JSON")], "reasoning_content": "Hm."},
    ],
    ids=["reasoning", "think in content", "call in content", "bad call"],
)
def test_a_stream_is_the_turn_that_comes_whole_and_is_shown_as_our_policys(
    server, nano_tokenizer, events, message
):
    """Also its cost, by the usage that the server counts, and the words of each part."""
    first = said(**message, usage=(100, 10))
    replies = first, said("4 2", usage=(200, 20))

    def answer(body):
        reply = script(*replies)(body)
        return events(reply) if body.get("stream") else reply

    server.answer = answer
    shown = {"reasoning": "", "content": "", "tool_call": ""}

    def on_event(kind, payload):
        for part, text in payload if kind in ("text", "turn") else ():
            shown[part] += text

    (whole,) = run(server, nano_tokenizer)
    (streamed,) = run(server, nano_tokenizer, on_event=on_event)
    assert replace(streamed, latency_s=0) == replace(whole, latency_s=0)
    assert whole.policy_usd == pytest.approx((300 * 3 + 30 * 5) / 1e6)
    parts = [chat.parse(nano_tokenizer, whole.ids[t.start : t.end]) for t in whole.turns]
    assert shown == {
        "reasoning": "".join(turn.reasoning for turn in parts),
        "content": "".join(turn.content for turn in parts),
        "tool_call": "".join(call.raw for turn in parts for call in turn.calls),
    }
    assert [body.get("stream", False) for body in server.bodies] == [False] * 2 + [True] * 2


def test_a_token_is_shown_before_the_next_one_is_sent(server, nano_tokenizer):
    """A call, too, before the one that follows it is whole."""
    seen = threading.Semaphore(0)
    reply = said(None, TWO, reasoning="abc")

    def answer(body):
        if body["messages"][-1]["role"] == "tool":
            return said("42")
        return hesitant()

    def hesitant():
        for event in told(reply, size=1):
            yield event
            delta = (event["choices"] or [{}])[0].get("delta", {}) if event is not DONE else {}
            second = [part for part in delta.get("tool_calls", ()) if part["index"] == 1]
            begun = second and "id" in second[0]
            if "reasoning" in delta or begun:
                assert seen.acquire(timeout=10), f"{delta} was not shown"

    def on_event(kind, payload):
        for _ in payload if kind == "text" else ():
            seen.release()

    server.answer = answer
    (t,) = run(server, nano_tokenizer, on_event=on_event)
    assert (t.status, t.calls, t.answer) == ("answered", {"echo": 2}, "42")


def breaks(*events, end=b""):
    """A stream of events that breaks off after `end`."""
    yield from events
    yield end


HALF = [{"choices": [{"delta": {"content": "It is"}}]}]
ERROR = {"error": {"message": "overloaded", "code": 503}}


@pytest.mark.parametrize(
    "events, problem, tokens",
    [
        (HALF, "the reply breaks off", 7),
        ([*HALF, b'data: {"choi'], "the reply breaks off", 7),
        ([*HALF, b"data: {oops}\n\n"], "not JSON: {oops}", 7),
        ([*HALF, ERROR], "the endpoint says: overloaded", 7),
        ([*HALF, {"choices": [{"delta": 7}]}], "choices[0].delta is 7", 7),
        ([], "the reply breaks off", 0),
        ([ERROR], "the endpoint says: overloaded", None),
    ],
)
def test_a_stream_that_breaks_is_the_infrastructures_failure_in_one_line(
    server, nano_tokenizer, events, problem, tokens
):
    """It is not asked again, as the model has worked; what it has read and written is paid."""
    server.answer = lambda body: breaks(*events)
    texts = []

    def on_event(kind, payload):
        texts.extend(text for _, text in payload if kind == "text")

    (t,) = run(
        server, nano_tokenizer, on_event=lambda kind, p: kind == "text" and on_event(kind, p)
    )
    assert (t.status, len(server.bodies), len(t.turns)) == ("infrastructure", 1, 1)
    assert problem in t.failure and "\n" not in t.failure
    assert "".join(texts) == ("It is" if HALF[0] in events else "")
    if tokens is None:
        assert t.policy_usd == 0
    else:
        read = http.count_tokens(json.dumps(server.bodies[0]))
        assert t.policy_usd == pytest.approx((read * 3 + tokens * 5) / 1e6)


def test_a_refusal_before_a_stream_is_asked_again(server, nano_tokenizer):
    def answer(body):
        server.status = 200 if len(server.bodies) > 1 else 503
        return told(said("42")) if len(server.bodies) > 1 else {"error": {"message": "busy"}}

    server.answer = answer
    (t,) = run(server, nano_tokenizer, on_event=lambda *_: None)
    assert (t.status, t.answer, len(server.bodies)) == ("answered", "42", 2)


def test_limits_are_those_of_our_policy(server, nano_tokenizer):
    server.answer = lambda body: said("word " * 99)
    (t,) = run(server, nano_tokenizer, turn_tokens=20)
    assert (t.status, sum(t.sampled)) == ("token_limit", 20)
    assert t.turns[0].finish_reason == "length"
    assert server.bodies[-1]["max_completion_tokens"] == 20
    server.answer = lambda body: said("42", finish="length")
    (t,) = run(server, nano_tokenizer)
    assert t.status == "token_limit" and nano_tokenizer.decode(t.ids).endswith("\n\n42")


def test_a_failure_is_infrastructure_and_keeps_what_was_before(server, nano_tokenizer):
    server.answer = script(said(None, [HI]), [])
    (t,) = run(server, nano_tokenizer)
    assert (t.status, len(t.turns), t.calls, t.outcome) == ("infrastructure", 2, {"echo": 1}, 0)
    (result,) = t.turns[1].results
    assert result.infrastructure and f"big at {server.url} failed (" in result.content


def test_an_attempt_lasts_as_long_as_its_requests(server, nano_tokenizer):
    """Measured, whatever the number of tokens; a reply that is kept lasts what it did at first."""

    def answer(body):
        first = body["messages"][-1]["role"] == "user"
        time.sleep(0.3 if first else 0.1)
        return said(None, [HI]) if first else said("42 " * 200)

    server.answer = answer
    (t,) = run(server, nano_tokenizer)
    assert t.calls == {"echo": 1} and sum(t.sampled) > 200
    assert 2.4 <= t.latency_s < 3.9  # 2 s are the tool's virtual price


def test_the_users_seconds_bound_a_request(server, nano_tokenizer):
    """A turn that would outlast them is given up, and the attempt ends by that limit."""
    asked = []

    def answer(body):
        asked.append(body)
        time.sleep(2.0 if len(asked) == 2 else 0.0)
        return said(None, [HI])

    server.answer = answer
    env = echoing()
    env.task = replace(env.task, preference=replace(env.task.preference, seconds=2.4))
    start = time.monotonic()
    (t,) = run(server, nano_tokenizer, env)
    assert (t.status, len(t.turns), len(asked)) == ("user_limit", 2, 2)
    assert time.monotonic() - start < 1.8 and 2.4 <= t.latency_s < 3.8  # 2 s are the tool's


def test_a_request_that_is_not_waited_for_is_settled(server, nano_tokenizer):
    """A client that goes away in the middle of a turn leaves no reservation."""
    entered, release = threading.Event(), threading.Event()

    def answer(body):
        entered.set()
        release.wait(5)
        return said("42", usage=(10, 5))

    server.answer = answer
    spending = Spending(max_usd=1.0)
    rollout = endpoint.EndpointRollout(
        f"big@{server.url}", Price(3.0, 5.0), nano_tokenizer, SETTINGS, spending
    )

    async def leave():
        attempt = asyncio.ensure_future(Attempt(rollout, 0, echoing(), 0, None).run())
        await asyncio.to_thread(entered.wait, 5)
        attempt.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await attempt

    asyncio.run(leave())
    assert spending.spent > 0.001  # at its most, while it is open
    release.set()
    end = time.monotonic() + 2
    while spending.spent != pytest.approx((10 * 3 + 5 * 5) / 1e6):
        assert time.monotonic() < end
        time.sleep(0.01)


def test_arguments_without_measure_are_an_error_that_the_endpoint_reads(server, nano_tokenizer):
    for deep in ("[" * 900 + "]" * 900, "[" * 10**5, "1" + "0" * 5000):
        arguments = '{"text": ' + deep + "}"
        server.answer = script(said(None, [("echo", arguments)]), said("42"))
        (t,) = run(server, nano_tokenizer, turn_tokens=10**6, context_tokens=10**7)
        assert t.answer == "42" and t.turns[0].results[0].error
        json.dumps(to_row(echoing().task, t))


def test_attempts_run_side_by_side_up_to_a_limit(server, nano_tokenizer, monkeypatch):
    monkeypatch.setattr(endpoint, "Endpoint", partial(endpoint.Endpoint, concurrency=3))
    three, free = threading.Barrier(3), threading.Semaphore(3)

    def answer(body):
        assert free.acquire(blocking=False)  # there is no answer if more come
        three.wait(10)  # raises if fewer come
        free.release()
        return said("42")

    server.answer = answer
    trajectories = run(server, nano_tokenizer, *[echoing() for _ in range(6)])
    assert {t.answer for t in trajectories} == {"42"}


def test_a_user_may_reply(server, nano_tokenizer):
    env = echoing()

    async def reply(content):
        return None if content == "42" else ToolResult(f"no, not {content}")

    env.reply = reply
    server.answer = script(said("41"), said("42"))
    (t,) = run(server, nano_tokenizer, env)
    assert (t.status, t.answer, t.outcome) == ("answered", "42", 1.0)
    assert server.bodies[-1]["messages"][-1] == {"role": "user", "content": "no, not 41"}
    assert "<|im_start|>user\nno, not 41<|im_end|>" in nano_tokenizer.decode(t.ids)


def test_with_rebuilt_context_every_turn_is_a_request_of_its_own(server, nano_tokenizer):
    def answer(body):
        seen = "Doc 1" in body["messages"][-1]["content"]
        return said("42", usage=(200, 20)) if seen else said(None, [HI], usage=(100, 10))

    server.answer = answer
    (t,) = run(server, nano_tokenizer, context="rebuild")
    assert (t.status, t.outcome, len(t.turns)) == ("answered", 1, 2)
    # The cost is what the server counts.
    assert t.cost_usd == pytest.approx(0.25 + (300 * 3 + 30 * 5) / 1e6)
    assert 2.0 < t.latency_s < 3.0  # the tool's two seconds, and those of two requests
    for turn, body in zip(t.turns, server.bodies, strict=True):
        prompt = chat.encode(nano_tokenizer, body["messages"], body["tools"])
        assert t.ids[turn.context : turn.start] == prompt
