"""Tensors far larger than memory, for the test of offsets: only touched pages take any."""

from __future__ import annotations

import mmap

import torch
from kernel_check import DEVICE
from torch import Tensor

MAP_NORESERVE = 0x4000  # of Linux; Python names it from 3.13 on


def reserved(elements: int, dtype: torch.dtype) -> Tensor:
    """Returns a tensor of so many elements; on a CPU they are zeros, and may exceed memory."""
    if DEVICE == "cuda":
        return torch.empty(elements, dtype=dtype, device=DEVICE)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    return torch.frombuffer(mmap.mmap(-1, elements * dtype.itemsize, flags), dtype=dtype)
