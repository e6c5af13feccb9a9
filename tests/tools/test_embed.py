"""Our decoder computes the vectors that transformers' Qwen3 has with last-token pooling."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import faiss
import numpy as np
import pytest
import torch
from four_gpus import FourGpus
from transformers import Qwen3Model

from nanorchestra.errors import UserError
from nanorchestra.tools import embed
from nanorchestra.tools.corpus import build_index, open_index
from nanorchestra.tools.devices import device_named
from nanorchestra.tools.embed import Embedder
from tools import LookupTool


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


@pytest.fixture
def gpus(monkeypatch):
    """Four GPUs; what is loaded onto one, or made there, is on the CPU. `loaded` and `made` say it.

    `used` are the GPUs that are current where a model computes.
    """
    gpus = FourGpus()
    gpus.patch(monkeypatch)
    gpus.loaded, gpus.made, gpus.used = loaded, made, used = [], [], []

    def model_on_the_cpu(checkpoint, device, dtype, build, load=embed.load_model):
        loaded.append((device, dtype))
        model, tokenizer = load(checkpoint, "cpu", "float32", build=build)
        model.register_forward_pre_hook(lambda *_: used.append(torch.cuda.current_device()))
        return model, tokenizer

    def on_the_cpu(make):
        def run(*values, device=None, **more):
            made.append(device)
            return make(*values, **more)

        return run

    monkeypatch.setattr(embed, "load_model", model_on_the_cpu)
    monkeypatch.setattr(torch, "tensor", on_the_cpu(torch.tensor))
    monkeypatch.setattr(torch, "arange", on_the_cpu(torch.arange))
    return gpus


def test_a_tool_searches_on_the_gpu_of_its_rank_from_any_thread(
    checkpoint, tmp_path, gpus, monkeypatch
):
    """Its calls run in threads whose current GPU is 0. Search failed so on seven of eight GPUs."""
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text('{"text": "Gold has 79."}\n{"text": "Iron has 26."}\n')
    monkeypatch.setattr(faiss, "get_num_gpus", lambda: 0)
    build_index(corpus, tmp_path / "index", str(checkpoint))
    gpus.current = 3
    tool = LookupTool("docs", "d", open_index(tmp_path / "index"))
    used = gpus.used
    used.clear()
    with ThreadPoolExecutor(1) as pool:
        result = pool.submit(tool.call, {"query": "gold"}).result()
    assert result.content in ("Gold has 79.", "Iron has 26.") and not result.error
    assert used == [3] and torch.cuda.current_device() == 3


def test_faiss_holds_the_vectors_on_the_gpu_of_the_embedder(
    checkpoint, tmp_path, gpus, monkeypatch
):
    corpus, asked = tmp_path / "corpus.jsonl", []
    corpus.write_text('{"text": "Gold has 79."}\n{"text": "Iron has 26."}\n')
    build_index(corpus, tmp_path / "index", str(checkpoint))

    def index_cpu_to_gpu(resources, device, index, options):
        asked.append((device, torch.cuda.current_device(), options.useFloat16))
        if len(asked) == 2:
            raise RuntimeError("alloc fail:\n trying to allocate 344 GB")
        return index

    monkeypatch.setattr(faiss, "get_num_gpus", lambda: 4)
    monkeypatch.setattr(faiss, "GpuClonerOptions", SimpleNamespace, raising=False)
    monkeypatch.setattr(faiss, "StandardGpuResources", object, raising=False)
    monkeypatch.setattr(faiss, "index_cpu_to_gpu", index_cpu_to_gpu, raising=False)
    assert len(open_index(tmp_path / "index", "cuda:3").search("gold", 2)) == 2
    with pytest.raises(UserError, match=r"cuda:1 cannot hold the vectors \(alloc .* --device cpu"):
        open_index(tmp_path / "index", "cuda:1")
    assert asked == [(3, 3, True), (1, 1, True)]
    assert len(open_index(tmp_path / "index", "cpu").search("gold", 2)) == len(asked) == 2


def test_a_device_that_is_not_there_is_one_line(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert device_named("cuda:0").index == 0 and device_named("cuda").index == 1
    assert device_named("cpu") == torch.device("cpu")
    for name, says in (
        ("cuda:2", "--device cuda:2: there are 2 GPUs; the last is cuda:1"),
        ("gpu", "--device gpu: it must be cpu or cuda:N"),
    ):
        with pytest.raises(UserError, match=says):
            device_named(name)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(UserError, match="torch finds no GPU"):
        device_named("cuda:0")
