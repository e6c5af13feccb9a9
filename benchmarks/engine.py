"""Measures the engine beside transformers' `generate` and beside what the machine could do.

    python benchmarks/engine.py [--json PATH] [--rounds 1] [--threads 2]
    python benchmarks/engine.py --peers    # beside llama.cpp, vLLM and transformers: peers.py

Works: samples in groups, a tool loop beside prefilling every turn anew, decoding, prefill. On the
CPU in float32 with a model of 28M parameters, whose time goes into arithmetic, and with nano, whose
time goes into Python; then on a GPU, if there is one, with Qwen3-8B in bf16. Weights are random.
Rounds alternate and medians are reported. A timed window makes no engine and captures no graph, and
one of decoding computes no prompt: each asserts it. Every speed stands beside its ceiling: the
bytes and FLOPs of the work at the machine's own measured rates.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from nanorchestra.engine.engine import Engine, SamplingParams
from nanorchestra.model.hf_config import PRESETS
from nanorchestra.model.native import pack
from nanorchestra.model.qwen3 import Qwen3
from nanorchestra.model.saving import save_checkpoint
from nanorchestra.training.costs import Costs

BATCH_TOKENS = 8192  # of a step that prefills, before decoding is timed
WINDOWS = 4  # of decode steps, of which one must be undisturbed
WARM_UPS = 5  # rounds of a work, after which it must have captured its graphs

SHAPES = PRESETS | {
    "28M": replace(
        PRESETS["nano"],
        vocab_size=8192,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=8,
        head_dim=64,
    )
}


class Ceiling:
    """The machine's rates: bytes/s of a large copy, FLOP/s of a matrix product in the dtype."""

    def __init__(self, device: torch.device, dtype: torch.dtype):
        self.device, self.dtype = device, dtype
        on_gpu = device.type == "cuda"
        source = torch.empty(1 << (31 if on_gpu else 27), dtype=torch.uint8, device=device)
        target, size, rows = torch.empty_like(source), *((8192, 8192) if on_gpu else (1024, 512))
        a, b = (torch.randn(n, size, device=device, dtype=dtype) for n in (rows, size))
        self.bandwidth = 2 * source.numel() / self._best(lambda: target.copy_(source))
        self.flops = 2 * rows * size * size / self._best(lambda: a @ b)

    def _best(self, work: Callable[[], Any]) -> float:
        return min(seconds(work, self.device) for _ in range(12))

    def time(self, costs: Costs, steps: int, tokens: int, rows: int, kv: float, pairs: float):
        """Seconds of `steps` steps: weights read or FLOPs done, and `kv` tokens of KV read."""
        scale = torch.finfo(self.dtype).bits / 16  # Costs counts bytes of bf16
        flops = tokens * costs.token_flops + rows * costs.logit_flops + pairs * costs.pair_flops
        weights = steps * costs.weight_bytes * scale / self.bandwidth
        return max(weights, flops / self.flops) + kv * costs.kv_bytes * scale / self.bandwidth


