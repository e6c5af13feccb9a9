"""The kernels at shapes of Qwen3-8B, for compile.py and gpu.py, with bytes and FLOPs.

32 query heads and 8 key/value heads of 128, hidden size 4096, feed-forward 12288, 151936 ids, bf16.
Pages have 64 tokens, as in the engine. Inputs are made on torch's default device.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from kernels import norm, swiglu
from kernels.common import FP8
from kernels.decode import decode_attention
from kernels.decode_plan import DecodeWork, decode_work
from kernels.flash_plan import flash_attention, plan
from kernels.logprob import linear_logprob
from kernels.prefill import prefill_attention, prefill_work
from kernels.quantised import quantised_linear
from kernels.rope import norm_rope_store
from kernels.sample import sample
from kernels.truncate import truncation

H, HKV, D, HIDDEN, FF, VOCAB, PAGE = 32, 8, 128, 4096, 12288, 151936, 64
T, EPS = 8192, 1e-6
randn = partial(torch.randn, dtype=torch.bfloat16)
Function = Callable[..., Any]
Inputs = tuple[Any, ...]


@dataclass(frozen=True)
class Case:
    """One kernel at one shape: `make` gives the arguments of `run`."""

    name: str
    make: Callable[[], Inputs]
    run: Function
    bytes: float  # that must be moved
    flops: float = 0.0
    gradients: int = 0  # of the first so many arguments are computed too

    def call(self, *arguments: Any, run: Function | None = None) -> Any:
        """Returns what the kernel does, or `run` in its place."""
        leaves = [x.detach().requires_grad_() for x in arguments[: self.gradients]]
        out = (run or self.run)(*leaves, *arguments[self.gradients :])
        return torch.autograd.grad(out, leaves, torch.ones_like(out)) if leaves else out


def select(word: str) -> list[Case]:
    """Returns the cases whose name contains the word. Exits with status 2 if there are none."""
    cases = [
        *pointwise(),
        *(decode(64, 4096), decode(1, 32768), decode(64, 4352, shared=4096)),
        decode(64, 4096, kind=FP8),
        *(prefill(0, 8192), prefill(8192, 2048), prefill(8192, 2048, FP8)),
        *training(),
        *outputs(),
        *(case for mode in ("int8", "int4", "awq", "fp8") for case in products(mode)),
    ]
    chosen = [case for case in cases if word in case.name]
    if not chosen:
        names = ", ".join(dict.fromkeys(case.name.split()[0] for case in cases))
        print(f"--kernel {word}: no such kernel; there are {names}", file=sys.stderr)
        sys.exit(2)
    return chosen


def pointwise() -> list[Case]:
    """Returns norms, rotation and SwiGLU."""
    heads, size, wide = H + 2 * HKV, 2 * T * HIDDEN, 2 * T * FF

    def hidden():
        return randn(T, HIDDEN), randn(HIDDEN), EPS

    def qkv(kind=torch.bfloat16):
        angles, caches = torch.rand(2, T, D // 2), randn(2, T // PAGE, HKV, PAGE, D).to(kind)
        return randn(T, heads * D), tuple(randn(2, D)), *angles, *caches, torch.arange(T), EPS

    def gates():
        return (randn(T, 2 * FF),)

    return [
        Case("rms_norm, residual", lambda: (*hidden(), randn(T, HIDDEN)), norm.rms_norm, 4 * size),
        Case("rms_norm", hidden, norm.rms_norm_train, 5 * size, 0, 2),
        Case("norm_rope_store", qkv, norm_rope_store, 4 * T * heads * D),
        Case(
            "norm_rope_store fp8", lambda: qkv(FP8), norm_rope_store, T * (4 * heads - 2 * HKV) * D
        ),
        Case("swiglu", gates, swiglu.swiglu, 8 * wide, 0, 1),
    ]


def decode(rows: int, length: int, shared: int = 0, kind: torch.dtype = torch.bfloat16) -> Case:
    """Returns decodes at one length; with `shared`, 16 neighbours have so many keys in common."""
    groups, count = rows // 16 if shared else 0, rows * length // PAGE

    def make():
        tables = torch.arange(count, dtype=torch.int32).view(rows, -1)
        first = torch.arange(rows) // 16 * 16
        tables[:, : shared // PAGE] = tables[first, : shared // PAGE]
        spans = [(16 * i, 16, shared) for i in range(groups)]
        *tensors, results = decode_work([length] * rows, spans, 16)
        work = DecodeWork(*(x.to(torch.get_default_device()) for x in tensors), results)
        lengths = torch.full((rows,), length, dtype=torch.int32)
        caches = randn(2, count, HKV, PAGE, D).to(kind)
        q, out = randn(2, rows, H, D)
        return q, *caches, tables, lengths, work, out

    keys = rows * (length - shared) + groups * shared
    name = f"decode_attention{' fp8' * (kind == FP8)} B={rows} n={length} shared={shared}"
    flops = 4.0 * rows * length * H * D
    return Case(name, make, decode_attention, 2 * kind.itemsize * keys * HKV * D, flops)


def prefill(start: int, count: int, kind: torch.dtype = torch.bfloat16) -> Case:
    """Returns the prefill of `count` tokens on `start` earlier ones."""
    end = start + count

    def make():
        tables = torch.arange(end // PAGE, dtype=torch.int32)[None]
        caches, work = randn(2, end // PAGE, HKV, PAGE, D).to(kind), prefill_work([start], [count])
        return randn(count, H, D), *caches, tables, work, randn(count, H, D)

    flops = 4 * H * D * (count * start + count * (count + 1) / 2)
    name = f"prefill_attention{' fp8' * (kind == FP8)} {count} on {start}"
    return Case(name, make, prefill_attention, 2 * kind.itemsize * end * HKV * D, flops)


def training() -> list[Case]:
    """Returns attention over a pack of one sequence, without and with gradients."""
    spans = [(0, T, 0, T)]

    def make():
        work = plan(spans, torch.get_default_device(), torch.bfloat16)
        return randn(T, H, D), *randn(2, T, HKV, D), work

    size, flops = 4 * T * (H + HKV) * D, 2.0 * H * D * T * (T + 1)
    return [
        Case("flash_attention", make, flash_attention, size, flops),
        Case("flash_attention backward", make, flash_attention, 3 * size, 3.5 * flops, 3),
    ]


def outputs() -> list[Case]:
    """Returns log-probabilities and sampling over the output matrix."""
    size, flops = 2 * VOCAB * HIDDEN, 2.0 * HIDDEN * VOCAB

    def tokens():
        return randn(T, HIDDEN), randn(VOCAB, HIDDEN), torch.randint(VOCAB, (T,)), 60.0, VOCAB

    def logits():
        uniform = torch.rand(256, dtype=torch.float64)
        return torch.randn(256, VOCAB), uniform, torch.ones(256), VOCAB

    def limits():
        top_k = torch.full((256,), 20, dtype=torch.int32)
        return torch.randn(256, VOCAB), torch.ones(256), top_k, torch.full((256,), 0.95), VOCAB

    def loss(*arguments):
        return linear_logprob(*arguments)[0].mean()

    return [
        Case("linear_logprob", tokens, loss, size, T * flops),
        Case("linear_logprob backward", tokens, loss, 3 * size, 4 * T * flops, 2),
        Case("sample", logits, sample, 1024 * VOCAB),
        Case("truncation", limits, truncation, 1024 * VOCAB),
    ]


def products(mode: str) -> list[Case]:
    """Returns the gate and up projection with quantised weights; awq: int4 with zero points."""
    n, k, bits = 2 * FF, HIDDEN, 4 if mode in ("int4", "awq") else 8
    size = n * k * (1 if bits == 8 else 0.5 + 2 / 128)

    def quantised():
        values = torch.randint(126, (n, k * bits // 8), dtype=torch.uint8)
        if bits == 8:
            kind = torch.int8 if mode == "int8" else torch.float8_e4m3fn
            return values.view(kind), torch.rand(n, 1)
        scales = torch.rand(n, k // 128, dtype=torch.float16)
        return values, scales

    def product(rows):
        name, flops = f"quantised_linear {mode} M={rows}", 2.0 * rows * n * k

        def make():
            zeros = None
            if mode == "awq":
                zeros = torch.randint(16, (n, k // 128), dtype=torch.uint8)
            return randn(rows, k), *quantised(), torch.bfloat16, zeros

        return Case(name, make, quantised_linear, size, flops)

    return [product(1), product(16), product(64)]
