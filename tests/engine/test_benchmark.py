"""The benchmark runs, and the figures that are quoted are on the right side of one."""

from __future__ import annotations

import pytest
import torch

from benchmarks.engine import Bench


@pytest.mark.slow
def test_groups_and_tool_loops_are_faster_than_without_sharing():
    bench = Bench("nano", torch.device("cpu"), torch.float32, rounds=1)
    groups = bench.group_sampling(4, prompts=2)
    assert groups["ratio_to_transformers"] > 1
    loop = bench.tool_loop(turns=4, given=10, sampled=2)
    assert loop["speedup_over_reprefill"] > 1
    # every turn but the first computes the last sampled token of the turn before
    assert loop["prefill_tokens"] == loop["appended_tokens"] + 4 - 1
