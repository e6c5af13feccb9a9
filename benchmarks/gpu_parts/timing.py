"""Times the kernels beside the GPU's own ceilings, at the shapes of cases.py.

The L2 cache is cold, times are medians. Peers are torch, eager and compiled, SDPA and cuBLAS, and
flash-attn where it is installed. A speed is a share of what this GPU was just measured to copy or
to multiply.
"""

from collections.abc import Callable
from typing import Any

import torch
from triton.testing import do_bench

from benchmarks.gpu_parts.cases import Case
from benchmarks.gpu_parts.peers import functions

DEVICE = "cuda"


def ceilings() -> tuple[float, float]:
    """Returns the bytes/s that this GPU copies, and the FLOP/s of a bf16 product of 8192 cubed."""
    with torch.device(DEVICE):
        source = torch.randint(255, (1 << 30,), dtype=torch.uint8)
        a, b = torch.randn(2, 8192, 8192, dtype=torch.bfloat16)
    return 2e3 * source.numel() / median(source.clone), 2e3 * 8192**3 / median(torch.mm, (a, b))


def measure(case: Case, limits: tuple[float, float]) -> dict[str, Any]:
    """Returns milliseconds of a kernel and its peers, its share of the ceiling, and which it is."""
    with torch.device(DEVICE):
        arguments = case.make()
    peers = functions(case)
    own = median(peers.pop("own"), arguments)
    times = {"own": own}
    for name, run in peers.items():
        try:
            times[name] = median(run, arguments)
        except Exception as error:  # a peer that does not run here
            print(f"  {case.name}, {name}: {type(error).__name__}: {error}")
    # the least seconds at these bytes/s and FLOP/s, and which of them is the limit
    seconds, limit = max((case.bytes / limits[0], "bandwidth"), (case.flops / limits[1], "FLOP/s"))
    share = seconds * 1e3 / own
    return {"name": case.name, "ms": times, "limit": limit, "share": share}


def median(run: Callable[..., Any], arguments: tuple[Any, ...] = ()) -> float:
    """Returns milliseconds a call, with a cold L2 cache."""
    return do_bench(lambda: run(*arguments), return_mode="median")
