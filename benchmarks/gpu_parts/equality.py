"""The GPU engine's tokens beside the CPU engine's, with the same float32 weights."""

from __future__ import annotations

import random
from dataclasses import replace

import torch

from benchmarks.engine import SHAPES
from benchmarks.gpu_parts import Part, by_kernels
from benchmarks.gpu_parts.engine import TINY, random_model
from nanorchestra.engine.engine import Engine, SamplingParams
from nanorchestra.model.qwen3 import Qwen3

NEAR = 1e-3  # nats: the log-probabilities of a sequence agree until a tie is this near


def tokens(part: Part) -> None:
    """Prompts in pages, over pages, in chunks and in groups; greedy and sampled, two engines."""
    shape = TINY if part.rehearse else replace(SHAPES["28M"], max_position_embeddings=4096)
    lengths, count = ((3, 20, 20), 3) if part.rehearse else ((3, 65, 300, 300, 300, 900), 64)
    reference = random_model(shape, torch.device("cpu"), torch.float32)
    with torch.device(part.device):
        own = Qwen3(shape)
    own.load_state_dict(reference.state_dict())
    rng = random.Random(0)
    texts = {n: [rng.randrange(shape.vocab_size) for _ in range(n)] for n in set(lengths)}
    prompts = [texts[n] for n in lengths]
    options = {"page_size": 16 if part.rehearse else 64, "num_pages": 256, "max_batch_tokens": 512}
    on_cpu = Engine(reference, **options)
    with by_kernels(part):
        engines = [Engine(own, **options) for _ in range(2)]
    for kind, temperature in (("greedy", 0.0), ("sampled", 1.0)):
        params = [
            SamplingParams(max_tokens=count, temperature=temperature, seed=seed, ignore_eos=True)
            for seed in range(len(prompts))
        ]
        wanted = on_cpu.generate(prompts, params)
        results = [engine.generate(prompts, params) for engine in engines]
        pairs = list(zip(results[0], wanted, strict=True))
        equal = sum(a.token_ids == b.token_ids for a, b in pairs)
        twins = all(a.token_ids == b.token_ids for a, b in zip(*results, strict=True))
        gap = max(_gap(a, b) for a, b in pairs)
        figures = {"equal_to_cpu": equal, "of": len(prompts), "engines_equal": twins}
        part.note(kind, **figures, largest_logprob_gap=gap)
        assert twins, f"{kind}: two engines on the GPU drew other tokens"
        assert gap < NEAR, f"{kind}: a log-probability is off by {gap:.2g} nats"
        assert equal >= len(prompts) - (len(prompts) > 3), f"{kind}: {equal} sequences are equal"


def _gap(a, b) -> float:
    """The largest difference of log-probabilities of the ids that both drew first."""
    same = [x == y for x, y in zip(a.token_ids, b.token_ids, strict=True)]
    until = same.index(False) if False in same else len(same)
    pairs = zip(a.logprobs[:until], b.logprobs[:until], strict=True)
    return max((abs(x - y) for x, y in pairs), default=0.0)
