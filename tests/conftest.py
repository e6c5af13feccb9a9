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


@pytest.fixture(scope="session", autouse=True)
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def sandbox():
    from nanorchestra.tools.sandbox import Sandbox

    with Sandbox() as box:
        yield box


@pytest.fixture(scope="session")
def nano_tokenizer(sandbox):
    from nanorchestra.model.tokenizer import train_bpe
    from worlds.miniature.teacher import texts
    from worlds.miniature.world import World

    return train_bpe(texts(World(0), 60, sandbox), 700)


@pytest.fixture(scope="session")
def make_nano(nano_tokenizer):
    """make_nano() returns a small model that babbles in nano_tokenizer's ids."""
    from nanorchestra.model.hf_config import PRESETS
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
def make_training(tmp_path, sandbox, monkeypatch, nano_model, nano_tokenizer):
    """make_training(name, settings) wires a small run of a model that babbles, as train.py does.

    It stands at the beginning of GRPO, or, with resume=True, at its last checkpoint. It is asked to
    stop after `steps` steps. Rewards are drawn at random.
    """
    from nanorchestra.model.saving import save_checkpoint
    from nanorchestra.report.run import Run, to_toml
    from nanorchestra.settings import load_config
    from nanorchestra.training import phases
    from nanorchestra.training.ranks import Ranks
    from nanorchestra.training.run import TrainingRun
    from worlds import metrics
    from worlds.mixture import Worlds

    save_checkpoint(nano_model, nano_tokenizer, tmp_path / "model", dtype=torch.float32)
    score = metrics.score

    def rewarded(task, trajectory):
        draw = random.Random(trajectory.seed)
        score(task, trajectory)
        trajectory.reward, trajectory.outcome = draw.random(), float(draw.random() < 0.5)
        return trajectory

    monkeypatch.setattr(metrics, "score", rewarded)
    monkeypatch.setattr(phases, "write_report", lambda path: None)  # it takes seconds
    small = {
        "run.threads": 1,
        "run.checkpoint_every": 2,
        "model.path": str(tmp_path / "model"),
        "warm_start.steps": 0,
        "grpo.prompts": 2,
        "grpo.group_size": 2,
        "grpo.bounds": "task",
        "grpo.optimizer": "muon",
        "rollout.turn_tokens": 12,
    }

    def make(name, settings=None, *, resume=False, steps=10**9):
        path = tmp_path / name
        if resume:
            folder, config = Run.open(path), load_config(path / "config.toml", settings or {})
        else:
            config = load_config(None, small | (settings or {}))
            folder = Run.create(path, to_toml(config))
        worlds = Worlds(config.task, config.run.seed, sandbox)
        run = TrainingRun(config, folder, Ranks(), worlds, Stop(steps))
        run.progress.phase = "grpo"
        if resume:
            run.restore()
        else:
            run.publish()
        return run

    return make


class Stop:
    """Asks a run to stop after so many steps."""

    def __init__(self, steps=10**9):
        self.left = steps

    @property
    def asked(self):
        self.left -= 1
        return self.left <= 0
