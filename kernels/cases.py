"""Every kernel at the shapes of Qwen3-8B: what `compile.py` compiles and `bench.py` measures, with the bytes and FLOPs that bound it.

32 query heads and 8 key/value heads of 128, hidden size 4096, feed-forward 12288, 151936 ids, bf16, pages of 64 tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from kernels import (
    decode,
    flash_plan,
    gemm,
    logprob,
    logprob_backward,
    norm,
    prefill,
    quantised,
    rope,
    sample,
    swiglu,
)
from kernels.external import Sequences, external_attention, sequences
from kernels.flash import flash_forward
from kernels.flash_backward import flash_backward

H, HKV, D, HIDDEN, FF, VOCAB, PAGE = 32, 8, 128, 4096, 12288, 151936, 64
BF16 = torch.bfloat16
TOKENS = 8192


class Maker:
    """Makes the inputs of a case: random ones on a device, or, to compile for, empty ones."""

    def __init__(self, device: str, random: bool):
        self.device, self.random = device, random
        self.generator = torch.Generator(device).manual_seed(0) if random else None

    def __call__(self, *shape: int, dtype: torch.dtype = BF16, scale: float = 1.0) -> Tensor:
        if not self.random:
            return torch.empty(shape, dtype=dtype, device=self.device)
        return torch.randn(*shape, dtype=dtype, device=self.device, generator=self.generator).mul_(
            scale
        )

    def integers(self, high: int, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.randint(high, shape, dtype=dtype, device=self.device, generator=self.generator)

    def order(self, count: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.randperm(count, device=self.device, generator=self.generator).to(dtype)


@dataclass(frozen=True)
class Case:
    """`make` gives the arguments of `run` and of each baseline. bytes and flops: what must be moved and done. compiles: False if the run
    would compute on the CPU when it is only to be compiled."""

    kernel: str
    shape: str
    make: Callable[[Maker], tuple[Any, ...]]
    run: Callable[..., Any]
    bytes: float
    flops: float
    baselines: dict[str, Callable[..., Any]] = field(default_factory=dict)
    target: str = ""
    compiles: bool = True

    @property
    def name(self) -> str:
        return f"{self.kernel} {self.shape}"


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=False)


def by(backend: SDPBackend | None) -> Callable[..., Tensor]:
    """Causal SDPA on q [T, H, D], k and v [T, Hkv, D] -> [T, H, D], by a backend or by torch's own choice."""

    def run(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        with sdpa_kernel(backend) if backend else nullcontext():
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[
                0
            ].transpose(0, 1)

    return run


def peer(package: str, name: str, run: Callable[..., Any]) -> dict[str, Callable[..., Any]]:
    """A baseline of a package that need not be installed."""
    return {name: run} if find_spec(package) else {}


def liger(function: str, *arguments: Any) -> Any:
    return getattr(import_module("liger_kernel.transformers.functional"), function)(*arguments)


@lru_cache
def one_sequence(tokens: int) -> Sequences:
    return sequences([(0, tokens, 0, tokens)], "cuda")


def by_flash_attn(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
    return external_attention(q, k, v, one_sequence(len(q)))


def attention_peers() -> dict[str, Callable[..., Tensor]]:
    return {
        "SDPA": by(None),
        "SDPA cuDNN": by(SDPBackend.CUDNN_ATTENTION),
        **peer("flash_attn", "flash-attn", by_flash_attn),
    }


def pointwise() -> list[Case]:
    angles = lambda m: (
        m(TOKENS, D // 2, dtype=torch.float32),
        m(TOKENS, D // 2, dtype=torch.float32),
    )
    rows = (H + 2 * HKV) * D
    norm_eager = lambda x, residual, weight: norm.reference(x + residual, weight, 1e-6)
    pages = TOKENS // PAGE
    qkv = lambda m: (
        m(TOKENS, rows),
        m(D),
        m(D),
        *angles(m),
        m(pages, HKV, PAGE, D),
        m(pages, HKV, PAGE, D),
        m.order(TOKENS, torch.int64),
    )
    return [
        Case(
            "add_rms_norm",
            f"T={TOKENS}",
            lambda m: (m(TOKENS, HIDDEN), m(TOKENS, HIDDEN), m(HIDDEN)),
            lambda x, r, w: norm.add_rms_norm(x, r, w, 1e-6),
            4 * TOKENS * HIDDEN * 2,
            0,
            {
                "eager": norm_eager,
                "compile": compiled(norm_eager),
                **peer(
                    "liger_kernel",
                    "liger",
                    lambda x, residual, weight: liger("liger_rms_norm", x + residual, weight, 1e-6),
                ),
            },
            "88%",
        ),
        Case(
            "add_rms_norm",
            "T=64",
            lambda m: (m(64, HIDDEN), m(64, HIDDEN), m(HIDDEN)),
            lambda x, r, w: norm.add_rms_norm(x, r, w, 1e-6),
            4 * 64 * HIDDEN * 2,
            0,
            {"eager": norm_eager},
        ),
        Case(
            "rms_norm backward",
            f"T={TOKENS}",
            lambda m: (m(TOKENS, HIDDEN), m(TOKENS, HIDDEN), m(HIDDEN)),
            lambda g, x, w: norm.rms_norm_backward(g, x, w, 1e-6),
            3 * TOKENS * HIDDEN * 2,
            0,
        ),
        Case(
            "norm_rope_store",
            f"T={TOKENS}",
            qkv,
            lambda *a: rope.norm_rope_store(*a, 1e-6),
            2 * TOKENS * rows * 2,
            0,
            {"eager": lambda *a: rope.reference(*a, 1e-6)},
            "82%",
        ),
        Case(
            "swiglu",
            f"T={TOKENS}",
            lambda m: (m(TOKENS, 2 * FF),),
            swiglu.swiglu,
            3 * TOKENS * FF * 2,
            0,
            {
                "eager": swiglu.reference,
                "compile": compiled(swiglu.reference),
                **peer(
                    "liger_kernel",
                    "liger",
                    lambda gate_up: liger("liger_swiglu", *gate_up.chunk(2, 1)),
                ),
            },
            "90%",
        ),
        Case(
            "swiglu backward",
            f"T={TOKENS}",
            lambda m: (m(TOKENS, FF), m(TOKENS, 2 * FF)),
            swiglu.swiglu_backward,
            5 * TOKENS * FF * 2,
            0,
        ),
    ]


def decodes() -> list[Case]:
    def case(rows: int, length: int, shared: int = 0, target: str = "") -> Case:
        per_row, common = (length - shared) // PAGE, shared // PAGE
        groups = -(-rows // 16)

        def make(m: Maker) -> tuple[Any, ...]:
            own = m.order(rows * per_row).view(rows, per_row)
            first = (
                m.order(groups * common).view(groups, common).repeat_interleave(16, 0)[:rows]
                + rows * per_row
            )
            pages = rows * per_row + groups * common
            spans = (
                torch.tensor(
                    [[16 * g, min(16, rows - 16 * g), shared] for g in range(groups)],
                    dtype=torch.int32,
                    device=m.device,
                )
                if shared
                else None
            )
            lengths = torch.full((rows,), length, dtype=torch.int32, device=m.device)
            return (
                m(rows, H, D),
                m(pages, HKV, PAGE, D),
                m(pages, HKV, PAGE, D),
                torch.cat((first, own), 1),
                lengths,
                spans,
            )

        def whole(
            q: Tensor, k: Tensor, v: Tensor, *rest: Any
        ) -> Tensor:  # the same bytes, laid out contiguously
            k, v = (
                x.view(rows, per_row, HKV, PAGE, D).transpose(1, 2).reshape(rows, HKV, -1, D)
                for x in (k, v)
            )
            return F.scaled_dot_product_attention(q[:, :, None], k, v, enable_gqa=True)

        read = (rows * (length - shared) + groups * shared) * 2 * HKV * D * 2
        shape = f"B={rows} n={length}" + (f" of which {shared} shared by 16" if shared else "")
        return Case(
            "decode_attention",
            shape,
            make,
            lambda q, k, v, t, n, g: decode.decode_attention(
                q, k, v, t, n, max_length=length, groups=g
            ),
            read,
            4.0 * rows * length * H * D,
            {} if shared else {"SDPA, after a copy": whole},
            target,
        )

    return [
        case(64, 4096, target="85%"),
        case(8, 4096, target="70%"),
        case(256, 2048),
        case(1, 32768),
        case(1, 4096),
        case(64, 4352, shared=4096),
    ]


def prefills() -> list[Case]:
    def case(count: int, start: int, target: str = "") -> Case:
        pages = (start + count) // PAGE

        def make(m: Maker) -> tuple[Any, ...]:
            work = torch.as_tensor(prefill.prefill_work([start], [count])).to(m.device)
            return (
                m(count, H, D),
                m(pages, HKV, PAGE, D),
                m(pages, HKV, PAGE, D),
                m.order(pages)[None],
                work,
            )

        def dense(attention: Callable[..., Tensor]) -> Callable[..., Tensor]:
            return lambda q, k, v, *rest: attention(
                q, *(x.transpose(1, 2).reshape(count, HKV, D) for x in (k, v))
            )

        pairs = count * start + count * (count + 1) / 2
        baselines = (
            {}
            if start
            else {name: dense(attention) for name, attention in attention_peers().items()}
        )
        return Case(
            "prefill_attention",
            f"{count} on {start}",
            make,
            prefill.prefill_attention,
            2 * (start + count) * HKV * D * 2,
            4 * H * D * pairs,
            baselines,
            target,
        )

    return [case(8192, 0, "400 TFLOP/s, 1.15x SDPA"), case(2048, 0), case(2048, 8192)]


def flashes() -> list[Case]:
    pairs = TOKENS * (TOKENS + 1) / 2
    spans = flash_plan.varlen_spans([0, TOKENS])
    qkv = lambda m: (m(TOKENS, H, D), m(TOKENS, HKV, D), m(TOKENS, HKV, D))
    work = lambda m: flash_plan.plan(spans, m.device, BF16)

    def trained(m: Maker) -> tuple[Any, ...]:
        q, k, v, plan = *qkv(m), work(m)
        out, lse = (
            torch.empty_like(q),
            torch.empty(H, TOKENS, dtype=torch.float32, device=m.device).T,
        )
        if m.random:
            flash_forward(q, k, v, plan.queries, out, lse)
        return m(TOKENS, H, D), q, k, v, out, lse, plan

    def autograd(attention: Callable[..., Tensor]) -> Callable[..., Any]:
        def run(
            grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any
        ) -> Any:  # forward and backward: 3.5 times the FLOPs of a forward
            q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
            return torch.autograd.grad(attention(q, k, v), (q, k, v), grad)

        return run

    return [
        Case(
            "flash_forward",
            f"1 x {TOKENS}",
            lambda m: (*qkv(m), work(m)),
            lambda q, k, v, plan: flash_forward(q, k, v, plan.queries),
            2 * TOKENS * (H + HKV) * D * 2,
            4 * H * D * pairs,
            attention_peers(),
            "400 TFLOP/s",
        ),
        Case(
            "flash_backward",
            f"1 x {TOKENS}",
            trained,
            lambda g, q, k, v, out, lse, plan: flash_backward(
                g, q, k, v, out, lse, plan.queries, plan.keys
            ),
            4 * TOKENS * (H + HKV) * D * 2,
            10 * H * D * pairs,
            {
                f"{name}, forward too": autograd(attention)
                for name, attention in attention_peers().items()
            },
        ),
    ]


def outputs() -> list[Case]:
    weight_bytes = VOCAB * HIDDEN * 2
    product = 2.0 * TOKENS * HIDDEN * VOCAB
    matrix = lambda m, rows: (m(rows, HIDDEN), m(VOCAB, HIDDEN, scale=0.02))

    def chunked(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        return torch.cat(
            [
                F.cross_entropy((part @ weight.T).float(), ids, reduction="none").neg()
                for part, ids in zip(hidden.split(1024), targets.split(1024))
            ]
        )

    def with_gradients(forward: Callable[..., Tensor]) -> Callable[..., Any]:
        def run(hidden: Tensor, weight: Tensor, targets: Tensor) -> Any:
            hidden, weight = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
            return torch.autograd.grad(forward(hidden, weight, targets).sum(), (hidden, weight))

        return run

    own = lambda hidden, weight, targets: logprob.linear_logprob(hidden, weight, targets)[0]
    tokens = lambda m: (*matrix(m, TOKENS), m.integers(VOCAB, TOKENS))
    draws = lambda rows: (
        lambda m: (
            *matrix(m, rows),
            m.integers(1 << 40, rows),
            m.integers(4096, rows),
            torch.ones(rows, device=m.device),
        )
    )

    def logits(m: Maker) -> tuple[Any, ...]:
        of_rows = [
            m(2048, dtype=torch.float32) for _ in range(4)
        ]  # entropy, logsumexp, and the gradients of the two results
        return m(2048, 8192, dtype=torch.float32), m(2048, 8192), m.integers(8192, 2048), *of_rows

    def gumbel(hidden: Tensor, weight: Tensor, *rest: Any) -> Tensor:
        logits = (hidden @ weight.T).float()
        return (logits - torch.empty_like(logits).exponential_().log()).argmax(1)

    fused = [
        Case(
            "sample_linear",
            f"B={rows}",
            draws(rows),
            lambda h, w, s, p, t: sample.sample_linear(h, w, s, p, t, vocab=VOCAB),
            weight_bytes,
            2.0 * rows * HIDDEN * VOCAB,
            {"cuBLAS and eager": gumbel, "cuBLAS and compile": compiled(gumbel)},
            "345 us",
        )
        for rows in (1, 16, 64)
    ]
    return [
        Case(
            "linear_logprob",
            f"T={TOKENS}",
            tokens,
            own,
            weight_bytes,
            product,
            {"chunks of 1024": chunked},
            "550 TFLOP/s",
        ),
        Case(
            "linear_logprob with gradients",
            f"T={TOKENS}",
            tokens,
            with_gradients(own),
            3 * weight_bytes,
            4 * product,
            {
                "chunks of 1024": with_gradients(chunked),
                **peer(
                    "liger_kernel",
                    "liger",
                    with_gradients(
                        lambda *inputs: liger("liger_fused_linear_cross_entropy", *inputs)
                    ),
                ),
            },
            "530 TFLOP/s, under 650 MB",
            compiles=False,
        ),
        Case(
            "gradient_of_logits",
            "T=2048, 8192 ids",
            logits,
            lambda *a: logprob_backward.gradient_of_logits(*a, 1.0, 0),
            2048 * 8192 * 6,
            0,
        ),
        *fused,
        Case(
            "sample_logits",
            "B=256",
            lambda m: (
                m(256, VOCAB),
                m.integers(1 << 40, 256),
                m.integers(4096, 256),
                torch.ones(256, device=m.device),
            ),
            lambda x, s, p, t: sample.sample_logits(x, s, p, t, vocab=VOCAB),
            256 * VOCAB * 2,
            0,
        ),
    ]


def products() -> list[Case]:
    n, k = 2 * FF, HIDDEN
    int8 = lambda rows: (
        lambda m: (
            m(rows, k),
            m.integers(255, n, k, dtype=torch.int16).sub_(127).to(torch.int8),
            m(n, 1, dtype=torch.float32).abs_() * 0.001,
        )
    )
    int4 = lambda rows: (
        lambda m: (
            m(rows, k),
            m.integers(255, n, k // 2, dtype=torch.uint8),
            m(n, k // 128, dtype=torch.float16).abs_() * 0.01,
            m.integers(15, n, k // 128, dtype=torch.uint8),
        )
    )
    weight = {}

    def cublas(x: Tensor, *rest: Any) -> Tensor:
        if "bf16" not in weight:
            weight["bf16"] = [
                torch.randn(n, k, dtype=BF16, device=x.device) for _ in range(3)
            ]  # in turns: none stays in the L2
        weight["bf16"].append(weight["bf16"].pop(0))
        return x @ weight["bf16"][0].T

    cases = []
    for rows in (1, 16, 64):
        cases += [
            Case(
                "int8_linear",
                f"M={rows} gate_up",
                int8(rows),
                quantised.int8_linear,
                n * k,
                2.0 * rows * n * k,
                {"cuBLAS bf16": cublas},
                "1.45x cuBLAS" * (rows == 1),
            ),
            Case(
                "int4_linear",
                f"M={rows} gate_up",
                int4(rows),
                quantised.int4_linear,
                n * k * (0.5 + 3 / 128),
                2.0 * rows * n * k,
                {"cuBLAS bf16": cublas},
                "2.0x cuBLAS" * (rows == 1),
            ),
        ]
    cases += [
        Case(
            "quantised_linear",
            "int8 M=1024 gate_up",
            int8(1024),
            quantised.quantised_linear,
            n * k,
            2048.0 * n * k,
            {"cuBLAS bf16": cublas},
            compiles=False,
        ),
        Case(
            "quantised_linear",
            "int4 M=1024 gate_up",
            int4(1024),
            quantised.quantised_linear,
            n * k / 2,
            2048.0 * n * k,
            {"cuBLAS bf16": cublas},
            compiles=False,
        ),
    ]
    both = lambda rows: lambda m: (m(rows, k), m(n, k, scale=0.02))
    return cases + [
        Case(
            "invariant_linear",
            f"M={rows} gate_up",
            both(rows),
            gemm.invariant_linear,
            n * k * 2,
            2.0 * rows * n * k,
            {"cuBLAS bf16": lambda x, w: x @ w.T},
        )
        for rows in (1, 64, 4096)
    ]


def cases() -> list[Case]:
    """All of them, in the order of a decoder's layer and then of its output."""
    return [*pointwise(), *decodes(), *prefills(), *flashes(), *outputs(), *products()]


def speedometer(case: Case, seconds: float, bandwidth: float, flops: float) -> tuple[str, float]:
    """("3,912 GB/s" or "512 TFLOP/s", the share of the ceiling that binds), from bytes/s and FLOP/s of the machine."""
    if case.bytes / bandwidth > case.flops / flops:
        return f"{case.bytes / seconds / 1e9:,.0f} GB/s", case.bytes / seconds / bandwidth
    return f"{case.flops / seconds / 1e12:,.0f} TFLOP/s", case.flops / seconds / flops


def floor(case: Case, bandwidth: float, flops: float) -> float:
    """Seconds that no kernel can beat at these rates."""
    return max(case.bytes / bandwidth, case.flops / flops)
