"""What all launchers share: checks of their tensors, the configurations of GPUs, a wide product.

A launcher is the Python function that checks tensors, allocates the result and starts kernels. A
differentiable one of a layer calls its autograd.Function only while gradients are enabled: an eager
step of inference makes hundreds of launches, and the call costs host time. This file holds no
kernel.
"""

import os
import tomllib
from functools import cache
from pathlib import Path

# a * b + c is rounded once. Triton 3.10 changes the default.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

import torch
import triton
from torch import Tensor

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SIZES = (16, 32, 64, 128, 256)  # of heads, and of pages
# Cards whose blocks have at most 99 KiB of shared memory: sm_86, 89, 120 and 121.
SMALL_SHARED_MEMORY = (86, 89, 120, 121)
FP32 = "32"  # key of a configuration for float32 tensors
# kernel -> architecture, or FP32 -> configuration
TILES = tomllib.loads(Path(__file__).with_name("tiles.toml").read_text(encoding="utf-8"))

Config = dict[str, int]  # by the kernel's own names: tile sizes, PROGRAMS, STAGES


def check(
    shape: tuple[int | None, ...],
    dtype: torch.dtype | None = None,
    strided: bool = False,
    **tensors: Tensor,
) -> None:
    """Raises ValueError unless every tensor has this shape and dtype and is contiguous.

    None stands for any size, and for any of DTYPES. strided: the first dimension may have any
    stride. An eager step of 36 layers calls this hundreds of times, so messages are made on failure
    only.
    """
    dtypes = DTYPES if dtype is None else (dtype,)
    for name, x in tensors.items():
        sizes = x.shape
        if sizes != shape and not _fits(sizes, shape):
            raise ValueError(f"{name} has shape {list(sizes)}; expected {list(shape)}")
        if x.dtype not in dtypes:
            expected = " or ".join(map(str, dtypes))
            raise ValueError(f"{name} is {x.dtype}; expected {expected}")
        if not x.is_contiguous() and not (strided and x[:1].is_contiguous()):
            raise ValueError(f"{name} has strides {x.stride()}; it must be contiguous")


def _fits(sizes: tuple[int, ...], shape: tuple[int | None, ...]) -> bool:
    """Returns True if the sizes are those of the shape, in which None stands for any size."""
    if len(sizes) != len(shape):
        return False
    for size, expected in zip(sizes, shape, strict=True):
        if expected is not None and size != expected:
            return False
    return True


@cache
def multiprocessors(device: torch.device) -> int:
    """Returns the number of multiprocessors of a GPU; 4 for the interpreter, which has none."""
    if device.type != "cuda":
        return 4
    return torch.cuda.get_device_properties(device).multi_processor_count


def pick(kernel: str, dtype: torch.dtype | None = None) -> Config:
    """Returns the configuration of a kernel in tiles.toml for the current GPU.

    The entries are for sm_80, 89 and 90. GPUs of SMALL_SHARED_MEMORY take that of sm_89, newer ones
    than sm_90 the entry "100", if the kernel has one, or that of sm_90, others before it that of
    sm_80. For float32 the entry "32" comes first, if the kernel has one. The interpreter takes the
    entry of sm_80. ValueError before sm_80.
    """
    configs = TILES[kernel]
    if dtype == torch.float32 and FP32 in configs:
        return configs[FP32]
    if os.environ.get("TRITON_INTERPRET") == "1":  # kernels run in Python on CPU tensors
        return configs["80"]
    arch = triton.runtime.driver.active.get_current_target().arch
    if arch < 80:
        raise ValueError(f"the kernels need a GPU of compute capability 8.0; it has {arch / 10}")
    if arch in SMALL_SHARED_MEMORY:
        return configs["89"]
    if arch > 90 and "100" in configs:
        return configs["100"]
    return configs["90" if arch >= 90 else "80"]


def wide_product(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """Returns a @ b in fp32, or fp64 for fp64: sums are wide anyway, and stay so.

    It is in `out`, of that dtype, if that is given.
    """
    wide = torch.promote_types(a.dtype, torch.float32)
    if a.is_cuda and a.dtype != wide:
        if out is None:
            return torch.mm(a, b, out_dtype=wide)
        return torch.mm(a, b, out_dtype=wide, out=out)
    product = a.to(wide) @ b.to(wide)
    return product if out is None else out.copy_(product)
