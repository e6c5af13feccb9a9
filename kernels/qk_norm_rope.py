"""RMSNorm of the query and key heads and their rotation by position; v is copied or stored.

    n = x / sqrt(mean(x^2) + eps) * weight     over the D elements of a head
    y[i]         = n[i] * cos - n[i + D / 2] * sin          for i < D / 2
    y[i + D / 2] = n[i + D / 2] * cos + n[i] * sin

The norm is that of Qwen3; models without one give no weights, and n is x. cos and sin are those of
the angle of pair i at the token's position (Su et al. 2021, section 3.4.2). The paper pairs the
neighbours 2i and 2i + 1; pairs of i and i + D / 2 are the layout of GPT-NeoX and Hugging Face, and
the same rotation of reordered columns.

`qk_norm_rope` gives q, k and v to the attention of training, and is differentiable.
`qk_norm_rope_store` puts k and v into the pages of inference. Both are one kernel, and give the
same bits.

Each element is read and written once, with about 10 FLOPs: bandwidth is the limit. T = 8192 tokens
of 32 + 2 * 8 heads of 128 in bf16 move 201 MB, backward 285 MB: three times qkv, less v, which is
not read again. The arithmetic is fp32, also between norm and rotation; every result is rounded
once.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.common import (
    SIZES,
    check,
    dependent_launch,
    multiprocessors,
    pick,
    wait_for_previous,
)

TILE = 2048  # elements of a program
PROGRAMS_PER_MULTIPROCESSOR = 4  # of the backward pass


def naive_qk_norm_rope(
    qkv: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    kv_heads: int,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns what qk_norm_rope computes, head by head, in the dtype of its arguments."""
    tokens, half = cos.shape
    dim = 2 * half
    heads = qkv.shape[1] // dim - 2 * kv_heads
    q, k, v = [], [], []
    for token in range(tokens):
        for head in range(heads + 2 * kv_heads):
            x = qkv[token, head * dim : (head + 1) * dim]
            if head >= heads + kv_heads:
                v.append(x)
                continue
            weight = q_norm if head < heads else k_norm
            if weight is not None:
                x = x / ((x * x).sum() / dim + eps).sqrt() * weight
            first, second = x[:half], x[half:]
            rotated_first = first * cos[token] - second * sin[token]
            rotated_second = second * cos[token] + first * sin[token]
            rotated = torch.cat((rotated_first, rotated_second))
            if head < heads:
                q.append(rotated)
            else:
                k.append(rotated)
    q = torch.stack(q).view(tokens, heads, dim)
    k = torch.stack(k).view(tokens, kv_heads, dim)
    v = torch.stack(v).view(tokens, kv_heads, dim)
    return q, k, v


def qk_norm_rope(
    qkv: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    kv_heads: int,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns q [T, H, D] and k [T, Hkv, D], normalised and rotated, and v [T, Hkv, D].

    qkv [T, (H + 2 * Hkv) * D] with any row stride; q_norm and k_norm: weights [D], or both None for
    no norm; cos and sin fp32 [T, D / 2]. Differentiable in qkv and the weights. ValueError for
    other shapes and dtypes.
    """
    _check(qkv, q_norm, k_norm, cos, sin, 2 * cos.shape[-1], kv_heads)
    if not torch.is_grad_enabled():
        return _to_tensors(qkv, q_norm, k_norm, cos, sin, kv_heads, eps)
    return _QkNormRope.apply(qkv, q_norm, k_norm, cos, sin, kv_heads, eps)


def qk_norm_rope_store(
    qkv: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    eps: float,
) -> Tensor:
    """Returns q [T, H, D], normalised and rotated; stores k, likewise, and v in the caches.

    qkv, q_norm, k_norm, cos and sin as in qk_norm_rope; caches [pages, Hkv, page_size, D] of qkv's
    dtype; slots int32 [T]. Token t goes to page slots[t] // page_size, offset
    slots[t] % page_size; tokens with a negative slot are not stored, and the other slots are all
    different. ValueError for other shapes and dtypes.
    """
    check((None, None, None, None), qkv.dtype, k_cache=k_cache)
    check(k_cache.shape, qkv.dtype, v_cache=v_cache)
    _, kv_heads, _, dim = k_cache.shape
    _check(qkv, q_norm, k_norm, cos, sin, dim, kv_heads)
    check((len(qkv),), torch.int32, slots=slots)
    return _to_slots(qkv, q_norm, k_norm, cos, sin, k_cache, v_cache, slots, eps)


def _check(qkv, q_norm, k_norm, cos, sin, dim: int, kv_heads: int) -> None:
    check((None, None), strided=True, qkv=qkv)
    tokens, width = qkv.shape
    if dim not in SIZES:
        raise ValueError(f"head_dim is {dim}; expected one of {SIZES}")
    if width % dim != 0 or width // dim <= 2 * kv_heads:
        raise ValueError(
            f"qkv has {width} columns; expected (H + 2 * {kv_heads}) * {dim} with H >= 1"
        )
    check((tokens, dim // 2), torch.float32, cos=cos, sin=sin)
    if (q_norm is None) != (k_norm is None):
        raise ValueError("q_norm and k_norm: expected two weights, or None twice")
    if q_norm is not None:
        check((dim,), q_norm=q_norm, k_norm=k_norm)


def _heads_of_program(total: int, dim: int) -> int:
    """Returns how many of the `total` heads of a token one program owns, a power of two."""
    return min(max(1, TILE // dim), triton.next_power_of_2(total))


def _to_tensors(qkv, q_norm, k_norm, cos, sin, kv_heads, eps) -> tuple[Tensor, Tensor, Tensor]:
    """Returns q, k and v. To the kernel, k and v are caches whose pages hold one token."""
    tokens, dim = len(qkv), 2 * cos.shape[1]
    k = qkv.new_empty(tokens, kv_heads, 1, dim)
    v = qkv.new_empty(tokens, kv_heads, 1, dim)
    q = _to_slots(qkv, q_norm, k_norm, cos, sin, k, v, None, eps)
    return q, k.view(tokens, kv_heads, dim), v.view(tokens, kv_heads, dim)


def _to_slots(qkv, q_norm, k_norm, cos, sin, k_cache, v_cache, slots, eps) -> Tensor:
    """Returns q; fills the caches, where token t has slot t if slots is None."""
    tokens, width = qkv.shape
    _, kv_heads, page_size, dim = k_cache.shape
    total = width // dim
    q = qkv.new_empty(tokens, total - 2 * kv_heads, dim)
    heads_of_program = _heads_of_program(total, dim)
    grid = (tokens * triton.cdiv(total, heads_of_program),)
    _qk_norm_rope[grid](
        qkv,
        q_norm,
        k_norm,
        cos,
        sin,
        slots,
        q,
        k_cache,
        v_cache,
        qkv.stride(0),
        eps,
        H=total - 2 * kv_heads,
        HKV=kv_heads,
        D=dim,
        PAGE=page_size,
        HEADS=heads_of_program,
        **dependent_launch(),
    )
    return q


@triton.jit(do_not_specialize_on_alignment=["slots_ptr"])
def _qk_norm_rope(
    qkv_ptr,  # [T, (H + 2 * HKV) * D], rows qkv_stride apart
    q_norm_ptr,  # [D], or None
    k_norm_ptr,  # [D], or None
    cos_ptr,  # fp32 [T, D / 2]
    sin_ptr,
    slots_ptr,  # [T], or None: token t has slot t
    q_ptr,  # [T, H, D]
    k_cache_ptr,  # [pages, HKV, PAGE, D]
    v_cache_ptr,
    qkv_stride,
    eps,
    H: tl.constexpr,
    HKV: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    HEADS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One program owns HEADS of the heads of one token: those of q come first, then k, then v."""
    wait_for_previous(DEPENDENT)
    TOTAL: tl.constexpr = H + 2 * HKV
    HALF: tl.constexpr = D // 2
    programs_of_token = tl.cdiv(TOTAL, HEADS)
    token = (tl.program_id(0) // programs_of_token).to(tl.int64)
    first_head = tl.program_id(0) % programs_of_token * HEADS
    head = (first_head + tl.arange(0, HEADS))[:, None]  # [HEADS, 1]
    col = tl.arange(0, HALF)[None, :]
    is_q = head < H
    is_k = (head >= H) & (head < H + HKV)
    is_v = (head >= H + HKV) & (head < TOTAL)

    x_ptr = qkv_ptr + token * qkv_stride + head * D + col
    x1 = _load(x_ptr, head < TOTAL)  # [HEADS, D / 2]
    x2 = _load(x_ptr + HALF, head < TOTAL)
    cos = tl.load(cos_ptr + token * HALF + col)
    sin = tl.load(sin_ptr + token * HALF + col)
    n1 = x1
    n2 = x2
    if q_norm_ptr is not None:
        weight1, weight2 = _weights(q_norm_ptr, k_norm_ptr, is_q, col, HALF)
        rstd = tl.rsqrt(tl.sum(x1 * x1 + x2 * x2, 1, keep_dims=True) / D + eps)
        n1 = x1 * rstd * weight1
        n2 = x2 * rstd * weight2
    y1 = n1 * cos - n2 * sin
    y2 = n2 * cos + n1 * sin

    # A head goes to one of q, k_cache and v_cache: its lanes of the two other stores are masked.
    q_ptr += (token * H + head) * D + col
    tl.store(q_ptr, y1, is_q)
    tl.store(q_ptr + HALF, y2, is_q)
    slot = token
    if slots_ptr is not None:
        slot = tl.load(slots_ptr + token).to(tl.int64)
    if slot >= 0:
        page = slot // PAGE
        kv_head = (head - H) % HKV  # of k and of v alike; masked lanes have any
        page_offset = ((page * HKV + kv_head) * PAGE + slot % PAGE) * D + col
        tl.store(k_cache_ptr + page_offset, y1, is_k)
        tl.store(k_cache_ptr + page_offset + HALF, y2, is_k)
        tl.store(v_cache_ptr + page_offset, x1, is_v)
        tl.store(v_cache_ptr + page_offset + HALF, x2, is_v)


@triton.jit
def _load(ptr, mask):
    """Returns what ptr points to in fp32, and 0 where the mask is false."""
    return tl.load(ptr, mask, 0.0).to(tl.float32)


@triton.jit
def _weights(q_norm_ptr, k_norm_ptr, is_q, col, HALF: tl.constexpr):
    """Returns the weights of the norms of HEADS heads, fp32: two halves [HEADS, D / 2]."""
    q1 = tl.load(q_norm_ptr + col)
    q2 = tl.load(q_norm_ptr + HALF + col)
    k1 = tl.load(k_norm_ptr + col)
    k2 = tl.load(k_norm_ptr + HALF + col)
    return tl.where(is_q, q1, k1).to(tl.float32), tl.where(is_q, q2, k2).to(tl.float32)


# Backward. A rotation turns the gradient back, and the norm's follows from it. With rstd =
# 1 / sqrt(mean(x^2) + eps), r = x * rstd and g = d_n * weight:
#
#     d_n[i]         = d_y[i] * cos + d_y[i + D / 2] * sin
#     d_n[i + D / 2] = d_y[i + D / 2] * cos - d_y[i] * sin
#     d_x = rstd * (g - r * mean(g * r))        d_weight = sum over tokens and heads of d_n * r
#
# d_qkv is written whole by one kernel: nothing joins the gradients of q, k and v afterwards. HEADS
# heads are a group, and each group has `workers`. A worker is a program that takes every workers-th
# token, so that it adds up its part of the gradients of the weights in registers and writes it
# once; torch adds the parts. Without atomics, every run has the same bits.


class _QkNormRope(torch.autograd.Function):
    @staticmethod
    def forward(ctx, qkv, q_norm, k_norm, cos, sin, kv_heads, eps):
        ctx.save_for_backward(qkv, q_norm, k_norm, cos, sin)
        ctx.eps = eps
        return _to_tensors(qkv, q_norm, k_norm, cos, sin, kv_heads, eps)

    @staticmethod
    def backward(ctx, d_q, d_k, d_v):
        qkv, q_norm, k_norm, cos, sin = ctx.saved_tensors
        tokens, width = qkv.shape
        heads, dim = d_q.shape[1:]
        kv_heads = d_k.shape[1]
        total = heads + 2 * kv_heads
        heads_of_program = _heads_of_program(total, dim)
        groups = triton.cdiv(total, heads_of_program)
        workers = triton.cdiv(PROGRAMS_PER_MULTIPROCESSOR * multiprocessors(qkv.device), groups)
        workers = min(workers, tokens)
        d_qkv = qkv.new_empty(tokens, width)
        d_norm_parts = None
        if q_norm is not None:
            d_norm_parts = qkv.new_empty(workers, groups, 2, dim, dtype=torch.float32)
        _qk_norm_rope_backward[(groups, workers)](
            d_q.contiguous(),
            d_k.contiguous(),
            d_v.contiguous(),
            qkv,
            q_norm,
            k_norm,
            cos,
            sin,
            d_qkv,
            d_norm_parts,
            tokens,
            qkv.stride(0),
            ctx.eps,
            H=heads,
            HKV=kv_heads,
            D=dim,
            HEADS=heads_of_program,
            **pick("qk_norm_rope_backward"),
        )
        d_q_norm = d_k_norm = None
        if q_norm is not None:
            d_q_norm, d_k_norm = d_norm_parts.sum((0, 1)).to(q_norm.dtype)  # [2, D]
        return d_qkv, d_q_norm, d_k_norm, None, None, None, None


@triton.jit(do_not_specialize=["T"])
def _qk_norm_rope_backward(
    d_q_ptr,  # [T, H, D]
    d_k_ptr,  # [T, HKV, D]
    d_v_ptr,  # [T, HKV, D]
    qkv_ptr,  # [T, (H + 2 * HKV) * D], rows qkv_stride apart
    q_norm_ptr,  # [D], or None
    k_norm_ptr,  # [D], or None
    cos_ptr,  # fp32 [T, D / 2]
    sin_ptr,
    d_qkv_ptr,  # [T, (H + 2 * HKV) * D]
    d_norm_ptr,  # fp32 [workers, groups, 2, D]: of q_norm, of k_norm; or None
    T,
    qkv_stride,
    eps,
    H: tl.constexpr,
    HKV: tl.constexpr,
    D: tl.constexpr,
    HEADS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One worker owns the heads of its group at every num_programs(1)-th token."""
    TOTAL: tl.constexpr = H + 2 * HKV
    HALF: tl.constexpr = D // 2
    group = tl.program_id(0)
    worker = tl.program_id(1)
    head = (group * HEADS + tl.arange(0, HEADS))[:, None]  # [HEADS, 1]
    col = tl.arange(0, HALF)[None, :]
    is_q = head < H
    is_k = (head >= H) & (head < H + HKV)
    is_v = (head >= H + HKV) & (head < TOTAL)
    if q_norm_ptr is not None:
        weight1, weight2 = _weights(q_norm_ptr, k_norm_ptr, is_q, col, HALF)
        d_weight1 = tl.zeros((HEADS, HALF), tl.float32)
        d_weight2 = tl.zeros((HEADS, HALF), tl.float32)

    for t in tl.range(worker, T, tl.num_programs(1), num_stages=STAGES):
        token = tl.cast(t, tl.int64)  # an int in the interpreter
        cos = tl.load(cos_ptr + token * HALF + col)
        sin = tl.load(sin_ptr + token * HALF + col)
        d_q_ptrs = d_q_ptr + (token * H + head) * D + col
        d_k_ptrs = d_k_ptr + (token * HKV + head - H) * D + col
        d_v_ptrs = d_v_ptr + (token * HKV + head - H - HKV) * D + col
        # A head has one of the three gradients. Masked lanes load 0 and touch no memory, so their
        # addresses may lie anywhere: head - H is negative for heads of q.
        d_y1 = _load(d_q_ptrs, is_q) + _load(d_k_ptrs, is_k)  # [HEADS, D / 2]
        d_y2 = _load(d_q_ptrs + HALF, is_q) + _load(d_k_ptrs + HALF, is_k)
        d_v1 = _load(d_v_ptrs, is_v)
        d_v2 = _load(d_v_ptrs + HALF, is_v)
        d_n1 = d_y1 * cos + d_y2 * sin
        d_n2 = d_y2 * cos - d_y1 * sin
        d_x1 = d_n1
        d_x2 = d_n2
        if q_norm_ptr is not None:
            x_ptr = qkv_ptr + token * qkv_stride + head * D + col
            x1 = _load(x_ptr, is_q | is_k)
            x2 = _load(x_ptr + HALF, is_q | is_k)
            rstd = tl.rsqrt(tl.sum(x1 * x1 + x2 * x2, 1, keep_dims=True) / D + eps)
            r1 = x1 * rstd
            r2 = x2 * rstd
            d_weight1 += d_n1 * r1
            d_weight2 += d_n2 * r2
            g1 = d_n1 * weight1
            g2 = d_n2 * weight2
            mean = tl.sum(g1 * r1 + g2 * r2, 1, keep_dims=True) / D
            d_x1 = (g1 - r1 * mean) * rstd
            d_x2 = (g2 - r2 * mean) * rstd
        d_x_ptr = d_qkv_ptr + token * (TOTAL * D) + head * D + col
        tl.store(d_x_ptr, tl.where(is_v, d_v1, d_x1), head < TOTAL)
        tl.store(d_x_ptr + HALF, tl.where(is_v, d_v2, d_x2), head < TOTAL)

    if q_norm_ptr is not None:
        d_norm_ptr += (worker * tl.num_programs(0) + group) * 2 * D + col
        tl.store(d_norm_ptr, _sum_of(d_weight1, is_q))
        tl.store(d_norm_ptr + HALF, _sum_of(d_weight2, is_q))
        tl.store(d_norm_ptr + D, _sum_of(d_weight1, is_k))
        tl.store(d_norm_ptr + D + HALF, _sum_of(d_weight2, is_k))


@triton.jit
def _sum_of(values, rows):
    """Returns the sum of the chosen rows of values [HEADS, D / 2], as [1, D / 2]."""
    return tl.sum(tl.where(rows, values, 0.0), 0, keep_dims=True)
