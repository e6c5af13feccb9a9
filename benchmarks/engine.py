"""Measures the engine on a CPU beside what the machine could do.

    python benchmarks/engine.py [--threads 2] [--rounds 1] [--json PATH]

The works are samples in groups, a tool loop, prefill and decoding. They run in float32 with a model
of 28M parameters, whose time goes into arithmetic, and with nano, whose time goes into Python.
Weights are random. peers.py beside this file measures other engines, and gpu.py a GPU; both take
works, ceilings and `Bench` from here.

A speed stands beside its ceiling: the bytes and FLOPs of the work at the rates of this machine. The
rates are measured with the same threads by reading as many bytes as the model's weights have, and
by a product of two matrices. One engine serves all works of a model, so that no timed window makes
one.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from nanorchestra.engine.engine import Engine, SamplingParams
from nanorchestra.model import ops
from nanorchestra.model.checkpoint import PRESETS
from nanorchestra.model.native import pack
from nanorchestra.model.qwen3 import ModelConfig, Qwen3
from nanorchestra.training.costs import Costs

CONTEXT = 40960  # that every model allows
ROOM = 90_000  # tokens of the KV pool: 64 sequences of 1,100 tokens and what the cache keeps
READ_AT_MOST = 2 << 30  # bytes: more than any cache holds
SETTLE = 4  # decode steps before the timed ones

SHAPES = PRESETS | {
    "28M": replace(
        PRESETS["nano"],
        vocab_size=8192,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=8,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=64,
    )
}


@dataclass(frozen=True)
class EngineWork:
    """What a work asks of the machine; counts of all its steps together.

    steps: each reads all weights. tokens: through the layers. logits: tokens with logits. keys:
    tokens whose KV decode steps read. pairs: of query and key in prefill.
    """

    steps: int
    tokens: int
    logits: int
    keys: float = 0.0
    pairs: float = 0.0


def prefill_work(length: int) -> EngineWork:
    """Counts one prompt, to its first token."""
    return EngineWork(1, length, 1, pairs=length**2 / 2)


def decode_work(rows: int, context: float, steps: int = 1) -> EngineWork:
    """Counts steps of `rows` unrelated sequences that have `context` tokens on average."""
    return EngineWork(steps, rows * steps, rows * steps, keys=rows * steps * context)


def group_work(prompts: int, prompt: int, samples: int, sampled: int) -> EngineWork:
    """Counts samples in groups. A prompt is computed once, and read once for all its samples."""
    rows = prompts * samples
    own_keys = rows * sampled * (sampled - 1) / 2
    shared_keys = prompts * prompt * (sampled - 1)
    return EngineWork(
        steps=sampled,
        tokens=prompts * prompt + rows * (sampled - 1),
        logits=rows * sampled,
        keys=own_keys + shared_keys,
        pairs=prompts * prompt**2 / 2,
    )


def loop_work(prompt: int, turns: int, given: int, sampled: int) -> EngineWork:
    """Counts a tool loop that keeps its KV: in each turn tokens are given, then some sampled."""
    keys = pairs = 0.0
    context = prompt
    for turn in range(turns):
        if turn == 0:
            pairs += (prompt + given) ** 2 / 2
        else:
            pairs += given * context
        keys += (context + given) * sampled
        context += given + sampled
    return EngineWork(turns * sampled, context, turns * sampled, keys, pairs)


class Ceiling:
    """The rates of this machine with a model: bytes/s of a read, FLOP/s of a product."""

    def __init__(self, model: Qwen3):
        weight = model.embed_tokens.weight
        self.device = weight.device
        self.costs = Costs.of(model.config)
        self.kv_bytes = self.costs.kv_bytes * weight.dtype.itemsize // 2  # Costs counts in bf16
        self.weight_bytes = sum(x.nbytes for x in (*model.parameters(), *model.buffers()))
        if not model.config.tie_word_embeddings:
            self.weight_bytes -= weight.nbytes  # a step reads few of its rows
        numbers = torch.ones(min(self.weight_bytes, READ_AT_MOST) // 4, device=self.device)
        self.bandwidth = numbers.nbytes / self._best(numbers.sum)
        rows, size = (8192, 8192) if self.device.type == "cuda" else (512, 1024)
        left = torch.randn(rows, size, device=self.device, dtype=weight.dtype)
        right = torch.randn(size, size, device=self.device, dtype=weight.dtype)
        self.flops = 2 * rows * size * size / self._best(lambda: left @ right)

    def _best(self, call: Callable[[], Any]) -> float:
        return min(seconds(call, self.device) for _ in range(12))

    def bytes_of(self, work: EngineWork) -> float:
        """Counts the bytes of weights and KV that must be read."""
        return work.steps * self.weight_bytes + work.keys * self.kv_bytes

    def flops_of(self, work: EngineWork) -> float:
        """Counts the FLOPs."""
        costs = self.costs
        layers = work.tokens * costs.token_flops + work.pairs * costs.pair_flops
        return layers + work.logits * costs.logit_flops

    def seconds(self, work: EngineWork) -> float:
        """Returns the least seconds: weights read or FLOPs done, and the KV read."""
        weights = work.steps * self.weight_bytes / self.bandwidth
        keys = work.keys * self.kv_bytes / self.bandwidth
        return max(weights, self.flops_of(work) / self.flops) + keys

    def figures(self, work: EngineWork, tokens: int, elapsed: float) -> dict[str, float]:
        """Returns a speed beside its ceiling: `tokens` of the work, in `elapsed` seconds."""
        bound = self.seconds(work)
        return {
            "tokens_per_second": tokens / elapsed,
            "ceiling_tokens_per_second": tokens / bound,
            "share_of_ceiling": bound / elapsed,
            "gb_per_second": self.bytes_of(work) / elapsed / 1e9,
            "gflop_per_second": self.flops_of(work) / elapsed / 1e9,
        }


def seconds(call: Callable[[], Any], device: torch.device) -> float:
    """Returns the wall time of a call, the device's included."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def random_model(shape: ModelConfig, device: torch.device, dtype: torch.dtype) -> Qwen3:
    """Makes a decoder whose weights are drawn where they lie."""
    with torch.device(device):
        model = Qwen3(replace(shape, max_position_embeddings=CONTEXT)).to(dtype)
    generator = torch.Generator(device).manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.fill_(1.0)
            else:
                parameter.normal_(0.0, shape.initializer_range, generator=generator)
    return model


class Bench:
    """One model and one engine, and the works to run on them. Each work returns its figures.

    On a CPU the model is packed, so that C computes it. room: tokens of the KV pool.
    """

    def __init__(self, model: Qwen3, rounds: int = 1, room: int = ROOM, **options: Any):
        self.rounds = rounds
        self.rng = random.Random(0)
        self.vocab_size = model.config.vocab_size
        self.ceiling = Ceiling(model)
        self.device = self.ceiling.device
        if ops.by_kernel(model.embed_tokens.weight):
            page_size = 64
        else:
            page_size = 16
            pack(model)
        options = {"page_size": page_size, "num_pages": room // page_size} | options
        self.engine = Engine(model, **options)

    def ids(self, count: int) -> list[int]:
        """Returns random ids."""
        return [self.rng.randrange(self.vocab_size) for _ in range(count)]

    def sample(self, prompts: list[list[int]], samples: int, tokens: int) -> None:
        """Samples each prompt so many times, with nothing cached before."""
        self.engine.reset_prefix_cache()
        texts, params = [], []
        for prompt in prompts:
            for seed in range(samples):
                texts.append(prompt)
                params.append(sampling(tokens, seed))
        self.engine.generate(texts, params)

    def loop(self, prompt: list[int], turns: list[list[int]], tokens: int) -> None:
        """Samples once after each turn's observation, in a session that keeps the KV."""
        self.engine.reset_prefix_cache()
        session = self.engine.session(prompt)
        for seed, observation in enumerate(turns):
            session.append(observation)
            session.sample(sampling(tokens, seed))
        session.close()

    def median(self, work: Callable[[], Any]) -> float:
        """Returns the median seconds of a work, after one run that warms up."""
        work()
        return median(seconds(work, self.device) for _ in range(self.rounds))

    def prefill(self, length: int) -> dict[str, float]:
        """Computes one prompt, to its first token."""
        prompt = self.ids(length)
        elapsed = self.median(lambda: self.sample([prompt], 1, 1))
        return self.ceiling.figures(prefill_work(length), length, elapsed)

    def group_sampling(
        self, sampled: int = 24, prompts: int = 8, samples: int = 8, prompt: int = 300
    ) -> dict[str, float]:
        """Samples in groups, prefill included. A group's full pages of prompt are computed once."""
        texts = [self.ids(prompt) for _ in range(prompts)]
        elapsed = self.median(lambda: self.sample(texts, samples, sampled))
        work = group_work(prompts, prompt, samples, sampled)
        return self.ceiling.figures(work, prompts * samples * sampled, elapsed)

    def tool_loop(
        self, prompt: int = 1000, turns: int = 20, given: int = 60, sampled: int = 8
    ) -> dict[str, float]:
        """Samples once in each turn of a session, on what the turns before have left."""
        text, observations = self.ids(prompt), [self.ids(given) for _ in range(turns)]
        before = self.engine.stats["prefill_tokens"]
        elapsed = self.median(lambda: self.loop(text, observations, sampled))
        computed = (self.engine.stats["prefill_tokens"] - before) // (1 + self.rounds)
        figures = self.ceiling.figures(
            loop_work(prompt, turns, given, sampled), turns * sampled, elapsed
        )
        return figures | {"seconds": elapsed, "prefill_tokens": computed}

    def decode(self, batch: int, context: int = 1000, steps: int = 64) -> dict[str, float]:
        """Decodes `batch` unrelated sequences of about `context` tokens.

        The prompts are computed first and stay in the prefix cache, so that the requests that are
        timed start together. A window that computes a prompt, or in which a request ends, raises.
        """
        engine = self.engine
        prompts = [self.ids(context - steps // 2) for _ in range(batch)]
        engine.reset_prefix_cache()
        engine.generate(prompts, sampling(1))
        longest = (self.rounds + 1) * steps + 100
        requests = [engine.submit(ids, sampling(longest, i)) for i, ids in enumerate(prompts)]
        start = engine.stats
        computed = None
        while engine.stats["prefill_tokens"] != computed:
            computed = engine.stats["prefill_tokens"]
            engine.step()
        for _ in range(SETTLE):
            engine.step()
        keys, times = [], []
        for _ in range(self.rounds):
            before = engine.stats
            times.append(seconds(lambda: [engine.step() for _ in range(steps)], self.device))
            after = engine.stats
            sampled = after["sampled_tokens"] - before["sampled_tokens"]
            assert sampled == batch * steps, f"{sampled} tokens in {steps} steps of {batch} rows"
            assert after["prefill_tokens"] == before["prefill_tokens"], "a prompt was computed"
            drawn = (before["sampled_tokens"] - start["sampled_tokens"]) / batch
            keys.append(len(prompts[0]) + drawn + steps / 2)
        for request in requests:
            engine.abort(request)
        step = median(times) / steps  # seconds
        figures = self.ceiling.figures(decode_work(batch, median(keys)), batch, step)
        return figures | {"step_ms": step * 1e3, "context": median(keys)}


def sampling(tokens: int, seed: int = 0) -> SamplingParams:
    """Returns the settings of so many sampled tokens, whatever their ids."""
    return SamplingParams(max_tokens=tokens, ignore_eos=True, seed=seed)


def run(bench: Bench) -> dict[str, Any]:
    """Runs all works and prints a line for each. Returns the figures."""
    works: dict[str, Callable[[], dict[str, float]]] = {
        "group_sampling": bench.group_sampling,
        "group_sampling_64": lambda: bench.group_sampling(64),
        "tool_loop": bench.tool_loop,
        "prefill": lambda: bench.prefill(1024),
        "decode_1": lambda: bench.decode(1),
        "decode_64": lambda: bench.decode(64),
    }
    bandwidth, flops = bench.ceiling.bandwidth / 1e9, bench.ceiling.flops / 1e9
    figures: dict[str, Any] = {"read_gb_per_second": bandwidth, "product_gflop_per_second": flops}
    print(f"  {'work':18}{'tokens/s':>10}{'ceiling':>10}{'share':>8}{'GB/s':>8}{'GFLOP/s':>9}")
    print(f"  {'this machine':46}{bandwidth:8.1f}{flops:9,.0f}")
    for name, work in works.items():
        row = figures[name] = work()
        print(
            f"  {name:18}{row['tokens_per_second']:10,.0f}{row['ceiling_tokens_per_second']:10,.0f}"
            f"{row['share_of_ceiling']:8.0%}{row['gb_per_second']:8.1f}"
            f"{row['gflop_per_second']:9,.0f}",
            flush=True,
        )
    return figures


def cpu_name() -> str:
    """Returns the CPU's name as Linux gives it."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return "a CPU without a name"


def machine(threads: int) -> dict[str, Any]:
    """Describes where figures come from."""
    date = time.strftime("%Y-%m-%d")
    return {"machine": cpu_name(), "threads": threads, "torch": torch.__version__, "date": date}


def main(argv: list[str] | None = None) -> int:
    """Measures, prints, and writes the figures where --json says."""
    parser = argparse.ArgumentParser(prog="benchmarks/engine.py")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default: 2)")
    parser.add_argument("--rounds", type=int, default=1, help="timed rounds (default: 1)")
    parser.add_argument("--json", type=Path, help="where to write all figures")
    options = parser.parse_args(argv)
    torch.set_num_threads(options.threads)
    figures = machine(options.threads)
    print(", ".join(f"{name} {value}" for name, value in figures.items()))
    for shape in ("28M", "nano"):
        print(f"{shape}, float32")
        model = random_model(SHAPES[shape], torch.device("cpu"), torch.float32)
        figures[shape] = run(Bench(model, options.rounds))
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
