"""The GPU's path through the engine, in Triton's interpreter where there is no GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from kernel_check import DEVICE
from test_look_ahead import EvenAfterThirds

from kernels.quantised import ROWS
from nanorchestra.engine.engine import Engine, SamplingParams
from nanorchestra.engine.gpu_runner import GpuRunner, token_sizes
from nanorchestra.errors import UserError
from nanorchestra.model import ops
from nanorchestra.model.checkpoint import copy_weights, named_hf_tensors
from nanorchestra.model.quantise import quantise_model
from nanorchestra.model.qwen3 import ModelConfig, Qwen3

SHAPE = ModelConfig(320, 32, 48, 1, 4, 2, head_dim=16, tie_word_embeddings=True)
UNTIED = ModelConfig(320, 128, 128, 1, 4, 2, head_dim=32)  # can be quantised

# What torch computes in a captured step, beside the kernels. None of it waits or allocates memory
# outside of the graph's pool.
CAPTURED = {
    "embedding",
    "index_select",
    "unbind",
    "flatten",
    "copy_",
    "new_zeros",
}  # in place of new_empty
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
    """Makes engines whose steps replay graphs, which compute at their replay."""
    replays = []

    class Graph:
        def __init__(self, runner, inputs, stream, pool):
            self.runner, self.inputs = runner, inputs

        def pool(self):
            return None

        def replay(self):
            replays.append((len(self.inputs.tokens), self.inputs.has_chunks))
            self.runner._forward(self.inputs)

    def make(**settings) -> Engine:
        monkeypatch.setattr(GpuRunner, "_captured", lambda *arguments: Graph(*arguments))
        made = engine(**settings)
        made.runner.capture()
        return made

    make.replays = replays
    return make


def ids(count: int, start: int = 5) -> list[int]:
    return [(start + 7 * i) % 300 for i in range(count)]


@pytest.mark.slow
def test_kernels_and_graphs_give_the_tokens_of_the_cpu(engine, with_graphs):
    """Prompts within a page, over pages, in chunks, in a group, with a shared prefix.

    Greedy, sampled, truncated, guided, and with reports of the most probable ids: the same seed
    draws the same token. Steps of a graph are padded, and store nothing for it.
    """
    prompts = [ids(3), ids(40), ids(17, 50), ids(60), ids(60), ids(60)[:40] + ids(5, 9), ids(60)]
    kinds = [{"temperature": 0.0}, {"guide": EvenAfterThirds()}, {}, {}, {"temperature": 0.7}]
    kinds += [
        {"top_p": 0.6, "top_k": 40, "top_logprobs": 3},
        {"guide": EvenAfterThirds(), "top_logprobs": 2},
    ]
    params = [
        SamplingParams(max_tokens=5, seed=i, ignore_eos=True, **kind)
        for i, kind in enumerate(kinds)
    ]

    def run(serving):
        serving.runner.kv_cache.fill_(float("nan"))
        requests = [serving.submit(*each) for each in zip(prompts, params, strict=True)]
        while serving.has_work:
            serving.step()
        return requests

    serving = with_graphs()
    by_kernels = run(serving)
    assert {(8, False), (48, True)} <= set(with_graphs.replays), "of seven rows, and with chunks"
    written = serving.runner.kv_cache[0, 0].isfinite().flatten(1).any(1)
    assert written.sum() < 32 and written[: written.sum()].all(), "pages that were handed out"
    for a, b in zip(run(engine(kernels=False)), by_kernels, strict=True):
        assert a.completed().token_ids == b.completed().token_ids
        assert a.logprobs == pytest.approx(b.logprobs, abs=1e-5)
        for one, other in zip(a.top_logprobs, b.top_logprobs, strict=True):
            assert [token for token, _ in one] == [token for token, _ in other]
            expected = [value for _, value in one]
            assert [value for _, value in other] == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("quantise, rows", [("", 3), ("int8", 3), ("int8", ROWS + 2)])
def test_draws_and_scores_are_from_fp32_logits(engine, monkeypatch, quantise, rows):
    """bf16 would round logits of 8 by 0.03. Torch computes more than ROWS; scores have one less."""
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
    serving.runner._forward(serving.runner._steps[rows, False])
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
    assert seen["mixed"] > steps / 10
    assert seen["ahead"] >= 0.95 * steps and seen["replays"] == seen["launches"]


@pytest.mark.parametrize("most", [1, 16, 48, 100, 4096, 8192])
def test_a_step_with_prefill_is_padded_by_a_quarter_at_most(most):
    sizes = token_sizes(most)
    assert sizes[-1] == most and sizes == sorted(set(sizes)) and len(sizes) <= 32
    for tokens in range(1, most + 1):
        size = min(size for size in sizes if size >= tokens)
        assert size - tokens < max(16, tokens / 4)
