"""Our decoder computes the vectors that transformers' Qwen3 has with last-token pooling."""

from __future__ import annotations

import threading
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from transformers import Qwen3Model

from nanorchestra.errors import UserError
from nanorchestra.tools import embed
from nanorchestra.tools.devices import device_named
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
    vectors = ours.passages(texts)
    assert vectors.dtype == np.float32 and vectors.shape == (5, ours.dimension)
    np.testing.assert_allclose(vectors, torch.stack([vector(t) for t in texts]), atol=2e-6)
    instructed = f"Instruct: {embed.INSTRUCTION}\nQuery:gold"
    np.testing.assert_allclose(ours.queries(["gold"])[0], vector(instructed), atol=2e-6)


def test_an_embedder_stays_on_the_gpu_of_the_thread_that_made_it(checkpoint, monkeypatch):
    """A rank above 0 makes it; a thread whose current GPU is 0 uses it."""
    current = threading.local()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: getattr(current, "number", 0))
    current.number = 3
    loaded, entered = [], []
    load = embed.load_model

    def on_the_cpu(checkpoint, device, dtype, build):
        loaded.append((device, dtype))
        return load(checkpoint, "cpu", "float32", build=build)

    monkeypatch.setattr(embed, "load_model", on_the_cpu)
    embedder = Embedder(checkpoint)
    assert loaded == [("cuda:3", "bfloat16")]
    assert embedder.device == torch.device("cuda", 3)
    monkeypatch.setattr(
        torch.cuda, "device", lambda number: entered.append(number) or nullcontext()
    )
    made, tensor, arange = [], torch.tensor, torch.arange

    def fake(make):
        def on_the_cpu(*values, device=None, **more):
            made.append(device)
            return make(*values, **more)

        return on_the_cpu

    monkeypatch.setattr(torch, "tensor", fake(tensor))
    monkeypatch.setattr(torch, "arange", fake(arange))
    thread = threading.Thread(target=embedder.passages, args=(["a text"],))
    thread.start()
    thread.join()
    assert entered == [3] and made and {device for device in made if device} == {embedder.device}


def test_a_device_that_is_not_there_is_one_line(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert device_named("cuda:0").index == 0 and device_named("cuda").index == 1
    assert device_named("cpu") == torch.device("cpu")
    for name, says in (
        ("cuda:2", "--device cuda:2: there are 2 GPUs; the last is cuda:1"),
        ("gpu", "--device gpu: it must be cpu or cuda:N"),
        ("cuda:", "--device cuda:: it must be"),
        ("cpu:0", "--device cpu:0: it must be"),
    ):
        with pytest.raises(UserError, match=says):
            device_named(name)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(UserError, match="torch finds no GPU"):
        device_named("cuda:0")
