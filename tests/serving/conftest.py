"""A small model that babbles, and a server of it."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from running_server import Running, scripted

from nanorchestra.engine.engine import Engine
from nanorchestra.model.qwen3 import PRESETS, Qwen3
from nanorchestra.serving.service import Limits


@pytest.fixture(scope="session")
def make_engine(nano_tokenizer):
    def make(**settings):
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
        torch.manual_seed(0)
        model = Qwen3(shape)
        model.init_weights(0)
        return scripted(Engine(model, nano_tokenizer, num_pages=2000, page_size=4, **settings))

    return make


@pytest.fixture(scope="module")
def running(make_engine):
    running = Running(make_engine(), limits=Limits(request_s=60, body_s=2, body_bytes=200_000))
    yield running
    running.assert_idle()
    running.stop()
