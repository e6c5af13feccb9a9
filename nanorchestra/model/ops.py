"""Plain functions of a Qwen3 decoder layer: RMSNorm, SwiGLU, rotary positions.

All are differentiable, hold no weights, and run on any device: Triton kernels compute CUDA tensors,
PyTorch computes the others. Attention over a training pack is in packed_attention.py.
"""

from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.norm import rms_norm_train
from kernels.swiglu import swiglu as fused_swiglu

# (layer, q [T, H, D], k [T, Hkv, D], v [T, Hkv, D]) -> [T, H, D]
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


def by_kernel(x: Tensor) -> bool:
    """Return True if Triton kernels compute with x."""
    return x.is_cuda


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
        return fused_swiglu(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


@cache
def rope_frequencies(head_dim: int, theta: float, device: torch.device) -> Tensor:
    """Return the rotary angle per position of each pair, theta^(-2i/d), fp32 [head_dim / 2].

    RoFormer (Su et al. 2021, section 3.2.2). Computed on the CPU, the same for all.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim
    return (1.0 / theta**exponents).to(device)


def rope_tables(
    positions: Tensor, frequencies: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return cos and sin, each [T, 1, D] in dtype: positions [T], frequencies fp32 [D / 2].

    Computed in fp32, then rounded. The first half of sin is negated for apply_rope.
    """
    angles = positions[:, None, None].float() * frequencies  # [T, 1, D/2]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), -1).to(dtype), torch.cat((-sin, sin), -1).to(dtype)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair (x[i], x[i + D/2]) of x [T, heads, D]; cos and sin are from rope_tables."""
    return x * cos + x.roll(x.shape[-1] // 2, -1) * sin
