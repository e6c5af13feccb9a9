"""Shared by the tests: one thread a process (they run side by side), a sandbox, and a tiny tokenizer and model of the miniature.

Without a GPU the kernels run in Triton's interpreter, which must be chosen before any of them is imported.
"""

from __future__ import annotations

import dataclasses
import os
import random
import signal

os.environ.setdefault(
    "OPENBLAS_NUM_THREADS", "1"
)  # before numpy: the interpreter's small products spend 100 times longer on two threads
signal.signal(
    signal.SIGINT, signal.default_int_handler
)  # a job in a shell's background ignores it, and what it starts would too

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    import kernel_interpreter  # noqa: F401  (teaches the interpreter bfloat16)


TIMINGS = {
    "seconds",
    "tokens_per_s",
    "phase_seconds",
    "mfu",
    "memory_mb",
}  # of a metrics row: the machine's, not the run's


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
    from nanorchestra.tools.sandbox import Sandbox

    with Sandbox() as box:
        yield box


@pytest.fixture(scope="session")
def nano_tokenizer(sandbox):
    from nanorchestra.model.tokenizer import train_bpe
    from worlds.miniature.teacher import texts
    from worlds.miniature.world import World

    return train_bpe(texts(World(0), 60, sandbox), 700)


@pytest.fixture
def nano_model(nano_tokenizer):
    from nanorchestra.model.qwen3 import PRESETS, Qwen3
    from worlds.miniature.induction import draft_induction

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
    draft_induction(model, model.init_weights(0))
    return model


@pytest.fixture
def make_training(tmp_path, sandbox, monkeypatch, nano_model, nano_tokenizer):
    """make_training(name, *overrides) is a small run at the beginning of GRPO, as train.py wires it, of a model that babbles; rewards are drawn.
    resume=True: where its last checkpoint left it."""
    import train as program
    from nanorchestra.config import load_config, to_toml
    from nanorchestra.model.saving import save_checkpoint
    from nanorchestra.model.weights import named_hf_tensors
    from nanorchestra.report.run import Run
    from nanorchestra.training.ranks import Ranks

    save_checkpoint(nano_model, nano_tokenizer, tmp_path / "model", dtype=torch.float32)
    score = program.score

    def rewarded(task, trajectory):
        draw = random.Random(trajectory.seed)
        score(task, trajectory).reward, trajectory.outcome = (
            draw.random(),
            float(draw.random() < 0.5),
        )
        return trajectory

    monkeypatch.setattr(program, "score", rewarded)
    monkeypatch.setattr(program, "write_report", lambda path: None)  # it takes its time
    small = [
        "--run.root",
        str(tmp_path),
        "--run.threads",
        "1",
        "--model.path",
        str(tmp_path / "model"),
        "--warm_start.steps",
        "0",
        "--grpo.prompts",
        "2",
        "--grpo.group_size",
        "2",
        "--grpo.bounds",
        "task",
        "--rollout.turn_tokens",
        "12",
        "--run.checkpoint_every",
        "2",
    ]

    def make(name, *overrides, resume=False):
        config = load_config(
            tmp_path / name / "config.toml" if resume else None,
            () if resume else [*small, "--run.name", name, *overrides],
        )
        run = Run.open(tmp_path / name) if resume else Run.create(tmp_path / name, to_toml(config))
        training = program.Training(config, run, sandbox, Ranks())
        training.phase = "grpo"
        if resume:
            training.restore()
        training.engine.update_weights(named_hf_tensors(training.trainer.model, training.dtype))
        return training

    return make


def steps_of(training):
    """The rows of metrics.jsonl without the times."""
    return [
        {key: value for key, value in row.items() if key not in TIMINGS}
        for row in training.run.rows("metrics")
    ]


class Stop:
    """To be asked to stop after so many steps."""

    def __init__(self, steps=10**9):
        self.left = steps

    @property
    def asked(self):
        self.left -= 1
        return self.left <= 0
