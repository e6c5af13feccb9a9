"""What Qwen3-8B should take on an H100 and an H200, and the arithmetic, without a GPU.

    python -m benchmarks.gpu_parts.estimate

Prints three tables: every kernel at its limit, a decode step part by part, and prefill and training
beside their goals. Limits are those of the data sheets (training/gpus.toml). Bytes and FLOPs are
counted from the shapes; launches by running a step with a driver that launches nothing. The host's
time is measured on this CPU. The shares below are assumptions: what good kernels of each kind
reach.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, replace
from statistics import median
from unittest import mock

os.environ.pop("TRITON_INTERPRET", None)

import torch  # noqa: E402
import triton  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from benchmarks.engine import decode_work  # noqa: E402
from benchmarks.gpu_parts import Part, by_kernels  # noqa: E402
from benchmarks.gpu_parts.cases import QWEN3_8B, all_cases  # noqa: E402
from benchmarks.gpu_parts.compile import Driver  # noqa: E402
from nanorchestra.engine.model_runner import ModelRunner, StepShape  # noqa: E402
from nanorchestra.engine.scheduler import Batch  # noqa: E402
from nanorchestra.engine.sequence import Request, SamplingParams, Sequence  # noqa: E402
from nanorchestra.model.hf_config import PRESETS  # noqa: E402
from nanorchestra.model.qwen3 import Qwen3  # noqa: E402
from nanorchestra.training.costs import GPUS, Costs, Gpu  # noqa: E402

SHAPE = PRESETS["qwen3-8b"]
COSTS = Costs.of(SHAPE)
CARDS = ("h100", "h200")
MULTIPROCESSORS = 132  # of both cards
CONTEXT, PAGE = 1000, 64
SPLIT = 128  # keys of a program of decode attention, up to position 2,048
BATCHES = 1, 32, 128, 256
DECODE_GOALS = {("h100", 1): 165, ("h200", 1): 230, ("h100", 128): 10_500, ("h200", 128): 14_500}

WEIGHTS = 0.82  # of bandwidth: products of few rows, which read a matrix
KV = 0.80  # of bandwidth: paged attention whose programs fill the card
GAP = 1.0e-6  # seconds between two launches of a graph
PRODUCTS = 0.72  # of FLOP/s: products of many rows
ATTENTION = 0.42  # of FLOP/s: attention forward, in Triton
ATTENTION_BACKWARD = 0.34  # of FLOP/s
LOGPROB = 0.60  # of FLOP/s: the fused output product
POINTWISE = 0.80  # of bandwidth: norms, rotation, SwiGLU
IDLE = 0.08  # of a training step: collectives that no computing hides, and the optimizer


class CountOperations(TorchDispatchMode):
    """Counts torch's operations that launch something on a GPU."""

    SILENT = ("view", "slice", "select.", "empty", "new_empty", "alias", "detach", "as_strided")
    SILENT += ("t.", "_unsafe_view", "unsqueeze", "reshape", "flatten", "split", "unbind", "expand")
    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if not function.__name__.startswith(self.SILENT):
            self.count += 1
        return function(*args, **kwargs or {})


def make_runner() -> ModelRunner:
    """Makes a runner of Qwen3-8B with narrow matrices, whose kernels are not launched.

    Neither the launches of a step nor the host's work depend on the width of the matrices.
    """
    shape = replace(SHAPE, hidden_size=256, intermediate_size=256, vocab_size=1024)
    return ModelRunner(
        Qwen3(shape).to(torch.bfloat16),
        num_pages=8,
        page_size=PAGE,
        vocab_size=shape.vocab_size,
        max_batch_tokens=4096,
        max_running=BATCHES[-1],
        max_context=4096,
    )


def count_launches(runner: ModelRunner) -> int:
    """Returns the launches of a decode step: what its graph holds."""
    kernels = []
    triton.runtime.driver.set_active(Driver(90))
    # The hook is asked before a kernel is compiled. True says that there is nothing to launch.
    triton.knobs.runtime.jit_cache_hook = lambda **_: kernels.append(1) or True
    with by_kernels(Part(rehearse=True)), CountOperations() as operations:
        runner._compute(StepShape(decodes=1, sampled=1))
    return len(kernels) + operations.count


