"""Every kernel against float64, then timed beside its ceiling and its peers.

An error is a multiple of the rounding of the exact result to the kernel's dtype; the exact result
is the naive version's in float64. What is allowed is what tests/kernels allows, and on a GPU twice
that. The cases are those of cases.py with fewer tokens, so on a GPU the timed kernels are the
compiled ones that were checked. Times are medians with a cold L2 cache, as shares of what this GPU
was just measured to read or to multiply.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from triton.testing import do_bench

from benchmarks.gpu_parts import Part, by_kernels
from benchmarks.gpu_parts.cases import QWEN3_8B, SMALL, Case, all_cases
from kernels.flash import Span, naive_attention
from kernels.paged_decode import decode_attention, naive_decode_attention
from kernels.paged_prefill import naive_prefill_attention
from kernels.qk_norm_rope import naive_qk_norm_rope
from kernels.quantised import naive_quantised_linear
from kernels.rms_norm import naive_add_rms_norm, naive_rms_norm
from kernels.swiglu import naive_swiglu
from nanorchestra.model.quantise import QuantisedLinear

Function = Callable[..., Any]

# With the compiled variants of the cases that are timed, but few tokens: naive versions are loops.
CHECKED = replace(QWEN3_8B, tokens=256, rows=32, context=1100, long_context=2000, prefix=1024)
# Multiples of the rounding. add_rms_norm norms a rounded sum, attention multiplies rounded weights.
# Two roundings are 1.41 on average, and 1.6 in a few rows.
ROUNDED_TWICE = ("add_rms_norm", "prefill_attention", "flash_attention")
ONCE, TWICE, GRADIENT = 1.1, 1.7, 2.0
TENSOR_CORES = 2  # their sums drop bits that the interpreter's keep
FLOORS = {torch.bfloat16: 1.66e-3 / 4, torch.float32: 2e-6}  # relative rounding at least
DEVICE = "cuda"  # of what is timed


def _naive_store(qkv, q_norm, k_norm, cos, sin, k_cache, v_cache, slots, eps) -> Tensor:
    q, _, _ = naive_qk_norm_rope(qkv, q_norm, k_norm, cos, sin, k_cache.shape[1], eps)
    return q


def _naive_prefill(q, k_cache, v_cache, block_tables, context_lens, *_) -> Tensor:
    start = int(context_lens[0]) - 1  # one sequence: the position of its first token
    return naive_prefill_attention(q, k_cache, v_cache, block_tables, [start], [len(q)])


def _naive_flash(q, k, v, work) -> Tensor:
    spans = {Span(*visit) for visit in work.forward.visits.tolist()}
    return naive_attention(q, k, v, sorted(spans))


def _naive_quantised(x, values, scales, dtype, zeros) -> Tensor:
    return naive_quantised_linear(x, values, scales, zeros)


NAIVE: dict[str, Function] = {
    "rms_norm": naive_rms_norm,
    "add_rms_norm": naive_add_rms_norm,
    "qk_norm_rope": naive_qk_norm_rope,
    "qk_norm_rope_store": _naive_store,
    "swiglu": naive_swiglu,
    "decode_attention": lambda *arguments: naive_decode_attention(*arguments[:5]),
    "prefill_attention": _naive_prefill,
    "flash_attention": _naive_flash,
    "quantised_linear": _naive_quantised,
}


def pointwise(part: Part) -> None:
    """Norms, rotation and store, SwiGLU."""
    run(part, "rms_norm", "add_rms_norm", "qk_norm_rope", "qk_norm_rope_store", "swiglu")


def paged_attention(part: Part) -> None:
    """Attention of decodes and of chunks over the paged cache."""
    run(part, "decode_attention", "prefill_attention")


def training_attention(part: Part) -> None:
    """Attention over a training pack, and its gradients."""
    run(part, "flash_attention")


def quantised_products(part: Part) -> None:
    """Products with weights in 8 and 4 bits."""
    run(part, "quantised_linear")


def run(part: Part, *kernels: str) -> None:
    """Checks the cases of these kernels, then times them on a GPU."""
    torch.manual_seed(0)
    wrong = []
    with torch.device(part.device), by_kernels(part):
        for case in all_cases(SMALL if part.rehearse else CHECKED):
            if kernel_of(case) in kernels:
                wrong += check(part, case)
    if not part.rehearse:
        rates = measure_rates()
        part.note("rates", read_tb_s=rates[0] / 1e12, product_tflop_s=rates[1] / 1e12)
        for case in all_cases(QWEN3_8B):
            if kernel_of(case) not in kernels:
                continue
            try:
                part.note(case.name, **measure(case, rates))
            except Exception as error:  # the other kernels are still measured
                wrong.append(f"{case.name}: {type(error).__name__}: {error}")
    if wrong:
        raise AssertionError("; ".join(wrong))


def kernel_of(case: Case) -> str:
    """Returns the first word of a case's name."""
    return case.name.split()[0]


