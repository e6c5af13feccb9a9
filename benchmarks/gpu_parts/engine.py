"""The engine with Qwen3-8B, random weights, in bf16: steps, decoding, serving, and its peers.

The rehearsal runs steps and decoding through the kernels in Triton's interpreter, with a model of
one layer, and serving as on a CPU with nano.
"""

from __future__ import annotations

import itertools
import json
import random
import tempfile
import time
from dataclasses import replace
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from benchmarks.engine import SHAPES, Bench, Ceiling, seconds
from benchmarks.gpu_parts import NotHereError, Part, by_kernels
from nanorchestra.engine.engine import Engine
from nanorchestra.model.hf_config import config_to_hf
from nanorchestra.model.quantise import quantise_model
from nanorchestra.model.qwen3 import ModelConfig, Qwen3
from nanorchestra.model.weights import copy_weights, named_hf_tensors
from nanorchestra.training.costs import Costs

# Sequences of so many tokens keep, for a few windows, the sizes of the steps that decode them.
CONTEXT = 1060
TINY = ModelConfig(320, 32, 48, 1, 4, 2, head_dim=16, tie_word_embeddings=True)
POSITIONS = 40960


class GpuBench(Bench):
    """A Bench whose weights are drawn on the device: 16 GB from a CPU take a minute.

    graphs and ahead: whether decode steps are captured, and launched one ahead. bounded: whether
    chunks are small while requests decode; a measure of decoding alone prefills first. kv_dtype: as
    the engine's.
    """

    def __init__(self, shape: ModelConfig, part: Part, quantise: str = ""):
        self.device, self.rounds, self.rng = torch.device(part.device), 1, random.Random(0)
        dtype = torch.float32 if part.rehearse else torch.bfloat16
        self.model = self.served = random_model(shape, self.device, dtype)
        if quantise:
            tensors = list(named_hf_tensors(self.model))
            quantise_model(self.model, quantise)
            copy_weights(self.model, tensors)
        self.costs, self.ceiling = Costs.of(self.model.config), Ceiling(self.device, dtype)
        self.graphs = self.ahead = self.bounded = True
        self.kv_dtype = None

    def engine(self, tokens: int, **options: Any) -> Engine:
        """As in Bench, with graphs and look-ahead switched off where they should be."""
        made = super().engine(tokens, kv_dtype=self.kv_dtype, **options)
        if not self.bounded:
            made.scheduler.mixed = None
        if not self.graphs:
            made.runner.graphs = False
        if not self.ahead:
            made.runner.overlaps = False
        return made

    @cached_property
    def peer(self) -> Any:
        """The same weights in transformers, without a copy on disk."""
        return transformers_model(self.model, self.device)


def random_model(shape: ModelConfig, device: torch.device, dtype: torch.dtype) -> Qwen3:
    """A decoder with normal weights, drawn where they lie."""
    with torch.device("meta"):
        model = Qwen3(shape).to(dtype)
    model.to_empty(device=device)
    generator = torch.Generator(device).manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.fill_(1.0)
            else:
                parameter.normal_(0.0, 0.02, generator=generator)
    return model


def transformers_model(model: Qwen3, device: torch.device) -> Any:
    """The model in transformers, with the same weights."""
    if find_spec("transformers") is None:
        raise NotHereError("transformers is not installed")
    from transformers import Qwen3Config, Qwen3ForCausalLM

    dtype = model.embed_tokens.weight.dtype
    with torch.device(device):
        peer = Qwen3ForCausalLM(Qwen3Config(**config_to_hf(model.config))).to(dtype).eval()
    own = peer.state_dict()
    with torch.no_grad():
        for name, tensor in named_hf_tensors(model):
            own[name].copy_(tensor)
    return peer


def bench_of(part: Part, quantise: str = "") -> GpuBench:
    """Qwen3-8B, or a tiny model for the interpreter."""
    shape = TINY if part.rehearse else SHAPES["qwen3-8b"]
    return GpuBench(replace(shape, max_position_embeddings=POSITIONS), part, quantise)