def host_seconds(runner: ModelRunner, rows: int, rounds: int = 20) -> float:
    """Returns the median seconds in which the host prepares a decode step up to its graph."""
    pages = -(-(CONTEXT + 1) // PAGE)
    requests = []
    for i in range(rows):
        sequence = Sequence([7] * CONTEXT)
        sequence.block_table = list(range(i * pages, (i + 1) * pages))
        params = SamplingParams(seed=i)
        requests.append(Request(id=i, sequence=sequence, params=params, limit=10**6))
    times = []
    with mock.patch.object(runner, "_compute"):
        for _ in range(rounds):
            start = time.process_time()
            runner.launch(Batch(decodes=requests))
            times.append(time.process_time() - start)
    return median(times)


def print_table(columns: str, rows: list[list[str]]) -> None:
    """Prints a Markdown table; columns are divided by commas."""
    names = columns.split(",")
    print("| " + " | ".join(names) + " |\n" + "|---" * len(names) + "|")
    for row in rows:
        print("| " + " | ".join(row) + " |")
    print()


def print_kernels() -> None:
    """Prints each case's bytes and FLOPs, and its time at the limit of each card."""
    rows = []
    for case in all_cases(QWEN3_8B):
        row = [case.name, f"{case.bytes / 1e6:,.1f}", f"{case.flops / 1e9:,.1f}"]
        for name in CARDS:
            gpu = GPUS[name]
            by_bytes, by_flops = case.bytes / gpu.bandwidth, case.flops / gpu.flops
            limit = "bytes" if by_bytes >= by_flops else "FLOPs"
            row.append(f"{1e6 * max(by_bytes, by_flops):,.1f} ({limit})")
        rows.append([*row, ""])
    print("Every kernel at the limit of its bytes or FLOPs\n")
    print_table("kernel,MB,GFLOP,H100 us,H200 us,measured us", rows)


@dataclass
class DecodeStep:
    """The parts of a decode step of so many rows, in seconds."""

    products: float
    attention: float
    draw: float
    gaps: float

    @classmethod
    def of(cls, gpu: Gpu, rows: int, launches: int) -> DecodeStep:
        """Computes the parts from bytes, FLOPs and launches."""
        flops = rows * (COSTS.token_flops + COSTS.logit_flops)
        read = COSTS.weight_bytes / (WEIGHTS * gpu.bandwidth)
        # A program reads its keys at a multiprocessor's share of the bandwidth.
        programs = rows * SHAPE.num_key_value_heads * -(-CONTEXT // SPLIT)
        busy = min(1.0, programs / MULTIPROCESSORS)
        keys = decode_work(rows, CONTEXT).keys
        logits = 12 * rows * SHAPE.vocab_size  # fp32, written once and read twice
        return cls(
            products=max(read, flops / (PRODUCTS * gpu.flops)),
            attention=keys * COSTS.kv_bytes / (KV * busy * gpu.bandwidth),
            draw=logits / (POINTWISE * gpu.bandwidth),
            gaps=launches * GAP,
        )

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return self.products + self.attention + self.draw + self.gaps


def print_decode() -> None:
    """Prints a decode step part by part, beside its goal and the card's limit."""
    runner = make_runner()
    launches = count_launches(runner)
    rows = []
    for name in CARDS:
        gpu = GPUS[name]
        for batch in BATCHES:
            step = DecodeStep.of(gpu, batch, launches)
            kv_bytes = batch * CONTEXT * COSTS.kv_bytes
            limit = (COSTS.weight_bytes + kv_bytes) / gpu.bandwidth
            goal = DECODE_GOALS.get((name, batch))
            parts = (step.products, step.attention, step.draw, step.gaps, step.total)
            row = [name.upper(), str(batch), f"{kv_bytes / 1e9:.2f}"]
            row += [f"{1e3 * part:.2f}" for part in parts]
            row += [f"{batch / step.total:,.0f}", f"{limit / step.total:.0%}"]
            if goal:
                row += [f"{goal:,}", f"{limit * goal / batch:.0%}"]
            else:
                row += ["", ""]
            rows.append([*row, f"{1e3 * host_seconds(runner, batch):.2f}"])
    print(
        f"A decode step at {CONTEXT:,} keys: {COSTS.weight_bytes / 1e9:.2f} GB of weights, "
        f"{launches} launches; times in ms, shares of the card's bandwidth\n"
    )
    print_table(
        "card,B,KV GB,products,attention,draw,gaps,step,tokens/s,share,goal,goal's share,host",
        rows,
    )


def print_compute() -> None:
    """Prints prefill, log-probabilities and a GRPO update as shares of the card's FLOP/s."""
    tokens = 8192  # in one sequence
    layers = tokens * COSTS.token_flops
    attention = tokens**2 / 2 * COSTS.pair_flops
    logits = tokens * COSTS.logit_flops
    # Bytes of a layer's pointwise kernels and token: two norms with sums, rotation, SwiGLU.
    qkv = (SHAPE.num_attention_heads + 2 * SHAPE.num_key_value_heads) * SHAPE.head_dim
    token_bytes = 2 * (8 * SHAPE.hidden_size + 2 * qkv + 3 * SHAPE.intermediate_size)
    pointwise = SHAPE.num_hidden_layers * tokens * token_bytes

    rows = []
    for name in CARDS:
        gpu = GPUS[name]
        moved = pointwise / (POINTWISE * gpu.bandwidth)
        forward = layers / (PRODUCTS * gpu.flops) + attention / (ATTENTION * gpu.flops) + moved
        backward = 2 * layers / (PRODUCTS * gpu.flops) + 2 * moved
        backward += 2.5 * attention / (ATTENTION_BACKWARD * gpu.flops)
        # Three more products go backward, of which one computes the logits again; the logits and
        # their gradient, in bf16, are moved five times.
        output = logits / (LOGPROB * gpu.flops) + 3 * logits / (PRODUCTS * gpu.flops)
        output += 10 * tokens * SHAPE.vocab_size / (POINTWISE * gpu.bandwidth)
        # A layer's forward pass is computed twice: checkpoints keep its input alone.
        update = (2 * forward + backward + output) / (1 - IDLE)
        for work, flops, elapsed, goal in (
            ("prefill", layers + attention, forward, "65%"),
            ("log-probabilities, both ways", 4 * logits, output, "55%"),
            ("GRPO update, MFU", 3 * (layers + attention + logits), update, "40%"),
        ):
            cells = [f"{flops / 1e12:,.0f}", f"{1e3 * elapsed:,.0f}", f"{tokens / elapsed:,.0f}"]
            rows.append([name.upper(), work, *cells, f"{flops / gpu.flops / elapsed:.0%}", goal])
    print(f"{tokens:,} tokens in one sequence; shares of the card's FLOP/s\n")
    print_table("card,work,TFLOP,ms,tokens/s,share,goal", rows)


def main() -> None:
    """Prints the tables."""
    torch.set_num_threads(1)
    print_kernels()
    print_decode()
    print_compute()


if __name__ == "__main__":
    main()
