"""Products with weights in 8 or 4 bits: y = x W^T.

    W[n, k] = (values[n, k] - zeros[n, k // group]) * scales[n, k // group]

8 bits: values int8 [N, K], scales fp32 [N, 1], a group is a row; no zeros. 4 bits: scales fp16 [N,
K / group], values uint8 [N, K / 2], where byte j of a group has column j in the low nibble and
column j + group / 2 in the high one; zeros uint8 [N, K / group], or 8 everywhere. The differences
enter the product as they are, exact in bf16, and the scales join in fp32. That reads N K bytes, or
N K (1/2 + 2/group), 3/group with zeros, for 2 M N K FLOPs: bandwidth is the limit up to 32 rows of
x. QuantisedLinear in nanorchestra/model/quantise.py multiplies more than ROWS by torch, from a
widened copy, which then costs less than the narrow instruction below.

One program of `_product` owns BLOCK_N outputs of up to 16 rows over one split of K; above 16 rows,
2 * BLOCK_N outputs of up to 32. Blocks of rows with the same outputs are neighbours in the grid, so
that all but the first read W from L2. `_add_parts` adds the fp32 parts of several splits in order.
W is the left operand, so that 8 rows of x fill an instruction. The splits depend on N and K alone,
and two warps keep every product on mma m16n8k16, also on Hopper: the bits of a row do not depend on
M.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.common import check, dependent_launch, pick, wait_for_previous

ROWS = 128
GROUPS = 256, 128, 64, 32  # columns that may share a scale with 4 bits
FEWEST_PROGRAMS = 192  # that a GPU wants; also of 2 * BLOCK_N outputs, as splits depend on N and K
BLOCK_N = 32
BLOCK_K = 128  # of 8 bits; of 4 bits it is the group
SHORTEST_SPLIT = 4  # steps of BLOCK_K columns


def naive_quantised_linear(
    x: Tensor, values: Tensor, scales: Tensor, zeros: Tensor | None = None
) -> Tensor:
    """Returns x W^T, column by column of W's stored values, in the dtype of x."""
    packed = values.dtype == torch.uint8
    columns = values.shape[1] * (2 if packed else 1)
    group = columns // scales.shape[1]
    weight = x.new_zeros(len(values), columns)
    for column in range(columns):
        index = column // group
        if packed:
            within = column % group
            byte = values[:, index * group // 2 + within % (group // 2)]
            q = byte & 15 if within < group // 2 else byte >> 4
            zero = 8 if zeros is None else zeros[:, index].to(x.dtype)
        else:
            q = values[:, column]
            zero = 0
        weight[:, column] = (q.to(x.dtype) - zero) * scales[:, index].to(x.dtype)
    return x @ weight.T


def quantised_linear(
    x: Tensor, values: Tensor, scales: Tensor, dtype: torch.dtype, zeros: Tensor | None = None
) -> Tensor:
    """Returns x W^T [M, N] in dtype for x [M, K], M <= ROWS.

    zeros: of 4 bits, None for 8 everywhere. The bits of a row do not depend on M. ValueError if the
    shapes do not fit, or if a group is none of GROUPS.
    """
    packed = values.dtype == torch.uint8
    m = len(x)
    n = len(values)
    k = values.shape[1] * (2 if packed else 1)
    _check_weights(values, scales, zeros, n, k)
    check((None, k), x=x)
    if m > ROWS:
        raise ValueError(f"x has {m} rows; expected at most {ROWS}")

    block_k = k // scales.shape[1] if packed else BLOCK_K
    steps = triton.cdiv(k, block_k)
    programs = triton.cdiv(n, 2 * BLOCK_N)
    most_splits = triton.next_power_of_2(triton.cdiv(FEWEST_PROGRAMS, programs))
    steps_of_split = max(SHORTEST_SPLIT, triton.cdiv(steps, most_splits))
    splits = triton.cdiv(steps, steps_of_split)

    block_m = 8 if m <= 8 else 16
    block_n = BLOCK_N
    stages = pick("quantised_linear")["num_stages"]
    if m > 16 and x.dtype != torch.float32:
        # x, now the larger part of what is read, is read once for each block of outputs.
        block_m = 32
        block_n = 2 * BLOCK_N
        stages = min(4, stages)

    out = x.new_empty(m, n, dtype=dtype)
    parts = out
    if splits > 1:
        parts = x.new_empty(splits, m, n, dtype=torch.float32)
    _product[(triton.cdiv(m, block_m), triton.cdiv(n, block_n), splits)](
        x,
        values,
        scales,
        zeros,
        parts,
        m,
        n,
        k,
        steps_of_split,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        num_warps=2,
        num_stages=stages,
        **dependent_launch(),
    )
    if splits > 1:
        _add_parts[(m, triton.cdiv(n, 512))](
            parts, out, splits, m, n, BLOCK=512, **dependent_launch()
        )
    return out


def _check_weights(values, scales, zeros, n, k) -> None:
    """Raises ValueError unless the stored tensors belong to one matrix [n, k]."""
    packed = values.dtype == torch.uint8
    check((n, None), torch.uint8 if packed else torch.int8, values=values)
    check((n, None if packed else 1), torch.float16 if packed else torch.float32, scales=scales)
    groups = scales.shape[1]
    if packed and (k % groups or k // groups not in GROUPS):
        raise ValueError(
            f"scales has {groups} groups for {k} columns; expected groups of 32, 64, 128 or 256"
        )
    if zeros is not None:
        if not packed:
            raise ValueError("zeros: 8-bit values have none")
        check(tuple(scales.shape), torch.uint8, zeros=zeros)


@triton.jit(do_not_specialize=["M"])
def _product(
    x_ptr,  # [M, K]
    values_ptr,  # [N, K] or uint8 [N, K / 2]
    scales_ptr,  # fp32 [N, 1] or fp16 [N, K / group]
    zeros_ptr,  # uint8 [N, K / group] or None
    out_ptr,  # [splits, M, N]
    M,
    N,
    K,
    steps_of_split,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    wait_for_previous(DEPENDENT)
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    outputs = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    split = tl.program_id(2)
    steps = tl.cdiv(K, BLOCK_K)
    first = split * steps_of_split
    end = tl.minimum(first + steps_of_split, steps)
    weight_rows = tl.minimum(outputs, N - 1).to(tl.int64)  # beyond N the last again, not stored
    PACKED: tl.constexpr = values_ptr.dtype.element_ty == tl.uint8
    columns = tl.arange(0, BLOCK_K // 2 if PACKED else BLOCK_K)
    inside = rows[None, :] < M
    x_ptr += rows[None, :] * K + columns[:, None]
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for step in range(first, end):
        if not PACKED:
            left = K - step * BLOCK_K  # columns
            values_ptrs = values_ptr + weight_rows[:, None] * K + step * BLOCK_K + columns[None, :]
            values = tl.load(values_ptrs, columns[None, :] < left, 0.0)
            x = tl.load(x_ptr + step * BLOCK_K, (columns[:, None] < left) & inside, 0.0)
            total = tl.dot(values.to(x.dtype), x, total, input_precision="ieee")
        else:  # BLOCK_K is the group
            HALF: tl.constexpr = BLOCK_K // 2
            group = weight_rows * steps + step
            values = tl.load(values_ptr + group[:, None] * HALF + columns[None, :])
            low_x = tl.load(x_ptr + step * BLOCK_K, inside, 0.0)
            high_x = tl.load(x_ptr + step * BLOCK_K + HALF, inside, 0.0)
            if zeros_ptr is None:
                low = ((values & 15).to(tl.int8) - 8).to(low_x.dtype)
                # 16 times the weight saves the shift of each byte: with its top bit flipped, a byte
                # without its low nibble is 16 * (high - 8).
                high = ((values ^ 0x80) & 0xF0).to(tl.int8, bitcast=True).to(low_x.dtype)
            else:
                zero = tl.load(zeros_ptr + group).to(tl.int16)[:, None]
                low = ((values & 15).to(tl.int16) - zero).to(low_x.dtype)
                high = ((values & 0xF0).to(tl.int16) - 16 * zero).to(low_x.dtype)
            part = 16 * tl.dot(low, low_x, input_precision="ieee")
            part = tl.dot(high, high_x, part, input_precision="ieee")
            total += part * (tl.load(scales_ptr + group).to(tl.float32) / 16)[:, None]
    if not PACKED:
        total *= tl.load(scales_ptr + weight_rows)[:, None]
    out_ptrs = out_ptr + (split * M + rows[None, :]).to(tl.int64) * N + outputs[:, None]
    tl.store(out_ptrs, total, inside & (outputs[:, None] < N))


@triton.jit(do_not_specialize=["M"])
def _add_parts(
    parts_ptr,  # fp32 [splits, M, N]
    out_ptr,  # [M, N]
    splits,
    M,
    N,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    wait_for_previous(DEPENDENT)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < N
    offsets = tl.program_id(0).to(tl.int64) * N + columns
    total = tl.zeros((BLOCK,), tl.float32)
    for split in range(splits):
        total += tl.load(parts_ptr + split * M * N + offsets, inside, 0.0)
    tl.store(out_ptr + offsets, total, inside)
