"""The GPU's path through the engine, in Triton's interpreter where there is no GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import defaultdict
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from kernel_check import DEVICE
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from kernels import decode, sample, truncate
from kernels.decode_plan import decode_work
from nanorchestra.engine import gpu, inputs
from nanorchestra.engine.engine import Engine, SamplingParams
from nanorchestra.errors import UserError
from nanorchestra.model.quantise import quantise_model
from nanorchestra.model.qwen3 import ModelConfig, Qwen3
from nanorchestra.model.weights import copy_weights, named_hf_tensors
from nanorchestra.training.costs import Costs

SHAPE = ModelConfig(320, 32, 48, 1, 4, 2, head_dim=16, tie_word_embeddings=True)
UNTIED = ModelConfig(320, 128, 128, 1, 4, 2, head_dim=32)  # can be quantised
IDLE = defaultdict(lambda: lambda *_, **__: None)  # a kernel that does nothing, on any grid


@pytest.fixture(scope="module")
def model():
    model = Qwen3(SHAPE)
    model.init_weights(0)
    return model


@pytest.fixture
def engine(model, monkeypatch):
    """Makes engines that compute by kernels, or as on a CPU."""

    def make(kernels: bool = True, own: Qwen3 = model, **settings) -> Engine:
        monkeypatch.setattr("nanorchestra.engine.engine.by_kernel", lambda x: kernels)
        options = {"num_pages": 64, "page_size": 16, "max_batch_tokens": 48}
        return Engine(own.to(DEVICE if kernels else "cpu"), **options | settings)

    return make


@pytest.fixture
def fake_graphs(monkeypatch):
    """Graphs that compute at their replay. Returns the sizes captured, and counts the replays."""
    sizes, counts = [], {"replay": 0}

    class Graph:
        def __init__(self, runner, size):
            sizes.append(size)
            self.runner, self.inputs, self.used = runner, gpu.Inputs(size, DEVICE), False

        def replay(self):
            self.used, counts["replay"] = True, counts["replay"] + 1
            with _disable_current_modes():  # of the device, not of the host
                counts["inside"] = True
                outputs = self.runner._compute(self.inputs)
                counts["inside"] = False
                return outputs

    monkeypatch.setattr(gpu, "_Graph", Graph)
    return sizes, counts


def ids(count: int, start: int = 5) -> list[int]:
    return [(start + 7 * i) % 300 for i in range(count)]


@pytest.mark.slow
def test_kernels_give_the_tokens_of_the_cpu(engine):
    """Prompts within a page, over pages, in chunks, in a group, with a shared prefix.

    Greedy, sampled, truncated: the same seed draws the same token.
    """
    prompts = [ids(3), ids(40), ids(17, 50), ids(60), ids(60), ids(60)[:40] + ids(5, 9)]
    kinds = [{"temperature": 0.0}, {}, {}, {}, {"temperature": 0.7}, {"top_p": 0.6}]
    params = [SamplingParams(max_tokens=4, seed=i, **kind) for i, kind in enumerate(kinds)]
    own = engine().generate(prompts, params)
    for a, b in zip(engine(kernels=False).generate(prompts, params), own, strict=True):
        assert a.token_ids == b.token_ids
        assert a.logprobs == pytest.approx(b.logprobs, abs=1e-5)


def test_a_kv_cache_in_8_bits(engine, monkeypatch):
    """Nearly the same log-probabilities. CPUs and older cards refuse it."""
    small, prompts = {"kv_dtype": torch.float8_e4m3fn}, [ids(40), ids(40), ids(17, 50)]
    params = [SamplingParams(max_tokens=6, temperature=0.0, seed=i) for i in range(3)]
    exact, rounded = (engine(**more).generate(prompts, params) for more in ({}, small))
    for a, b in zip(exact, rounded, strict=True):
        assert a.logprobs != b.logprobs and a.logprobs[0] == pytest.approx(b.logprobs[0], abs=0.05)
    with pytest.raises(UserError, match="kv_dtype is torch.float8_e4m3fn; expected torch.float32"):
        engine(kernels=False, **small)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    with pytest.raises(UserError, match="kv_dtype is torch.float8_e4m3fn; expected torch.float32"):
        engine(**small)


@pytest.mark.parametrize("quantise", ["", "int8"])
def test_graphs_change_no_token_and_write_no_other_page(engine, fake_graphs, quantise):
    """Padded steps of decodes and of chunks; a model with a quantised output matrix has graphs."""
    model, own = Qwen3(UNTIED), Qwen3(UNTIED)
    model.init_weights(0)
    own.load_state_dict(model.state_dict())
    if quantise:
        quantise_model(own, quantise)
        copy_weights(own, named_hf_tensors(model))
    params = [SamplingParams(max_tokens=4, temperature=t, seed=7) for t in (0.0, 1.0)]
    outcomes = []
    for graphs in (False, True):
        serving = engine(own=own)
        serving.runner.graphs = graphs
        if graphs:
            serving.runner.k_cache.fill_(float("nan"))
        done = serving.generate([ids(5), ids(18)], params)
        done += serving.generate([ids(5, 3), ids(18, 3)], params)
        outcomes.append(done)
    for a, b in zip(*outcomes, strict=True):
        assert a.token_ids == b.token_ids and a.logprobs == pytest.approx(b.logprobs, abs=1e-5)
    assert fake_graphs[1]["replay"] >= 4
    assert any(size.tokens for size in fake_graphs[0]), "the mixed steps have a graph too"
    pages = serving.runner.k_cache[0].isfinite().flatten(1).any(1).nonzero()[:, 0].tolist()
    assert len(pages) <= 8, "padding is stored nowhere"


class _Host(TorchDispatchMode):
    """Records what the host asks of the device: operations, and copies that wait."""

    VIEWS = ("view", "slice", "select", "empty", "split", "alias", "detach", "as_strided", "t.")

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.__name__
        if not name.startswith(self.VIEWS):
            self.operations.append(name)
        waits = name.startswith(("_local_scalar_dense", "_to_copy", "nonzero"))
        if name.startswith("copy_"):
            waits = not (len(args) > 2 and args[2] or (kwargs or {}).get("non_blocking"))
        if waits:
            self.waiting.append(name)
        return function(*args, **kwargs or {})

    def __enter__(self):
        self.operations, self.waiting = [], []
        return super().__enter__()


@pytest.mark.parametrize("quantise", ["", "int8"])
def test_a_step_that_looks_ahead_waits_for_nothing(engine, fake_graphs, monkeypatch, quantise):
    """No pageable copy and no synchronisation; at most 10 operations of the host."""
    own = Qwen3(UNTIED)
    own.init_weights(0)
    if quantise:
        tensors = [(name, x.clone()) for name, x in named_hf_tensors(own)]
        quantise_model(own, quantise)
        copy_weights(own, tensors)
    serving, host = engine(own=own), _Host()
    serving.runner.graphs, seen = True, []
    made = [(torch, name) for name in ("tensor", "as_tensor")]  # waiting, if for a device
    made += [(torch.Tensor, name) for name in ("to", "cpu", "cuda", "item", "tolist")]
    launch, fill = serving.runner.launch, serving.runner._host.fill

    def filled(*given):
        with _disable_current_modes():  # in the host's own memory
            return fill(*given)

    serving.runner._host.fill = filled

    def watched(right, name):
        def call(*given, **options):
            moves = "device" in options or name not in ("tensor", "as_tensor")
            if moves and not fake_graphs[1].get("inside"):
                host.waiting.append(name)
            return right(*given, **options)

        return call

    def recorded(plan, after=None):
        if after is None:
            return launch(plan, after)
        with monkeypatch.context() as patch, host:
            for owner, name in made:
                patch.setattr(owner, name, watched(getattr(owner, name), name))
            launched = launch(plan, after)
        seen.append((fake_graphs[1]["replay"], len(host.operations), host.waiting))
        return launched

    serving.runner.launch = recorded
    serving.generate([ids(3), ids(9)], SamplingParams(max_tokens=9, ignore_eos=True))
    (before, *_), (replays, operations, _) = seen[-2:]
    assert len(seen) > 4 and replays == before + 1
    assert all(not waiting for *_, waiting in seen), seen
    assert operations + 1 <= 10, host.operations


@pytest.mark.skipif(DEVICE == "cuda", reason="the CPU plays the card, and computes nothing")
@pytest.mark.parametrize("kind", ["tied", "untied", "int8"])
def test_on_a_card_steps_are_graphs_with_pinned_inputs_and_no_wait(
    engine, fake_graphs, monkeypatch, kind
):
    """What the engine does only where `is_cuda`. Rows with top-p are launched ahead too."""
    own, log, pinned, copies = Qwen3(SHAPE if kind == "tied" else UNTIED), [], [], []
    if kind == "int8":
        quantise_model(own, "int8")

    class Event:
        def record(self):
            log.append("event")

        def synchronize(self):
            log.append("wait")

    def computed(runner, x):
        tokens = torch.zeros_like(x.rows)
        return torch.zeros(len(tokens), own.config.hidden_size), tokens, tokens.float()

    def pinning(make):
        def made(*given, pin_memory=False, **options):
            out = make(*given, **options)
            pinned.extend([out] * pin_memory)
            return out

        return made

    def copied(to, source, non_blocking=False):
        known = {x.data_ptr() for x in pinned}
        copies.append(non_blocking and bool(known & {to.data_ptr(), source.data_ptr()}))
        return copy(to, source)

    with monkeypatch.context() as card:
        card.setattr(gpu.GpuRunner, "warm_up", lambda runner: log.append("warm up"))
        card.setattr(gpu.GpuRunner, "_compute", computed)
        card.setattr(torch.Tensor, "is_cuda", True)
        card.setattr(torch.cuda, "Event", Event)
        card.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
        serving = engine(own=own)
        assert log == ["warm up"], "before any request"
        copy, launch = torch.Tensor.copy_, serving.runner.launch

        def launched(plan, after=None):
            log.append("ahead" if after else "first")
            return launch(plan, after)

        serving.runner.launch = launched
        for owner, name in ((torch, "empty"), (torch, "zeros")):
            card.setattr(owner, name, pinning(getattr(owner, name)))
        card.setattr(torch.Tensor, "copy_", copied)
        params = [SamplingParams(max_tokens=6, ignore_eos=True, top_p=p) for p in (1.0, 0.5)]
        serving.generate([ids(3), ids(9)], params)
    assert fake_graphs[1]["replay"] >= 3
    assert len(copies) == 3 * 6 and all(copies), "of inputs, tokens and log-probabilities"
    step = ["ahead", "event", "wait"]
    assert log == ["warm up", "first", "event", "wait", "first", "event", *4 * step, "wait"]


def test_sleep_brings_the_graphs_in_use_back_before_a_request_waits(engine, fake_graphs):
    serving = engine()
    serving.runner.graphs = True
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    for start in (5, 6):
        serving.generate([ids(3, start), ids(9, start)], params)
    used, captured = list(fake_graphs[0]), fake_graphs[0]
    unused = gpu.Sizes(8, 4, 0, 0, 0, 0, 8, 4)
    serving.runner._captured[unused] = gpu._Graph(serving.runner, unused)
    captured.clear()
    serving.sleep()
    assert not serving.runner._captured and not captured
    serving.wake()
    assert used and set(captured) == set(used), "those in use, and no other"
    serving.generate([ids(3, 7), ids(9, 7)], params)
    assert len(captured) == len(used), "nothing is captured in service"


def test_work_and_scratch_grow_with_what_is_used(engine, monkeypatch):
    """512 rows of which one is long: today's keys, not 512 times the longest."""
    made = decode_work([131072] + [300] * 511, ())
    sizes = gpu.Sizes(512, len(made.own), 0, 0, 0, 0, 512, 2048).padded()
    assert len(made.own) == made.results == 512 + 2 * 511
    assert sizes.own <= 1.5 * len(made.own) + 4 and sizes.shared == 0
    runner, scratch, step = engine().runner, [], gpu.Inputs(sizes, DEVICE)
    q = torch.zeros(512, 4, 16, device=DEVICE)
    for name in ("_splits", "_merge"):
        monkeypatch.setattr(decode, name, IDLE)
    new_empty = torch.Tensor.new_empty
    monkeypatch.setattr(
        torch.Tensor, "new_empty", lambda *x, **y: scratch.append(x[1:]) or new_empty(*x, **y)
    )
    runner._attend(q, (runner.k_cache[0], runner.v_cache[0]), step)
    assert scratch == [(sizes.own, 4, 16), (sizes.own, 4)], "partial results and their sums"


