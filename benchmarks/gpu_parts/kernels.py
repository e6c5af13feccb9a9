"""Every kernel against float64, then timed beside its ceiling and its peers.

An error is a multiple of the rounding of the exact result to the kernel's dtype; what is allowed is
what tests/kernels allows. On a GPU the shapes of a check are those of Qwen3-8B with fewer tokens,
so the timed kernels are the compiled ones that were checked.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.gpu_parts import Part, by_kernels, cases, timing
from kernels import attention, flash, logprob, norm, rope, sample, swiglu
from kernels.decode import decode_attention
from kernels.decode_plan import DecodeWork, decode_work, group_rows
from kernels.flash_plan import flash_attention, plan
from kernels.prefill import prefill_attention, prefill_work
from kernels.truncate import truncation
from nanorchestra.model.quantise import QuantisedLinear

POINTWISE, ATTENTION, GRADIENT = 1.1, 1.6, 2.0  # multiples of the rounding
_FLOORS = {torch.bfloat16: 1.66e-3, torch.float32: 2e-6}
Results = Iterable[tuple[str, Tensor, Tensor, float]]  # (what, got, exact in float64, allowed)


@dataclass
class Shape:
    """The sizes of a check, and where its tensors lie."""

    device: str
    dtype: torch.dtype
    heads: int
    kv_heads: int
    dim: int
    hidden: int
    ff: int
    vocab: int
    page: int
    tokens: int

    @classmethod
    def of(cls, part: Part) -> Shape:
        """Qwen3-8B on a GPU, and in small on the CPU."""
        if part.rehearse:
            return cls("cpu", torch.bfloat16, 2, 1, 16, 32, 48, 70, 16, 20)
        return cls("cuda", torch.bfloat16, 32, 8, 128, 4096, 12288, 151936, 64, 600)

    def randn(self, *shape: int, scale: float = 1.0) -> Tensor:
        """Normal numbers, rounded to the dtype."""
        return (torch.randn(*shape, device=self.device) * scale).to(self.dtype)

    def cache(self, lengths: list[int]) -> tuple[Tensor, Tensor, Tensor]:
        """k_cache, v_cache and tables of sequences on shuffled pages."""
        most = -(-max(lengths) // self.page)
        tables = torch.randperm(len(lengths) * most, device=self.device).int().view(-1, most)
        shape = len(lengths) * most, self.kv_heads, self.page, self.dim
        return self.randn(*shape), self.randn(*shape), tables


def error(got: Tensor, exact: Tensor) -> float:
    """The relative error as a multiple of that of rounding the exact result."""
    assert torch.isfinite(got).all(), "it is not finite"
    size = exact.norm() + 1e-300
    rounding = ((exact.to(got.dtype).double() - exact).norm() / size).item()
    floor = max(rounding, _FLOORS[got.dtype] / (1 if got.dtype == torch.float32 else 4))
    return ((got.double() - exact).norm() / size).item() / floor


def check(part: Part, family: Callable[[Shape], Results], words: tuple[str, ...]) -> None:
    """Checks a family, then times the cases of cases.py whose names begin with a word."""
    torch.manual_seed(0)
    wrong, start = [], time.perf_counter()
    with by_kernels(part):
        for name, got, exact, allowed in family(Shape.of(part)):
            found = error(got, exact)
            part.note(f"{name}: error", times_rounding=found, allowed=allowed)
            if found > allowed:
                wrong.append(f"{name} is off by {found:.2f} times the rounding, allowed {allowed}")
    if part.rehearse:
        part.note("checks", seconds=time.perf_counter() - start)
    else:
        limits = timing.ceilings()
        part.note("ceilings", copied_tb_s=limits[0] / 1e12, product_tflop_s=limits[1] / 1e12)
        for case in cases.select(""):
            if case.name.startswith(words):
                try:
                    row = timing.measure(case, limits)
                except Exception as failure:  # the other kernels are still measured
                    wrong.append(f"{case.name}: {type(failure).__name__}: {failure}")
                    continue
                times = {f"{peer}_us": 1e3 * ms for peer, ms in row["ms"].items()}
                part.note(case.name, share=row["share"], limit=row["limit"], **times)
    if wrong:
        raise AssertionError("; ".join(wrong))


def _with_gradients(
    name: str, run: Callable, reference: Callable, inputs: list[Tensor], allowed: float
) -> Results:
    """The results of a differentiable kernel, and its gradients."""
    grad = None
    ways = []
    for function, cast in ((run, lambda x: x), (reference, Tensor.double)):
        leaves = [cast(x).detach().requires_grad_() for x in inputs]
        out = function(*leaves)
        grad = torch.randn_like(out) if grad is None else grad.double()
        ways.append((out.detach(), *torch.autograd.grad(out, leaves, grad)))
    yield name, ways[0][0], ways[1][0], allowed
    for i, (got, exact) in enumerate(zip(ways[0][1:], ways[1][1:], strict=True)):
        yield f"{name}, gradient {i}", got, exact, GRADIENT


def _pointwise(s: Shape) -> Results:
    x, weight, residual = (
        s.randn(s.tokens, s.hidden),
        s.randn(s.hidden),
        s.randn(s.tokens, s.hidden),
    )
    total = (x.double() + residual.double(), weight.double())
    got = norm.rms_norm(x, weight, 1e-6, residual)
    yield "rms_norm, residual", got, norm.reference(*total, 1e-6), POINTWISE
    yield from _with_gradients(
        "rms_norm",
        lambda *leaves: norm.rms_norm_train(*leaves, 1e-6),
        lambda *leaves: norm.reference(*leaves, 1e-6),
        [x, weight],
        POINTWISE,
    )
    yield from _with_gradients(
        "swiglu", swiglu.swiglu, swiglu.reference, [s.randn(s.tokens, 2 * s.ff)], POINTWISE
    )
    qkv = s.randn(s.tokens, (s.heads + 2 * s.kv_heads) * s.dim)
    norms, angles = s.randn(2, s.dim), torch.rand(s.tokens, s.dim // 2, device=s.device)
    k_cache, v_cache, tables = s.cache([s.tokens])
    at = torch.arange(s.tokens, device=s.device)
    slots = tables[0].long()[at // s.page] * s.page + at % s.page
    tables_of = angles.cos(), angles.sin()
    q = rope.norm_rope_store(qkv, tuple(norms), *tables_of, k_cache, v_cache, slots, 1e-6)
    wide = qkv.double(), tuple(norms.double()), *(x.double() for x in tables_of)
    stored = (x.transpose(1, 2).flatten(0, 1)[slots] for x in (k_cache, v_cache))
    for name, got, exact in zip(
        ("q", "k", "v"), (q, *stored), rope.reference(*wide, s.kv_heads, 1e-6), strict=True
    ):
        yield f"norm_rope_store, {name}", got, exact, POINTWISE


def _attention(s: Shape) -> Results:
    lengths = [1, 40, 16, 33] if s.device == "cpu" else [1, 65, 4096, 1300, 257, 2048]
    caches = s.cache(lengths)
    caches[2][3] = caches[2][2]  # rows 2 and 3 have their first pages in common
    q, wide = s.randn(len(lengths), s.heads, s.dim), [x.double() for x in caches[:2]]
    rows = torch.tensor(lengths, dtype=torch.int32, device=s.device)
    exact = attention.reference(
        q.double(), *wide, caches[2], [n - 1 for n in lengths], [1] * len(lengths)
    )
    common = min(lengths[2:4]) - 1
    for name, groups in (("", []), (" of groups", [(2, 2, common)])):
        most = group_rows(s.heads // s.kv_heads, q.element_size())
        *tensors, results = decode_work(lengths, groups, most)
        work = DecodeWork(*(x.to(s.device) for x in tensors), results)
        got = decode_attention(q, *caches, rows, work, torch.empty_like(q))
        yield f"decode_attention{name}", got, exact, POINTWISE
    starts, counts = [lengths[3], 0], [20, 7] if s.device == "cpu" else [300, 700]
    caches = s.cache([a + b for a, b in zip(starts, counts, strict=True)])
    q, wide = s.randn(sum(counts), s.heads, s.dim), [x.double() for x in caches[:2]]
    got = prefill_attention(q, *caches, prefill_work(starts, counts).to(s.device), q * 0)
    exact = attention.reference(q.double(), *wide, caches[2], starts, counts)
    yield "prefill_attention", got, exact, ATTENTION


def _flash(s: Shape) -> Results:
    n, third = s.tokens, s.tokens // 3
    spans = [(0, third, 0, third)]  # a prompt, and two samples that continue it
    for start, end in ((third, 2 * third), (2 * third, n)):
        spans += [(start, end, 0, third), (start, end, start, end)]
    work = plan(spans, s.device, s.dtype)
    inputs = [s.randn(n, heads, s.dim) for heads in (s.heads, s.kv_heads, s.kv_heads)]
    yield from _with_gradients(
        "flash_attention",
        lambda *leaves: flash_attention(*leaves, work),
        lambda *leaves: flash.reference(*leaves, spans),
        inputs,
        ATTENTION,
    )


def _outputs(s: Shape) -> Results:
    rows = min(s.tokens, 200)
    hidden, weight = s.randn(rows, s.hidden), s.randn(s.vocab, s.hidden, scale=s.hidden**-0.5)
    targets = torch.randint(s.vocab, (rows,), device=s.device)
    yield from _with_gradients(
        "linear_logprob",
        lambda *leaves: logprob.linear_logprob(*leaves, targets, 0.9, s.vocab)[0],
        lambda *leaves: logprob.reference(*leaves, targets, 0.9, s.vocab)[0],
        [hidden, weight],
        GRADIENT,
    )
    logits = (hidden.double() @ weight.double().T).float()
    uniform = torch.rand(rows, dtype=torch.float64, device=s.device)
    request = uniform, torch.full((rows,), 0.8, device=s.device)
    tokens, logprobs = sample.sample(logits, *request, vocab=s.vocab)
    wanted, exact = sample.reference(logits.double(), request[0], request[1].double(), s.vocab)
    same = tokens == wanted  # a draw at the very edge of an id may fall either way
    yield "sample, tokens", same.float(), torch.ones(rows, device=s.device).double(), 4e4
    yield "sample, log-probabilities", logprobs[same], exact[same], 20.0
    top_k = torch.full((rows,), 20, dtype=torch.int32, device=s.device)
    floors = truncation(logits, request[1], top_k, torch.ones_like(request[1]), s.vocab)
    kept = logits.topk(20).values[:, -1]
    yield "truncation", floors, kept.double(), 1e-6


def _quantised(s: Shape) -> Results:
    k, n = (256, 40) if s.device == "cpu" else (s.hidden, 2 * s.ff)
    with torch.device(s.device):
        linear = torch.nn.Linear(k, n, bias=False)
    for mode, kind, group in (
        ("int8", torch.int8, k),
        ("int4", torch.uint8, 128),
        ("awq", torch.uint8, 128),
    ):
        layer = QuantisedLinear(linear, kind, group, zeros=mode == "awq")
        layer.write(slice(0, n), linear.weight.detach())
        if mode == "awq":
            layer.zeros.random_(16)
        exact = layer.dequantise(torch.float64)
        for m in (1, 16, 64, 65):
            x = s.randn(m, k)
            got = layer(x)
            allowed = POINTWISE if m <= 64 else 2 * ATTENTION  # then W is rounded too
            yield f"quantised_linear {mode}, M={m}", got, x.double() @ exact.T, allowed


def pointwise(part: Part) -> None:
    """Norms, rotation and store, SwiGLU."""
    check(part, _pointwise, ("rms_norm", "norm_rope_store", "swiglu"))


def attention_kernels(part: Part) -> None:
    """Attention of decodes and of chunks over the paged cache."""
    check(part, _attention, ("decode_attention", "prefill_attention"))


def training_attention(part: Part) -> None:
    """Attention over a training pack, and its gradients."""
    check(part, _flash, ("flash_attention",))


def outputs(part: Part) -> None:
    """Log-probabilities and draws over the output matrix."""
    check(part, _outputs, ("linear_logprob", "sample", "truncation"))


def quantised(part: Part) -> None:
    """Products with weights in 8 and 4 bits."""
    check(part, _quantised, ("quantised_linear",))