def check(part: Part, case: Case) -> list[str]:
    """Compares all that a case computes with the naive version in float64. Returns what is off."""
    arguments = case.make()
    got = case.call(*arguments)
    exact = case.call(*[_wide(x) for x in arguments], run=NAIVE[kernel_of(case)])
    wrong = []
    if isinstance(got, Tensor):
        got, exact = (got,), (exact,)
    allowed = TWICE if kernel_of(case) in ROUNDED_TWICE else ONCE
    if case.gradients or got[0].dtype == torch.float32:
        allowed = GRADIENT
    if not part.rehearse:
        allowed *= TENSOR_CORES
    for number, (result, right) in enumerate(zip(got, exact, strict=True)):
        roundings = error(result, right.double())
        label = f"{case.name}: error of result {number}"
        part.note(label, times_rounding=roundings, allowed=allowed)
        if not roundings <= allowed:
            wrong.append(
                f"{case.name}, result {number}: {roundings:.2f} roundings, allowed {allowed}"
            )
    if kernel_of(case) == "decode_attention":
        same = _same_bits_alone(case, arguments, got[0])
        part.note(f"{case.name}: rows alone have the same bits", same=same)
        if not same:
            wrong.append(f"{case.name}: a row alone has other bits than in the batch")
    return wrong


def error(got: Tensor, exact: Tensor) -> float:
    """Returns the relative error as a multiple of that of rounding the exact result."""
    size = exact.norm() + 1e-300
    rounding = ((exact.to(got.dtype).double() - exact).norm() / size).item()
    return ((got.double() - exact).norm() / size).item() / max(rounding, FLOORS[got.dtype])


def _same_bits_alone(case: Case, arguments: tuple[Any, ...], together: Tensor) -> bool:
    """Returns True if the first rows, each in a step of its own, have the bits of the batch."""
    q, k_cache, v_cache, block_tables, context_lens, items, num_items, scratch, _ = arguments
    for row in range(2):
        mine = items[: int(num_items)]
        own = mine[(mine[:, 0] <= row) & (row < mine[:, 0] + mine[:, 1])].clone()
        own[:, 0], own[:, 1] = 0, 1
        one = slice(row, row + 1)
        alone = decode_attention(
            q[one],
            k_cache,
            v_cache,
            block_tables[one],
            context_lens[one],
            own,
            torch.full_like(num_items, len(own)),
            scratch,
            torch.empty_like(q[one]),
        )
        if not torch.equal(alone, together[one]):
            return False
    return True


def _wide(x: Any) -> Any:
    return x.double() if isinstance(x, Tensor) and x.is_floating_point() else x


def measure_rates() -> tuple[float, float]:
    """Returns the bytes/s that this GPU reads, and the FLOP/s of a bf16 product of 8192 cubed."""
    numbers = torch.ones(1 << 28, device=DEVICE)
    a, b = torch.randn(2, 8192, 8192, dtype=torch.bfloat16, device=DEVICE)
    return numbers.nbytes / _seconds(numbers.sum), 2 * 8192**3 / _seconds(lambda: a @ b)


def measure(case: Case, rates: tuple[float, float]) -> dict[str, Any]:
    """Returns microseconds of a kernel and its peers, its share of the ceiling, and which it is."""
    with torch.device(DEVICE):
        arguments = case.make()
    elapsed = _seconds(lambda: case.call(*arguments))
    least, limit = max((case.bytes / rates[0], "bytes"), (case.flops / rates[1], "FLOPs"))
    figures = {"us": 1e6 * elapsed, "share": least / elapsed, "limit": limit}
    for name, function in peers_of(case).items():
        try:
            figures[f"{name}_us"] = 1e6 * _seconds(lambda f=function: case.call(*arguments, run=f))
        except Exception as failure:  # a peer that does not run here
            print(f"  {case.name}, {name}: {type(failure).__name__}: {failure}")
    return figures


def _seconds(call: Callable[[], Any]) -> float:
    return do_bench(call, return_mode="median") / 1e3


def peers_of(case: Case) -> dict[str, Function]:
    """Returns functions that do the same job: torch, SDPA, cuBLAS."""
    kernel = kernel_of(case)
    if kernel in ("rms_norm", "swiglu"):
        eager = _torch_rms_norm if kernel == "rms_norm" else _torch_swiglu
        return {"eager": eager, "compiled": torch.compile(eager, dynamic=False)}
    if kernel == "flash_attention":
        return {"sdpa": _sdpa, "cudnn": sdpa_kernel(SDPBackend.CUDNN_ATTENTION)(_sdpa)}
    if kernel == "quantised_linear":
        shape = QWEN3_8B
        weight = torch.randn(2 * shape.ff, shape.hidden, dtype=torch.bfloat16, device=DEVICE)
        return {"cublas": lambda x, *_: x @ weight.T, "widened": _widened_product}
    return {}


def _widened_product(x: Tensor, values: Tensor, scales: Tensor, _, zeros: Tensor | None) -> Tensor:
    """Returns x W^T as QuantisedLinear computes it for more rows than its kernel takes."""
    columns, groups = x.shape[1], scales.shape[1]
    linear = nn.Linear(columns, len(values), bias=False, device="meta")
    layer = QuantisedLinear(linear, values.dtype, columns // groups)
    layer.values, layer.scales, layer.zeros = values, scales, zeros
    return F.linear(x, layer.dequantise(x.dtype))


def _torch_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, eps)


def _torch_swiglu(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def _sdpa(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Tensor:
    """Attends causally over one sequence: q [T, H, D], k and v [T, Hkv, D]."""
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return out[0].transpose(0, 1)
