"""The benchmark runs, has the figures that are quoted, and they are on the right side of one."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks import engine as bench
from benchmarks.engine import Bench


@pytest.fixture(scope="module")
def nano() -> Bench:
    return Bench("nano", torch.device("cpu"), torch.float32, rounds=1)


def assert_positive(figures: dict[str, float]) -> None:
    assert all(value > 0 for value in figures.values())


@pytest.mark.slow
def test_groups_are_sampled_faster_than_by_transformers(nano):
    """It prefills each of the sixteen samples, the engine each of the two prompts."""
    figures = nano.group_sampling(4, prompts=2, samples=8, prompt=300)
    assert_positive(figures)
    assert figures["ratio_to_transformers"] == pytest.approx(
        figures["tokens_per_second"] / figures["transformers_tokens_per_second"]
    )
    assert figures["ratio_to_transformers"] > 1


def test_a_tool_loop_is_faster_than_prefilling_each_turn_anew(nano):
    figures = nano.tool_loop(prompt=1000, turns=4, given=10, sampled=2)
    assert_positive(figures)
    assert figures["speedup_over_reprefill"] == pytest.approx(
        figures["reprefill_seconds"] / figures["seconds"]
    )
    assert figures["speedup_over_reprefill"] > 1
    assert (
        figures["prefill_tokens"] == figures["appended_tokens"] + 4 - 1
    )  # and the last sampled token of each turn but the last


def test_a_decode_step_and_the_hosts_part_of_it(nano):
    figures = nano.decode(2, context=100, steps=8, beside=True)
    assert_positive(figures)
    assert (
        figures["host_ms"] < figures["step_ms"]
        and {"transformers_tokens_per_second", "ratio_to_transformers"} <= figures.keys()
    )
    assert "ratio_to_transformers" not in nano.decode(2, context=50, steps=4)


@pytest.mark.parametrize("gpu", [False, True])
def test_a_gpu_adds_its_table_to_the_cpus(gpu, monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(bench, "Bench", lambda *arguments: arguments)
    monkeypatch.setattr(bench, "run", lambda made, cuda: {"of": [made[0], made[1].type, cuda]})
    assert bench.main(["--threads", "1", "--json", str(tmp_path / "f.json")]) == 0
    figures = json.loads((tmp_path / "f.json").read_text())
    assert (
        figures["of"] == ["28M", "cpu", False]
        and figures["nano"]["of"] == ["nano", "cpu", False]
        and "1 threads" in figures["machine"]
    )
    assert figures.get("cuda") == (
        {"machine": "a GPU", "of": ["qwen3-8b", "cuda", True]} if gpu else None
    )
