"""Measures the kernels beside the GPU's own ceilings: `python -m kernels.bench [--kernel NAME]`.

Every kernel runs at the shapes of cases.py with a cold L2 cache; times are medians. Peers are
torch, eager and compiled, SDPA and cuBLAS, and flash-attn where it is installed. A
speed is a share of what this GPU was just measured to copy or to multiply. Without a GPU, the
command says so, writes nothing, and exits with status 1.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from triton.testing import do_bench

from kernels.cases import Case, parser, select

DEVICE = "cuda"


def ceilings() -> tuple[float, float]:
    """Returns the bytes/s that this GPU copies, and the FLOP/s of a bf16 product of 8192 cubed."""
    with torch.device(DEVICE):
        source = torch.randint(255, (1 << 30,), dtype=torch.uint8)
        a, b = torch.randn(2, 8192, 8192, dtype=torch.bfloat16)
    return 2e3 * source.numel() / median(source.clone), 2e3 * 8192**3 / median(torch.mm, (a, b))


def measure(case: Case, limits: tuple[float, float]) -> dict[str, Any]:
    """Prints and returns milliseconds of a kernel and its peers, and its share of the ceiling."""
    with torch.device(DEVICE):
        arguments = case.make()
    functions, peers = case.functions(), []
    if "eager" in functions:
        functions["compiled"] = torch.compile(functions["eager"], dynamic=False)
    own = median(functions.pop("own"), arguments)
    times = {"own": own}
    for name, run in functions.items():
        try:
            times[name] = median(run, arguments)
            peers.append(f"{times[name] / own:.2f}x {name}")
        except Exception as error:  # a peer that does not run here is reported
            peers.append(f"{name}: {type(error).__name__}")
    seconds, limit = case.floor(limits)
    share = seconds * 1e3 / own
    print(f"{case.name:42} {own * 1e3:10,.1f} us  {share:6.1%} of {limit:9}  {', '.join(peers)}")
    return {"name": case.name, "ms": times, "limit": limit, "share": share}


def median(run: Callable[..., Any], arguments: tuple[Any, ...] = ()) -> float:
    """Returns milliseconds a call, with a cold L2 cache."""
    return do_bench(lambda: run(*arguments), return_mode="median")


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status."""
    arguments = parser("bench", __doc__)
    arguments.add_argument("--json", type=Path, help="where to write the figures")
    options = arguments.parse_args(argv)
    cases = select(options.kernel)
    if not torch.cuda.is_available():
        print("there is no GPU here: nothing was measured, nothing was written", file=sys.stderr)
        return 1
    machine, limits = torch.cuda.get_device_name(), ceilings()
    print(f"{machine}: {limits[0] / 1e12:.2f} TB/s copied, {limits[1] / 1e12:.0f} TFLOP/s bf16")
    results = [measure(case, limits) for case in cases]
    if options.json:
        report = {"machine": machine, "ceilings": limits, "results": results}
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
