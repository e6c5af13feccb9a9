"""The first two minutes of a machine: what can crash, smallest first, before anything is timed.

The small GRPO step among these is in training.py, the small engine in engine.py.
"""

from __future__ import annotations

import shutil
from collections import Counter
from dataclasses import replace
from functools import partial

import torch
import triton
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from benchmarks.engine import sampling, seconds
from benchmarks.gpu_parts import Part, by_kernels
from benchmarks.gpu_parts.cases import QWEN3_8B, SMALL, training
from benchmarks.gpu_parts.engine import KEYS, NEAR, bench_of
from benchmarks.gpu_parts.kernels import GRADIENT, TENSOR_CORES, check, error
from kernels.common import wide_product
from kernels.flash import flash_attention
from nanorchestra.training.logprobs import token_logprobs

PROFILED, SHOWN = 8, 12  # steps, and kernels of a step


def environment(part: Part) -> None:
    """The compilers that Triton calls, and what is free."""
    part.note("compilers", gcc=shutil.which("gcc"), ptxas=triton.knobs.nvidia.ptxas.path)
    if not part.rehearse:
        free, memory = torch.cuda.mem_get_info()
        part.note("card", free_gb=free / 1e9, of_gb=memory / 1e9, nccl=torch.cuda.nccl.version())


def wide_products(part: Part) -> None:
    """Products of bf16 matrices in fp32: eager, without rows, and in a captured graph."""
    with torch.device(part.device):
        a, b = torch.randn(2, 256, 128, dtype=torch.bfloat16)
        out = torch.empty(256, 256)
    exact = a.double() @ b.double().T
    wide_product(a[:0], b.T, out[:0])  # as of a rank without work
    wide_product(a, b.T, out)
    errors = {"eager": (out - exact).abs().max().item()}
    if not part.rehearse:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            wide_product(a, b.T, out)
        out.zero_()
        graph.replay()
        errors["replayed"] = (out - exact).abs().max().item()
    part.note("largest errors", allowed=NEAR, **errors)
    assert max(errors.values()) < NEAR, f"a product is off by {max(errors.values()):.2g}"


def log_probabilities(part: Part) -> None:
    """Log-probabilities in bf16 and their gradients, beside all logits in float64."""
    tokens, width, ids = (20, 32, 70) if part.rehearse else (333, 512, 5000)
    torch.manual_seed(0)
    with torch.device(part.device):
        leaves = [torch.randn(n, width, dtype=torch.bfloat16) for n in (tokens, ids)]
        targets = torch.randint(ids - 3, (tokens,))
    hidden, weight = (x.requires_grad_() for x in leaves)
    options = {"temperature": 8.0, "vocab_limit": ids - 3}
    token_logprobs(hidden[:0], weight, targets[:0], **options)[0].sum().backward()
    logprobs, _, _ = token_logprobs(hidden, weight, targets, **options)
    got = torch.autograd.grad(logprobs.sum(), leaves)

    wide = [x.detach().double().requires_grad_() for x in leaves]
    logits = wide[0] @ wide[1][: ids - 3].T / options["temperature"]
    exact = logits.log_softmax(1).gather(1, targets[:, None])[:, 0]
    right = torch.autograd.grad(exact.sum(), wide)
    off = (logprobs - exact).abs().max().item()
    roundings = [error(x, y) for x, y in zip(got, right, strict=True)]
    allowed = GRADIENT * TENSOR_CORES
    part.note("errors", nats=off, times_rounding=max(roundings), allowed=allowed)
    assert off < NEAR and max(roundings) < allowed


def checkpointed_attention(part: Part) -> None:
    """Attention over a tree that is computed again in the backward pass: its gradients."""
    case = training(SMALL if part.rehearse else replace(QWEN3_8B, tokens=160))[-1]
    again = partial(checkpoint, flash_attention, use_reentrant=False)
    with torch.device(part.device), by_kernels(part):
        wrong = check(part, replace(case, run=again))
    assert not wrong, "; ".join(wrong)


def decode_profile(part: Part) -> None:
    """Qwen3-8B decoding one row and 128: the kernels of a step, longest first."""
    batches, keys = ((1, 2), 30) if part.rehearse else ((1, 128), KEYS)
    activity = ProfilerActivity.CPU if part.rehearse else ProfilerActivity.CUDA
    with by_kernels(part):
        bench = bench_of(part)
        engine = bench.engine
        for batch in batches:
            part.note(f"B={batch}", **bench.decode(batch, keys, PROFILED))
            prompts = [bench.ids(keys) for _ in range(batch)]
            engine.generate(prompts, sampling(1))  # the requests then start together
            requests = [engine.submit(ids, sampling(100)) for ids in prompts]
            while not all(request.logprobs for request in requests):
                engine.step()
            with profile(activities=[activity]) as record:
                seconds(lambda: [engine.step() for _ in range(PROFILED)], bench.device)
            for request in requests:
                engine.abort(request)
            spent = Counter()
            for kernel in record.key_averages():
                spent[kernel.key[:60]] += kernel.self_device_time_total / PROFILED
            part.note(f"B={batch}, us a step by kernel", **dict(spent.most_common(SHOWN)))
