"""An orchestrator within an orchestrator: its calls, and what they cost, are part of its result."""

from __future__ import annotations

import asyncio

from scripted import ANSWER, EchoTool, ScriptedEngine, call, echoing

from nanorchestra.agent import nested
from nanorchestra.agent.loop import Rollout
from nanorchestra.records import Preference, Price, ToolCall
from nanorchestra.tools.allowance import Allowance


class Priced(EchoTool):
    def most_usd(self, arguments):
        return 0.25


def test_it_answers_a_task_with_its_own_tools_and_bills_them(nano_tokenizer, monkeypatch, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    loaded = []

    def load(path, limits, sampling, running, **options):
        loaded.append(path)
        engine = ScriptedEngine(nano_tokenizer, [[call(), ANSWER], [call(), call()]])
        return Rollout(engine, nano_tokenizer, lambda *_: None, limits, Price(1.0, 2.0))

    monkeypatch.setattr(nested, "load_rollout", load)
    nested._load.cache_clear()
    deputy = nested.Orchestrator("deputy", "d", tmp_path, [EchoTool()], depth=2, turns=2)
    result = deputy.call({"task": "what?"})
    assert result.content == "42" and not result.error
    (inner,) = result.parts
    assert (inner["name"], inner["arguments"], inner["cost_usd"]) == ("echo", {"text": "hi"}, 0.25)
    assert 0.25 < result.cost_usd < 0.26 and result.latency_s > 2.0
    lost = deputy.call({"task": "again?"})
    assert lost.content == "Error: deputy has no answer (turn_limit)" and lost.error
    assert lost.cost_usd > 0.5 and len(loaded) == 1
    nested._load.cache_clear()


def test_it_inherits_bans_and_a_share_of_the_dollars(nano_tokenizer, monkeypatch, tmp_path):
    """One that could spend what its caller may not made every limit worthless."""
    (tmp_path / "config.json").write_text("{}")
    seen = []

    def load(path, limits, sampling, running, **options):
        engine = ScriptedEngine(nano_tokenizer, [[call(), ANSWER]] * 9)
        rollout = Rollout(engine, nano_tokenizer, lambda *_: None, limits, Price(1.0, 2.0))
        run = rollout.run
        rollout.run = lambda environments, seeds: (
            seen.append(environments[0]) or run(environments, seeds)
        )
        return rollout

    monkeypatch.setattr(nested, "load_rollout", load)
    nested._load.cache_clear()
    outer = echoing(nested.Orchestrator("deputy", "d", tmp_path, [Priced()], turns=3))
    asked = ToolCall("deputy", {"task": "what?"})
    wish = Preference("Be cheap.", cost=1.0, tools={"deputy": -1.0, "echo": 1.0}, never=["echo"])
    for allowance, says in (
        (Allowance(0.4, 0.4, preference=wish), "the user forbids echo"),
        (Allowance(0.4, 0.2, 60.0), "refused echo: up to $0.25, $0.1"),
        (Allowance(0.4, 0.4), "hi"),
    ):
        prepared = outer.prepare(asked, allowance)
        result = asyncio.run(prepared.run())
        assert says in result.parts[0]["content"], result.parts
        assert result.cost_usd <= prepared.most_usd == min(allowance.usd, allowance.share)
    first = seen[0].task.preference
    assert (first.text, first.usd, first.tools) == ("Be cheap.", 0.4, {"echo": 1.0})
    assert seen[1].task.preference.seconds == 60.0
    broke = outer.prepare(asked, Allowance(0.0, 0.0))
    assert asyncio.run(broke.run()).refused and len(seen) == 3
    nested._load.cache_clear()
