"""The engine's benchmark: its windows hold what they measure, and its ceilings count all of it."""

from __future__ import annotations

import pytest
import torch

from benchmarks import engine as benchmark
from benchmarks.engine import SHAPES, Bench, EngineWork, group_work, loop_work, random_model


def make_bench(**options) -> Bench:
    model = random_model(SHAPES["nano"], torch.device("cpu"), torch.float32)
    return Bench(model, room=4096, **options)


@pytest.fixture(scope="module")
def bench():
    return make_bench()


def test_a_window_of_decoding_has_no_prompt_and_no_request_that_ends(monkeypatch, bench):
    """A step computes 16 tokens, so the last of 12 prompts is there many steps after the first."""
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


def test_a_window_in_which_requests_end_is_refused():
    with pytest.raises(AssertionError, match="tokens in 8 steps of 2 rows"):
        make_bench(max_context=64).decode(2, 60, 8)


def test_a_tool_loop_computes_each_token_once(bench):
    loop = bench.tool_loop(20, turns=3, given=10, sampled=2)
    # Every turn but the first computes the last sampled token of the turn before.
    assert loop["prefill_tokens"] == 20 + 3 * 10 + 2


def test_a_speed_stands_beside_the_bytes_and_flops_that_it_moved(bench):
    """Twice the time is half the speed, of tokens and bytes, at the same ceiling."""
    work = group_work(prompts=2, prompt=10, samples=3, sampled=4)
    fast, slow = (bench.ceiling.figures(work, 24, elapsed) for elapsed in (1.0, 2.0))
    assert fast["ceiling_tokens_per_second"] == slow["ceiling_tokens_per_second"]
    for name in ("tokens_per_second", "share_of_ceiling", "gb_per_second", "gflop_per_second"):
        assert fast[name] == pytest.approx(2 * slow[name])
    read = 4 * bench.ceiling.weight_bytes + work.keys * bench.ceiling.kv_bytes
    assert fast["gb_per_second"] == pytest.approx(read / 1e9)


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
