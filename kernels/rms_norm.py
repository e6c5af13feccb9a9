"""RMSNorm of rows, alone or after a residual addition: x / sqrt(mean(x^2) + eps) * weight.

Zhang & Sennrich 2019, eq. 4. `rms_norm` reads and writes one element for each of x,
`add_rms_norm` reads two and writes two. A few FLOPs each: bandwidth is the limit. At T = 8192
tokens, N = 4096, bf16:

    rms_norm 134 MB; add_rms_norm 268 MB

The sum of x and residual is rounded to their dtype, and the norm reads the rounded sum, so the bits
do not depend on whether the sum is made here or before. Everything else is fp32, and every result
is rounded once. Nothing is updated in place. Where gradients are wanted, model/ops.py calls torch's
addition and F.rms_norm instead, which differ by the order of a sum.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.common import check, dependent_launch, wait_for_previous

MAX_WIDTH = 8192  # elements of a row, which a program keeps in registers
TILE = 4096  # elements that one program holds at a time, with WARPS warps
WARPS = 8


def naive_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Returns what rms_norm computes, row by row, in the dtype of its arguments."""
    rows = []
    for row in x:  # [N]
        mean_square = (row * row).sum() / len(row)
        rows.append(row / (mean_square + eps).sqrt() * weight)
    return torch.stack(rows)


def naive_add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Returns what add_rms_norm computes, row by row, in the dtype of its arguments."""
    summed = x + residual
    return naive_rms_norm(summed, weight, eps), summed


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Returns the normalised rows [T, N], without gradients.

    x [T, N] with any row stride, N at most MAX_WIDTH; weight [N]; both of DTYPES. ValueError for
    other shapes.
    """
    _check(x, weight)
    out, _ = _forward(x, None, weight, eps)
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Returns rms_norm(x + residual) and x + residual, each [T, N], without gradients.

    x [T, N] with any row stride, N at most MAX_WIDTH; residual [T, N] of x's dtype; weight [N].
    ValueError for other shapes. The sum has x's dtype, and has the bits of torch's sum.
    """
    _check(x, weight)
    check(x.shape, x.dtype, residual=residual)
    return _forward(x, residual, weight, eps)


def _check(x: Tensor, weight: Tensor) -> None:
    check((None, None), strided=True, x=x)
    width = x.shape[1]
    if not 1 <= width <= MAX_WIDTH:
        raise ValueError(f"x has rows of {width}; expected 1 to {MAX_WIDTH}")
    check((width,), weight=weight)


def _tile(width: int) -> dict[str, int]:
    """Returns the constants of the kernels for rows of `width` elements.

    A program holds ROWS whole rows; a row longer than TILE has warps in proportion.
    """
    block = triton.next_power_of_2(width)
    warps = WARPS * triton.cdiv(block, TILE)
    return {"N": width, "ROWS": triton.cdiv(TILE, block), "BLOCK": block, "num_warps": warps}


def _forward(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float):
    """Returns the normalised rows, and the sum if there is a residual."""
    rows, width = x.shape
    tile = _tile(width)
    out = x.new_empty(rows, width)
    summed = None if residual is None else x.new_empty(rows, width)
    grid = (triton.cdiv(rows, tile["ROWS"]),)
    constants = tile | dependent_launch()
    _rms_norm[grid](x, residual, weight, out, summed, rows, x.stride(0), eps, **constants)
    return out, summed


@triton.jit(do_not_specialize=["T"])
def _rms_norm(
    x_ptr,  # [T, N], rows x_stride apart
    residual_ptr,  # [T, N], or None
    weight_ptr,  # [N]
    out_ptr,  # [T, N]
    summed_ptr,  # [T, N], or None as residual_ptr
    T,
    x_stride,
    eps,
    N: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    wait_for_previous(DEPENDENT)
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]  # [ROWS, 1]
    cols = tl.arange(0, BLOCK)[None, :]
    inside = (rows < T) & (cols < N)
    weight = tl.load(weight_ptr + cols, cols < N, 0.0).to(tl.float32)
    x = tl.load(x_ptr + rows * x_stride + cols, inside, 0.0).to(tl.float32)  # [ROWS, BLOCK]
    if residual_ptr is not None:
        residual = tl.load(residual_ptr + rows * N + cols, inside, 0.0).to(tl.float32)
        summed = (x + residual).to(summed_ptr.dtype.element_ty)
        tl.store(summed_ptr + rows * N + cols, summed, inside)
        x = summed.to(tl.float32)
    rstd = tl.rsqrt(tl.sum(x * x, 1, keep_dims=True) / N + eps)
    tl.store(out_ptr + rows * N + cols, x * rstd * weight, inside)
