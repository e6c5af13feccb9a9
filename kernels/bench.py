"""How fast the kernels are, beside this machine's own ceilings: `python -m kernels.bench [--kernel NAME] [--json PATH] [--plot PATH]`.

Every kernel runs at shapes of Qwen3-8B (cases.py) in a CUDA graph of calls over rotated inputs, more of them than the L2 cache holds, in turns
with torch eager, torch.compile, SDPA (torch's choice, and cuDNN) and cuBLAS; medians count. A speed is given as a share of what the machine
was just measured to copy or multiply. Without a GPU, the compile table and the time that no kernel can beat on an H200 are printed instead.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
import triton
from tqdm import tqdm

H200 = {
    "bandwidth": 4.3e12,
    "flops": 790e12,
}  # measured elsewhere: copied bytes/s (read and written), bf16 FLOP/s of an 8192^3 product
CALLS, REPLAYS, COPIES = 12, 30, 12  # calls a graph, timed replays, copies of the inputs at most


def graph_of(function: Callable[..., Any], inputs: list[tuple[Any, ...]]) -> torch.cuda.CUDAGraph:
    """CALLS calls, each with the next of the inputs, captured. The first calls, outside, compile what has to be."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for arguments in inputs[:3]:
            function(*arguments)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in range(CALLS):
            function(*inputs[call % len(inputs)])
    return graph


def seconds_of(graphs: dict[str, torch.cuda.CUDAGraph]) -> dict[str, list[float]]:
    """Seconds a call of each graph, REPLAYS times, in turns."""
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(REPLAYS):
        for name, graph in graphs.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times[name].append(begin.elapsed_time(end) / 1e3 / CALLS)
    return times


