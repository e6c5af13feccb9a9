"""What all launchers share: which configuration fits the card, and clear refusals of shapes and strides that a kernel does not handle."""

from __future__ import annotations

import os

os.environ.setdefault(
    "TRITON_DEFAULT_FP_FUSION", "1"
)  # a * b + c in one rounding; Triton 3.10 would change the default

import torch
import triton
from torch import Tensor

INTERPRETED = (
    os.environ.get("TRITON_INTERPRET") == "1"
)  # kernels run in Python, on tensors of the CPU: for tests
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
ARCHITECTURES = (80, 89, 90)  # A100, RTX 4090, H100 and H200

Config = dict[str, int]  # tile sizes by the kernel's own names, num_warps, num_stages


def architecture() -> int:
    """The newest of ARCHITECTURES that the card at hand is not older than; the oldest under the interpreter. ValueError before sm_80."""
    if INTERPRETED:
        return ARCHITECTURES[0]
    arch = triton.runtime.driver.active.get_current_target().arch
    known = [a for a in ARCHITECTURES if a <= arch]
    if not known:
        raise ValueError(
            f"the kernels need a GPU of compute capability 8.0 or newer (Ampere); this one has {arch / 10:.1f}"
        )
    return known[-1]


def pick(configs: dict[int, Config], override: Config | None = None) -> Config:
    """The configuration for the card at hand, with entries of `override` in place of its own."""
    return configs[architecture()] | (override or {})


def require(holds: bool, message: str) -> None:
    """ValueError(message) unless the condition holds."""
    if not holds:
        raise ValueError(message)


def check(
    name: str,
    tensor: Tensor,
    shape: tuple[int | None, ...],
    dtypes: tuple[torch.dtype, ...] = DTYPES,
    inner: int = 1,
) -> None:
    """ValueError unless a tensor has this shape (None: any size) and one of these dtypes, and its last `inner` dimensions are contiguous."""
    fits = tensor.dim() == len(shape) and all(
        want is None or have == want for have, want in zip(tensor.shape, shape)
    )
    require(
        fits,
        f"{name} has shape {tuple(tensor.shape)}; expected [{', '.join('*' if n is None else str(n) for n in shape)}]",
    )
    require(
        tensor.dtype in dtypes,
        f"{name} is {tensor.dtype}; expected {' or '.join(map(str, dtypes))}",
    )
    stride = 1
    for size, step in zip(
        reversed(tensor.shape[tensor.dim() - inner :]),
        reversed(tensor.stride()[tensor.dim() - inner :]),
    ):
        require(
            size == 1 or step == stride,
            f"{name} has strides {tensor.stride()}; its last {inner} dimensions must be contiguous",
        )
        stride *= size