def seconds(work: Callable[[], Any], device: torch.device) -> float:
    """Wall time of `work`, the device's included."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


class Bench:
    """One model, and the works to run on it. Each returns figures for the table and the JSON."""

    made = 0  # engines

    def __init__(self, shape: str, device: torch.device, dtype: torch.dtype, rounds: int):
        self.device, self.rounds, self.rng = device, rounds, random.Random(0)
        with torch.device(device):
            self.model = Qwen3(replace(SHAPES[shape], max_position_embeddings=40960)).to(dtype)
        self.model.init_weights(0)
        self.served = self.model if device.type == "cuda" else deepcopy(self.model)
        pack(self.served)
        self.costs, self.ceiling = Costs.of(self.model.config), Ceiling(device, dtype)

    def ids(self, count: int) -> list[int]:
        """Random ids."""
        return [self.rng.randrange(self.model.config.vocab_size) for _ in range(count)]

    def engine(self, tokens: int, **options: Any) -> Engine:
        """An engine with nothing cached and room for so many tokens."""
        page_size = 64 if self.device.type == "cuda" else 16
        self.made += 1
        return Engine(self.served, num_pages=tokens // page_size + 64, **options)

    @contextmanager
    def serving(self, tokens: int, **options: Any) -> Iterator[Engine]:
        """An engine as `engine` makes it; its memory, perhaps most of a GPU, is free afterwards."""
        made = self.engine(tokens, **options)
        try:
            yield made
        finally:
            made.sleep()

    def disturbances(self, *engines: Engine) -> list[Any]:
        """Counts what no timed window may contain: engines made, graphs captured, preemptions."""
        seen = [(e.runner.sizes_known, e.stats["preemptions"]) for e in engines]
        return [self.made, *seen]

    def alternate(self, *works: Callable[[], Any], engines: tuple[Engine, ...] = ()) -> list[float]:
        """Median seconds of each work, run in turn. They use these engines and make none.

        A work runs untimed at first, until it has captured the graphs of all its steps.
        """
        for work in works:
            for _ in range(WARM_UPS):
                before = self.disturbances(*engines)
                work()
                if self.disturbances(*engines) == before:
                    break
        before = self.disturbances(*engines)
        times = [[seconds(work, self.device) for work in works] for _ in range(self.rounds)]
        after = self.disturbances(*engines)
        assert after == before, f"a timed window made engines or graphs: {before}, then {after}"
        return [median(column) for column in zip(*times, strict=True)]

    @cached_property
    def peer(self) -> Any:
        """The same model in transformers."""
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.set_verbosity_error()
        logging.disable_progress_bar()
        with tempfile.TemporaryDirectory() as directory:
            path, dtype = Path(directory) / "model", self.model.embed_tokens.weight.dtype
            save_checkpoint(self.model, None, path)
            return AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval().to(self.device)

    def by_transformers(self, texts: list[list[int]], sampled: int, samples: int = 1) -> None:
        """Its `generate` for prompts of one length."""
        ids = torch.tensor(texts, device=self.device)
        self.peer.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            num_return_sequences=samples,
            max_new_tokens=sampled,
            min_new_tokens=sampled,
            pad_token_id=0,
            eos_token_id=None,
        )

    def group_sampling(
        self, sampled: int = 24, prompts: int = 8, samples: int = 8, prompt: int = 300
    ) -> dict[str, float]:
        """Samples in groups, prefill included. The engine computes a group's prompt once."""
        texts, count = [self.ids(prompt) for _ in range(prompts)], prompts * samples
        params = [
            SamplingParams(max_tokens=sampled, ignore_eos=True, seed=seed)
            for _ in texts
            for seed in range(samples)
        ]

        with self.serving(prompts * prompt + count * (sampled + 64)) as engine:

            def ours() -> None:
                engine.update_weights()  # forgets the prompts
                engine.generate([text for text in texts for _ in range(samples)], params)

            def theirs() -> None:
                self.by_transformers(texts, sampled, samples)

            mine, peer = self.alternate(ours, theirs, engines=(engine,))
        kv = count * sampled * (sampled - 1) / 2 + prompts * prompt * (sampled - 1)
        tokens, pairs = prompts * prompt + count * (sampled - 1), prompts * prompt**2 / 2
        bound = self.ceiling.time(self.costs, sampled, tokens, count * sampled, kv, pairs)
        return {
            "tokens_per_second": count * sampled / mine,
            "transformers_tokens_per_second": count * sampled / peer,
            "ratio_to_transformers": peer / mine,
            "ceiling_tokens_per_second": count * sampled / bound,
            "share_of_ceiling": bound / mine,
        }

    def tool_loop(
        self, prompt: int = 1000, turns: int = 20, given: int = 60, sampled: int = 8
    ) -> dict[str, float]:
        """One session turn by turn, beside the same turns each prefilled from the first token."""
        text, more = self.ids(prompt), [self.ids(given) for _ in range(turns)]
        room = prompt + turns * (given + sampled)
        params = [SamplingParams(max_tokens=sampled, ignore_eos=True, seed=s) for s in range(turns)]
        computed = 0

        with self.serving(room) as growing, self.serving(room) as fresh:

            def resumed() -> None:
                nonlocal computed
                growing.update_weights()  # forgets the round before
                before = growing.stats["prefill_tokens"]
                session = growing.session(text)
                for ids, one in zip(more, params, strict=True):
                    session.append(ids)
                    session.sample(one)
                session.close()
                computed = growing.stats["prefill_tokens"] - before

            def anew() -> None:
                ids = list(text)
                for extra, one in zip(more, params, strict=True):
                    fresh.update_weights()  # forgets the turn before
                    ids = ids + extra
                    ids += fresh.generate([ids], one)[0].token_ids

            mine, reprefill = self.alternate(resumed, anew, engines=(growing, fresh))
        lengths = [prompt + turn * (given + sampled) for turn in range(turns)]
        kv = sum((length + given) * sampled for length in lengths)
        pairs = (prompt + given) ** 2 / 2 + sum(given * length for length in lengths[1:])
        steps = turns * sampled
        return {
            "seconds": mine,
            "reprefill_seconds": reprefill,
            "speedup_over_reprefill": reprefill / mine,
            "ceiling_seconds": self.ceiling.time(self.costs, steps, room, steps, kv, pairs),
            "prefill_tokens": computed,
            "appended_tokens": prompt + turns * given,
        }

    def decode(self, batch: int, context: int = 1000, steps: int = 64) -> dict[str, float]:
        """Decoding alone: `batch` unrelated sequences of about `context` tokens.

        Windows of `steps` steps follow one another. The first counts in which no prompt was
        computed and every step was one that the engine knew: on a GPU, a replay of a graph.
        """
        prompt = context - steps // 2
        warm_up = batch * prompt // BATCH_TOKENS + 8
        longest = prompt + warm_up + WINDOWS * steps
        params = [
            SamplingParams(max_tokens=longest - prompt, ignore_eos=True, seed=seed)
            for seed in range(batch)
        ]
        with self.serving(batch * longest, max_batch_tokens=BATCH_TOKENS) as engine:
            requests = [engine.submit(self.ids(prompt), each) for each in params]
            while min(len(request.ids) for request in requests) < prompt + 4:
                engine.step()
            for _ in range(WINDOWS):
                before = [engine.stats["prefill_tokens"], *self.disturbances(engine)]
                keys = sum(len(request.ids) for request in requests) + batch * steps / 2
                whole = seconds(lambda: [engine.step() for _ in range(steps)], self.device)
                after = [engine.stats["prefill_tokens"], *self.disturbances(engine)]
                if after == before:
                    break
            assert after == before, f"no window decodes alone: {before}, then {after}"
            running = sum(not request.finished for request in requests)
            assert running == batch, f"{running} of {batch} sequences went on to the end"
        taken = whole / steps
        bound = self.ceiling.time(self.costs, 1, batch, batch, keys, 0)
        return {
            "tokens_per_second": batch / taken,
            "ceiling_tokens_per_second": batch / bound,
            "share_of_ceiling": bound / taken,
            "step_ms": taken * 1e3,
            "context": keys / batch,
        }

    def prefill(self, length: int) -> dict[str, float]:
        """One prompt, to its first token."""
        text, one = self.ids(length), SamplingParams(max_tokens=1)
        with self.serving(length, max_batch_tokens=length) as engine:

            def work() -> None:
                engine.update_weights()  # forgets the prompt
                engine.generate([text], one)

            (taken,) = self.alternate(work, engines=(engine,))
        bound = self.ceiling.time(self.costs, 1, length, 1, 0, length * length / 2)
        return {
            "tokens_per_second": length / taken,
            "ceiling_tokens_per_second": length / bound,
            "share_of_ceiling": bound / taken,
        }


