"""Shared by the tests: one thread a process (they run side by side), a sandbox, and a tiny tokenizer and model of the miniature."""

from __future__ import annotations

import dataclasses

import pytest


@pytest.fixture(scope="session", autouse=True)
def _one_thread():
    import torch
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
