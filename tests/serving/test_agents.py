"""Agents that are not ours play attempts: same ids as our loop, and faults that harm no other."""

from __future__ import annotations

import json
import time
from pathlib import Path

import httpx
import openai
import pytest

from nanorchestra.config import RolloutSection
from nanorchestra.errors import UserError
from nanorchestra.formats.rollout import load_rollout
from nanorchestra.model.checkpoint import NANO_BASE
from nanorchestra.serving.agents import AgentFailure, AgentFunction, played_by
from nanorchestra.training.grpo import as_group
from worlds.desk import Desk
from worlds.metrics import rewritten_share

EXAMPLE = Path(__file__).parents[2] / "examples" / "openai_agent.py"
COUNT = 8
CLIENT = openai.OpenAI(base_url="http://127.0.0.1", api_key="none", max_retries=0)

OWN = """
import openai

class Tasks:
    def reset(self, seed):
        return f"Task {seed}"

def play(attempt):
    client = openai.OpenAI(base_url=attempt.base_url, api_key=attempt.api_key)
    client.chat.completions.create(model="any", messages=[{"role": "user", "content": "What?"}])
    return 0.5
"""


@pytest.fixture(scope="module")
def ours():
    settings = RolloutSection(turns=10, turn_tokens=512, context_tokens=2048)
    return load_rollout(NANO_BASE, settings, {"temperature": 1.0}, COUNT)


@pytest.fixture(scope="module")
def world(sandbox):
    return Desk(0, sandbox)


