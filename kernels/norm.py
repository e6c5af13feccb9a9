"""RMSNorm: x / sqrt(mean(x^2) + eps) * weight over each row (Zhang & Sennrich 2019, eq. 4); alone, after a residual addition, and for training.

The arithmetic is fp32, every result is rounded once. Per element of a row: `rms_norm` reads and writes one element, `add_rms_norm` two each,
the backward pass reads two and writes one; a handful of FLOPs each, so bandwidth is the limit (T = 8192, N = 4096, bf16: 134, 268 and 201 MB).
One program owns ROWS whole rows, which stay in registers: one row from N = 4096 on, more when rows are short.

Backward, with n = x * rstd and g = grad * weight: dx = rstd * (g - n * mean(g * n)), dweight = sum over rows of grad * n. The row is at hand, so
rstd is computed again rather than kept. A fixed number of programs share the rows; each sums its part of dweight in registers and writes it
once in fp32 [programs, N], and the parts are added in order: no atomics, the same bits every time.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.common import Config, check, pick, require

MAX_WIDTH = 8192  # elements of a row that the backward pass keeps in registers without spilling
CONFIGS = {
    80: {"TILE": 4096, "num_warps": 8},
    89: {"TILE": 4096, "num_warps": 8},
    90: {"TILE": 4096, "num_warps": 8},
}
BACKWARD_CONFIGS = {  # two programs for each multiprocessor of an A100, an RTX 4090, an H100 or H200
    80: {"TILE": 4096, "PROGRAMS": 216, "STAGES": 3, "num_warps": 8},
    89: {"TILE": 4096, "PROGRAMS": 256, "STAGES": 2, "num_warps": 8},
    90: {"TILE": 4096, "PROGRAMS": 264, "STAGES": 3, "num_warps": 8},
}


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, out: Tensor | None = None, config: Config | None = None
) -> Tensor:
    """x [T, N], its rows any stride apart; weight [N] -> [T, N]. N at most MAX_WIDTH."""
    T, N, out, tile = _prepare(x, weight, out, pick(CONFIGS, config))
    _rms_norm[(triton.cdiv(T, tile["ROWS"]),)](x, weight, out, T, x.stride(0), eps, N, **tile)
    return out


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    out: Tensor | None = None,
    config: Config | None = None,
) -> tuple[Tensor, Tensor]:
    """residual [T, N] += x in place, and the norm of that sum before it is rounded: (normed [T, N], residual). The rest as in rms_norm."""
    T, N, out, tile = _prepare(x, weight, out, pick(CONFIGS, config))
    check("residual", residual, (T, N), (x.dtype,), inner=2)
    _add_rms_norm[(triton.cdiv(T, tile["ROWS"]),)](
        x, residual, weight, out, T, x.stride(0), eps, N, **tile
    )
    return out, residual


def rms_norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor, eps: float, config: Config | None = None
) -> tuple[Tensor, Tensor]:
    """(dx [T, N], dweight [N]) from grad [T, N] and the inputs of rms_norm."""
    config = pick(BACKWARD_CONFIGS, config)
    T, N, dx, tile = _prepare(x, weight, None, config)
    check("grad", grad, (T, N), (x.dtype,), inner=2)
    programs = min(config["PROGRAMS"], triton.cdiv(T, tile["ROWS"]))
    partial = torch.empty(programs, N, dtype=torch.float32, device=x.device)
    _rms_norm_backward[(programs,)](
        grad, x, weight, dx, partial, T, x.stride(0), eps, N, STAGES=config["STAGES"], **tile
    )
    return dx, partial.sum(0).to(weight.dtype)


def _prepare(
    x: Tensor, weight: Tensor, out: Tensor | None, config: Config
) -> tuple[int, int, Tensor, Config]:
    """T, N, the output, and how many rows make a tile; a row longer than TILE has warps in proportion."""
    check("x", x, (None, None))
    T, N = x.shape
    require(1 <= N <= MAX_WIDTH, f"a row of x has {N} elements; supported are 1 to {MAX_WIDTH}")
    check("weight", weight, (N,))
    out = torch.empty(T, N, dtype=x.dtype, device=x.device) if out is None else out
    check("out", out, (T, N), (x.dtype,), inner=2)
    block = triton.next_power_of_2(N)
    warps = config["num_warps"] * triton.cdiv(block, config["TILE"])
    return (
        T,
        N,
        out,
        {"ROWS": triton.cdiv(config["TILE"], block), "BLOCK": block, "num_warps": warps},
    )


# for training: rms_norm_train(x, weight, eps) is rms_norm with gradients for x and weight
rms_norm_train = torch.library.custom_op(
    "nanorchestra::rms_norm",
    rms_norm,
    mutates_args=(),
    schema="(Tensor x, Tensor weight, float eps) -> Tensor",
)
_backward = torch.library.custom_op(
    "nanorchestra::rms_norm_backward",
    rms_norm_backward,
    mutates_args=(),
    schema="(Tensor grad, Tensor x, Tensor weight, float eps) -> (Tensor, Tensor)",
)


def _save(ctx, inputs, output) -> None:
    x, weight, ctx.eps = inputs
    ctx.save_for_backward(x, weight)


rms_norm_train.register_fake(lambda x, weight, eps: x.new_empty(x.shape))
_backward.register_fake(
    lambda grad, x, weight, eps: (x.new_empty(x.shape), weight.new_empty(weight.shape))
)
rms_norm_train.register_autograd(
    lambda ctx, grad: (*_backward(grad.contiguous(), *ctx.saved_tensors, ctx.eps), None),
    setup_context=_save,
)


@triton.jit
def _normed(x, weight, eps, N: tl.constexpr):
    return x * tl.rsqrt(tl.sum(x * x, 1, keep_dims=True) / N + eps) * weight


@triton.jit(do_not_specialize=["T"])
def _rms_norm(
    x_ptr,
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
    tl.store(out_ptr + rows * N + cols, _normed(x, weight, eps, N), inside)


@triton.jit(do_not_specialize=["T"])
def _add_rms_norm(
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
    x += tl.load(residual_ptr + rows * N + cols, inside, 0.0).to(tl.float32)
    tl.store(residual_ptr + rows * N + cols, x, inside)
    tl.store(out_ptr + rows * N + cols, _normed(x, weight, eps, N), inside)


@triton.jit(do_not_specialize=["T"])
def _rms_norm_backward(
    grad_ptr,
    x_ptr,
    weight_ptr,
    dx_ptr,
    partial_ptr,
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
    tl.store(
        partial_ptr + tl.program_id(0) * N + cols, tl.sum(dweight, 0, keep_dims=True), cols < N
    )


def reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight
