"""Products with weights in 8 or 4 bits: y = x W^T + bias, where W[n, k] = (values[n, k] - zeros[n, k // group]) * scales[n, k // group].

int8 has one scale a row and no zeros; int4 is AWQ's (Lin et al. 2023, arXiv 2306.00978), packed as nanorchestra/model/quantise.py says. Up to ROWS
rows of x the weights enter the product as small integers, exact in x.dtype, and the scales join in fp32. That reads N K bytes, or
N K (1/2 + 3/group), and does 2 M N K FLOPs: the bytes are the floor. Beyond, W is written out in x.dtype for a library's product.

One program owns BLOCK_N outputs of up to 32 rows over one split of K; the fp32 parts of several splits are added in order by a second kernel.
W^T is the left operand: so 8 rows of x fill an instruction. The splits depend on N and K alone, and two warps keep every product on mma m16n8k16,
also where Hopper would change to wgmma for more rows: the order of a row's sum, and so its bits, do not depend on M.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.common import Config, check, pick, require
from kernels.dequantise import check_weights, dequantise_int4, dequantise_int8, reference  # noqa: F401

ROWS = 64  # more than these pay for writing W out
PROGRAMS = 192  # of 2 * BLOCK_N outputs: this many at least are wanted on a card
CONFIGS = {
    80: {"BLOCK_N": 32, "BLOCK_K": 128, "num_warps": 2, "num_stages": 5},
    89: {"BLOCK_N": 32, "BLOCK_K": 128, "num_warps": 2, "num_stages": 4},
    90: {"BLOCK_N": 32, "BLOCK_K": 128, "num_warps": 2, "num_stages": 6},
}


def quantised_linear(
    x: Tensor,
    values: Tensor,
    scales: Tensor,
    zeros: Tensor | None = None,
    group: int = 128,
    bias: Tensor | None = None,
) -> Tensor:
    """x [M, K] -> x W^T + bias [M, N]: int4 if there are zeros, else int8. Up to ROWS rows by the kernels below. Beyond, the FLOPs weigh more than
    the bytes: W [N, K] is made in x.dtype, for the length of the call, and multiplied by torch, whose bits may depend on M."""
    if len(x) <= ROWS:
        return _linear(x, values, scales, zeros, group, bias, None, None)
    weight = (
        dequantise_int8(values, scales, x.dtype)
        if zeros is None
        else dequantise_int4(values, scales, zeros, group, x.dtype)
    )
    return torch.mm(x, weight.T) if bias is None else torch.addmm(bias, x, weight.T)


def int8_linear(
    x: Tensor,
    values: Tensor,
    scales: Tensor,
    bias: Tensor | None = None,
    out: Tensor | None = None,
    config: Config | None = None,
) -> Tensor:
    """x [M, K], M <= ROWS, values int8 [N, K], scales fp32 [N, 1], bias [N] of x.dtype -> x W^T + bias [M, N]."""
    return _linear(x, values, scales, None, 0, bias, out, config)


def int4_linear(
    x: Tensor,
    values: Tensor,
    scales: Tensor,
    zeros: Tensor,
    group: int = 128,
    bias: Tensor | None = None,
    out: Tensor | None = None,
    config: Config | None = None,
) -> Tensor:
    """x [M, K], M <= ROWS, values uint8 [N, K / 2], scales fp16 and zeros uint8 [N, K / group], bias [N] of x.dtype -> x W^T + bias [M, N]."""
    return _linear(x, values, scales, zeros, group, bias, out, config)


def _linear(
    x: Tensor,
    values: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    group: int,
    bias: Tensor | None,
    out: Tensor | None,
    config: Config | None,
) -> Tensor:
    (n, k), m = check_weights(values, scales, zeros, group), len(x)
    check("x", x, (None, k), inner=2)
    require(
        m <= ROWS, f"x has {m} rows; expected at most {ROWS}: quantised_linear takes any number"
    )
    if bias is not None:
        check("bias", bias, (n,), (x.dtype,))
    out = torch.empty(m, n, dtype=x.dtype, device=x.device) if out is None else out
    check("out", out, (m, n), (x.dtype,), inner=2)
    if m == 0:
        return out
    config = pick(CONFIGS, config) | ({} if zeros is None else {"BLOCK_K": group})
    block_n, steps = config["BLOCK_N"], triton.cdiv(k, config["BLOCK_K"])
    split = max(
        4,
        triton.cdiv(
            steps, triton.next_power_of_2(triton.cdiv(PROGRAMS, triton.cdiv(n, 2 * block_n)))
        ),
    )  # steps of K in a split
    splits, block_m = triton.cdiv(steps, split), 8 if m <= 8 else 16
    if (
        m > 16 and x.dtype != torch.float32
    ):  # x, now the larger part of what is read, is read once for each BLOCK_N outputs
        block_m, config = (
            32,
            config | {"BLOCK_N": 2 * block_n, "num_stages": min(4, config["num_stages"])},
        )
    parts = out if splits == 1 else torch.empty(splits, m, n, dtype=torch.float32, device=x.device)
    kernel, weight = (
        (_int8_kernel, (values, scales))
        if zeros is None
        else (_int4_kernel, (values, scales, zeros))
    )
    kernel[(triton.cdiv(m, block_m), triton.cdiv(n, config["BLOCK_N"]), splits)](
        x, *weight, bias if splits == 1 else None, parts, m, n, k, split, BLOCK_M=block_m, **config
    )
    if splits > 1:
        _add_parts[(m, triton.cdiv(n, 512))](parts, bias, out, splits, m * n, n, BLOCK=512)
    return out


@triton.jit(do_not_specialize=["M"])
def _int8_kernel(
    x,
    values,
    scales,
    bias,
    out,
    M,
    N,
    K,
    split,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    rows, outputs = (
        tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M),
        tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N),
    )
    first, columns = tl.program_id(2) * split, tl.arange(0, BLOCK_K)
    weight = tl.minimum(outputs, N - 1).to(
        tl.int64
    )  # row of W; beyond N the last one again, which is not stored
    x += rows[None, :] * K + columns[:, None]
    values += weight[:, None] * K + columns[None, :]
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for step in range(first, tl.minimum(first + split, tl.cdiv(K, BLOCK_K))):
        left = K - step * BLOCK_K  # columns
        value = tl.load(values + step * BLOCK_K, columns[None, :] < left, 0)
        run = tl.load(x + step * BLOCK_K, (columns[:, None] < left) & (rows[None, :] < M), 0.0)
        total = tl.dot(value.to(run.dtype), run, total, input_precision="ieee")
    _store(total * tl.load(scales + weight)[:, None], bias, out, rows, outputs, M, N)


@triton.jit(do_not_specialize=["M"])
def _int4_kernel(
    x,
    values,
    scales,
    zeros,
    bias,
    out,
    M,
    N,
    K,
    split,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    rows, outputs = (
        tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M),
        tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N),
    )
    HALF: tl.constexpr = BLOCK_K // 2  # BLOCK_K is the group
    groups, first, columns = K // BLOCK_K, tl.program_id(2) * split, tl.arange(0, HALF)
    weight = tl.minimum(outputs, N - 1).to(tl.int64) * groups
    x += rows[None, :] * K + columns[:, None]
    values += weight[:, None] * HALF + columns[None, :]
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for group in range(first, tl.minimum(first + split, groups)):
        packed = tl.load(values + group * HALF)
        low_run = tl.load(x + group * BLOCK_K, rows[None, :] < M, 0.0)
        high_run = tl.load(x + group * BLOCK_K + HALF, rows[None, :] < M, 0.0)
        zero = tl.load(zeros + weight + group).to(tl.float32)[:, None]
        low = (packed & 15).to(tl.int8).to(low_run.dtype) - zero.to(low_run.dtype)
        # 16 times the weight, which saves the shift of every byte: with its top bit flipped, a byte less its low nibble is 16 * (high - 8)
        high = ((packed ^ 0x80) & 0xF0).to(tl.int8, bitcast=True).to(low_run.dtype) - (
            16 * zero - 128
        ).to(low_run.dtype)
        part = tl.dot(
            high,
            high_run,
            16 * tl.dot(low, low_run, input_precision="ieee"),
            input_precision="ieee",
        )
        total += part * (tl.load(scales + weight + group).to(tl.float32) / 16)[:, None]
    _store(total, bias, out, rows, outputs, M, N)


@triton.jit
def _store(total, bias, out, rows, outputs, M, N):
    """total [BLOCK_N, BLOCK_M] to out [splits, M, N], in its dtype."""
    if bias is not None:
        total += tl.load(bias + outputs, outputs < N, 0.0).to(tl.float32)[:, None]
    place = (tl.program_id(2) * M + rows[None, :]).to(tl.int64) * N + outputs[:, None]
    tl.store(
        out + place, total.to(out.dtype.element_ty), (rows[None, :] < M) & (outputs[:, None] < N)
    )


@triton.jit
def _add_parts(parts, bias, out, splits, size, N, BLOCK: tl.constexpr):
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside, place = columns < N, tl.program_id(0) * N + columns
    total = tl.zeros((BLOCK,), tl.float32)
    for _ in range(splits):
        total += tl.load(parts + place, inside, 0.0)
        parts += size
    if bias is not None:
        total += tl.load(bias + columns, inside, 0.0).to(tl.float32)
    tl.store(out + place, total.to(out.dtype.element_ty), inside)
