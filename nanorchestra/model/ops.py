"""Plain functions of a decoder layer: RMSNorm, SwiGLU, the norm and rotation of queries and keys.

They are differentiable, hold no weights, and run on any device: Triton kernels compute CUDA
tensors, the C of rows.py those of a CPU, and PyTorch the others, and norms on a GPU of which
gradients are wanted. All compute at least in fp32 and round a result once.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

import kernels.qk_norm_rope
import kernels.rms_norm
import kernels.swiglu
from nanorchestra.model import rows
from nanorchestra.model.compiler import LARGEST_DIM
from nanorchestra.model.rope import Rotation


def by_kernel(x: Tensor) -> bool:
    """Returns True if Triton kernels compute with x.

    Call it as `ops.by_kernel`: the tests replace it here, to run the kernels on CPU tensors in
    Triton's interpreter.
    """
    return x.is_cuda


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Returns x / rms(x) * weight of each row (Zhang & Sennrich 2019, eq. 4): x [T, N]."""
    if by_kernel(x) and not torch.is_grad_enabled():
        return kernels.rms_norm.rms_norm(x, weight, eps)
    if rows.computes(len(weight), x, weight):
        return rows.norm(x, None, weight, eps)
    return F.rms_norm(x, weight.shape, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Returns (rms_norm(sum), sum), where sum is x + residual, rounded: all [T, N]."""
    if by_kernel(x) and not torch.is_grad_enabled():
        return kernels.rms_norm.add_rms_norm(x, residual, weight, eps)
    if rows.computes(len(weight), x, residual, weight):
        return rows.norm(x, residual, weight, eps)
    summed = x + residual
    return rms_norm(summed, weight, eps), summed


def swiglu(gate_up: Tensor) -> Tensor:
    """Returns silu(gate) * up (Shazeer 2020): gate_up [T, 2 * F], gate first -> [T, F]."""
    if by_kernel(gate_up):
        return kernels.swiglu.swiglu(gate_up)
    if rows.computes(gate_up.shape[1] // 2, gate_up):
        return rows.swiglu(gate_up)
    gate, up = _wide(gate_up).chunk(2, dim=-1)
    return (F.silu(gate) * up).to(gate_up.dtype)


def qk_norm_rope(
    qkv: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    rotation: Rotation,
    kv_heads: int,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns q [T, H, D], k [T, Hkv, D] and v [T, Hkv, D] of qkv [T, (H + 2 Hkv) D].

    Queries and keys are normalised, each head by itself, and rotated. q_norm and k_norm are weights
    [D], or both None for a model without these norms.
    """
    if by_kernel(qkv):
        cos, sin = rotation.cos, rotation.sin
        return kernels.qk_norm_rope.qk_norm_rope(qkv, q_norm, k_norm, cos, sin, kv_heads, eps)
    head_dim = 2 * rotation.cos.shape[1]
    if head_dim <= LARGEST_DIM and rows.computes(head_dim // 2, qkv, q_norm, k_norm):
        return rows.qk_norm_rope(qkv, q_norm, k_norm, rotation, kv_heads, eps)
    q, k, v = qkv.unflatten(1, (-1, head_dim)).tensor_split((-2 * kv_heads, -kv_heads), dim=1)
    cos, sin = rotation.cos[:, None], rotation.sin[:, None]  # [T, 1, D / 2]

    def turned(x, norm):
        x = _wide(x)
        if norm is not None:
            x = F.rms_norm(x, (head_dim,), _wide(norm), eps)
        first, second = x.chunk(2, dim=-1)
        x = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
        return x.to(qkv.dtype)

    return turned(q, q_norm), turned(k, k_norm), v


def _wide(x) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
