"""RMSNorm of rows: x / sqrt(mean(x^2) + eps) * weight (Zhang & Sennrich 2019, eq. 4).

`rms_norm` reads and writes one element per element of x, with a residual two; the backward pass
reads two and writes one. A few FLOPs each: bandwidth is the limit. At T = 8192, N = 4096 in bf16
they move 134, 268 and 201 MB. One program owns ROWS whole rows in registers: one row from N = 4096
on.

Backward, with n = x * rstd and g = grad * weight: dx = rstd * (g - n * mean(g * n)) and
dweight = sum over rows of grad * n. rstd is recomputed. A fixed number of programs share the rows.
Each sums its part of dweight in registers and writes it once; torch adds the parts. There are no
atomics, so the result has the same bits in every run. All arithmetic is fp32, rounded once.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.common import check, pick, require

MAX_WIDTH = 8192  # elements of a row that the backward pass keeps in registers without spilling
TILE = 4096  # elements of a program with WARPS warps
WARPS = 8


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor:
    """Returns the normalised rows: x [T, N] with any row stride, weight [N] -> [T, N].

    With a residual [T, N], x is added to it in place, and the sum is normalised before it is
    rounded for the residual.
    """
    tile = _tile(x, weight)
    if residual is not None:
        check(x.shape, x.dtype, residual=residual)
    rows, width = x.shape
    out = x.new_empty(rows, width)
    grid = (triton.cdiv(rows, tile["ROWS"]),)
    _rms_norm[grid](x, residual, weight, out, rows, x.stride(0), eps, width, **tile)
    return out


def rms_norm_train(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Returns rms_norm(x, weight, eps), differentiable in x and weight."""
    return _RmsNorm.apply(x, weight, eps)


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, eps):
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return rms_norm(x, weight, eps)

    @staticmethod
    def backward(ctx, grad):
        (x, weight), (rows, width) = ctx.saved_tensors, grad.shape
        tile, config = _tile(x, weight), pick("rms_norm_backward")
        programs = min(config["PROGRAMS"], triton.cdiv(rows, tile["ROWS"]))
        dx, parts = x.new_empty(rows, width), x.new_empty(programs, width, dtype=torch.float32)
        inputs = grad.contiguous(), x, weight, dx, parts, rows, x.stride(0), ctx.eps, width
        _rms_norm_backward[(programs,)](*inputs, STAGES=config["STAGES"], **tile)
        return dx, parts.sum(0).to(weight.dtype), None


def _tile(x, weight) -> dict[str, int]:
    """The constants of the kernels; a row longer than TILE has warps in proportion."""
    check((None, None), strided=True, x=x)
    width = x.shape[1]
    require(1 <= width <= MAX_WIDTH, f"x has rows of {width}; expected 1 to {MAX_WIDTH}")
    check((width,), weight=weight)
    block = triton.next_power_of_2(width)
    warps = WARPS * triton.cdiv(block, TILE)
    return {"ROWS": triton.cdiv(TILE, block), "BLOCK": block, "num_warps": warps}


@triton.jit(do_not_specialize=["T"])
def _rms_norm(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    T,
    x_stride,
    eps,
    N: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    cols = tl.arange(0, BLOCK)[None, :]
    inside = (rows < T) & (cols < N)
    weight = tl.load(weight_ptr + cols, cols < N, 0.0).to(tl.float32)
    x = tl.load(x_ptr + rows * x_stride + cols, inside, 0.0).to(tl.float32)
    if residual_ptr is not None:
        x += tl.load(residual_ptr + rows * N + cols, inside, 0.0).to(tl.float32)
        tl.store(residual_ptr + rows * N + cols, x, inside)
    out = x * tl.rsqrt(tl.sum(x * x, 1, keep_dims=True) / N + eps) * weight
    tl.store(out_ptr + rows * N + cols, out, inside)


@triton.jit(do_not_specialize=["T"])
def _rms_norm_backward(
    grad_ptr,
    x_ptr,
    weight_ptr,
    dx_ptr,
    parts_ptr,
    T,
    x_stride,
    eps,
    N: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    cols = tl.arange(0, BLOCK)[None, :]
    weight = tl.load(weight_ptr + cols, cols < N, 0.0).to(tl.float32)
    dweight = tl.zeros((ROWS, BLOCK), tl.float32)
    for tile in tl.range(tl.program_id(0), tl.cdiv(T, ROWS), tl.num_programs(0), num_stages=STAGES):
        rows = (tile * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
        inside = (rows < T) & (cols < N)
        x = tl.load(x_ptr + rows * x_stride + cols, inside, 0.0).to(tl.float32)
        grad = tl.load(grad_ptr + rows * N + cols, inside, 0.0).to(tl.float32)
        rstd = tl.rsqrt(tl.sum(x * x, 1, keep_dims=True) / N + eps)
        mean = tl.sum(grad * weight * x, 1, keep_dims=True) * rstd / N
        tl.store(dx_ptr + rows * N + cols, (grad * weight - x * rstd * mean) * rstd, inside)
        dweight += grad * x * rstd
    part = parts_ptr + tl.program_id(0) * N + cols
    tl.store(part, tl.sum(dweight, 0, keep_dims=True), cols < N)


def reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Returns what rms_norm computes, in the dtype of its arguments."""
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight
