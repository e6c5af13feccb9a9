"""Products with weights in 8 or 4 bits: y = x W^T.

    W[n, k] = (values[n, k] - zeros[n, k // group]) * scales[n, k // group]

8 bits: values int8, or float8_e4m3fn from sm_89 on, [N, K], scales fp32 [N, 1], a group is a row;
no zeros. 4 bits: scales fp16 [N, K / group], values uint8 [N, K / 2], where byte j of a group has
column j in the low nibble and column j + group / 2 in the high one; zeros uint8 [N, K / group], or
8 everywhere. The differences enter the product as they are, exact in bf16, and the scales join in
fp32. That reads N K bytes, or N K (1/2 + 2/group), 3/group with zeros, for 2 M N K FLOPs: bandwidth
is the limit up to ROWS rows of x.
QuantisedLinear in nanorchestra/model/quantise.py multiplies more by torch; its `dequantise` is the
reference.

One program owns BLOCK_N outputs of up to 32 rows over one split of K. A second kernel adds the fp32
parts of several splits in order. W^T is the left operand, so that 8 rows of x fill an instruction.
The splits depend on N and K alone, and two warps keep every product on mma m16n8k16, also on
Hopper: the bits of a row do not depend on M.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.common import check, pick, require

ROWS = 64
PROGRAMS = 192  # of 2 * BLOCK_N outputs: a GPU wants at least as many
BLOCK_N, BLOCK_K = 32, 128


def quantised_linear(
    x: Tensor, values: Tensor, scales: Tensor, dtype: torch.dtype, zeros: Tensor | None = None
) -> Tensor:
    """Returns x W^T [M, N] in dtype for x [M, K], M <= ROWS.

    zeros: of 4 bits, None for 8 everywhere. The bits of a row do not depend on M.
    """
    packed, n, m = values.dtype == torch.uint8, len(values), len(x)
    k = values.shape[1] * (1 + packed)
    check((n, None), values.dtype, values=values)
    check((n, None if packed else 1), torch.float16 if packed else torch.float32, scales=scales)
    if zeros is not None:
        require(packed, "zeros: 8-bit values have none")
        check(tuple(scales.shape), torch.uint8, zeros=zeros)
    group = k // scales.shape[1]
    fits = not packed or group in (32, 64, 128, 256)
    require(fits, f"group is {group}; expected 32, 64, 128 or 256")
    check((None, k), x=x)
    require(m <= ROWS, f"x has {m} rows; expected at most {ROWS}")
    tile = {"BLOCK_M": 8 if m <= 8 else 16, "BLOCK_N": BLOCK_N, **pick("quantised_linear")}
    tile["BLOCK_K"] = group if packed else BLOCK_K
    steps = triton.cdiv(k, tile["BLOCK_K"])
    wanted = triton.next_power_of_2(triton.cdiv(PROGRAMS, triton.cdiv(n, 2 * BLOCK_N)))
    split = max(4, triton.cdiv(steps, wanted))  # steps of K in a split
    splits = triton.cdiv(steps, split)
    if m > 16 and x.dtype != torch.float32:
        # x, now the larger part of what is read, is read once for each BLOCK_N outputs
        stages = min(4, tile["num_stages"])
        tile |= {"BLOCK_M": 32, "BLOCK_N": 2 * BLOCK_N, "num_stages": stages}
    out = x.new_empty(m, n, dtype=dtype)
    parts = out if splits == 1 else x.new_empty(splits, m, n, dtype=torch.float32)
    grid = triton.cdiv(m, tile["BLOCK_M"]), triton.cdiv(n, tile["BLOCK_N"]), splits
    _product[grid](x, values, scales, zeros, parts, m, n, k, split, **tile, num_warps=2)
    if splits > 1:
        _add_parts[(m, triton.cdiv(n, 512))](parts, out, splits, m * n, n, BLOCK=512)
    return out


@triton.jit(do_not_specialize=["M"])
def _product(
    x,
    values,
    scales,
    zeros,
    out,
    M,
    N,
    K,
    split,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    outputs = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    first, steps = tl.program_id(2) * split, tl.cdiv(K, BLOCK_K)
    weight = tl.minimum(outputs, N - 1).to(tl.int64)  # beyond N the last row again, not stored
    PACKED: tl.constexpr = values.dtype.element_ty == tl.uint8
    columns = tl.arange(0, BLOCK_K // 2 if PACKED else BLOCK_K)
    inside = rows[None, :] < M
    x += rows[None, :] * K + columns[:, None]
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for step in range(first, tl.minimum(first + split, steps)):
        if not PACKED:
            left = K - step * BLOCK_K  # columns
            place = values + weight[:, None] * K + step * BLOCK_K + columns[None, :]
            value = tl.load(place, columns[None, :] < left, 0.0)
            run = tl.load(x + step * BLOCK_K, (columns[:, None] < left) & inside, 0.0)
            total = tl.dot(value.to(run.dtype), run, total, input_precision="ieee")
        else:  # BLOCK_K is the group
            HALF: tl.constexpr = BLOCK_K // 2
            group = weight * steps + step
            packed = tl.load(values + group[:, None] * HALF + columns[None, :])
            low_run = tl.load(x + step * BLOCK_K, inside, 0.0)
            high_run = tl.load(x + step * BLOCK_K + HALF, inside, 0.0)
            if zeros is None:
                low = ((packed & 15).to(tl.int8) - 8).to(low_run.dtype)
                # 16 times the weight saves the shift of each byte: with its top bit flipped, a byte
                # without its low nibble is 16 * (high - 8)
                high = ((packed ^ 0x80) & 0xF0).to(tl.int8, bitcast=True).to(low_run.dtype)
            else:
                zero = tl.load(zeros + group).to(tl.int16)[:, None]
                low = ((packed & 15).to(tl.int16) - zero).to(low_run.dtype)
                high = ((packed & 0xF0).to(tl.int16) - 16 * zero).to(low_run.dtype)
            part = 16 * tl.dot(low, low_run, input_precision="ieee")
            part = tl.dot(high, high_run, part, input_precision="ieee")
            total += part * (tl.load(scales + group).to(tl.float32) / 16)[:, None]
    if not PACKED:
        total *= tl.load(scales + weight)[:, None]
    place = out + (tl.program_id(2) * M + rows[None, :]).to(tl.int64) * N + outputs[:, None]
    tl.store(place, total, inside & (outputs[:, None] < N))


@triton.jit
def _add_parts(parts, out, splits, size, N, BLOCK: tl.constexpr):
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside, place = columns < N, tl.program_id(0) * N + columns
    total = tl.zeros((BLOCK,), tl.float32)
    for _ in range(splits):
        total += tl.load(parts + place, inside, 0.0)
        parts += size
    tl.store(out + place, total, inside)
