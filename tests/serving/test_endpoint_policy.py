"""A model behind an endpoint as the policy: a scripted server answers, or misbehaves."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from functools import partial

import pytest
from openai_server import openai_server, said, told
from scripted import ANSWER, SETTINGS, echoing, play

from nanorchestra.model import chat
from nanorchestra.records import Price
from nanorchestra.serving import endpoint
from nanorchestra.tools import http
from nanorchestra.tools.spending import Spending

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


def test_a_policy_that_only_repeats_itself_is_not_paid_for_to_the_last_turn(server, nano_tokenizer):
    def asked(*texts):
        calls = [said(None, [("echo", json.dumps({"text": text}))]) for text in texts]
        server.answer, before = script(*calls, said("42")), len(server.bodies)
        (t,) = run(server, nano_tokenizer)
        return t.status, t.answer, len(server.bodies) - before

    assert asked("a", *["b"] * 9) == ("turn_limit", "", 4)
    assert asked("a", "a", "b", "b", "a", "a") == ("answered", "42", 7), "it has tried another"


THINK = "<think>\n{}\n</think>\n\n"
CALL = '<tool_call>\n{{"name": "{}", "arguments": {}}}\n</tool_call>'
GOOD = CALL.format("echo", '{"text": "hi"}')
TURNS = {  # a reply, and what our policy would have said
    "a bad call": (
        said(None, [("echo", "hello")]),
        THINK.format("") + CALL.format("echo", "hello"),
    ),
    "arguments as an object": (
        said("", [("echo", {"text": "hi"})], reasoning="Hm."),
        THINK.format("Hm.") + GOOD,
    ),
    "think in content": (
        said("<think>\nHm.\n</think>\n\nI look.", [HI]),
        THINK.format("Hm.") + "I look.\n" + GOOD,
    ),
    "two calls": (
        said("I look.", [HI, HI], reasoning_content="Hm."),
        THINK.format("Hm.") + "I look.\n" + GOOD + "\n" + GOOD,
    ),
}


def changed(events, change):
    """Events of whose calls `change(number, part)` has changed each part."""
    for number, event in enumerate(events):
        for choice in event["choices"] if isinstance(event, dict) else ():
            for part in choice["delta"].get("tool_calls", ()):
                change(number, part)
        yield event


def on_the_wire(events):
    """Events as bytes with comments, names and CRLF, cut anywhere."""
    lines = [b": at work\r\n\r\n"]
    for event in events:
        data = event if isinstance(event, bytes) else f"data:{json.dumps(event)}\n\n".encode()
        lines.append(b"event: chunk\r\n" + data.replace(b"\n", b"\r\n"))
    whole = b"".join(lines)
    yield from (whole[i : i + 50] for i in range(0, len(whole), 50))


STREAMS = {
    "pieces": partial(told, size=1),
    "whole calls": lambda reply: changed(
        told(reply, size=999), lambda _, part: part.update(index=None, id=None)
    ),
    "one index": lambda reply: changed(told(reply), lambda _, part: part.update(index=0)),
    "an id a part": lambda reply: changed(told(reply), lambda n, part: part.update(id=f"call-{n}")),
    "on the wire": lambda reply: on_the_wire(told(reply)),
    "no stream": lambda reply: reply,
}


@pytest.mark.parametrize("reply, text", TURNS.values(), ids=TURNS)
def test_a_turn_is_what_our_policy_would_have_said_whole_and_in_any_stream(
    server, nano_tokenizer, reply, text
):
    """Ids, results, cost and what is shown; the history stays valid JSON, also after a bad call."""
    replies = reply, said("42", reasoning_content="t", usage=(200, 20))
    server.answer = script(*replies)
    (theirs,) = run(server, nano_tokenizer)
    ((ours,), _) = play(nano_tokenizer, [text + "<|im_end|>", ANSWER])
    assert nano_tokenizer.decode(theirs.ids) == nano_tokenizer.decode(ours.ids)
    assert [turn.results for turn in theirs.turns] == [turn.results for turn in ours.turns]
    for name in ("status", "answer", "well_formed", "outcome"):
        assert getattr(theirs, name) == getattr(ours, name)
    assert theirs.policy_usd == pytest.approx((210 * 3 + 25 * 5) / 1e6)
    results = theirs.turns[0].results
    assistant, *observed = server.bodies[-1]["messages"][-1 - len(results) :]
    assert [m["content"] for m in observed] == [result.content for result in results] != []
    for asked in assistant["tool_calls"]:
        assert isinstance(json.loads(asked["function"]["arguments"]), dict)
    message = reply["choices"][0]["message"]
    field = "reasoning" if "reasoning" in message else "reasoning_content"
    thought = "Hm." if "Hm." in text else None
    assert assistant.get(field) == thought and "Hm." not in assistant["content"]
    if isinstance(message["tool_calls"][0]["function"]["arguments"], dict):
        return  # no stream has these
    parts = [chat.parse(nano_tokenizer, theirs.ids[t.start : t.end]) for t in theirs.turns]
    for name, events in STREAMS.items():
        shown = dict.fromkeys(("reasoning", "content", "tool_call"), "")

        def on_event(kind, payload, shown=shown):
            for part, text in payload if kind in ("text", "turn") else ():
                shown[part] += text

        server.answer = lambda body, events=events: events(script(*replies)(body))
        (streamed,) = run(server, nano_tokenizer, on_event=on_event)
        assert replace(streamed, latency_s=0) == replace(theirs, latency_s=0), name
        assert shown == {
            "reasoning": "".join(turn.reasoning for turn in parts),
            "content": "".join(turn.content for turn in parts),
            "tool_call": "".join(call.raw for turn in parts for call in turn.calls),
        }, name
    assert server.bodies[-1]["stream"]


HALF = [{"choices": [{"delta": {"content": "It is"}}]}]
ERROR = {"error": {"message": "overloaded", "code": 503}}


@pytest.mark.parametrize(
    "events, problem, tokens",
    [
        (HALF, "the reply breaks off", 7),
        ([*HALF, b"data: {oops}\n\n"], "not JSON: {oops}", 7),
        ([], "the reply breaks off", 0),
        ([ERROR], "the endpoint says: overloaded", None),
    ],
)
def test_a_stream_that_breaks_is_the_infrastructures_failure_in_one_line(
    server, nano_tokenizer, events, problem, tokens
):
    """It is not asked again, as the model has worked; what it has read and written is paid."""
    server.answer = lambda body: iter([*events, b""])
    texts = []

    def on_event(kind, payload):
        if kind == "text":
            texts.extend(text for _, text in payload)

    (t,) = run(server, nano_tokenizer, on_event=on_event)
    assert (t.status, len(server.bodies), len(t.turns)) == ("infrastructure", 1, 1)
    assert problem in t.failure and "\n" not in t.failure
    assert "".join(texts) == ("It is" if HALF[0] in events else "")
    if tokens is None:
        assert t.policy_usd == 0
    else:
        read = http.count_tokens(json.dumps(server.bodies[0]))
        assert t.policy_usd == pytest.approx((read * 3 + tokens * 5) / 1e6)


def test_limits_are_those_of_our_policy(server, nano_tokenizer):
    server.answer = lambda body: said("word " * 99)
    (t,) = run(server, nano_tokenizer, turn_tokens=20)
    assert (t.status, sum(t.sampled)) == ("token_limit", 20)
    assert t.turns[0].finish_reason == "length"
    body = server.bodies[-1]
    assert body["max_completion_tokens"] == 20 and body["model"] == "big"
    assert not body.keys() & {"temperature", "seed", "stream"}, "none of them was given"
    assert server.headers[-1]["Authorization"] == f"Bearer {KEY}"
    server.answer = lambda body: said("42", finish="length")
    (t,) = run(server, nano_tokenizer)
    assert t.status == "token_limit" and nano_tokenizer.decode(t.ids).endswith("\n\n42")


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
