"""How fast the engine is, beside transformers and beside what the machine could do: `python -m benchmarks.engine [--json PATH]`.

Samples in groups and decoding beside transformers' `generate`, a tool loop beside prefilling every turn anew, prefill alone: on the CPU in float32 with a model of 28M parameters, whose time goes into arithmetic, and with nano, whose time goes into
Python; then, if there is a GPU, on it with Qwen3-8B in bf16. Weights are random. Rounds alternate, medians are reported, and every speed stands beside its
ceiling: the bytes and FLOPs of the work at the machine's own measured rates.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import sys
import tempfile
import time
from dataclasses import replace
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any, Callable

import torch
from tqdm import tqdm

from nanorchestra.engine.engine import Engine, SamplingParams
from nanorchestra.engine.sampler import Draw
from nanorchestra.model.qwen3 import PRESETS, Qwen3
from nanorchestra.model.saving import save_checkpoint
from nanorchestra.training.costs import Costs

PEAK_M = 512  # rows of the matrix product that measures the FLOP/s
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
    """The machine's own rates: bytes/s of a large copy (read and written), FLOP/s of a matrix product in the model's dtype."""

    def __init__(self, device: torch.device, dtype: torch.dtype):
        self.device, self.dtype = device, dtype
        source = torch.empty(
            1 << (31 if device.type == "cuda" else 27), dtype=torch.uint8, device=device
        )
        target, size = torch.empty_like(source), 8192 if device.type == "cuda" else 1024
        a, b = (
            torch.randn(rows, size, device=device, dtype=dtype)
            for rows in (8192 if device.type == "cuda" else PEAK_M, size)
        )
        self.bandwidth = 2 * source.numel() / self._best(lambda: target.copy_(source))
        self.flops = 2 * a.shape[0] * size * size / self._best(lambda: a @ b)

    def _best(self, work: Callable[[], Any], rounds: int = 12) -> float:
        return min(seconds(work, self.device) for _ in range(rounds))

    def time(
        self, costs: Costs, steps: int, tokens: int, rows: int, kv_tokens: float, pairs: float
    ) -> float:
        """Seconds that `steps` steps take at these rates: their weights read or their FLOPs done, and their KV read."""
        scale = torch.finfo(self.dtype).bits / 16  # Costs counts bytes of bf16
        flops = tokens * costs.token_flops + rows * costs.logit_flops + pairs * costs.pair_flops
        return (
            max(steps * costs.weight_bytes * scale / self.bandwidth, flops / self.flops)
            + kv_tokens * costs.kv_bytes * scale / self.bandwidth
        )


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
    """One model, and the workloads to run it on. Every method returns a dictionary of figures for the table and the JSON."""

    def __init__(self, shape: str, device: torch.device, dtype: torch.dtype, rounds: int):
        self.device, self.rounds, self.rng = device, rounds, random.Random(0)
        with torch.device(device):
            self.model = Qwen3(replace(SHAPES[shape], max_position_embeddings=40960)).to(dtype)
        self.model.init_weights(0)
        self.config, self.costs = self.model.config, Costs.of(self.model.config)
        self.ceiling = Ceiling(device, dtype)

    def ids(self, count: int) -> list[int]:
        return [self.rng.randrange(self.config.vocab_size) for _ in range(count)]

    def engine(self, tokens: int, **options: Any) -> Engine:
        """An engine with nothing cached and room for so many tokens."""
        return Engine(
            self.model,
            num_pages=tokens // (64 if self.device.type == "cuda" else 16) + 64,
            **options,
        )

    def alternate(self, *works: Callable[[], Any]) -> list[float]:
        """Median seconds of each, run in turn; the first round warms up."""
        times = [[seconds(work, self.device) for work in works] for _ in range(self.rounds + 1)][1:]
        return [median(column) for column in zip(*times)]

    @cached_property
    def peer(self) -> Any:
        return peer(self.model)

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
        self, sampled: int, prompts: int = 8, samples: int = 8, prompt: int = 300
    ) -> dict[str, float]:
        """Samples in groups, prefill included, beside transformers. The fewer tokens are sampled, the more of
        the work is the prompts, which are computed once a group here and once a sample there."""
        texts = [self.ids(prompt) for _ in range(prompts)]
        params = [
            SamplingParams(max_tokens=sampled, ignore_eos=True, seed=seed)
            for _ in texts
            for seed in range(samples)
        ]

        def ours(**options: Any) -> None:
            engine = self.engine(
                prompts * (prompt + samples * sampled) + len(params) * 64, **options
            )
            engine.generate([text for text in texts for _ in range(samples)], params)

        mine, transformers = self.alternate(
            ours,
            lambda: self.by_transformers(texts, sampled, samples),
        )
        count = prompts * samples * sampled
        own = (
            prompts * samples * sampled * (sampled - 1) / 2
        )  # KV read: each sample its own, each group its prompt together
        bound = self.ceiling.time(
            self.costs,
            sampled,
            prompts * prompt + count - len(params),
            count,
            own + prompts * prompt * (sampled - 1),
            prompts * prompt * prompt / 2,
        )
        return {
            "tokens_per_second": count / mine,
            "transformers_tokens_per_second": count / transformers,
            "ratio_to_transformers": transformers / mine,
            "ceiling_tokens_per_second": count / bound,
            "share_of_ceiling": bound / mine,
        }

    def tool_loop(
        self, prompt: int = 1000, turns: int = 20, given: int = 60, sampled: int = 8
    ) -> dict[str, float]:
        """One session that goes on turn by turn, beside the same turns each prefilled from its first token."""
        text, more = self.ids(prompt), [self.ids(given) for _ in range(turns)]
        room = prompt + turns * (given + sampled)
        params = [
            SamplingParams(max_tokens=sampled, ignore_eos=True, seed=turn) for turn in range(turns)
        ]
        stats: dict[str, float] = {}

        def resumed() -> None:
            engine = self.engine(room)
            session = engine.session(text)
            for ids, one in zip(more, params):
                session.append(ids)
                session.sample(one)
            stats.update(engine.stats)

        def anew() -> None:
            ids = list(text)
            for extra, one in zip(more, params):
                ids = ids + extra
                ids += self.engine(room).generate([ids], one)[0].token_ids

        mine, reprefill = self.alternate(resumed, anew)
        steps, lengths = (
            turns * sampled,
            [prompt + turn * (given + sampled) for turn in range(turns)],
        )
        kv = sum((length + given) * sampled for length in lengths)
        pairs = (prompt + given) ** 2 / 2 + sum(given * length for length in lengths[1:])
        bound = self.ceiling.time(
            self.costs, steps, prompt + turns * (given + sampled), steps, kv, pairs
        )
        return {
            "seconds": mine,
            "reprefill_seconds": reprefill,
            "speedup_over_reprefill": reprefill / mine,
            "ceiling_seconds": bound,
            "share_of_ceiling": bound / mine,
            "prefill_tokens": stats["prefill_tokens"],
            "appended_tokens": prompt + turns * given,
        }

    def decode(
        self, batch: int, context: int = 1000, steps: int = 64, beside: bool = False
    ) -> dict[str, float]:
        """Decoding alone: `batch` unrelated sequences of about `context` tokens. beside: transformers with them too, its prefill subtracted."""
        texts = [self.ids(context - steps // 2) for _ in range(batch)]
        engine = self.engine(
            batch * (context + 2 * steps), max_batch_tokens=max(8192, batch), max_running=batch
        )
        for seed, text in enumerate(texts):
            engine.submit(
                text, SamplingParams(max_tokens=2 * steps + 32, ignore_eos=True, seed=seed)
            )
        while engine.stats["sampled_tokens"] < batch or engine.scheduler.waiting:
            engine.step()
        for _ in range(8):
            engine.step()
        taken = seconds(lambda: [engine.step() for _ in range(steps)], self.device) / steps
        bound = self.ceiling.time(self.costs, 1, batch, batch, batch * context, 0)
        figures = {
            "tokens_per_second": batch / taken,
            "ceiling_tokens_per_second": batch / bound,
            "share_of_ceiling": bound / taken,
            "step_ms": taken * 1e3,
            "host_ms": self.host_seconds(engine, batch) * 1e3,
        }
        engine.sleep()  # on a GPU there is no room for both
        if beside:
            first, last = (
                min(
                    seconds(lambda: self.by_transformers(texts, sampled), self.device)
                    for _ in range(self.rounds + 1)
                )
                for sampled in (1, steps + 1)
            )
            figures |= {
                "transformers_tokens_per_second": batch * steps / (last - first),
                "ratio_to_transformers": (last - first) / (steps * taken),
            }
        return figures

    def host_seconds(self, engine: Engine, batch: int, steps: int = 16) -> float:
        """What Python and launches take of a decode step. A GPU has done by then what was launched before, and what is launched now is not waited
        for; a CPU is spared the computation."""
        if self.device.type == "cpu":
            engine.runner.logits, engine.sampler = (
                lambda plan: None,
                lambda *_: [Draw(0, 0.0, [])] * batch,
            )
        taken = 0.0
        for _ in range(steps):
            if self.device.type == "cuda":
                torch.cuda.synchronize()
            start = time.perf_counter()
            engine.step()
            taken += time.perf_counter() - start
        return taken / steps

    def prefill(self, length: int = 8192) -> dict[str, float]:
        """One prompt, to its first token."""
        text = self.ids(length)
        (taken,) = self.alternate(
            lambda: self.engine(length, max_batch_tokens=length).generate(
                [text], SamplingParams(max_tokens=1)
            )
        )
        bound = self.ceiling.time(self.costs, 1, length, 1, 0, length * length / 2)
        return {
            "tokens_per_second": length / taken,
            "ceiling_tokens_per_second": length / bound,
            "share_of_ceiling": bound / taken,
        }


def peer(model: Qwen3) -> Any:
    """The same model in transformers, which is installed for the tests only."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as directory:
        save_checkpoint(model, None, Path(directory) / "model")
        return (
            AutoModelForCausalLM.from_pretrained(
                Path(directory) / "model", dtype=model.embed_tokens.weight.dtype
            )
            .eval()
            .to(model.embed_tokens.weight.device)
        )