def environments(world, count=COUNT):
    return [world.environment(world.task("train", i // 4), i) for i in range(count)]


def agent(ours, function, timeout_s=60.0):
    """Our rollout, played by a function of an attempt."""
    rollout = played_by(f"{EXAMPLE}:play", ours, timeout_s)
    rollout.agent = AgentFunction("test", function)
    return rollout


def ask(attempt, messages, **settings):
    client = CLIENT.with_options(base_url=attempt.base_url, api_key=attempt.api_key)
    settings = {"tools": attempt.task["tools"] or openai.NOT_GIVEN, "model": "any"} | settings
    return client.chat.completions.create(messages=messages, **settings).choices[0].message


def one(ours, world, function):
    """The trajectory of one attempt that a function plays."""
    return agent(ours, function).run(environments(world, 1), [7])[0]


def test_a_loop_over_openais_client_plays_what_our_loop_plays_bit_for_bit(ours, world):
    seeds = [1000 + i for i in range(COUNT)]
    expected = ours.run(environments(world), seeds)
    played = played_by(f"{EXAMPLE}:play", ours, 60.0).run(environments(world), seeds)
    assert sum(len(t.turns) for t in expected) > COUNT
    for mine, theirs in zip(expected, played, strict=True):
        for name in ("ids", "sampled", "logprobs", "weight_versions", "status", "answer"):
            assert getattr(theirs, name) == getattr(mine, name)
        for name in ("cost_usd", "latency_s", "outcome", "calls", "well_formed"):
            assert getattr(theirs, name) == getattr(mine, name)
        assert theirs.calls and len(theirs.contexts()) == 1


def test_what_an_agent_rewrites_is_another_sample_of_the_same_trajectory(ours, world):
    def play(attempt):
        first = ask(attempt, attempt.task["messages"], max_tokens=3).model_dump(exclude_none=True)
        again = [*attempt.task["messages"], first, {"role": "user", "content": "sure?"}]
        second = ask(attempt, again).model_dump(exclude_none=True)
        longer = [*again, second, {"role": "user", "content": "more"}]
        longer[0] = longer[0] | {"content": "another question"}  # what was said is now another
        ask(attempt, longer)
        third = ask(attempt, again).model_dump(exclude_none=True)
        ask(attempt, [*again, third, {"role": "user", "content": "more"}], tools=[])
        ask(attempt, [{"role": "user", "content": "hello"}])
        ask(attempt, [{"role": "user", "content": "hello"}])
        return 0.25

    t = one(ours, world, play)
    assert (t.status, t.outcome, len(t.turns)) == ("answered", 0.25, 7)
    cut, places = t.turns[0], t.contexts()
    assert cut.end == cut.start + 3 and not t.sampled[cut.end]  # what ends it was given
    assert len(places) == 6  # the first goes on once, then five times other prompts
    assert rewritten_share([t]) == 5 / 6
    group = as_group([t])
    assert [len(sample.ids) for sample in group.samples] == [end - b for b, _, end in places]
    *_, one_more, last = t.turns  # of the same prompt, with other noise
    assert t.ids[one_more.start : one_more.end] != t.ids[last.start : last.end]


@pytest.mark.parametrize(
    "does, status, failure",
    [
        ("raises", "infrastructure", "test: KeyError: 'a bug'"),
        ("asks nothing", "infrastructure", "the agent asked the policy nothing"),
        ("returns 7", "infrastructure", "reward"),
        ("hangs", "time_limit", ""),
        ("asks without an end", "turn_limit", ""),
    ],
)
def test_an_agent_that_fails_ends_its_own_attempt_alone(ours, world, does, status, failure):
    def play(attempt):
        if not attempt.task["id"].endswith("-0"):
            return ask(attempt, attempt.task["messages"]).content
        if does == "asks nothing":
            return "42"
        ask(attempt, attempt.task["messages"])
        if does == "raises":
            raise KeyError("a bug")
        if does == "hangs":
            time.sleep(60)
        while does == "asks without an end":
            ask(attempt, attempt.task["messages"])
        return 7.0

    rollout = agent(ours, play, timeout_s=1.5 if does == "hangs" else 60.0)
    envs = [world.environment(world.task("train", index), 0) for index in range(3)]
    bad, *good = rollout.run(envs, [1, 2, 3])
    assert bad.status == status and failure in bad.failure and bad.outcome == 0
    assert [t.status for t in good] == ["answered"] * 2 and not rollout.attempts


def test_a_request_needs_its_attempts_key_and_is_one_that_a_run_serves(ours, world):
    def play(attempt):
        with pytest.raises(AgentFailure, match="the policy comes first"):
            attempt.call([{"name": "x"}])
        for wrong in ([], [{"name": "x", "arguments": "{}"}], [{"name": {1}}], [{}]):
            with pytest.raises((UserError, TypeError)):
                attempt.call(wrong)
        url = f"{attempt.base_url}/chat/completions"
        body = {"messages": [{"role": "user", "content": "hello"}], "model": "any"}
        for sent, key, status in (
            (body, "other", 401),
            (body | {"n": 2}, attempt.api_key, 400),
            (body, attempt.api_key, 200),
        ):
            headers = {"Authorization": f"Bearer {key}"}
            assert httpx.post(url, json=sent, headers=headers).status_code == status
        return 0.5

    t = one(ours, world, play)
    assert (t.status, t.outcome) == ("answered", 0.5), t.failure


def test_calls_are_billed_and_run_side_by_side(ours, world):
    def play(attempt):
        ask(attempt, attempt.task["messages"])
        row, code = {"table": "order", "id": 100}, {"code": "6 * 7"}
        calls = [{"name": "records", "arguments": row}, {"name": "python", "arguments": code}]
        results = attempt.call(calls)
        results += attempt.call([{"name": "none"}])
        return json.dumps(results)

    t = one(ours, world, play)
    results = json.loads(t.answer)
    assert len(results) == 3 and results[2]["error"]
    made = t.turns[0].results
    assert [r.content for r in made] == [result["content"] for result in results]
    assert sum(t.calls.values()) == sum(not result.refused for result in made) > 0
    calls_usd = sum(result["cost_usd"] for result in results)
    own_usd = ours.price.cost(t.sampled.count(False), t.sampled.count(True))
    assert t.cost_usd == pytest.approx(calls_usd + own_usd) and calls_usd > 0


def test_a_run_keeps_the_file_of_its_agent(make_training, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(OWN)
    mine = {"task.world": str(file), "task.agent": f"{file}:play"}
    run = make_training("own", {"grpo.steps": 1} | mine)
    assert run.train() and (run.folder.path / "agent.py").read_text() == OWN
