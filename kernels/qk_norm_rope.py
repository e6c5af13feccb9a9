"""RMSNorm of q and k heads, rotary positions, and the store of k and v into the cache, in one.

Norm: x / sqrt(mean(x^2) + eps) * weight over the D elements of a head (the q and k norm of Qwen3).
Rotation of each pair (x1[i], x2[i]) = (x[i], x[i + D/2]) by the angle of its position (Su et al.
2021, section 3.4.2): x1 * cos - x2 * sin, x2 * cos + x1 * sin. v is copied.

Each element is read and written once, with about 10 FLOPs: bandwidth is the limit. T = 8192 tokens
of 32 + 2 * 8 heads of 128 in bf16 move 201 MB. One program owns HEADS of the H + 2 * Hkv heads of
one token. The arithmetic is fp32, also between norm and rotation; q and k are rounded once.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.common import FP8, check, require

TILE = 2048  # elements of a program


def norm_rope_store(
    qkv: Tensor,
    norms: tuple[Tensor, Tensor],
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    eps: float,
) -> Tensor:
    """Returns q [T, H, D], normalised and rotated; stores k, likewise, and v in the cache.

    qkv [T, (H + 2 * Hkv) * D] with any row stride; norms: weights [D] of the q and the k norm; cos
    and sin fp32 [T, D / 2]; caches [pages, Hkv, page_size, D], of that dtype or FP8; slots int64
    [T], all different. Token t goes to page slots[t] // page_size, offset slots[t] % page_size; a
    negative slot is not stored.
    """
    check((None, None), strided=True, qkv=qkv)
    kind = FP8 if k_cache.dtype == FP8 else qkv.dtype
    check((None, None, None, None), kind, k_cache=k_cache)
    check(k_cache.shape, kind, v_cache=v_cache)
    _, kv_heads, page_size, dim = k_cache.shape
    tokens, width = qkv.shape
    heads = width // dim - 2 * kv_heads
    require(
        heads >= 1 and width % dim == 0,
        f"qkv has {width} columns; expected (H + 2 * {kv_heads}) * {dim} with H >= 1",
    )
    check((dim,), q_weight=norms[0], k_weight=norms[1])
    check((tokens, dim // 2), torch.float32, cos=cos, sin=sin)
    check((tokens,), torch.int64, slots=slots)
    out = qkv.new_empty(tokens, heads, dim)
    total = heads + 2 * kv_heads
    block = min(max(1, TILE // dim), triton.next_power_of_2(total))
    _norm_rope_store[(tokens * triton.cdiv(total, block),)](
        qkv,
        *norms,
        cos,
        sin,
        k_cache,
        v_cache,
        slots,
        out,
        qkv.stride(0),
        eps,
        heads,
        kv_heads,
        dim,
        page_size,
        block,
    )
    return out


@triton.jit
def _norm_rope_store(
    qkv_ptr,
    q_weight_ptr,
    k_weight_ptr,
    cos_ptr,
    sin_ptr,
    k_cache_ptr,
    v_cache_ptr,
    slots_ptr,
    q_ptr,
    stride,
    eps,
    H: tl.constexpr,
    HKV: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    HEADS: tl.constexpr,
):
    programs = tl.cdiv(H + 2 * HKV, HEADS)  # of one token
    token = (tl.program_id(0) // programs).to(tl.int64)
    slot = tl.load(slots_ptr + token)
    # heads of q first, then of k, then of v
    head = (tl.program_id(0) % programs * HEADS + tl.arange(0, HEADS))[:, None]  # [HEADS, 1]
    col = tl.arange(0, D // 2)[None, :]
    is_q, is_k = head < H, (head >= H) & (head < H + HKV)
    is_v = (head >= H + HKV) & (head < H + 2 * HKV)

    x_ptr = qkv_ptr + token * stride + head * D + col
    x1 = tl.load(x_ptr, head < H + 2 * HKV, 0.0).to(tl.float32)  # [HEADS, D / 2]
    x2 = tl.load(x_ptr + D // 2, head < H + 2 * HKV, 0.0).to(tl.float32)
    q1, q2 = tl.load(q_weight_ptr + col), tl.load(q_weight_ptr + D // 2 + col)
    k1, k2 = tl.load(k_weight_ptr + col), tl.load(k_weight_ptr + D // 2 + col)
    cos = tl.load(cos_ptr + token * (D // 2) + col)
    sin = tl.load(sin_ptr + token * (D // 2) + col)

    rstd = tl.rsqrt(tl.sum(x1 * x1 + x2 * x2, 1, keep_dims=True) / D + eps)
    n1 = x1 * rstd * tl.where(is_q, q1, k1).to(tl.float32)
    n2 = x2 * rstd * tl.where(is_q, q2, k2).to(tl.float32)
    y1, y2 = n1 * cos - n2 * sin, n2 * cos + n1 * sin

    q_ptr += (token * H + head) * D + col
    tl.store(q_ptr, y1, is_q)
    tl.store(q_ptr + D // 2, y2, is_q)
    if slot >= 0:
        page, offset = slot // PAGE, slot % PAGE  # int64
        place = ((page * HKV + (head - H) % HKV) * PAGE + offset) * D + col
        tl.store(k_cache_ptr + place, y1, is_k)
        tl.store(k_cache_ptr + place + D // 2, y2, is_k)
        tl.store(v_cache_ptr + place, x1, is_v)
        tl.store(v_cache_ptr + place + D // 2, x2, is_v)


def reference(
    qkv: Tensor, norms: tuple[Tensor, Tensor], cos: Tensor, sin: Tensor, kv_heads: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns q [T, H, D], k [T, Hkv, D] and v [T, Hkv, D], in the dtype of the arguments."""
    dim = norms[0].shape[0]
    heads = qkv.unflatten(1, (-1, dim))
    q, k, v = heads.split((heads.shape[1] - 2 * kv_heads, kv_heads, kv_heads), dim=1)
    cos = torch.cat((cos, cos), -1)[:, None]  # [T, 1, D]
    sin = torch.cat((-sin, sin), -1)[:, None]

    def normed_rotated(x, weight):
        x = x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight
        return x * cos + x.roll(dim // 2, -1) * sin

    return normed_rotated(q, norms[0]), normed_rotated(k, norms[1]), v
