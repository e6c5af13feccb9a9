"""What all launchers share: checks, configurations of GPUs, early launches, a wide product.

A launcher is the Python function that checks tensors, allocates the result and starts kernels. A
differentiable one of a layer calls its autograd.Function only while gradients are enabled: an eager
step of inference makes hundreds of launches, and the call costs host time. This file launches no
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
import triton.language as tl
from torch import Tensor

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SIZES = (16, 32, 64, 128, 256)  # of heads, and of pages
# Cards whose blocks have at most 99 KiB of shared memory: sm_86, 89, 120 and 121.
SMALL_SHARED_MEMORY = (86, 89, 120, 121)
DEPENDENT_LAUNCH = 90  # the first architecture with programmatic dependent launch
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


@cache
def architecture() -> int:
    """Returns the compute capability of the GPU, 90 for 9.0; 80 for the interpreter.

    The interpreter runs kernels in Python on CPU tensors.
    """
    if os.environ.get("TRITON_INTERPRET") == "1":
        return 80
    return triton.runtime.driver.active.get_current_target().arch


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
    arch = architecture()
    if arch < 80:
        raise ValueError(f"the kernels need a GPU of compute capability 8.0; it has {arch / 10}")
    if arch in SMALL_SHARED_MEMORY:
        return configs["89"]
    if arch > 90 and "100" in configs:
        return configs["100"]
    return configs["90" if arch >= 90 else "80"]


def dependent_launch() -> dict[str, bool]:
    """Returns the options of a launch whose kernel begins with `wait_for_previous(DEPENDENT)`.

    The kernels of a decode step that are small for a few rows have them.
    """
    dependent = architecture() >= DEPENDENT_LAUNCH
    return {"DEPENDENT": dependent, "launch_pdl": dependent}


@triton.jit
def wait_for_previous(DEPENDENT: tl.constexpr):
    """Waits for all earlier kernels to end, then lets the next one start early.

    With programmatic dependent launch (CUDA programming guide, "Programmatic Dependent Launch and
    Synchronization") the programs of a kernel are on the GPU before the kernel in front of it has
    ended, so its launch takes no time of its own. The wait ends when that kernel has ended and its
    results are visible. Three rules make this safe for any caller:

    - It is the first statement of a kernel, and every program reaches it. No global memory is read
      or written before it: not even weights, which a copy just before may have written. In a loop,
      Triton would move loads in front of it.
    - The next kernel is let in after the wait, not before. All kernels before this one have then
      ended, so only one kernel is early at a time, and what it waits for covers all of them.
    - Other kernels may stand between. One without this launch, as torch's, starts when all before
      it have ended. Behind one that lets nothing in, an early kernel starts when its programs end.
    """
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


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
