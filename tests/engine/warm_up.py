"""Counts what Triton would compile after a warm-up, for a GPU that is not there. Run by test_gpu.

Usage: warm_up.py [int8]. Prints a line for each kernel that the warm-up did not bring.
"""

import random
import sys

import torch
import triton
from nanorchestra.engine.gpu import GpuRunner
from nanorchestra.engine.inputs import BATCHES, Inputs, Sizes

from benchmarks.gpu_parts.compile import Driver
from nanorchestra.model.quantise import quantise_model
from nanorchestra.model.qwen3 import ModelConfig, Qwen3

COMPILED = set()


def count(*, key, fn, **_) -> bool:
    """Takes the place of the compiler: True says that there is nothing to launch."""
    COMPILED.add((fn.name, str(key)))
    return True


triton.runtime.driver.set_active(Driver(90))
triton.knobs.runtime.jit_cache_hook = count
with torch.device("meta"):
    model = Qwen3(ModelConfig(1000, 256, 512, 1, 8, 2, head_dim=32)).to(torch.bfloat16)
    if "int8" in sys.argv:
        quantise_model(model, "int8")
        import nanorchestra.model.quantise as quantise

        quantise.by_kernel = lambda x: True
    runner = GpuRunner(model, 8, 64, 1000, torch.bfloat16)
runner.warm_up()
known, rng = set(COMPILED), random.Random(0)
for _ in range(60):
    decodes, tokens = rng.choice(BATCHES), rng.choice((0, 1, 77, 384, 1111))
    if not decodes + tokens:
        continue
    items, pages = [rng.choice((0, 4, 9, 130)) for _ in range(2)], 4 * rng.randint(1, 70)
    chunks = min(tokens, rng.randint(1, 9))
    sampled = rng.choice((1, 3, 64, 65)) if tokens else decodes
    sizes = Sizes(decodes, *items, tokens, chunks, chunks, sampled, pages, rng.random() < 0.3)
    inputs = Inputs(sizes, "meta")
    runner._compute(inputs)
for name in sorted(name for name, _ in COMPILED - known):
    print(name)
print(f"{len(known)} kernels", file=sys.stderr)
