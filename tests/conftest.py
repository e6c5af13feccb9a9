"""Shared by the tests: one thread a process (they run side by side), a sandbox, and a tiny tokenizer and model of the miniature.

Without a GPU the kernels run in Triton's interpreter, which must be chosen before any of them is imported.
"""

from __future__ import annotations

import dataclasses
import os
import random
import signal

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")       # before numpy: the interpreter's small products spend 100 times longer on two threads
signal.signal(signal.SIGINT, signal.default_int_handler)   # a job in a shell's background ignores it, and what it starts would too

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    import kernel_interpreter  # noqa: F401  (teaches the interpreter bfloat16)


@pytest.fixture
def generator():
    """Random numbers that differ from run to run; a failing test shows the seed, and KERNEL_SEED repeats it."""
    seed = int(os.environ.get("KERNEL_SEED", random.SystemRandom().randrange(2**31)))
    print(f"KERNEL_SEED={seed}")
    return torch.Generator().manual_seed(seed)


@pytest.fixture(scope="session", autouse=True)
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def sandbox():
    from nanorchestra.sandbox import Sandbox
    with Sandbox() as box:
        yield box


@pytest.fixture(scope="session")
def nano_tokenizer(sandbox):
    from data_gen import World, texts
    from nanorchestra.tokenizer import train_bpe
    return train_bpe(texts(World(0), 60, sandbox), 700)


@pytest.fixture
def nano_model(nano_tokenizer):
    from nanorchestra.model import PRESETS, Qwen3
    shape = dataclasses.replace(PRESETS["nano"], vocab_size=704, hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2,
                                head_dim=16, eos_token_ids=tuple(nano_tokenizer.eos_ids))
    model = Qwen3(shape)
    model.init_weights(0)
    return model
