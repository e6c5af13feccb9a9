"""The GPU's path through the engine, in Triton's interpreter where there is no GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from kernel_check import DEVICE

from nanorchestra.engine import gpu_runner
from nanorchestra.engine.engine import Engine, SamplingParams
from nanorchestra.engine.gpu_runner import GpuRunner, graph_sizes
from nanorchestra.engine.guide import Guide
from nanorchestra.engine.step_inputs import first_decodes, group_by_prefix
from nanorchestra.errors import UserError
from nanorchestra.model import ops
from nanorchestra.model.checkpoint import copy_weights, named_hf_tensors
from nanorchestra.model.quantise import quantise_model
from nanorchestra.model.qwen3 import ModelConfig, Qwen3

SHAPE = ModelConfig(320, 32, 48, 1, 4, 2, head_dim=16, tie_word_embeddings=True)
UNTIED = ModelConfig(320, 128, 128, 1, 4, 2, head_dim=32)  # can be quantised


# What torch computes in a captured step, beside the kernels. None of it waits or allocates memory
# outside of the graph's pool.
CAPTURED = {"embedding", "unbind", "flatten", "copy_", "new_zeros"}  # in place of new_empty
CAPTURED |= {"to", "mul", "cos", "sin"}  # the rotation
CAPTURED |= {"linear", "matmul", "numpy_T", "promote_types"}  # products


@pytest.fixture(scope="module")
def model():
    model = Qwen3(SHAPE)
    model.init_weights(0)
    return model


@pytest.fixture
def engine(model, monkeypatch):
    """Makes engines that compute by kernels, or as on a CPU."""

    def make(kernels: bool = True, own: Qwen3 = model, **settings) -> Engine:
        monkeypatch.setattr(ops, "by_kernel", lambda x: kernels)
        options = {"num_pages": 64, "page_size": 16, "max_batch_tokens": 48, "max_running": 8}
        options |= {"max_context": 512}
        return Engine(own.to(DEVICE if kernels else "cpu"), **options | settings)

    return make


@pytest.fixture
def with_graphs(engine, monkeypatch):
    """Makes engines whose decode-only steps replay graphs, which compute at their replay."""
    replays = []

    class Graph:
        def __init__(self, runner, rows, stream, pool):
            self.runner, self.rows = runner, rows

        def pool(self):
            return None

        def replay(self):
            replays.append(self.rows)
            self.runner._forward(first_decodes(self.runner._inputs, self.rows))

    def make(**settings) -> Engine:
        monkeypatch.setattr(GpuRunner, "_captured", lambda *arguments: Graph(*arguments))
        made = engine(**settings)
        made.runner.capture()
        return made

    make.replays = replays
    return make


def ids(count: int, start: int = 5) -> list[int]:
    return [(start + 7 * i) % 300 for i in range(count)]


class Odd(Guide):
    """From the third token on, ids must be odd."""

    def __init__(self):
        self.count = 0

    def copy(self):
        return Odd()

    def advance(self, token):
        assert self.count < 2 or token % 2, "a forbidden id was drawn"
        self.count += 1

    def allowed(self):
        return np.arange(320) % 2 == 1 if self.count >= 2 else None


@pytest.mark.slow
def test_kernels_and_graphs_give_the_tokens_of_the_cpu(engine, with_graphs):
    """Prompts within a page, over pages, in chunks, in a group, with a shared prefix.

    Greedy, sampled, truncated, guided, and with reports of the most probable ids: the same seed
    draws the same token.
    """
    prompts = [ids(3), ids(40), ids(17, 50), ids(60), ids(60), ids(60)[:40] + ids(5, 9), ids(60)]
    kinds = [{"temperature": 0.0}, {"guide": Odd()}, {}, {}, {"temperature": 0.7}]
    kinds += [{"top_p": 0.6, "top_k": 40, "top_logprobs": 3}, {"guide": Odd(), "top_logprobs": 2}]
    params = [
        SamplingParams(max_tokens=5, seed=i, ignore_eos=True, **kind)
        for i, kind in enumerate(kinds)
    ]

    def run(serving):
        requests = [serving.submit(*each) for each in zip(prompts, params, strict=True)]
        while serving.has_work:
            serving.step()
        return requests

    by_kernels = run(with_graphs())
    assert len(with_graphs.replays) >= 3
    for a, b in zip(run(engine(kernels=False)), by_kernels, strict=True):
        assert a.completed().token_ids == b.completed().token_ids
        assert a.logprobs == pytest.approx(b.logprobs, abs=1e-5)
        for one, other in zip(a.top_logprobs, b.top_logprobs, strict=True):
            assert [token for token, _ in one] == [token for token, _ in other]
            expected = [value for _, value in one]
            assert [value for _, value in other] == pytest.approx(expected, abs=1e-5)


def test_graphs_change_no_token_and_write_no_other_page(engine, with_graphs):
    """Padded decode-only steps; a model with a quantised output matrix has graphs too."""
    model, own = Qwen3(UNTIED), Qwen3(UNTIED)
    model.init_weights(0)
    quantise_model(own, "int8")
    copy_weights(own, named_hf_tensors(model))
    params = [SamplingParams(max_tokens=4, temperature=t, seed=7) for t in (0.0, 1.0, 1.0)]
    outcomes = []
    for make in (engine, with_graphs):
        serving = make(own=own)
        serving.runner.kv_cache.fill_(float("nan"))
        outcomes.append(serving.generate([ids(5), ids(18), ids(18, 3)], params))
    for a, b in zip(*outcomes, strict=True):
        assert a.token_ids == b.token_ids and a.logprobs == pytest.approx(b.logprobs, abs=1e-5)
    assert with_graphs.replays == [4, 4, 4], "of three rows"
    written = serving.runner.kv_cache[0, 0].isfinite().flatten(1).any(1).nonzero()[:, 0].tolist()
    assert len(written) <= 6, "padding is stored nowhere"


@pytest.mark.slow
def test_after_the_start_nothing_is_captured_compiled_or_waited_for():
    """Requests come and go, alone and in groups, some guided, some with reports.

    In a process without the interpreter; the compiler is only asked, not run.
    """
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(Path(__file__).parents[2])
    script, steps = Path(__file__).with_name("fake_gpu_rollout.py"), 200
    command = [sys.executable, str(script), str(steps)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    seen = json.loads(run.stdout)
    assert seen["steps"] == steps and seen["kernels"] > 5
    assert seen["compiled"] == [] and seen["captures"] == 0
    assert set(seen["captured_operations"]) <= CAPTURED
    assert seen["waits"] == {}
    assert seen["ahead"] > steps / 2 and seen["replays"] > steps / 2


def test_graph_sizes_end_with_the_most_rows():
    assert graph_sizes(1) == [1] and graph_sizes(6) == [1, 2, 4, 6]
    assert graph_sizes(512)[:6] == [1, 2, 4, 8, 16, 32] and graph_sizes(512)[-1] == 512
    assert len(graph_sizes(512)) == 36


def test_the_pool_is_sized_by_the_memory_that_is_left(engine, monkeypatch):
    monkeypatch.setattr(gpu_runner, "free_memory", lambda device: 10_000_000)
    page = 2 * SHAPE.num_key_value_heads * SHAPE.head_dim * 64 * 4  # bytes: k and v, one layer
    serving = engine(num_pages=None, page_size=None)
    assert serving.limits.pool == 64 * int(0.9 * 10_000_000 / page)
    assert serving.runner.kv_cache.shape[2] == serving.blocks.num_pages


@pytest.mark.parametrize("quantise, rows", [("", 3), ("int8", 3), ("int8", 70)])
def test_draws_and_scores_are_from_fp32_logits(engine, monkeypatch, quantise, rows):
    """bf16 would round logits of 8 by 0.03. 70 rows are more than the quantised kernel takes."""
    own, seen = Qwen3(UNTIED), []
    own.init_weights(0)
    tensors = [(name, x.clone()) for name, x in named_hf_tensors(own)]
    own.bfloat16()
    if quantise:
        quantise_model(own, quantise)
    copy_weights(own, tensors)
    hidden = 20 * torch.randn(rows, 128, generator=torch.Generator().manual_seed(0))
    hidden = hidden.bfloat16().to(DEVICE)
    serving = engine(own=own, max_running=rows, max_batch_tokens=rows)
    rounded = torch.float32 if rows == 3 else torch.bfloat16  # the kernel does not round
    weight = own.lm_head.dequantise(rounded) if quantise else own.lm_head.weight
    own.forward = lambda *_: hidden
    scored = "nanorchestra.engine.score.score_tokens"
    monkeypatch.setattr(scored, lambda logits, *_: seen.append(logits) or [0.0] * len(logits))
    serving.runner._forward(first_decodes(serving.runner._inputs, rows))
    seen.append(serving.runner.logits)
    serving.score([[5] * rows])
    exact = hidden.double() @ weight.double().T
    assert len(seen) == 2
    for logits in seen:
        assert logits.dtype == torch.float32
        assert torch.allclose(logits.double(), exact[: len(logits)], atol=1e-4)


def test_what_the_kernels_cannot_serve_is_refused_when_the_engine_is_made(engine):
    with pytest.raises(UserError, match="page size is 24; the GPU's kernels take 16, 32, 64"):
        engine(page_size=24)
    with pytest.raises(UserError, match="head_dim is 24; the GPU's kernels take 16, 32, 64"):
        engine(own=Qwen3(ModelConfig(64, 48, 48, 1, 2, 1, head_dim=24)))


def test_nan_in_the_weights_is_an_error_and_pages_are_cleared(engine):
    serving = engine()
    weight = serving.model.embed_tokens.weight[7]  # tied: one logit is NaN
    good = weight.detach().clone()
    with torch.no_grad():
        weight.fill_(float("nan"))
    with pytest.raises(FloatingPointError, match="not finite"):
        serving.generate([[1, 2, 3, 7]], SamplingParams(max_tokens=1))
    assert serving.runner.kv_cache.isfinite().all()
    with torch.no_grad():
        weight.copy_(good)


def test_a_system_prompt_common_to_all_does_not_split_groups():
    bodies = [[1, 2, 3, *range(10 * g + 4, 10 * g + 14)] for g in range(5)]
    tables = np.array([body + [1000 + i] for body in bodies for i in range(8)], np.int32)
    groups = group_by_prefix(tables, [14] * 40)
    assert sorted((len(rows), shared) for rows, shared in groups) == [(8, 13)] * 5
