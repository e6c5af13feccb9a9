"""The engine's benchmark: its windows hold what they measure, and its ceilings count all of it."""

from __future__ import annotations

import torch

from benchmarks import engine as benchmark
from benchmarks.engine import SHAPES, Bench, EngineWork, group_work, loop_work, random_model


def test_a_window_of_decoding_has_no_prompt_and_no_request_that_ends(monkeypatch):
    """A step computes 16 tokens, so the last of 12 prompts is there many steps after the first."""
    bench = Bench(random_model(SHAPES["nano"], torch.device("cpu"), torch.float32), room=4096)
    monkeypatch.setattr(bench.engine.scheduler, "max_batch_tokens", 16)
    windows, timed = [], benchmark.seconds

    def watched(call, device):
        before = bench.engine.stats
        elapsed = timed(call, device)
        after = bench.engine.stats
        windows.append({name: after[name] - before[name] for name in after})
        return elapsed

    monkeypatch.setattr(benchmark, "seconds", watched)
    figures = bench.decode(12, 60, 8)
    (window,) = windows
    assert window["prefill_tokens"] == window["preemptions"] == 0
    assert window["steps"] == 8 and window["sampled_tokens"] == 8 * 12
    assert figures["context"] > 60 and not bench.engine.has_work


def test_works_are_counted_token_by_token():
    """The prompt of a group is computed once, and read once for all samples of a step."""
    counted = EngineWork(steps=4, tokens=20, logits=0, pairs=2 * 10**2 / 2)
    tokens, logits, keys = counted.tokens, 2 * 3, 0
    for step in range(1, 4):
        tokens += 2 * 3
        logits += 2 * 3
        keys += 2 * 10 + 2 * 3 * step
    work = group_work(prompts=2, prompt=10, samples=3, sampled=4)
    assert work == EngineWork(steps=4, tokens=tokens, logits=logits, keys=keys, pairs=counted.pairs)

    work = loop_work(prompt=100, turns=3, given=10, sampled=2)
    assert work.steps == work.logits == 3 * 2 and work.tokens == 100 + 3 * (10 + 2)
    assert work.keys == 2 * (110 + 122 + 134)
    assert work.pairs == 110**2 / 2 + 10 * 112 + 10 * 124
