"""Our decoder computes the vectors that transformers' Qwen3 has with last-token pooling."""

from __future__ import annotations

import numpy as np
import torch
from transformers import Qwen3Model

from nanorchestra.tools import embed
from nanorchestra.tools.embed import Embedder


def test_vectors_are_those_of_transformers(checkpoint, nano_tokenizer, monkeypatch):
    monkeypatch.setattr(embed, "MAX_TOKENS", 60)
    texts = ["Gold has 79.", "<|im_end|>", "", "a longer text about iron " * 20, "Iron has 26."]
    theirs = Qwen3Model.from_pretrained(checkpoint).eval()
    end = nano_tokenizer.token_id("<|endoftext|>")

    def vector(text):
        ids = torch.tensor([[*nano_tokenizer.encode(text)[:59], end]])
        with torch.no_grad():
            return torch.nn.functional.normalize(theirs(ids).last_hidden_state[0, -1], dim=0)

    ours = Embedder(checkpoint)
    found = ours.passages(texts)
    assert found.dtype == np.float32 and found.shape == (5, ours.dimension)
    np.testing.assert_allclose(found, torch.stack([vector(t) for t in texts]), atol=2e-6)
    instructed = f"Instruct: {embed.INSTRUCTION}\nQuery:gold"
    np.testing.assert_allclose(ours.queries(["gold"])[0], vector(instructed), atol=2e-6)
