"""The engine with Qwen3-8B, random weights, in bf16: steps, decoding, serving, and vLLM.

The engine is built before anything is timed, with all its graphs. The rehearsal runs steps and
decoding through the kernels in Triton's interpreter, with a model of one layer, and serving as on a
CPU with nano.
"""

from __future__ import annotations

import gc
import itertools
import json
import math
import random
import tempfile
import time
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from benchmarks.engine import CONTEXT, SHAPES, Bench, random_model, sampling
from benchmarks.gpu_parts import NotHereError, Part, by_kernels
from kernels import common
from nanorchestra.engine.engine import Engine, SamplingParams
from nanorchestra.model.checkpoint import config_to_hf, copy_weights, named_hf_tensors
from nanorchestra.model.quantise import quantise_model
from nanorchestra.model.qwen3 import ModelConfig, Qwen3

BATCHES = 1, 32, 128, 256
KEYS = 1060  # tokens of context while decoding is timed
STEPS = 64
POOL = BATCHES[-1] * (KEYS + 4 * STEPS)  # tokens
TINY = ModelConfig(320, 32, 48, 1, 4, 2, head_dim=16, tie_word_embeddings=True)
NEAR = 1e-3  # nats: the log-probabilities of a sequence agree until a tie is this near


def bench_of(part: Part, quantise: str = "", **options: Any) -> Bench:
    """Returns Qwen3-8B and its engine, or a tiny one for the interpreter."""
    if part.rehearse:
        model = random_model(TINY, torch.device("cpu"), torch.float32)
        options |= {"room": 4096, "max_batch_tokens": 128, "max_running": 4, "max_context": 256}
    else:
        model = random_model(SHAPES["qwen3-8b"], torch.device("cuda"), torch.bfloat16)
        options = {"room": POOL, "max_running": BATCHES[-1], "max_context": 4096} | options
    if quantise:
        tensors = list(named_hf_tensors(model))
        quantise_model(model, quantise)
        copy_weights(model, tensors)
    return Bench(model, **options)


def decode_rows(part: Part, label: str, batches: tuple[int, ...], **options: Any) -> None:
    """Decodes at several batch sizes with an engine of these options, and frees it."""
    with by_kernels(part):
        bench = bench_of(part, **options)
        for batch in batches:
            sizes = (30, 5) if part.rehearse else (KEYS, STEPS)
            part.note(f"{label}B={batch}", **bench.decode(batch, *sizes))
    del bench
    gc.collect()  # an engine's parts know each other
    if not part.rehearse:
        torch.cuda.empty_cache()


def decode(part: Part) -> None:
    """Decoding at several batch sizes; small ones with weights in int8 too."""
    batches = (1, 2) if part.rehearse else BATCHES
    decode_rows(part, "", batches)
    if not part.rehearse:
        decode_rows(part, "int8, ", batches[:2], quantise="int8")


def steps(part: Part) -> None:
    """A decode step with graphs and look-ahead on and off; a CPU has no graphs."""
    batches, switches, sizes = (1, 32), (True, False), (KEYS, STEPS)
    if part.rehearse:
        batches, switches, sizes = (1,), (False,), (30, 5)
    with by_kernels(part):
        bench = bench_of(part)
        runner = bench.engine.runner
        captured = runner.graphs
        for batch, graphs, overlaps in itertools.product(batches, switches, (True, False)):
            runner.graphs = captured if graphs else {}
            runner.overlaps = overlaps
            step_ms = bench.decode(batch, *sizes)["step_ms"]
            part.note(f"B={batch}, graphs {graphs}, look-ahead {overlaps}", step_ms=step_ms)


def early_launches(part: Part) -> None:
    """A decode step of one row with and without programmatic dependent launch, in turns.

    Both compute the same tokens and log-probabilities. The rehearsal has neither graphs nor early
    launches.
    """
    sizes = (30, 5) if part.rehearse else (KEYS, STEPS)
    for weights, quantise in (("bf16", ""), ("int8", "int8")):
        with by_kernels(part):
            bench = bench_of(part, quantise, max_running=1, room=8 * KEYS)
            runner = bench.engine.runner
            graphs = {"early": runner.graphs}
            runner.graphs = {}
            with mock.patch.object(common, "DEPENDENT_LAUNCH", math.inf):
                if not part.rehearse:
                    runner.warm_up()
                    runner.capture()
            graphs["in full"] = runner.graphs
            prompt, drawn = bench.ids(sizes[0]), []
            for turn, launch in itertools.product((1, 2), graphs):
                runner.graphs = graphs[launch]
                step_ms = bench.decode(1, *sizes)["step_ms"]
                part.note(f"{weights}, launched {launch}, turn {turn}", step_ms=step_ms)
                bench.engine.reset_prefix_cache()
                drawn += bench.engine.generate([prompt], sampling(sizes[1]))
        for completion in drawn:
            assert completion.token_ids == drawn[0].token_ids, "an early launch drew other tokens"
            assert completion.logprobs == drawn[0].logprobs, "an early launch changes bits"
        del bench, runner, graphs
        gc.collect()
        if not part.rehearse:
            torch.cuda.empty_cache()