def steps(part: Part) -> None:
    """A decode step with graphs and look-ahead on and off, in bf16 and in 8 bits."""
    batches, sizes = ((1,), (30, 5)) if part.rehearse else ((1, 32), (CONTEXT, 48))
    for quantise in ("",) if part.rehearse else ("", "int8"):
        bench = bench_of(part, quantise)
        bench.bounded = False
        for batch in batches:
            for bench.graphs, bench.ahead in itertools.product((True, False), repeat=2):
                with by_kernels(part):
                    figures = bench.decode(batch, *sizes)
                words = f"graphs {bench.graphs}, ahead {bench.ahead}"
                part.note(f"{quantise or 'bf16'} B={batch}, {words}", step_ms=figures["step_ms"])
        del bench
        if not part.rehearse:
            torch.cuda.empty_cache()


def decode(part: Part) -> None:
    """Decoding at several batch sizes, contexts of CONTEXT tokens; transformers beside it.

    The larger batches also with the KV in 8 bits.
    """
    batches, sizes = ((1, 2), (30, 5)) if part.rehearse else ((1, 32, 128, 256), (CONTEXT, 64))
    bench = bench_of(part)
    bench.bounded = False
    for batch in batches:
        with by_kernels(part):
            part.note(f"B={batch}", **bench.decode(batch, *sizes))
    bench.kv_dtype = torch.float8_e4m3fn
    share = bench.kv_dtype.itemsize / bench.ceiling.dtype.itemsize
    bench.costs = replace(bench.costs, kv_bytes=bench.costs.kv_bytes * share)
    for batch in batches[len(batches) // 2 :]:
        with by_kernels(part):
            part.note(f"KV fp8, B={batch}", **bench.decode(batch, *sizes))
    for batch in batches[:2]:
        texts = [bench.ids(sizes[0]) for _ in range(batch)]

        def sample(count: int, texts: list[list[int]] = texts) -> float:
            return seconds(lambda: bench.by_transformers(texts, count), bench.device)

        sample(2)  # makes the peer, and warms it up
        taken = sample(2 + sizes[1]) - sample(2)  # of decoding alone
        part.note(f"transformers B={batch}", tokens_per_second=batch * sizes[1] / taken)


def serving(part: Part) -> None:
    """Prefill, samples in groups and a tool loop; groups beside transformers."""
    if part.rehearse:
        bench = GpuBench(replace(SHAPES["nano"], max_position_embeddings=POSITIONS), part)
        part.note("prefill", **bench.prefill(256))
        part.note("tool loop", **bench.tool_loop(60, turns=3, given=10, sampled=2))
        part.note("groups of 4", **bench.group_sampling(4, prompts=2, samples=4, prompt=40))
        return
    bench = bench_of(part)
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

    shape = replace(SHAPES["qwen3-8b"], max_position_embeddings=POSITIONS)
    with tempfile.TemporaryDirectory() as directory:
        text = json.dumps(config_to_hf(shape) | {"dtype": "bfloat16"})
        (Path(directory) / "config.json").write_text(text)
        options = {"load_format": "dummy", "skip_tokenizer_init": True, "max_model_len": 4096}
        # Without its cache of prompts: each call computes them, and the difference decodes alone.
        llm = LLM(directory, dtype="bfloat16", enable_prefix_caching=False, **options)
    for batch in (1, 32, 128, 256):
        prompts = [
            {"prompt_token_ids": [(7 * i + n) % 9000 for i in range(CONTEXT - 32)]}
            for n in range(batch)
        ]
        times = []
        for count in (66, 2, 66):  # the first warms up
            params = SamplingParams(max_tokens=count, ignore_eos=True, detokenize=False)
            start = time.perf_counter()
            llm.generate(prompts, params, use_tqdm=False)
            times.append(time.perf_counter() - start)
        part.note(f"B={batch}", tokens_per_second=batch * 64 / (times[2] - times[1]))
