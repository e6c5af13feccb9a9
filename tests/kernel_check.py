"""Judges kernels by their distance to float64, in multiples of the rounding of the exact result."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
POINTWISE, ATTENTION, GRADIENT = 1.1, 1.6, 2.0  # multiples of the rounding floor
# the floor of normally distributed values
_FLOORS = {torch.bfloat16: 1.66e-3, torch.float16: 2.1e-4, torch.float32: 2.5e-8}
_FP32_SUMS = 2e-6  # what fp32 sums may lose: matters for fp32 results only


def randn(
    generator: torch.Generator, *shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0
) -> Tensor:
    return (torch.randn(*shape, generator=generator) * scale).to(dtype).to(DEVICE)


def poisoned(*shape: int, dtype: torch.dtype) -> Tensor:
    """Returns what a kernel that forgets to write leaves behind: NaN."""
    return torch.full(shape, float("nan"), dtype=dtype, device=DEVICE)


def assert_close(out: Tensor, exact: Tensor, multiple: float) -> None:
    """Asserts that the relative error is at most `multiple` times that of rounding `exact`.

    The norm is Frobenius', exact is float64, and no element may be off by more than 8 roundings of
    the largest.
    """
    assert exact.dtype == torch.float64 and out.shape == exact.shape, (out.shape, exact.shape)
    assert torch.isfinite(out).all(), f"{int((~torch.isfinite(out)).sum())} are not finite"
    size = exact.norm() + 1e-300
    error = ((out.double() - exact).norm() / size).item()
    rounding = ((exact.to(out.dtype).double() - exact).norm() / size).item()
    floor = max(rounding, _FLOORS[out.dtype] / 4)
    if out.dtype == torch.float32:
        floor = max(floor, _FP32_SUMS)
    assert error <= multiple * floor, f"error {error:.3g}: {error / floor:.2f} times the rounding"
    worst = (out.double() - exact).abs().max().item()
    allowed = 8 * max(torch.finfo(out.dtype).eps, _FP32_SUMS) * max(exact.abs().max().item(), 1e-30)
    assert worst <= allowed, f"one element is off by {worst:.3g} (allowed: {allowed:.3g})"


def flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal):
    """Stands in for flash-attn: computes in plain PyTorch what its documentation says."""
    assert causal and cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
    outputs = []
    for i in range(len(cu_seqlens_q) - 1):
        (first, last), (start, end) = (x[i : i + 2].tolist() for x in (cu_seqlens_q, cu_seqlens_k))
        rows, length = last - first, end - start
        assert 0 < rows <= max_seqlen_q and length <= max_seqlen_k
        keys, values = k[start:end], v[start:end]
        # aligned with the last query and the last key
        mask = torch.ones(rows, length, dtype=torch.bool).tril(length - rows)
        heads_first = (x.transpose(0, 1)[None] for x in (q[first:last], keys, values))
        out = F.scaled_dot_product_attention(*heads_first, mask, enable_gqa=True)
        outputs.append(out[0].transpose(0, 1))
    return torch.cat(outputs)