def ceilings() -> dict[str, float]:
    """What this GPU copies (bytes/s, read and written) and multiplies (bf16 FLOP/s, 8192 cubed, random data)."""
    source = [torch.randint(255, (1 << 30,), dtype=torch.uint8, device="cuda") for _ in range(2)]
    target = torch.empty_like(source[0])
    a, b = (torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    out = torch.empty_like(a)
    graphs = {
        "copy": graph_of(target.copy_, [(x,) for x in source]),
        "product": graph_of(lambda x, y: torch.mm(x, y, out=out), [(a, b)]),
    }
    times = seconds_of(graphs)
    return {
        "bandwidth": 2 * target.numel() / median(times["copy"]),
        "flops": 2 * 8192**3 / median(times["product"]),
    }


def measure(case, limits: dict[str, float]) -> dict[str, Any]:
    """One case beside its baselines: seconds (median, 20th and 80th percentile), share of the ceiling, ratios, memory beyond the inputs."""
    from kernels.cases import Maker, speedometer

    maker = Maker("cuda", random=True)
    first = case.make(maker)
    size = sum(x.nbytes for x in first if isinstance(x, torch.Tensor))
    wanted = 5 * torch.cuda.get_device_properties(0).L2_cache_size
    inputs = [first] + [
        case.make(maker) for _ in range(min(COPIES, max(1, -(-wanted // max(size, 1)))) - 1)
    ]
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    case.run(*first)
    extra = torch.cuda.max_memory_allocated() - before
    graphs, failures = {"own": graph_of(case.run, inputs)}, {}
    for name, baseline in case.baselines.items():
        try:
            graphs[name] = graph_of(baseline, inputs)
        except (
            Exception
        ) as error:  # a peer that does not run here is reported, and the rest goes on
            failures[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:120]}"
            torch.cuda.synchronize()
    times = seconds_of(graphs)
    low, *_, high = quantiles(times["own"], n=5)
    own = median(times["own"])
    speed, share = speedometer(case, own, **limits)
    return {
        "kernel": case.kernel,
        "shape": case.shape,
        "seconds": own,
        "p20": low,
        "p80": high,
        "speed": speed,
        "share_of_ceiling": share,
        "target": case.target,
        "extra_bytes": extra,
        "ratios": {name: median(t) / own for name, t in times.items() if name != "own"},
        "failures": failures,
    }


def row(result: dict[str, Any]) -> str:
    ratios = ", ".join(
        [f"{ratio:.2f}x {name}" for name, ratio in result["ratios"].items()]
        + [f"{name}: {why}" for name, why in result["failures"].items()]
    )
    return (
        f"{result['kernel']:30} {result['shape']:34} {result['seconds'] * 1e6:10,.1f} us  {result['speed']:>14}  {result['share_of_ceiling']:6.1%} of the ceiling  "
        f"{result['extra_bytes'] / 1e6:8,.0f} MB  {'(target ' + result['target'] + ')  ' if result['target'] else ''}{ratios}"
    )


def plot(results: list[dict[str, Any]], machine: str, path: Path) -> None:
    """A bar a case: the share of the ceiling that binds it."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(10, 0.32 * len(results) + 1.2), layout="constrained")
    names = [f"{result['kernel']}  {result['shape']}" for result in results]
    bars = axes.barh(
        names, [100 * result["share_of_ceiling"] for result in results], color="#4878a8"
    )
    axes.bar_label(bars, [result["speed"] for result in results], padding=3, fontsize=8)
    axes.axvline(100, color="black", linewidth=0.8)
    axes.invert_yaxis()
    axes.set(xlim=(0, 118), xlabel=f"% of what this machine copies or multiplies, {machine}")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def without_gpu(wanted: str) -> int:
    """What can be said without one."""
    from kernels import compile as compiler
    from kernels.cases import cases, floor

    print("no GPU here, so nothing is measured. What the kernels compile to:\n", flush=True)
    status = compiler.main(["--kernel", wanted])
    print(
        f"\nno kernel can be faster on an H200 ({H200['bandwidth'] / 1e12:.1f} TB/s copied, {H200['flops'] / 1e12:.0f} TFLOP/s bf16):\n"
    )
    for case in cases():
        if wanted in case.name:
            binds = (
                "bytes" if case.bytes / H200["bandwidth"] > case.flops / H200["flops"] else "FLOPs"
            )
            print(
                f"{case.kernel:30} {case.shape:34} {case.bytes / 1e6:10,.1f} MB {case.flops / 1e9:12,.1f} GFLOP  {floor(case, **H200) * 1e6:10,.1f} us by its {binds}"
                f"{'  (target ' + case.target + ')' if case.target else ''}"
            )
    return status


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m kernels.bench", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--kernel", default="", help="only cases whose name contains this")
    parser.add_argument("--json", type=Path, help="where to write all figures")
    parser.add_argument("--plot", type=Path, help="where to draw them (a .png file)")
    options = parser.parse_args(argv)
    from kernels.cases import cases

    if not any(options.kernel in case.name for case in cases()):
        print(
            f"--kernel {options.kernel}: no such kernel; there are {', '.join(dict.fromkeys(case.kernel for case in cases()))}",
            file=sys.stderr,
        )
        return 1
    if not torch.cuda.is_available():
        return without_gpu(options.kernel)
    machine = torch.cuda.get_device_name()
    limits = ceilings()
    versions = {
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": torch.version.cuda,
        "date": time.strftime("%Y-%m-%d"),
    }
    print(f"{machine}, " + ", ".join(f"{name} {value}" for name, value in versions.items()))
    print(
        f"ceilings measured now: {limits['bandwidth'] / 1e12:.2f} TB/s copied, {limits['flops'] / 1e12:.0f} TFLOP/s bf16\n"
    )
    results = []
    for case in tqdm(
        [case for case in cases() if options.kernel in case.name],
        desc="cases",
        disable=None,
        leave=False,
    ):
        results.append(measure(case, limits))
        tqdm.write(row(results[-1]))
        torch.cuda.empty_cache()
        if options.json:  # after each: a benchmark cut short has told something
            options.json.parent.mkdir(parents=True, exist_ok=True)
            options.json.write_text(
                json.dumps(
                    {"machine": machine} | versions | limits | {"results": results}, indent=1
                )
                + "\n"
            )
    if options.plot and results:
        plot(results, machine, options.plot)
    for name, path in (("figures", options.json), ("plot", options.plot)):
        if path:
            print(f"{name}: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
