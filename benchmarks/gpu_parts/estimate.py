"""What a decode step of Qwen3-8B should take on an H200, part by part, without a GPU.

    python -m benchmarks.gpu_parts.estimate

Bytes and FLOPs are counted from the shape. Launches are counted by running the step on tensors
without memory, with a driver that launches nothing. The host's time is measured on this CPU: what
`launch` does before a captured graph is replayed. Rates are those measured on an H200: 4.3 TB/s
copied, 790 TFLOP/s; SHARE of them is what products and attention reach in comparable kernels.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

os.environ.pop("TRITON_INTERPRET", None)
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch  # noqa: E402
import triton  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from benchmarks.gpu_parts.compile import Driver  # noqa: E402
from nanorchestra.engine.gpu import GpuRunner  # noqa: E402
from nanorchestra.engine.inputs import Host, Inputs, Sizes  # noqa: E402
from nanorchestra.engine.sequence import Request, SamplingParams  # noqa: E402
from nanorchestra.engine.scheduler import Plan  # noqa: E402
from nanorchestra.model.hf_config import PRESETS
from nanorchestra.model.quantise import quantise_model  # noqa: E402
from nanorchestra.model.qwen3 import Qwen3  # noqa: E402
from nanorchestra.training.costs import Costs  # noqa: E402

BANDWIDTH, FLOPS = 4.3e12, 790e12
SHARE = 0.88  # of bandwidth: what cuBLAS and paged attention reach at these sizes
BUBBLE = 1.3e-6  # seconds between two launches of a graph
CONTEXT, PAGE = 1000, 64


class _Count(TorchDispatchMode):
    """Counts torch's operations that launch something."""

    SILENT = (
        "view",
        "slice",
        "select",
        "empty",
        "new_empty",
        "alias",
        "detach",
        "as_strided",
        "t.",
    )
    SILENT += ("_unsafe_view", "unsqueeze", "reshape", "flatten", "split")

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if not function.__name__.startswith(self.SILENT):
            self.operations = getattr(self, "operations", 0) + 1
        return function(*args, **kwargs or {})


def launches(batch: int, quantise: str = "") -> int:
    """Launches of a decode step of `batch` rows: what its graph holds."""
    counted = []
    triton.runtime.driver.set_active(Driver(90))
    triton.knobs.runtime.jit_cache_hook = lambda **_: counted.append(1) or True
    shape = PRESETS["qwen3-8b"]
    with torch.device("meta"):
        model = Qwen3(shape).to(torch.bfloat16)
        if quantise:
            quantise_model(model, quantise)
    runner = GpuRunner(model, 8, PAGE, shape.vocab_size, torch.bfloat16)
    sizes = Sizes(batch, 4 * batch, 0, 0, 0, 0, batch, 16)
    inputs, count = Inputs(sizes, "meta"), _Count()
    with count:
        runner._compute(inputs)
    return len(counted) + count.operations


def host_seconds(batch: int, rounds: int = 20) -> float:
    """Seconds in which the host fills the inputs of a step that looks ahead."""
    pages = -(-(CONTEXT + 1) // PAGE)
    requests = [Request(i, [7] * CONTEXT, SamplingParams(seed=i), 10**6) for i in range(batch)]
    for i, request in enumerate(requests):
        request.table.pages = list(range(i * pages, (i + 1) * pages))
    host, plan = Host(PAGE, 16, False), Plan(decodes=requests)
    before, times = {request: i for i, request in enumerate(requests)}, []
    for _ in range(rounds):
        start = time.process_time()
        host.fill(plan, before, True)
        times.append(time.process_time() - start)
    return sorted(times)[rounds // 2]


def main() -> None:
    """Prints a row for each batch size."""
    costs, shape = Costs.of(PRESETS["qwen3-8b"]), PRESETS["qwen3-8b"]
    count = launches(1)
    print(f"{count} launches of a step in bf16; bytes in GB, times in ms\n")
    columns = "B weights KV logits launches products attention draw gaps step tokens/s host"
    print("| " + columns.replace(" ", " | ") + " |\n|" + "---|" * 12)
    for batch in (1, 32, 128, 256):
        logits = 12 * batch * shape.vocab_size  # fp32, written once and read twice
        kv = batch * CONTEXT * costs.kv_bytes
        flops = batch * (costs.token_flops + costs.logit_flops)
        products = max(costs.weight_bytes / BANDWIDTH / SHARE, flops / FLOPS / SHARE)
        parts = products, kv / BANDWIDTH / SHARE, logits / BANDWIDTH, count * BUBBLE
        step = sum(parts)
        sizes = (f"{x / 1e9:.2f}" for x in (costs.weight_bytes, kv, logits))
        times = (f"{1e3 * x:.2f}" for x in (*parts, step))
        cells = (
            *sizes,
            str(count),
            *times,
            f"{batch / step:,.0f}",
            f"{1e3 * host_seconds(batch):.2f}",
        )
        print(f"| {batch} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
