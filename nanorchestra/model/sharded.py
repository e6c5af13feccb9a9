"""Reads and writes tensors that may be sharded over ranks: DTensors that FSDP2 divides by rows.

Every function also takes a plain tensor, which counts as held whole by every rank.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:  # slow to import; one process does without it
    from torch.distributed.tensor import DTensor


def is_sharded(tensor: Tensor) -> bool:
    """Returns True for a DTensor, of which this rank holds some rows."""
    return hasattr(tensor, "device_mesh")


def local(tensor: Tensor) -> Tensor:
    """Returns the rows that this rank holds; a plain tensor itself."""
    return tensor.to_local() if is_sharded(tensor) else tensor


def like(tensor: DTensor, part: Tensor) -> DTensor:
    """Returns the DTensor, divided as `tensor` is, of which this rank holds `part`."""
    return type(tensor).from_local(
        part,
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )


def whole(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Gathers all rows on every rank, on the mesh's device, detached, cast to dtype first.

    All ranks must call it together. A plain tensor stays on its device.
    """
    tensor = tensor.detach()
    if not is_sharded(tensor):
        return tensor if dtype is None else tensor.to(dtype)
    return like(tensor, tensor.to_local().to(tensor.device_mesh.device_type, dtype)).full_tensor()


@torch.no_grad()
def fill(tensor: Tensor, value: Tensor, begin: int = 0) -> None:
    """Copies `value` into rows begin.. of `tensor`; each rank takes and casts its own rows."""
    held, first = local(tensor.detach()), first_row(tensor)
    low, high = max(begin, first), min(begin + len(value), first + len(held))
    if low < high:
        held[low - first : high - first].copy_(value[low - begin : high - begin])


def first_row(tensor: Tensor) -> int:
    """Returns the index of this rank's first row, divided as by torch.chunk."""
    if not is_sharded(tensor):
        return 0
    shards = tensor.device_mesh["shard"]
    return min(shards.get_local_rank() * -(-tensor.shape[0] // shards.size()), tensor.shape[0])
