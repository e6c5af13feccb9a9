"""Decode attention over pages that several rows share (samples of one prompt), read once for all.

A group is up to ROWS neighbouring rows of the batch whose block tables begin alike. A program owns
SPLIT shared keys of one group and one kv head, for BLOCK_M of the group's query heads: 64 FLOP a
byte in bf16, where a row alone does 4 at G = 4. It writes the partial result of each row where the
row's own program would write it, so that the merge in decode.py is the same. (Hydragen; Juravsky et
al. 2024.)

groups int32 [N, 3]: first row, number of rows (at most ROWS; 0: padding), shared length in keys.
The shared length is a multiple of SPLIT, and no row of the group is shorter. The groups lie on the
device, so that a captured graph serves any grouping into at most N groups.
"""

import triton
import triton.language as tl

from kernels.attention import attend_split

ROWS = 16


def group_tile(heads: int, element_size: int) -> dict[str, int]:
    """Returns the constants of a group's programs, for `heads` query heads of a kv head."""
    members = triton.next_power_of_2(heads)  # slot of a query head: row * members + head
    slots = ROWS * members
    block = min(slots, 64 if element_size == 2 else 8)  # fp32 products need many registers
    return {"PARTS": slots // block, "MEMBERS": members, "BLOCK_M": block}


@triton.jit
def shared_splits(
    q,
    k_cache,
    v_cache,
    tables,
    groups,
    partial,
    lse,
    q_stride,
    table_stride,
    PARTS: tl.constexpr,
    MEMBERS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    G: tl.constexpr,
    HKV: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Fills partial [B, splits, H, D] and lse [B, splits, H] at the shared splits of the groups."""
    group, head, split = groups + tl.program_id(0) // PARTS * 3, tl.program_id(1), tl.program_id(2)
    slot = tl.program_id(0) % PARTS * BLOCK_M + tl.arange(0, BLOCK_M)
    start, rows, first = tl.load(group).to(tl.int64), tl.load(group + 1), split * SPLIT
    if (tl.program_id(0) % PARTS * BLOCK_M >= rows * MEMBERS) | (first >= tl.load(group + 2)):
        return
    row, member = start + slot // MEMBERS, slot % MEMBERS
    real = (slot // MEMBERS < rows) & (member < G)
    columns = tl.arange(0, D)[None, :]
    place = q + row[:, None] * q_stride + (head * G + member[:, None]) * D + columns
    queries = tl.load(place, real[:, None], 0.0)
    pages = k_cache, v_cache, tables + start * table_stride, head
    mean, log_sum = attend_split(queries, pages, first, first + SPLIT, HKV, PAGE, BLOCK_N)
    at = (row * tl.num_programs(2) + split) * (HKV * G) + head * G + member
    tl.store(partial + at[:, None] * D + columns, mean, real[:, None])
    tl.store(lse + at, log_sum, real)