def test_counts_of_a_graph_are_half_as_many_again_at_most():
    assert inputs.grown(0) == 0 and inputs.grown(3) == 4
    assert all(n <= inputs.grown(n) <= 1.5 * n for n in range(4, 3000))


@pytest.mark.slow
@pytest.mark.parametrize("quantise", ["", "int8"])
def test_the_warm_up_compiles_all_that_a_step_can_launch(quantise):
    """In a process without the interpreter; the compiler is only asked, not run."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(Path(__file__).parents[2])
    command = [sys.executable, str(Path(__file__).with_name("warm_up.py")), quantise]
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout == "", f"compiled in service: {run.stdout}"


def test_inputs_lie_where_the_kernels_were_compiled_for():
    """Triton compiles anew for a pointer that is not a multiple of 16 bytes."""
    sizes = gpu.Sizes(3, 5, 7, 9, 3, 1, 5, 4)
    inputs = gpu.Inputs(sizes, "cpu")
    own = {x: y for x, y in vars(inputs).items() if isinstance(y, torch.Tensor)}
    assert len(own) == 16 and not [x for x, y in own.items() if y.data_ptr() % 16]
    assert inputs.tables[3:].data_ptr() % 16 == 0
    flat = own.pop("flat")
    spans = sorted((x.data_ptr(), x.data_ptr() + x.nbytes) for x in own.values())
    assert all(end <= start for (_, end), (start, _) in pairwise(spans)), "they overlap"
    assert spans[0][0] == flat.data_ptr() and spans[-1][1] <= flat.data_ptr() + flat.nbytes


@pytest.mark.parametrize("share", [0.9, 0.5])
def test_the_pool_is_sized_by_the_free_memory(engine, monkeypatch, share):
    monkeypatch.setattr("nanorchestra.engine.engine.free_memory", lambda device: 10_000_000)
    page = 2 * SHAPE.num_key_value_heads * SHAPE.head_dim * 64 * 4  # bytes: k and v, one layer
    serving = engine(num_pages=None, page_size=None, memory_share=share)
    assert serving.limits.pool == 64 * int(share * 10_000_000 / page)
    assert serving.runner.k_cache.nbytes * 2 <= share * 10_000_000


def test_free_memory_is_asked_when_the_cache_is_empty(monkeypatch):
    left = [2, 7]  # bytes: free, in all
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: left.__setitem__(0, 3))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: tuple(left))
    assert gpu.free_memory(torch.device("cuda")) == 3


def test_chunks_are_bounded_by_the_costs_of_the_model(engine):
    costs = Costs.of(SHAPE)
    assert engine().scheduler.mixed == (inputs.CHUNKS[-1], costs.token_flops / costs.pair_flops)


@pytest.mark.parametrize("rows", [3, 70])
@pytest.mark.parametrize("quantise", ["", "int8"])
def test_draws_and_scores_are_from_fp32_logits(engine, monkeypatch, quantise, rows):
    """bf16 would round logits of 8 by 0.03. 70 rows are more than the quantised kernel takes."""
    own, seen = Qwen3(UNTIED), []
    own.init_weights(0)
    tensors = [(name, x.clone()) for name, x in named_hf_tensors(own)]
    own.bfloat16()
    if quantise:
        quantise_model(own, quantise)
        monkeypatch.setattr("nanorchestra.model.quantise.by_kernel", lambda x: True)
    copy_weights(own, tensors)
    hidden = 20 * torch.randn(rows, 128, generator=torch.Generator().manual_seed(0))
    hidden = hidden.bfloat16().to(DEVICE)
    runner, sizes = engine(own=own).runner, gpu.Sizes(0, 0, 0, rows, 0, 0, rows, 4)
    rounded = torch.float32 if rows == 3 else torch.bfloat16  # the kernel does not round
    weight = own.lm_head.dequantise(rounded) if quantise else own.lm_head.weight
    step = gpu.Inputs(sizes, DEVICE)
    step.rows.copy_(torch.arange(rows))
    runner._forward = own.forward = lambda *_: hidden
    monkeypatch.setattr(gpu, "sample", lambda logits, *_: seen.append(logits) or (None, None))
    score = "nanorchestra.engine.runner.score_tokens"
    monkeypatch.setattr(score, lambda logits, *_: seen.append(logits) or [0.0] * len(logits))
    runner._compute(step)
    runner.score([5] * rows)
    exact = hidden.double() @ weight.double().T
    assert len(seen) == 2
    for logits in seen:
        assert logits.dtype == torch.float32
        assert torch.allclose(logits.double(), exact[: len(logits)], atol=1e-4)


def test_truncation_sorts_nothing(engine, monkeypatch):
    """The kernels stand idle: what counts is what torch is asked beside them."""
    runner = engine().runner
    for module, name in ((sample, "_chunks"), (sample, "_choose"), (truncate, "_truncation")):
        monkeypatch.setattr(module, name, IDLE)
    runner._forward = lambda x: torch.randn(2, 32, device=DEVICE)
    step = gpu.Inputs(gpu.Sizes(0, 0, 0, 2, 0, 0, 2, 4, truncated=True), DEVICE)
    for name, value in (("temperature", 1.0), ("top_p", 0.9), ("top_k", 5)):
        getattr(step, name).fill_(value)
    for name in ("sort", "argsort", "topk", "kthvalue"):
        for owner in (torch, torch.Tensor):
            monkeypatch.setattr(owner, name, lambda *_, **__: pytest.fail("sorts the vocabulary"))
    runner._compute(step)


def test_what_the_kernels_cannot_serve_is_refused_when_the_engine_is_made(engine):
    with pytest.raises(UserError, match="page size is 24; the GPU's kernels take 16, 32, 64"):
        engine(page_size=24)
    with pytest.raises(UserError, match="head_dim is 24; the GPU's kernels take 16, 32, 64"):
        engine(own=Qwen3(ModelConfig(64, 48, 48, 1, 2, 1, head_dim=24)))


def test_nan_in_the_weights_is_an_error(engine):
    serving = engine()
    weight = serving.model.embed_tokens.weight[7]  # tied: one logit is NaN
    good = weight.detach().clone()
    with torch.no_grad():
        weight.fill_(float("nan"))
    with pytest.raises(FloatingPointError, match="not finite"):
        serving.generate([[1, 2, 3]], SamplingParams(max_tokens=1))
    with torch.no_grad():
        weight.copy_(good)
