"""An orchestrator within an orchestrator: its calls, and what they cost, are part of its result."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from four_gpus import FourGpus
from scripted import ANSWER, EchoTool, ScriptedEngine, call, echoing, play

from nanorchestra.agent import load, nested
from nanorchestra.agent.loop import AttemptLimits, Rollout
from nanorchestra.errors import UserError
from nanorchestra.records import Preference, Price, ToolCall, ToolResult
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


DOWN = ToolResult("Error: echo did not answer: HTTP 429", error=True, infrastructure=True)


@pytest.fixture
def deputy(nano_tokenizer, monkeypatch, tmp_path):
    """deputy(load, *tools) is an orchestrator that `load(**options)` loads."""
    (tmp_path / "config.json").write_text("{}")

    def make(load, *tools):
        monkeypatch.setattr(nested, "load_rollout", lambda *given, **options: load(**options))
        nested._load.cache_clear()
        return nested.Orchestrator("deputy", "d", tmp_path, list(tools), turns=3)

    yield make
    nested._load.cache_clear()


def scripted(tokenizer):
    engine = ScriptedEngine(tokenizer, [[call(), ANSWER]] * 9)
    return Rollout(engine, tokenizer, lambda *_: None, AttemptLimits(), Price(1.0, 2.0))


def test_what_fails_inside_fails_the_attempt_of_its_caller(deputy, nano_tokenizer):
    """A tool, the checkpoint, the memory, the engine. The policy is to blame for none of them."""

    def outer(load, *tools):
        asks = call(name="deputy").replace('"text"', '"task"')
        (t,), _ = play(nano_tokenizer, [asks, ANSWER], envs=[echoing(deputy(load, *tools))])
        assert t.status == "infrastructure" and not t.answer
        return t.failure

    def damaged(**_):
        raise UserError("model.safetensors: not whole")

    def full(**_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    def broken(**_):
        rollout = scripted(nano_tokenizer)
        rollout.engine.step = lambda: 1 / 0
        return rollout

    inner = EchoTool(result=DOWN)
    assert DOWN.content in outer(lambda **_: scripted(nano_tokenizer), inner)
    assert "model.safetensors: not whole" in outer(damaged)
    assert "does not fit in the free memory of cpu" in outer(full)
    assert "ZeroDivisionError" in outer(broken)


def test_it_waits_for_other_tasks_only_so_long(deputy, nano_tokenizer, monkeypatch):
    monkeypatch.setattr(nested, "WAIT_S", 0.05)
    busy = deputy(lambda **_: scripted(nano_tokenizer), EchoTool())
    _, free = nested._loaded(busy.model, busy.turns, busy.depth, busy.device)
    start = time.monotonic()
    with free:
        result = busy.call({"task": "what?"})
    assert time.monotonic() - start < 1.0
    assert result.infrastructure and "it worked on other tasks for 0.05 s" in result.content
    assert busy.call({"task": "what?"}).content == "42"


def test_two_threads_that_ask_first_load_it_once(deputy, nano_tokenizer):
    loaded = []

    def slowly(**_):
        loaded.append(time.sleep(0.05))
        return scripted(nano_tokenizer)

    expert = deputy(slowly, EchoTool())
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda n: expert.call({"task": "what?"}), range(4)))
    assert len(loaded) == 1 and [result.content for result in results] == ["42"] * 4


def test_it_works_on_the_gpu_of_its_rank_whichever_thread_calls_it(
    deputy, nano_tokenizer, monkeypatch
):
    """It was loaded onto the first GPU by every rank, with nine tenths of its memory."""
    gpus, options, used = FourGpus(), [], []
    gpus.patch(monkeypatch)
    gpus.current = 3  # of the rank's main thread; that of others is 0

    def load(**given):
        options.append(given | {"current": torch.cuda.current_device()})
        rollout = scripted(nano_tokenizer)
        step = rollout.engine.step
        rollout.engine.step = lambda: used.append(torch.cuda.current_device()) or step()
        return rollout

    expert = deputy(load, EchoTool())
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(expert.call, {"task": "what?"}).result().content == "42"
    assert options == [{"device": torch.device("cuda", 3), "least_pool": True, "current": 3}]
    assert set(used) == {3}


def test_the_pool_of_a_gpu_has_room_for_its_one_conversation(monkeypatch):
    made = []

    class StopError(Exception):
        pass

    def engine(model, tokenizer, **options):
        made.append(options)
        raise StopError

    load_model = load.load_model
    monkeypatch.setattr(
        load,
        "load_model",
        lambda path, device, dtype, quantise: made.append(device) or load_model(path, "cpu", dtype),
    )
    monkeypatch.setattr(load, "Engine", engine)
    monkeypatch.setattr(load, "pack", lambda model: None)
    gpu, limits = torch.device("cuda", 3), AttemptLimits(context_tokens=1000)
    for least_pool, pages in ((True, 64), (False, None)):
        with pytest.raises(StopError):
            load.load_rollout(load.NANO, limits, {}, 1, device=gpu, least_pool=least_pool)
        device, options = made[-2:]
        assert device == "cuda:3" and options.get("num_pages") == pages