def serving(part: Part) -> None:
    """Prefill, samples in groups and a tool loop."""
    if part.rehearse:
        bench = Bench(random_model(SHAPES["nano"], torch.device("cpu"), torch.float32), room=9000)
        part.note("prefill", **bench.prefill(256))
        part.note("tool loop", **bench.tool_loop(60, turns=3, given=10, sampled=2))
        part.note("groups of 4", **bench.group_sampling(4, prompts=2, samples=4, prompt=40))
        return
    model = random_model(SHAPES["qwen3-8b"], torch.device("cuda"), torch.bfloat16)
    bench = Bench(model, room=100_000, max_batch_tokens=8192, max_running=64)
    for length in (2048, 8192):
        part.note(f"prefill {length}", **bench.prefill(length))
    part.note("tool loop", **bench.tool_loop())
    part.note("tool loop, prompt 8000", **bench.tool_loop(8000, turns=6, given=200, sampled=64))
    part.note("groups of 64", **bench.group_sampling(64))
    part.note("groups of 256", **bench.group_sampling(256))


def vllm(part: Part) -> None:
    """Measures vLLM's decoding where it is installed, with random weights of the same shape."""
    if find_spec("vllm") is None:
        raise NotHereError("vllm is not installed")
    from vllm import LLM, SamplingParams

    shape = replace(SHAPES["qwen3-8b"], max_position_embeddings=CONTEXT)
    with tempfile.TemporaryDirectory() as directory:
        text = json.dumps(config_to_hf(shape) | {"dtype": "bfloat16"})
        (Path(directory) / "config.json").write_text(text)
        options = {"load_format": "dummy", "skip_tokenizer_init": True, "max_model_len": 4096}
        # Without its cache of prompts: each call computes them, and the difference decodes alone.
        llm = LLM(directory, dtype="bfloat16", enable_prefix_caching=False, **options)
    for batch in BATCHES:
        prompts = []
        for number in range(batch):
            ids = [(7 * i + number) % 9000 for i in range(KEYS - STEPS // 2)]
            prompts.append({"prompt_token_ids": ids})
        times = []
        for tokens in (STEPS + 2, 2, STEPS + 2):  # the first warms up
            params = SamplingParams(max_tokens=tokens, ignore_eos=True, detokenize=False)
            start = time.perf_counter()
            llm.generate(prompts, params, use_tqdm=False)
            times.append(time.perf_counter() - start)
        part.note(f"B={batch}", tokens_per_second=batch * STEPS / (times[2] - times[1]))


def tokens_as_on_cpu(part: Part) -> None:
    """Draws the same tokens as the CPU's engine with the same float32 weights, and twice the same.

    Prompts lie in pages, over pages, in chunks and in groups; greedy and sampled, some with a
    top-k. How many sequences are drawn alike without graphs is counted.
    """
    shape = TINY if part.rehearse else replace(SHAPES["28M"], max_position_embeddings=4096)
    lengths, count = ((3, 20, 20), 3) if part.rehearse else ((3, 65, 300, 300, 300, 900), 64)
    on_cpu = random_model(shape, torch.device("cpu"), torch.float32)
    with torch.device(part.device):
        copy = Qwen3(on_cpu.config)
    copy.load_state_dict(on_cpu.state_dict())
    rng = random.Random(0)
    texts = {n: [rng.randrange(shape.vocab_size) for _ in range(n)] for n in set(lengths)}
    prompts = [texts[n] for n in lengths]
    options = {"page_size": 16 if part.rehearse else 64, "num_pages": 256, "max_batch_tokens": 512}
    options |= {"max_running": 8, "max_context": 2048}
    reference = Engine(on_cpu, **options)
    with by_kernels(part):
        engine = Engine(copy, **options)
    for kind, temperature in (("greedy", 0.0), ("sampled", 1.0)):
        params = []
        for seed in range(len(prompts)):
            params.append(
                SamplingParams(
                    count, temperature, top_k=20 * (seed % 2), seed=seed, ignore_eos=True
                )
            )
        expected = reference.generate(prompts, params)
        done = engine.generate(prompts, params)
        engine.reset_prefix_cache()
        again = engine.generate(prompts, params)
        captured, engine.runner.graphs = engine.runner.graphs, {}
        engine.reset_prefix_cache()
        eager = engine.generate(prompts, params)
        engine.runner.graphs = captured
        alike = sum(x.token_ids == y.token_ids for x, y in zip(done, eager, strict=True))
        equal, gap = 0, 0.0
        for got, twin, right in zip(done, again, expected, strict=True):
            assert got.token_ids == twin.token_ids, f"{kind}: a second run drew other tokens"
            if got.token_ids == right.token_ids:
                equal += 1
            draws = zip(got.token_ids, right.token_ids, got.logprobs, right.logprobs, strict=True)
            for token, right_token, logprob, right_logprob in draws:
                if token != right_token:
                    break
                gap = max(gap, abs(logprob - right_logprob))
        equal_to = {"equal_to_cpu": equal, "equal_without_graphs": alike, "of": len(prompts)}
        part.note(kind, **equal_to, largest_logprob_gap=gap)
        assert gap < NEAR, f"{kind}: a log-probability is off by {gap:.2g} nats"
        # One of many sequences may differ: rounding decides between nearly equal ids.
        least = len(prompts) - 1 if len(prompts) > 3 else len(prompts)
        assert equal >= least, f"{kind}: {equal} sequences are equal"
