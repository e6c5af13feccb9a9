"""Shared by the tests: one thread per process, a sandbox, a tiny model and tokenizer, a small run.

Without a GPU the kernels run in Triton's interpreter, which must be chosen before any of them is
imported.
"""

from __future__ import annotations

import dataclasses
import os
import random
import signal

import pytest

# Before numpy: on two threads the interpreter's small products take 100 times longer.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"  # a word that is no path is a hub id, and no test asks the hub
# A job in a shell's background ignores SIGINT, and its children would too.
signal.signal(signal.SIGINT, signal.default_int_handler)

import torch  # noqa: E402  (brings numpy)

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    import benchmarks.gpu_parts.interpreter  # noqa: F401  (teaches it bfloat16)


@pytest.fixture
def generator():
    """Random numbers that differ from run to run; KERNEL_SEED, which is printed, repeats them."""
    seed = int(os.environ.get("KERNEL_SEED", random.SystemRandom().randrange(2**31)))
    print(f"KERNEL_SEED={seed}")
    return torch.Generator().manual_seed(seed)


def pytest_runtest_setup():
    """Sets one thread for each test: a run in this process may have chosen more before."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def sandbox():
    from nanorchestra.tools.sandbox import Sandbox

    with Sandbox() as box:
        yield box


@pytest.fixture(scope="session")
def nano_tokenizer(sandbox):
    from nanorchestra.model.tokenizer import train_bpe
    from nanorchestra.training.draft import texts
    from worlds.desk import Desk

    return train_bpe(texts(Desk(0, sandbox), 60), 700)


@pytest.fixture(scope="session")
def make_nano(nano_tokenizer):
    """make_nano() returns a small model that babbles in nano_tokenizer's ids."""
    from nanorchestra.model.checkpoint import PRESETS
    from nanorchestra.model.qwen3 import Qwen3

    def make():
        shape = dataclasses.replace(
            PRESETS["nano"],
            vocab_size=704,
            hidden_size=64,
            intermediate_size=96,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            eos_token_ids=tuple(nano_tokenizer.eos_ids),
        )
        model = Qwen3(shape)
        model.init_weights(0)
        return model

    return make


@pytest.fixture
def nano_model(make_nano):
    return make_nano()


@pytest.fixture
def without_report(monkeypatch):
    """A run writes no report, which takes seconds."""
    monkeypatch.setattr("train.write_report", lambda *_: None)


@pytest.fixture
def make_training(tmp_path, sandbox, monkeypatch, nano_model, nano_tokenizer, without_report):
    """make_training(name, settings) is a small run of a model that babbles; `train()` trains it.

    With resume=True it goes on at its last checkpoint. It is asked to stop after `steps` steps.
    Rewards are drawn at random.
    """
    import train as program
    from nanorchestra.model.checkpoint import save_checkpoint
    from nanorchestra.settings import load_config
    from nanorchestra.training.distributed import Ranks
    from nanorchestra.training.progress import TrainingRun

    save_checkpoint(nano_model, nano_tokenizer, tmp_path / "model", dtype=torch.float32)

    def drawn_rewards(attempts, *task):
        return [random.Random(attempt.seed).random() for attempt in attempts]

    monkeypatch.setattr(program, "group_rewards", drawn_rewards)
    small = {
        "run.threads": 1,
        "run.checkpoint_every": 2,
        "model.path": str(tmp_path / "model"),
        "warm_start.steps": 0,
        "grpo.prompts": 2,
        "grpo.group_size": 2,
        "grpo.min_std": 0.0,
        "grpo.optimizer": "muon",
        "rollout.turn_tokens": 12,
        "evaluation.tasks": 1,
    }

    class Training(TrainingRun):
        def train(self):
            """Trains until the end, or until it is asked to stop; returns whether it ended."""
            try:
                return program.train(self, sandbox)
            finally:
                self.checkpoints.wait()
                self.folder.unlock()

    def make(name, settings=None, *, resume=False, steps=10**9):
        path = tmp_path / name
        if resume:
            config = load_config(path / "config.toml", settings or {})
        else:
            config = load_config(None, small | (settings or {}))
        # It looks twice more, before and after the held-out tasks, if it begins before GRPO.
        stop = Stop(steps + 2 * (not resume))
        return Training(config, path, Ranks(), stop, program.write_report, resumed=resume)

    return make


class Stop:
    """Asks a run to stop when it has looked so often."""

    def __init__(self, times):
        self.left = times

    @property
    def asked(self):
        self.left -= 1
        return self.left <= 0