def cpu_name() -> str:
    """As Linux calls it; elsewhere the architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")),
        platform.machine(),
    )


def run(bench: Bench, cuda: bool) -> dict[str, Any]:
    """All workloads of one model, printed as they are measured."""
    parameters = sum(p.numel() for p in bench.model.parameters())
    print(
        f"\n{parameters / 1e6:,.1f}M parameters; ceilings measured here: copy {bench.ceiling.bandwidth / 1e9:,.1f} GB/s, matrix product "
        f"{bench.ceiling.flops / 1e9:,.0f} GFLOP/s"
    )
    works: dict[str, Callable[[], dict[str, float]]] = {
        "group_sampling": lambda: bench.group_sampling(24),
        "group_sampling_64": lambda: bench.group_sampling(64),
        "tool_loop": bench.tool_loop,
    }
    works |= {
        f"decode_{batch}": lambda batch=batch: bench.decode(batch, beside=cuda or batch == 1)
        for batch in ((1, 32, 128) if cuda else (1, 64))
    }
    works["prefill"] = lambda: bench.prefill(8192 if cuda else 1024)
    figures: dict[str, Any] = {
        "parameters": parameters,
        "bandwidth": bench.ceiling.bandwidth,
        "flops": bench.ceiling.flops,
    }
    for name, work in tqdm(works.items(), desc="workloads", disable=None, leave=False):
        figures[name] = work()
        tqdm.write(
            f"  {name}: "
            + ", ".join(
                f"{key} {value:,.2f}" if value < 100 else f"{key} {value:,.0f}"
                for key, value in figures[name].items()
            )
        )
    return figures


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.engine", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--json", type=Path, help="where to write all figures")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default: 2)")
    parser.add_argument(
        "--rounds", type=int, default=3, help="timed rounds of each work (default: 3)"
    )
    options = parser.parse_args(argv)
    if find_spec("transformers") is None:
        print(
            "transformers, the peer that is measured alongside, is not installed: pip install -r requirements-dev.txt",
            file=sys.stderr,
        )
        return 1
    torch.set_num_threads(options.threads)
    figures: dict[str, Any] = {"torch": torch.__version__, "date": time.strftime("%Y-%m-%d")}
    for cuda in (False, True)[: 1 + torch.cuda.is_available()]:
        device, dtype = (
            (torch.device("cuda"), torch.bfloat16) if cuda else (torch.device("cpu"), torch.float32)
        )
        machine = (
            torch.cuda.get_device_name() if cuda else f"{cpu_name()}, {options.threads} threads"
        )
        print(f"{machine}, {str(dtype)[6:]}, torch {torch.__version__}")
        table = (
            figures.setdefault("cuda", {}) if cuda else figures
        )  # the GPU's table stands within that of its host
        table["machine"] = machine
        for shape in ("qwen3-8b",) if cuda else ("28M", "nano"):
            measured = run(Bench(shape, device, dtype, options.rounds), cuda)
            table |= measured if shape != "nano" else {"nano": measured}
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(figures, indent=1) + "\n")
        print(f"figures: {options.json}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
