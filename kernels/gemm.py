"""A batch-invariant product: y = x W^T + bias, in which a row of y has the same bits whatever other rows are computed with it.

A library chooses its tiles, and with them the order of each sum, by the number of rows (He et al. 2025, "Defeating Nondeterminism in LLM
Inference", Thinking Machines Lab). Here every call has the same tiles, and each element is one sum over K in one order, never split.
Reads (M + N) K elements at best and does 2 M N K FLOPs: up to about 200 rows in bf16 the bytes of W are the floor, beyond it the FLOPs.

One program owns a tile of BLOCK_M rows by BLOCK_N outputs over all of K. Programs go down GROUP tiles of rows before they move to the next
outputs, so that those that run at a time share what they read in the L2.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.common import Config, check, pick

# BLOCK_K counts elements of two bytes; fp32 takes half. On sm_90 these are products of wgmma, m64n128k16.
CONFIGS = {
    80: {"BLOCK_M": 64, "BLOCK_N": 128, "BLOCK_K": 64, "GROUP": 8, "num_warps": 4, "num_stages": 4},
    89: {"BLOCK_M": 64, "BLOCK_N": 128, "BLOCK_K": 64, "GROUP": 8, "num_warps": 4, "num_stages": 3},
    90: {
        "BLOCK_M": 128,
        "BLOCK_N": 128,
        "BLOCK_K": 64,
        "GROUP": 8,
        "num_warps": 8,
        "num_stages": 3,
    },
}


def invariant_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    out: Tensor | None = None,
    config: Config | None = None,
) -> Tensor:
    """x [M, K], weight [N, K], bias [N], of one dtype -> x W^T + bias [M, N]: summed in fp32, rounded once."""
    check("x", x, (None, None), inner=2)
    (m, k), n = x.shape, len(weight)
    check("weight", weight, (None, k), (x.dtype,), inner=2)
    if bias is not None:
        check("bias", bias, (n,), (x.dtype,))
    out = torch.empty(m, n, dtype=x.dtype, device=x.device) if out is None else out
    check("out", out, (m, n), (x.dtype,), inner=2)
    chosen = pick(CONFIGS, config)
    if x.dtype == torch.float32:
        chosen = chosen | {"BLOCK_K": chosen["BLOCK_K"] // 2}
    if out.numel():
        tiles = triton.cdiv(m, chosen["BLOCK_M"]) * triton.cdiv(n, chosen["BLOCK_N"])
        _invariant_kernel[(tiles,)](x, weight, bias, out, m, n, k, **chosen)
    return out


@triton.jit(do_not_specialize=["M"])
def _invariant_kernel(
    x,
    weight,
    bias,
    out,
    M,
    N,
    K,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    tiles_m = tl.cdiv(M, BLOCK_M)
    tile, in_band = tl.program_id(0), GROUP * tl.cdiv(N, BLOCK_N)
    above = tile // in_band * GROUP  # tiles of rows before this band of them
    height = tl.minimum(tiles_m - above, GROUP)
    rows = (above + tile % in_band % height) * BLOCK_M + tl.arange(0, BLOCK_M)
    outputs = tile % in_band // height * BLOCK_N + tl.arange(0, BLOCK_N)
    columns = tl.arange(0, BLOCK_K)
    x += rows[:, None].to(tl.int64) * K + columns[None, :]
    weight += (
        tl.minimum(outputs, N - 1)[None, :].to(tl.int64) * K + columns[:, None]
    )  # beyond N the last again, which is not stored
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, K, BLOCK_K):
        left = tl.load(x + k, (rows[:, None] < M) & (columns[None, :] < K - k), 0.0)
        right = tl.load(weight + k, columns[:, None] < K - k, 0.0)
        total = tl.dot(left, right, total, input_precision="ieee")
    if bias is not None:
        total += tl.load(bias + outputs, outputs < N, 0.0).to(tl.float32)[None, :]
    place = rows[:, None].to(tl.int64) * N + outputs[None, :]
    tl.store(
        out + place, total.to(out.dtype.element_ty), (rows[:, None] < M) & (outputs[None, :] < N)
    )


def reference(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The same in plain torch, in the dtype of its inputs."""
    return torch.nn.functional.linear(x, weight, bias)
