"""Lists the work of decode attention on the host (decode.py): no program is empty.

The keys of a row are cut into splits of a fixed size. Neighbouring rows whose tables begin alike
share the items of their common splits.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import triton
from torch import Tensor

SPLIT = 256  # keys of a program: a change changes the bits of every result
TILE = {2: 64, 4: 8}  # query heads of a program by element size; fp32 needs many registers


class DecodeWork(NamedTuple):
    """What decode_attention computes: items are int32 [N, 3]: first row, number of rows, split.

    An item of 0 rows is padding. starts int32 [B]: the place of a row's first partial result among
    `results`.
    """

    starts: Tensor
    own: Tensor
    shared: Tensor
    results: int


def decode_work(
    lengths: Sequence[int], groups: Sequence[tuple[int, int, int]], most: int = 1
) -> DecodeWork:
    """Returns the work of rows with so many keys, on the CPU.

    groups: (first row, rows, keys) of neighbours whose tables begin alike, for so many keys at
    least; no row is in two. most: that of group_rows.
    """
    counts = -(-np.array(lengths, np.int64) // SPLIT)
    skipped, shared = np.zeros_like(counts), []
    for first, rows, keys in groups:
        skipped[first : first + rows] = keys // SPLIT
        for start in range(first, first + rows, most):
            some = min(most, first + rows - start)
            shared += [(start, some, split) for split in range(keys // SPLIT)]
    left = counts - skipped
    row = np.repeat(np.arange(len(counts)), left)
    split = np.arange(len(row)) + np.repeat(skipped - left.cumsum() + left, left)
    own = np.stack((row, np.ones_like(row), split), 1)
    parts = counts.cumsum() - counts, own, np.array(shared, np.int64).reshape(-1, 3)
    return DecodeWork(*(torch.from_numpy(x.astype(np.int32)) for x in parts), int(counts.sum()))


def group_rows(fold: int, element_size: int) -> int:
    """Returns the rows of a shared item at most, for `fold` query heads of a kv head."""
    return max(1, TILE[element_size] // triton.next_power_of_2(fold))
