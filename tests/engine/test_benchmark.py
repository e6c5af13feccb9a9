"""The benchmark runs, its windows hold what they measure, and quoted ratios are above one."""

from __future__ import annotations

import pytest
import torch

from benchmarks import engine as benchmark
from benchmarks.engine import Bench
from nanorchestra.engine import gpu


@pytest.fixture
def bench():
    return Bench("nano", torch.device("cpu"), torch.float32, rounds=1)


@pytest.fixture
def windows(monkeypatch, bench):
    """What each timed window contained: prompts' tokens, sizes of steps, graphs, engines."""
    engines, found, make, timed = [], [], bench.engine, benchmark.seconds

    def making(tokens, **options):
        engines.append(make(tokens, **options))
        return engines[-1]

    def watched(work, device):
        def state():
            sizes, graphs = engines[-1].runner.sizes_known
            return engines[-1].stats["prefill_tokens"], sizes, graphs, len(engines)

        before = state()
        taken = timed(work, device)
        found.append(tuple(b - a for a, b in zip(before, state(), strict=True)))
        return taken

    monkeypatch.setattr(bench, "engine", making)
    monkeypatch.setattr(benchmark, "seconds", watched)
    return found


@pytest.mark.slow
def test_groups_and_tool_loops_are_faster_than_without_sharing(bench):
    groups = bench.group_sampling(4, prompts=2)
    assert groups["ratio_to_transformers"] > 1
    loop = bench.tool_loop(turns=4, given=10, sampled=2)
    assert loop["speedup_over_reprefill"] > 1
    # every turn but the first computes the last sampled token of the turn before
    assert loop["prefill_tokens"] == loop["appended_tokens"] + 4 - 1


def test_decoding_is_timed_when_all_prompts_have_been_computed(monkeypatch, bench, windows):
    """12 prompts of 56 tokens, of which a step computes one: the first request is far ahead."""
    monkeypatch.setattr(benchmark, "BATCH_TOKENS", 64)
    figures = bench.decode(12, 60, 8)
    assert windows == [(0, 0, 0, 0)]
    assert figures["context"] > 60 and figures["tokens_per_second"] > 0


def test_prompts_are_timed_on_an_engine_that_is_there(bench, windows):
    bench.prefill(100)
    bench.tool_loop(20, turns=2, given=10, sampled=2)
    prompt, resumed, anew = windows
    assert prompt == (100, 0, 0, 0)
    assert resumed[3] == anew[3] == 0


def test_a_window_in_which_a_step_is_captured_is_not_the_one_that_counts(
    monkeypatch, bench, windows
):
    """As on a GPU, with kernels that do nothing: a row's table grows at 257 keys."""

    class Graph:
        def __init__(self, runner, sizes):
            self.runner, self.inputs, self.used = runner, gpu.Inputs(sizes, "cpu"), False

        def replay(self):
            return self.runner._compute(self.inputs)

    def compute(runner, inputs):
        rows = len(inputs.rows)
        return torch.zeros(rows, 8), torch.ones(rows, dtype=torch.long), torch.zeros(rows)

    monkeypatch.setattr(gpu, "_Graph", Graph)
    monkeypatch.setattr(gpu.GpuRunner, "_compute", compute)
    monkeypatch.setattr("nanorchestra.engine.engine.by_kernel", lambda x: True)
    make = bench.engine

    def on_gpu(tokens, **options):
        made = make(tokens, page_size=16, **options)
        made.runner.graphs = True
        return made

    monkeypatch.setattr(bench, "engine", on_gpu)
    figures = bench.decode(1, 252, 8)
    first, second = windows
    assert first[2] == 1 and first[1] == 1, "the first window meets a new size and captures it"
    assert second == (0, 0, 0, 0) and figures["context"] > 257
    monkeypatch.setattr(benchmark, "WINDOWS", 1)
    with pytest.raises(AssertionError, match="no window decodes alone"):
        bench.decode(1, 252, 8)


def test_a_window_that_makes_an_engine_is_refused(bench):
    with pytest.raises(AssertionError, match="made engines or graphs"):
        bench.alternate(lambda: bench.engine(100))
