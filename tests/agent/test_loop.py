"""The loop on a scripted engine: what it samples is written in the test, the rest is real."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

import pytest
from scripted import ANSWER, SETTINGS, EchoTool, both, call, echoing, play

from nanorchestra.agent.environment import ToolEnvironment
from nanorchestra.records import Task, ToolResult


def run(tokenizer, *scripts, tool=None, **settings):
    return play(
        tokenizer, *scripts, envs=[echoing(tool, number=i) for i in range(len(scripts))], **settings
    )


def test_a_trajectory_records_ids_calls_costs_and_latencies(nano_tokenizer):
    (t,), engine = run(nano_tokenizer, [call("hi"), ANSWER])
    assert (t.task_id, t.status, t.answer, t.outcome) == ("t0", "answered", "42", 1.0)
    assert t.well_formed and t.calls == {"echo": 1} and engine.sessions[0].closed
    sampled = sum(t.sampled)
    assert t.cost_usd == pytest.approx(0.25 + ((len(t.ids) - sampled) + sampled * 2.0) / 1e6)
    assert t.latency_s == pytest.approx(2.0 + 0.01 * sampled)
    assert len(t.ids) == len(t.sampled) == len(t.logprobs) == len(t.weight_versions)
    assert t.prompt_length == len(engine.sessions[0].prompt) == t.turns[0].start
    places = [i for turn in t.turns for i in range(turn.start, turn.end)]
    assert [i for i, sampled in enumerate(t.sampled) if sampled] == places and len(t.turns) == 2
    for i, sampled in enumerate(t.sampled):
        assert (t.logprobs[i], t.weight_versions[i]) == ((-0.5, 3) if sampled else (0.0, -1))
    assert all(t.ids[turn.end - 1] == nano_tokenizer.end_of_turn for turn in t.turns)
    between = nano_tokenizer.decode(t.ids[t.turns[0].end : t.turns[1].start])
    response = "<|im_start|>user\n<tool_response>\nhi\n</tool_response><|im_end|>"
    assert between == f"\n{response}\n<|im_start|>assistant\n"


def test_calls_of_a_turn_run_side_by_side_and_are_all_billed(nano_tokenizer):
    start = time.monotonic()
    script, slow = [both(call("a"), call("b")), ANSWER], EchoTool(blocking=True, seconds=0.3)
    (t,), _ = run(nano_tokenizer, script, tool=slow)
    assert time.monotonic() - start < 0.55
    assert [result.content for result in t.turns[0].results] == ["a", "b"]
    assert t.calls == {"echo": 2} and t.cost_usd > 0.5
    assert t.latency_s == pytest.approx(2.0 + 0.01 * sum(t.sampled))  # two prices, one wait


def test_limits_and_failures_end_an_attempt(nano_tokenizer):
    down = EchoTool(result=ToolResult("Error: down", error=True, infrastructure=True))
    ((t,), _) = run(nano_tokenizer, [ANSWER])
    for script, changes, more, status, turns in (
        ([call()] * 9, {"turns": 3}, {}, "turn_limit", 3),
        ([ANSWER], {"context_tokens": t.prompt_length}, {}, "token_limit", 0),
        ([ANSWER], {}, {"finish": "length"}, "token_limit", 1),
        ([call(), ANSWER], {}, {"tool": down}, "infrastructure", 1),
    ):
        (t,), engine = run(nano_tokenizer, script, settings=replace(SETTINGS, **changes), **more)
        assert (t.status, len(t.turns), t.outcome, t.well_formed) == (status, turns, 0.0, False)
        assert all(session.closed for session in engine.sessions)
        assert len(engine.sessions) == 1


def test_lockstep_keeps_the_order_of_the_attempts_and_without_it_others_go_on(nano_tokenizer):
    class First(EchoTool):
        def call(self, arguments):
            if arguments["text"] == "slow":
                last.wait(0 if lockstep else 10)
                time.sleep(0.3)
            elif arguments["text"] == "last":
                last.set()
            return super().call(arguments)

    scripts = [[call("slow"), ANSWER], [call(), call("last"), ANSWER]]
    for lockstep, order in ((True, [0, 1, 0, 1, 1]), (False, [0, 1, 1, 1, 0])):
        tool, last = First(blocking=True), threading.Event()
        settings = replace(SETTINGS, lockstep=lockstep)
        trajectories, engine = run(nano_tokenizer, *scripts, tool=tool, settings=settings)
        assert [seed for seed, _ in engine.params] == order
        assert all(t.outcome == 1.0 for t in trajectories)


def test_events_tell_what_happens_and_exceptions_reach_the_caller(nano_tokenizer):
    seen = []
    (t,), _ = run(nano_tokenizer, [call(), ANSWER], on_event=lambda *event: seen.append(event))
    kinds = [kind for kind, _ in seen if kind != "text"]
    assert kinds == ["start", "turn", "results", "turn"] and seen[0][1] is t
    deltas = [delta for kind, parts in seen if kind in ("text", "turn") for delta in parts]
    assert "".join(text for kind, text in deltas if kind == "content") == "42"
    assert [text for kind, text in deltas if kind == "tool_call"] == [t.turns[0].calls[0].raw]

    def fail(kind, payload):
        raise RuntimeError("the listener is broken")

    with pytest.raises(RuntimeError, match="listener"):
        run(nano_tokenizer, *[[call(), ANSWER]] * 3, on_event=fail)


def test_turns_with_equal_prompts_are_drawn_apart(nano_tokenizer):
    """With one seed for all turns, a search that brings nothing new would be repeated for ever."""
    answers = ToolEnvironment(Task("t", "?"), [EchoTool(), EchoTool("answer", kind="answer")], len)
    for env, last, count in ((answers, call("42", "answer"), 4), (echoing(), ANSWER, 1)):
        _, engine = play(nano_tokenizer, [call()] * 3 + [last], envs=[env])
        seeds = [seed for seed, _ in engine.params]
        assert len(seeds) == 4 and seeds[0] == 0 and len(set(seeds)) == count


def test_results_that_are_too_long_for_the_context_are_shortened(nano_tokenizer):
    """Those of a turn share the room by their length."""
    long = " ".join(f"w{n}" for n in range(3000))

    class Long(EchoTool):
        def call(self, arguments):
            return ToolResult(long if arguments["text"] == "a" else "short one")

    settings = replace(SETTINGS, context_tokens=900, turn_tokens=200)
    script = [both(call("a"), call("short")), ANSWER]
    (t,), engine = run(nano_tokenizer, script, tool=Long(), settings=settings)
    first, second = (result.content for result in t.turns[0].results)
    assert t.status == "answered" and t.outcome == 1 and second == "short one"
    kept, note = first.rsplit("\n", 1)
    count = len(kept.split())
    assert long.startswith(kept) and note == f"[{count} of 3,000 words]" and count > 50
    assert len(t.ids) < 900 and engine.params[1][1] >= 200, "the next turn has its room"
    assert len(nano_tokenizer.encode(first)) > 300, "the room that there is, is used"
