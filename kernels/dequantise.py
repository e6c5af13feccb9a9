"""Weights in 8 or 4 bits written out in full, computed in fp32 and rounded once.

    W[n, k] = (values[n, k] - zeros[n, k // group]) * scales[n, k // group]

8 bits: values int8 or float8_e4m3fn [N, K], scales fp32 [N, 1], no zeros. int4: scales fp16 and
zeros uint8 [N, K / group], values uint8 [N, K / 2], where byte j of a group has its column j in the
low nibble and column j + group / 2 in the high one (as in nanorchestra/model/quantise.py, whose
`dequantise` is the reference).

Reads N K bytes, or N K (1/2 + 3/group), and writes N K elements: bandwidth is the limit. One
program owns up to BLOCK bytes of one row.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.common import check, require

BLOCK = 2048


def dequantise(
    values: Tensor, scales: Tensor, zeros: Tensor | None, group: int, dtype: torch.dtype
) -> Tensor:
    """Returns W [N, K] in dtype; zeros are None in 8 bits."""
    n, k = check_weights(values, scales, zeros, group)
    out = values.new_empty(n, k, dtype=dtype)
    width = values.shape[1]
    grid = n, triton.cdiv(width, BLOCK)
    _dequantise[grid](values, scales, zeros, out, width, group // 2, BLOCK)
    return out


def check_weights(
    values: Tensor, scales: Tensor, zeros: Tensor | None, group: int
) -> tuple[int, int]:
    """Returns (N, K). ValueError if a shape, a dtype or a stride does not fit."""
    n, width = values.shape
    if zeros is None:
        eight = torch.int8, torch.float8_e4m3fn
        require(values.dtype in eight, f"values is {values.dtype}; expected {eight}")
        check((n, width), values.dtype, values=values)
        check((n, 1), torch.float32, scales=scales)
        return n, width
    check((n, width), torch.uint8, values=values)
    require(group in (32, 64, 128, 256), f"group is {group}; expected 32, 64, 128 or 256")
    check((n, 2 * width // group), torch.float16, scales=scales)
    check(scales.shape, torch.uint8, zeros=zeros)
    return n, 2 * width


@triton.jit
def _dequantise(values, scales, zeros, out, width, HALF: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)  # of values [N, width]
    inside = columns < width
    packed = tl.load(values + row * width + columns, inside, 0.0 if zeros is None else 0)
    if zeros is None:
        weight = packed.to(tl.float32) * tl.load(scales + row)
        tl.store(out + row * width + columns, weight, inside)
    else:
        group = row * (width // HALF) + columns // HALF
        zero = tl.load(zeros + group, inside, 0).to(tl.float32)
        scale = tl.load(scales + group, inside, 0.0).to(tl.float32)
        out += group * (2 * HALF) + columns % HALF
        tl.store(out, ((packed & 15).to(tl.float32) - zero) * scale, inside)
        tl.store(out + HALF, ((packed >> 4).to(tl.float32) - zero) * scale, inside)
