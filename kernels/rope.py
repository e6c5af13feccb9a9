"""Between the q/k/v projection and attention, in one pass: RMSNorm of each q and k head, rotary positions, and k and v into their cache pages.

Norm: x / sqrt(mean(x^2) + eps) * weight over the D elements of a head (Qwen3's q and k norm). Rotation of the pairs (x1[i], x2[i]) = (x[i],
x[i + D/2]) by the angle of the position (Su et al. 2021, section 3.4.2): x1 * cos - x2 * sin, x2 * cos + x1 * sin. v is only moved.

Each element is read once and written once (T = 8192, 32 + 2 * 8 heads, D = 128, bf16: 201 MB, and 4 MB of tables), about 10 FLOPs each:
bandwidth is the limit. One program owns HEADS of the H + 2 Hkv heads of one token; which of q, k and v a head is, its row of the tile knows,
so any H and Hkv fit. fp32 throughout, also between norm and rotation; q and k are rounded once, v not at all.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.common import Config, check, pick, require

CONFIGS = {
    80: {"TILE": 2048, "num_warps": 4},
    89: {"TILE": 2048, "num_warps": 4},
    90: {"TILE": 2048, "num_warps": 4},
}


def norm_rope_store(
    qkv: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    eps: float,
    out: Tensor | None = None,
    config: Config | None = None,
) -> Tensor:
    """q [T, H, D], normed and rotated; k, likewise, and v of token t go to page slots[t] // page_size, offset slots[t] % page_size of the caches.

    qkv [T, (H + 2 * Hkv) * D], its rows any stride apart; q_weight and k_weight [D]; cos and sin fp32 [T, D / 2]; caches [pages, Hkv, page_size, D];
    slots int64 [T], all different; a negative one: that token's k and v are not stored. D is a power of two from 16 to 256.
    """
    check("k_cache", k_cache, (None, None, None, None), (qkv.dtype,), inner=4)
    check("v_cache", v_cache, tuple(k_cache.shape), (qkv.dtype,), inner=4)
    Hkv, page_size, D = k_cache.shape[1:]
    require(
        D in (16, 32, 64, 128, 256),
        f"the caches have heads of {D} elements; supported are 16, 32, 64, 128 and 256",
    )
    check("qkv", qkv, (None, None))
    T, H = qkv.shape[0], qkv.shape[1] // D - 2 * Hkv
    require(
        H >= 1 and qkv.shape[1] % D == 0,
        f"qkv has {qkv.shape[1]} columns; expected (H + 2 * {Hkv}) * {D} with H >= 1",
    )
    for name, weight in ("q_weight", q_weight), ("k_weight", k_weight):
        check(name, weight, (D,))
    for name, table in ("cos", cos), ("sin", sin):
        check(name, table, (T, D // 2), (torch.float32,), inner=2)
    check("slots", slots, (T,), (torch.int64,))
    out = torch.empty(T, H, D, dtype=qkv.dtype, device=qkv.device) if out is None else out
    check("out", out, (T, H, D), (qkv.dtype,), inner=3)
    config = pick(CONFIGS, config)
    heads = min(max(1, config["TILE"] // D), triton.next_power_of_2(H + 2 * Hkv))
    _norm_rope_store[(T * triton.cdiv(H + 2 * Hkv, heads),)](
        qkv,
        q_weight,
        k_weight,
        cos,
        sin,
        k_cache,
        v_cache,
        slots,
        out,
        qkv.stride(0),
        eps,
        H,
        Hkv,
        D,
        page_size,
        heads,
        num_warps=config["num_warps"],
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
    head = (tl.program_id(0) % programs * HEADS + tl.arange(0, HEADS))[
        :, None
    ]  # [HEADS, 1]: first those of q, then k, then v
    col = tl.arange(0, D // 2)[None, :]
    is_q, is_k, is_v = (
        head < H,
        (head >= H) & (head < H + HKV),
        (head >= H + HKV) & (head < H + 2 * HKV),
    )

    x_ptr = qkv_ptr + token * stride + head * D + col
    x1 = tl.load(x_ptr, head < H + 2 * HKV, 0.0).to(tl.float32)  # [HEADS, D / 2]
    x2 = tl.load(x_ptr + D // 2, head < H + 2 * HKV, 0.0).to(tl.float32)
    weight1 = tl.where(is_q, tl.load(q_weight_ptr + col), tl.load(k_weight_ptr + col)).to(
        tl.float32
    )
    weight2 = tl.where(
        is_q, tl.load(q_weight_ptr + D // 2 + col), tl.load(k_weight_ptr + D // 2 + col)
    ).to(tl.float32)
    cos = tl.load(cos_ptr + token * (D // 2) + col)
    sin = tl.load(sin_ptr + token * (D // 2) + col)

    rstd = tl.rsqrt(tl.sum(x1 * x1 + x2 * x2, 1, keep_dims=True) / D + eps)
    n1, n2 = x1 * rstd * weight1, x2 * rstd * weight2
    y1, y2 = n1 * cos - n2 * sin, n2 * cos + n1 * sin

    tl.store(q_ptr + (token * H + head) * D + col, y1, is_q)
    tl.store(q_ptr + (token * H + head) * D + D // 2 + col, y2, is_q)
    if slot >= 0:
        kv_head = (head - H) % HKV
        place = (
            (slot // PAGE * HKV + kv_head) * PAGE + slot % PAGE
        ) * D + col  # int64, as slots are
        tl.store(k_cache_ptr + place, y1, is_k)
        tl.store(k_cache_ptr + place + D // 2, y2, is_k)
        tl.store(v_cache_ptr + place, x1, is_v)
        tl.store(v_cache_ptr + place + D // 2, x2, is_v)


def reference(
    qkv: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    kv_heads: int,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """(q [T, H, D], k [T, Hkv, D], v [T, Hkv, D])"""
    D = q_weight.shape[0]
    q, k, v = (
        x.unflatten(1, (-1, D))
        for x in qkv.split((qkv.shape[1] - 2 * kv_heads * D, kv_heads * D, kv_heads * D), dim=1)
    )
    cos, sin = torch.cat((cos, cos), -1)[:, None], torch.cat((-sin, sin), -1)[:, None]  # [T, 1, D]

    def normed_rotated(x: Tensor, weight: Tensor) -> Tensor:
        x = x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight
        return x * cos + x.roll(D // 2, -1) * sin

    return normed_rotated(q, q_weight), normed_rotated(k, k_weight), v
