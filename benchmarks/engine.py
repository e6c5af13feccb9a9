"""Sampling speed of the engine beside Hugging Face transformers' `generate`: the same random nano model, prompts, machine and process.

    python benchmarks/engine.py                    8 prompts of about 300 tokens, 8 samples each, 64 new tokens, 2 threads

Both sample from the whole distribution at temperature 1 and ignore the end of text. The rounds alternate; medians are reported.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from nanorchestra.engine import Engine, SamplingParams  # noqa: E402
from nanorchestra.model import PRESETS, Qwen3  # noqa: E402
from nanorchestra.weights import save_checkpoint  # noqa: E402


class Stopwatch:
    """Adds up the seconds spent in functions, by name."""

    def __init__(self):
        self.seconds: dict[str, float] = {}

    def timed(self, name: str, function):
        def call(*args, **kwargs):
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

        return call


def watched_engine(model: Qwen3, rows: int, watch: Stopwatch) -> Engine:
    """An engine whose parts are timed: the whole forward ("forward"), attention with the KV store within it, and the sampler."""
    engine = Engine(model, max_running=rows)
    attend = engine.runner._attend
    engine.runner._attend = lambda *args: watch.timed("attention", attend(*args))
    engine.runner.logits = watch.timed("forward", engine.runner.logits)
    engine.sampler = watch.timed("sampling", engine.sampler)
    return engine


def run_engine(model: Qwen3, prompts: list[list[int]], samples: int, tokens: int, watch: Stopwatch) -> tuple[float, int]:
    """(seconds, steps) for all samples of all prompts, the prefill included; a fresh engine, so nothing is cached."""
    engine = watched_engine(model, len(prompts) * samples, watch)
    params = [SamplingParams(max_tokens=tokens, ignore_eos=True, seed=seed) for _ in prompts for seed in range(samples)]
    start = time.perf_counter()
    completions = engine.generate([prompt for prompt in prompts for _ in range(samples)], params)
    seconds = time.perf_counter() - start
    assert all(len(completion.token_ids) == tokens for completion in completions)
    return seconds, engine.stats["steps"]


def run_transformers(model, prompts: list[list[int]], samples: int, tokens: int) -> float:
    """Seconds for the same work in one batched call, left-padded."""
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    start = time.perf_counter()
    with torch.inference_mode():
        out = model.generate(ids, attention_mask=mask, do_sample=True, temperature=1.0, top_k=0, top_p=1.0, num_return_sequences=samples,
                             max_new_tokens=tokens, min_new_tokens=tokens, pad_token_id=0, eos_token_id=None)  # fmt: skip
    assert out.shape == (len(prompts) * samples, width + tokens)
    return time.perf_counter() - start


def decode_step(model: Qwen3, rows: int, samples: int, rng: random.Random, watch: Stopwatch) -> float:
    """Milliseconds of a decode step, median: `rows` running in groups of `samples`, prompts of about 330 tokens, own parts of 20..120."""
    engine = watched_engine(model, rows, watch)
    for _ in range(rows // samples):
        prompt = [rng.randrange(model.config.vocab_size) for _ in range(rng.randrange(310, 350))]
        for seed in range(samples):
            own = [rng.randrange(model.config.vocab_size) for _ in range(rng.randrange(20, 70))]
            engine.submit(prompt + own, SamplingParams(max_tokens=50, ignore_eos=True, seed=seed))
    while engine.scheduler.waiting or len(engine.scheduler.plan().decodes) < rows:
        engine.step()
    watch.seconds.clear()
    times = []
    while engine.has_work and len(times) < 45:
        start = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - start)
    watch.seconds = {name: seconds / len(times) * 1e3 for name, seconds in watch.seconds.items()}
    return median(times) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("threads", 2), ("prompts", 8), ("samples", 8), ("tokens", 64), ("rounds", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)

    model, rng = Qwen3(PRESETS["nano"]), random.Random(0)
    model.init_weights(0)
    print(f"nano, {sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters, {options.threads} threads, torch {torch.__version__}")
    for rows in (128, 256):
        watch = Stopwatch()
        milliseconds = decode_step(model, rows, options.samples, rng, watch)
        parts = watch.seconds
        print(f"decode step of {rows} rows: {milliseconds:.1f} ms median, {rows / milliseconds * 1e3:,.0f} tokens/s (mean ms: "
              f"model {parts['forward'] - parts['attention']:.1f}, attention {parts['attention']:.1f}, sampling {parts['sampling']:.1f})")  # fmt: skip

    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as directory:
        save_checkpoint(model, None, Path(directory) / "nano")
        other = AutoModelForCausalLM.from_pretrained(Path(directory) / "nano", dtype=torch.float32).eval()
    prompts = [[rng.randrange(model.config.vocab_size) for _ in range(rng.randrange(280, 320))] for _ in range(options.prompts)]
    watch, ours, theirs, steps = Stopwatch(), [], [], 0
    for round_index in range(options.rounds + 1):                     # the first warms up
        if round_index == 1:
            watch.seconds.clear()
        seconds, steps = run_engine(model, prompts, options.samples, options.tokens, watch)
        ours.append(seconds)
        theirs.append(run_transformers(other, prompts, options.samples, options.tokens))
    ours, theirs = median(ours[1:]), median(theirs[1:])
    count = options.prompts * options.samples * options.tokens
    forward, attention, sampling = (watch.seconds[name] / options.rounds / steps * 1e3 for name in ("forward", "attention", "sampling"))
    print(f"{options.prompts} prompts x {options.samples} samples x {options.tokens} tokens, prefill included:")
    print(f"  nanorchestra  {count / ours:8,.0f} tokens/s  ({ours / steps * 1e3:.1f} ms a step of {steps}: model {forward - attention:.1f}, "
          f"attention {attention:.1f}, sampling {sampling:.1f})")  # fmt: skip
    print(f"  transformers  {count / theirs:8,.0f} tokens/s")
    print(f"  ratio         {theirs / ours:8.1f}")


if __name__ == "__main__":
    main()
