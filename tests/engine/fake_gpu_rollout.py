"""A rollout on a GPU that is not there, watched from the host. Run by test_gpu_runner.py.

Usage: fake_gpu_rollout.py STEPS. The real scheduler and runner serve requests that come, are
guided, report their most probable ids, and end; kernels are compiled by name only and compute
nothing, so every token is 0. One layer has weights in bfloat16, the other layer and the output
matrix have them in 8 bits. Prints one JSON object: what happened after the start.
"""

import copy
import json
import random
import sys
from collections import Counter
from types import SimpleNamespace
from typing import ClassVar
from unittest import mock

import numpy as np
import torch
import triton
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from benchmarks.gpu_parts.compile import Driver
from nanorchestra.engine import gpu_runner
from nanorchestra.engine.engine import Engine, SamplingParams
from nanorchestra.engine.guide import Guide
from nanorchestra.model import ops, quantise
from nanorchestra.model.qwen3 import ModelConfig, Qwen3

VIEWS = ("view", "slice", "select", "empty", "split", "alias", "detach", "as_strided", "unsqueeze")
COMPILED = set()
COUNTS = Counter()


def compiled(*, key, fn, **_) -> bool:
    """Takes the place of the compiler: True says that there is nothing to launch."""
    COMPILED.add((fn.name, str(key)))
    return True


class FakeGraph:
    """A graph whose capture computes once and whose replay is one operation of the host."""

    operations: ClassVar[set[str]] = set()  # of torch, beside the kernels, in what is captured

    def __init__(self, runner, inputs, stream, pool):
        COUNTS["captures"] += 1
        with Record(self.operations):
            runner._forward(inputs)

    def pool(self):
        """Nothing: it has no memory."""

    def replay(self):
        COUNTS["replays"] += 1


class Record(TorchDispatchMode):
    """Adds the names of the operations that are not views to a set."""

    def __init__(self, names):
        super().__init__()
        self.names = names

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.__name__
        if not name.startswith(VIEWS):
            self.names.add(name.partition(".")[0])
        return function(*args, **kwargs or {})


class Watch(TorchDispatchMode):
    """Counts what would make the host wait for a device.

    A value that is read, and a tensor made of values. All memory is the host's here, so a copy says
    that it crosses by being non_blocking; `staged` alone makes those to the device.
    """

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.__name__
        if name.startswith(("_local_scalar_dense", "nonzero")):
            COUNTS[f"waits: {name}"] += 1
        return function(*args, **kwargs or {})

    def __enter__(self):
        torch.tensor, torch.as_tensor = from_values, from_values
        return super().__enter__()

    def __exit__(self, *error):
        torch.tensor, torch.as_tensor = TENSOR, AS_TENSOR
        return super().__exit__(*error)


def from_values(*values, **options):
    """Takes the place of torch.tensor while a step is watched."""
    COUNTS["waits: a tensor made of values"] += 1
    return TENSOR(*values, **options)


TENSOR, AS_TENSOR = torch.tensor, torch.as_tensor


class Sometimes(Guide):
    """Forbids an id now and then."""

    def __init__(self):
        self.count = 0

    def copy(self):
        return Sometimes()

    def advance(self, token):
        self.count += 1

    def allowed(self):
        return np.arange(997) % 2 == 0 if self.count % 5 == 4 else None


# What no kernel fills is 0: the ids that are drawn, too.
torch.Tensor.new_empty = torch.Tensor.new_zeros
triton.runtime.driver.set_active(Driver(90))
triton.knobs.runtime.jit_cache_hook = compiled
ops.by_kernel = lambda x: True
gpu_runner.free_memory = lambda device: 1 << 24
steps = int(sys.argv[1])
model = Qwen3(ModelConfig(1000, 256, 512, 2, 8, 2, head_dim=32)).to(torch.bfloat16)
unquantised = copy.deepcopy(model.layers[0])
quantise.quantise_model(model, "int8")
model.layers[0] = unquantised
# A tokenizer has fewer ids than the output matrix has rows.
tokenizer = SimpleNamespace(vocab_size=997, eos_ids=(), decode=lambda ids, skip_special: "")
serving = Engine(model, tokenizer, max_batch_tokens=512, max_running=24, max_context=2000)
runner = serving.runner
gpu_runner.GpuRunner._captured = lambda *arguments: FakeGraph(*arguments)
runner.warm_up()
runner.capture()
compiled_at_start, captures = set(COMPILED), COUNTS["captures"]

make_inputs, launch, draw = gpu_runner.make_inputs, runner.launch, runner.draw


def unwatched_inputs(*arguments):
    """The host's own arithmetic."""
    with _disable_current_modes(), mock.patch("torch.tensor", TENSOR):
        return make_inputs(*arguments)


def watched_launch(batch, previous=None):
    COUNTS["launches"] += 1
    COUNTS["mixed"] += bool(batch.decodes and batch.prefills)
    COUNTS["ahead"] += previous is not None
    with Watch():
        return launch(batch, previous)


def watched_draw(launched):
    with Watch():
        draw(launched)


gpu_runner.make_inputs = unwatched_inputs
runner.launch, runner.draw = watched_launch, watched_draw
rng = random.Random(0)
while serving.stats["steps"] < steps:
    queued = len(serving.scheduler.running) + len(serving.scheduler.waiting)
    if queued < 30 and rng.random() < 0.2 or not serving.has_work:
        prompt = [rng.randrange(1000) for _ in range(rng.choice((3, 40, 300, 900)))]
        guide = Sometimes() if rng.random() < 0.1 else None
        params = SamplingParams(
            max_tokens=rng.randint(1, 120),
            top_p=rng.choice((1.0, 0.9)),
            top_logprobs=rng.choice((0,) * 19 + (3,)),
            guide=guide,
            ignore_eos=True,
        )
        for _ in range(rng.choice((1, 1, 4))):
            serving.submit(prompt, params)
    serving.step()
print(
    json.dumps(
        {
            "steps": serving.stats["steps"],
            "launches": COUNTS["launches"],
            "mixed": COUNTS["mixed"],
            "ahead": COUNTS["ahead"],
            "replays": COUNTS["replays"],
            "captures": COUNTS["captures"] - captures,
            "compiled": sorted({name for name, _ in COMPILED - compiled_at_start}),
            "waits": {name: n for name, n in COUNTS.items() if name.startswith("waits")},
            "kernels": len(compiled_at_start),
            "captured_operations": sorted(FakeGraph.operations),
        }
    )
)
