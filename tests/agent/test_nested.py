"""An orchestrator within an orchestrator: its calls, and what they cost, are part of its result."""

from __future__ import annotations

from scripted import ANSWER, EchoTool, ScriptedEngine, call

from nanorchestra.agent import nested
from nanorchestra.agent.loop import Rollout
from nanorchestra.records import Price


def test_it_answers_a_task_with_its_own_tools_and_bills_them(nano_tokenizer, monkeypatch, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    loaded = []

    def load(path, limits, sampling, running):
        loaded.append(path)
        engine = ScriptedEngine(nano_tokenizer, [[call(), ANSWER], [call(), call()]])
        return Rollout(engine, nano_tokenizer, lambda *_: None, limits, Price(1.0, 2.0))

    monkeypatch.setattr(nested, "load_rollout", load)
    nested._loaded.cache_clear()
    deputy = nested.Orchestrator("deputy", "d", tmp_path, [EchoTool()], depth=2, turns=2)
    result = deputy.call({"task": "what?"})
    assert result.content == "42" and not result.error
    (inner,) = result.parts
    assert (inner["name"], inner["arguments"], inner["cost_usd"]) == ("echo", {"text": "hi"}, 0.25)
    assert 0.25 < result.cost_usd < 0.26 and result.latency_s > 2.0
    lost = deputy.call({"task": "again?"})
    assert lost.content == "Error: deputy found no answer (turn_limit)" and lost.error
    assert lost.cost_usd > 0.5 and len(loaded) == 1
    nested._loaded.cache_clear()
