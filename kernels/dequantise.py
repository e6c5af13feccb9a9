"""Weights in 8 or 4 bits written out in full: W[n, k] = (values[n, k] - zeros[n, k // group]) * scales[n, k // group], in fp32, rounded once.

The storage is that of nanorchestra/model/quantise.py. int8: values [N, K], scales fp32 [N, 1], no zeros. int4: two to a byte, where byte j of a group
has its column j in the low nibble and column j + group / 2 in the high one; scales fp16 and zeros uint8 [N, K / group].

Reads N K bytes (or N K / 2 and 3 for each group) and writes N K elements, with 2 N K FLOPs. One program owns up to BLOCK bytes of one row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.common import Config, check, pick, require

CONFIGS = {arch: {"BLOCK": 2048, "num_warps": 4} for arch in (80, 89, 90)}


def dequantise_int8(
    values: Tensor,
    scales: Tensor,
    dtype: torch.dtype,
    out: Tensor | None = None,
    config: Config | None = None,
) -> Tensor:
    """values int8 [N, K], scales fp32 [N, 1] -> W [N, K] in dtype, rounded once."""
    return _dequantised(values, scales, None, 0, dtype, out, config)


def dequantise_int4(
    values: Tensor,
    scales: Tensor,
    zeros: Tensor,
    group: int,
    dtype: torch.dtype,
    out: Tensor | None = None,
    config: Config | None = None,
) -> Tensor:
    """values uint8 [N, K / 2], scales fp16 and zeros uint8 [N, K / group] -> W [N, K] in dtype, rounded once."""
    return _dequantised(values, scales, zeros, group, dtype, out, config)


def check_weights(
    values: Tensor, scales: Tensor, zeros: Tensor | None, group: int
) -> tuple[int, int]:
    """(N, K) of weights in 8 bits (zeros None) or 4; ValueError if a shape or a dtype does not fit."""
    check("values", values, (None, None), (torch.int8 if zeros is None else torch.uint8,), inner=2)
    n, k = len(values), values.shape[1] * (1 if zeros is None else 2)
    require(
        n > 0 and k > 0, f"values have shape {tuple(values.shape)}; expected no empty dimension"
    )
    if zeros is None:
        check("scales", scales, (n, 1), (torch.float32,), inner=2)
    else:
        require(
            group in (32, 64, 128, 256) and k % group == 0,
            f"{k} columns in groups of {group}; expected 32, 64, 128 or 256, dividing them",
        )
        check("scales", scales, (n, k // group), (torch.float16,), inner=2)
        check("zeros", zeros, (n, k // group), (torch.uint8,), inner=2)
    return n, k


def _dequantised(
    values: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    group: int,
    dtype: torch.dtype,
    out: Tensor | None,
    config: Config | None,
) -> Tensor:
    n, k = check_weights(values, scales, zeros, group)
    out = torch.empty(n, k, dtype=dtype, device=values.device) if out is None else out
    check("out", out, (n, k), (dtype,), inner=2)
    chosen, width = pick(CONFIGS, config), values.shape[1]
    _dequantise[(n, triton.cdiv(width, chosen["BLOCK"]))](
        values, scales, zeros, out, width, HALF=group // 2, **chosen
    )
    return out


@triton.jit
def _dequantise(values, scales, zeros, out, width, HALF: tl.constexpr, BLOCK: tl.constexpr):
    row, columns = (
        tl.program_id(0).to(tl.int64),
        tl.program_id(1) * BLOCK + tl.arange(0, BLOCK),
    )  # of values [N, width]
    inside = columns < width
    packed = tl.load(values + row * width + columns, inside, 0)
    if zeros is None:
        tl.store(
            out + row * width + columns,
            (packed.to(tl.float32) * tl.load(scales + row)).to(out.dtype.element_ty),
            inside,
        )
    else:
        group = row * (width // HALF) + columns // HALF
        zero, scale = (
            tl.load(zeros + group, inside, 0).to(tl.float32),
            tl.load(scales + group, inside, 0.0).to(tl.float32),
        )
        out += group * (2 * HALF) + columns % HALF
        tl.store(
            out, (((packed & 15).to(tl.float32) - zero) * scale).to(out.dtype.element_ty), inside
        )
        tl.store(
            out + HALF,
            (((packed >> 4).to(tl.float32) - zero) * scale).to(out.dtype.element_ty),
            inside,
        )


def reference(
    values: Tensor, scales: Tensor, zeros: Tensor | None = None, group: int = 128
) -> Tensor:
    """W [N, K] in float64, which holds it exactly."""
    if zeros is None:
        return values.double() * scales.double()
    halves = values.unflatten(1, (-1, group // 2))  # [N, groups, group / 2]
    return (
        (torch.cat((halves & 15, halves >> 4), 2).double() - zeros[..., None])
        * scales[..., None].double()
    ).flatten(1)