def cpu_name() -> str:
    """The CPU's name as Linux gives it; elsewhere the architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def run(bench: Bench, on_gpu: bool) -> dict[str, Any]:
    """Runs all works of one model, and prints each as it is measured."""
    parameters = sum(p.numel() for p in bench.model.parameters())
    rates = bench.ceiling.bandwidth, bench.ceiling.flops
    figures: dict[str, Any] = {"parameters": parameters, "bandwidth": rates[0], "flops": rates[1]}
    print(f"\n{parameters / 1e6:,.1f}M parameters", end="; ")
    print(f"ceilings: copy {rates[0] / 1e9:,.1f} GB/s, product {rates[1] / 1e9:,.0f} GFLOP/s")
    works: dict[str, Callable[[], dict[str, float]]] = {
        "group_sampling": bench.group_sampling,
        "group_sampling_64": lambda: bench.group_sampling(64),
        "tool_loop": bench.tool_loop,
        "prefill": lambda: bench.prefill(8192 if on_gpu else 1024),
    }
    for batch in (1, 32, 128) if on_gpu else (1, 64):
        works[f"decode_{batch}"] = lambda batch=batch: bench.decode(batch)
    for name, work in works.items():
        figures[name] = work()
        shown = (f"{key} {value:,.{2 * (value < 100)}f}" for key, value in figures[name].items())
        print(f"  {name}: {', '.join(shown)}", flush=True)
    return figures


def main(argv: list[str] | None = None) -> int:
    """Measures, prints, and writes the figures where --json says."""
    parser = argparse.ArgumentParser(prog="benchmarks/engine.py")
    parser.add_argument("--json", type=Path, help="where to write all figures")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default: 2)")
    parser.add_argument("--rounds", type=int, default=1, help="timed rounds (default: 1)")
    parser.add_argument("--peers", action="store_true", help="beside other engines (peers.py)")
    parser.add_argument("--install", action="store_true", help="with --peers: install them first")
    parser.add_argument("--home", type=Path, default=Path("runs/peers"), help="where they live")
    parser.add_argument("--shape", choices=SHAPES, default="28M", help="with --peers: the model")
    options = parser.parse_args(argv)
    if options.peers:
        from benchmarks import peers

        torch.set_num_threads(options.threads)
        return peers.main(options)
    if find_spec("transformers") is None:
        print("transformers is not installed: pip install -r requirements-dev.txt", file=sys.stderr)
        return 1
    torch.set_num_threads(options.threads)
    figures: dict[str, Any] = {"torch": torch.__version__, "date": time.strftime("%Y-%m-%d")}
    figures["machine"] = f"{cpu_name()}, {options.threads} threads"
    print(f"{figures['machine']}, float32, torch {torch.__version__}")
    cpu = torch.device("cpu")
    figures |= run(Bench("28M", cpu, torch.float32, options.rounds), on_gpu=False)
    figures["nano"] = run(Bench("nano", cpu, torch.float32, options.rounds), on_gpu=False)
    if torch.cuda.is_available():
        print(f"{torch.cuda.get_device_name()}, bfloat16")
        bench = Bench("qwen3-8b", torch.device("cuda"), torch.bfloat16, options.rounds)
        figures["cuda"] = {"machine": torch.cuda.get_device_name()} | run(bench, on_gpu=True)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(figures, indent=1) + "\n")
        print(f"figures: {options.json}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
