"""A small Qwen3 backbone with random weights, for the tests of vectors."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory, nano_tokenizer):
    """A backbone as Qwen3-Embedding is published: bare names, an output said not to be tied."""
    from transformers import Qwen3Config, Qwen3Model  # seconds, which few of the tests need

    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 16}
    config = Qwen3Config(vocab_size=704, num_attention_heads=4, num_key_value_heads=2, **shape)
    path = tmp_path_factory.mktemp("embedding")
    Qwen3Model(config).save_pretrained(path)
    nano_tokenizer.save(path)
    return path
