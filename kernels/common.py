"""What all launchers share: configurations of the GPU at hand, checks of shapes and strides."""

import os
import tomllib
from pathlib import Path

# a * b + c is rounded once. Triton 3.10 changes the default.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

import torch
import triton
from torch import Tensor

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
FP8 = torch.float8_e4m3fn  # what the KV cache may hold in place of the dtype of q, from sm_89 on
SMALL = (86, 89, 120, 121)  # cards whose blocks have 99 KiB take those of sm_89
SIZES = (16, 32, 64, 128, 256)  # of heads, and of pages
FP32 = "32"  # key of a configuration for float32 tensors
# kernel -> architecture, or FP32 -> configuration
TILES = tomllib.loads(Path(__file__).with_name("tiles.toml").read_text(encoding="utf-8"))

Config = dict[str, int]  # tile sizes by the kernel's own names, num_warps, num_stages


def pick(kernel: str, dtype: torch.dtype | None = None) -> Config:
    """Returns a kernel's configuration for float32 if there is one, else that for the GPU at hand.

    Another GPU takes those of the last one before it with as much shared memory. ValueError before
    sm_80.
    """
    configs = TILES[kernel]
    if dtype == torch.float32 and FP32 in configs:
        return configs[FP32]
    if os.environ.get("TRITON_INTERPRET") == "1":  # kernels run in Python on CPU tensors
        return configs["80"]
    arch = triton.runtime.driver.active.get_current_target().arch
    require(arch >= 80, f"the kernels need a GPU of compute capability 8.0; it has {arch / 10}")
    return configs["89" if arch in SMALL else "90" if arch >= 90 else "80"]


def require(holds: bool, message: str) -> None:
    """Raises ValueError(message) unless the condition holds."""
    if not holds:
        raise ValueError(message)


def check(
    shape: tuple[int | None, ...],
    dtype: torch.dtype | None = None,
    strided: bool = False,
    **tensors: Tensor,
) -> None:
    """Raises ValueError unless every tensor has this shape and dtype and is contiguous.

    None stands for any size, and for any of DTYPES. strided: the first dimension may have any
    stride.
    """
    for name, x in tensors.items():
        fits = x.dim() == len(shape) and all(
            want in (None, have) for want, have in zip(shape, x.shape, strict=True)
        )
        require(fits, f"{name} has shape {list(x.shape)}; expected {list(shape)}")
        allowed = DTYPES if dtype is None else (dtype,)
        require(x.dtype in allowed, f"{name} is {x.dtype}; expected {allowed}")
        block = x[:1] if strided else x
        require(block.is_contiguous(), f"{name} has strides {x.stride()}; it must be contiguous")


def wide_product(a: Tensor, b: Tensor) -> Tensor:
    """Returns a @ b in fp32, or fp64 for fp64: sums are wide anyway, and stay so."""
    wide = torch.promote_types(a.dtype, torch.float32)
    if a.is_cuda and a.dtype != wide:
        return torch.mm(a, b, out_dtype=wide)
    return a.to(wide) @ b.to(wide)
