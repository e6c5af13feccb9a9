"""Plain functions of a Qwen3 decoder layer: linear, RMSNorm, SwiGLU, rotary positions, KV pages.

All are differentiable, hold no weights, and run on any device: Triton kernels compute CUDA tensors,
PyTorch computes the others. Attention over a training pack is in packed_attention.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.norm import rms_norm_train
from kernels.swiglu import swiglu_train

# (layer, q [T, H, D], k [T, Hkv, D], v [T, Hkv, D]) -> [T, H, D]
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]

# oneDNN multiplies at most this many rows, by a weight of at least this many numbers.
ONEDNN_ROWS, ONEDNN_NUMEL = 8, 1 << 18
_ONEDNN = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def by_kernel(x: Tensor) -> bool:
    """Return True if Triton kernels compute with x."""
    return x.is_cuda


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x @ weight.T + bias: x [T, in], weight [out, in], bias [out] -> [T, out].

    Inference on a CPU sends a few rows to oneDNN, which reads a large weight with all threads; MKL,
    torch's default, takes one to two times as long. MKL keeps the rest, because oneDNN compiles new
    code for each number of rows.
    """
    few = len(x) <= ONEDNN_ROWS and weight.numel() >= ONEDNN_NUMEL
    if few and _ONEDNN and x.is_cpu and x.dtype == weight.dtype == torch.float32:
        needs_grad = x.requires_grad or weight.requires_grad
        if not (torch.is_grad_enabled() and needs_grad):
            return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return F.linear(x, weight, bias)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x / rms(x) * weight over the last dimension (Zhang & Sennrich 2019, eq. 4).

    x [..., N]; weight broadcasts against it. The norm is computed in fp32 and rounded to x.dtype
    before the weight multiplies it, as in Qwen3's training. The kernel rounds once.
    """
    if weight.dim() == 1 and x.dim() == 2 and by_kernel(x):
        return rms_norm_train(x, weight, eps)
    return F.rms_norm(x, (x.shape[-1],), None, eps) * weight


def swiglu(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up (Shazeer 2020): gate_up [T, 2 * F], gate first -> [T, F]."""
    if by_kernel(gate_up):
        return swiglu_train(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def rope_frequencies(
    head_dim: int, theta: float, scaling: Mapping[str, Any] | None = None
) -> tuple[Tensor, float]:
    """Return the angle per position, fp32 [head_dim / 2] on the CPU, and the factor of cos and sin.

    RoPE: theta_i = theta^(-2i/d) (Su et al. 2021, section 3.2.2), with factor 1.0. `scaling` has
    the keys of a HF config for YaRN, which interpolates the frequencies by parts and scales the
    attention (Peng et al. 2023, eqs. 17-23).
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim
    wavelengths = theta**exponents
    plain = 1.0 / wavelengths
    if scaling is None:
        return plain, 1.0
    original, factor = scaling["original_max_position_embeddings"], scaling["factor"]

    def pair_with(rotations: float) -> float:
        """Return the fractional pair index that turns so often within the original context."""
        return head_dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair_with(scaling.get("beta_fast", 32)), pair_with(scaling.get("beta_slow", 1))
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    pairs = torch.arange(head_dim // 2, dtype=torch.float32, device="cpu")
    # 1 for fast pairs, which keep their angle; 0 for slow ones, whose angle is divided by `factor`
    kept = 1 - ((pairs - low) / (high - low)).clamp(0, 1)
    frequencies = 1.0 / (factor * wavelengths) * (1 - kept) + plain * kept
    return frequencies, _yarn_attention_factor(factor, scaling)


def _yarn_attention_factor(factor: float, scaling: Mapping[str, Any]) -> float:
    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if "attention_factor" in scaling:
        return float(scaling["attention_factor"])
    if "mscale" in scaling and "mscale_all_dim" in scaling:
        return mscale(scaling["mscale"]) / mscale(scaling["mscale_all_dim"])
    return mscale(1.0)


def rope_tables(
    positions: Tensor, frequencies: Tensor, factor: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return cos and sin, each [T, 1, D] in dtype: positions [T], frequencies fp32 [D / 2].

    Computed in fp32, then rounded. The first half of sin is negated for apply_rope.
    """
    angles = positions[:, None, None].float() * frequencies  # [T, 1, D/2]
    cos, sin = angles.cos(), angles.sin()
    if factor != 1.0:
        cos, sin = cos * factor, sin * factor
    return torch.cat((cos, cos), -1).to(dtype), torch.cat((-sin, sin), -1).to(dtype)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair (x[i], x[i + D/2]) of x [T, heads, D]; cos and sin are from rope_tables."""
    return x * cos + x.roll(x.shape[-1] // 2, -1) * sin


# The engine's KV pages: k_cache and v_cache [pages, Hkv, page_size, D]. One head of a page is
# contiguous.


def cache_rows(slots: Tensor, kv_heads: int, page_size: int) -> Tensor:
    """Return the rows of a cache, viewed as [rows, D], for `slots`: int64 [T] -> int64 [T, Hkv].

    slot = page * page_size + offset.
    """
    heads = torch.arange(kv_heads, device=slots.device)
    pages, offsets = slots[:, None] // page_size, slots[:, None] % page_size
    return (pages * kv_heads + heads) * page_size + offsets


def store_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, rows: Tensor) -> None:
    """Write k and v [T, Hkv, D] into the caches at `rows` int64 [T, Hkv], from cache_rows."""
    for new, cache in ((k, k_cache), (v, v_cache)):
        cache.view(-1, cache.shape[-1]).index_copy_(0, rows.flatten(), new.flatten(0, 1))
