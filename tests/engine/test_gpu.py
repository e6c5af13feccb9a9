"""The GPU's path through the engine, in Triton's interpreter where there is no GPU."""

from __future__ import annotations

import pytest
import torch
from kernel_check import DEVICE, flash_attn_varlen_func

from nanorchestra.engine.engine import Engine, SamplingParams
from nanorchestra.model.qwen3 import ModelConfig, Qwen3

SHAPE = ModelConfig(320, 32, 48, 1, 4, 2, head_dim=16, tie_word_embeddings=True)


@pytest.fixture(scope="module")
def model():
    model = Qwen3(SHAPE)
    model.init_weights(0)
    return model


@pytest.fixture
def engine(model, monkeypatch):
    """Makes engines that compute by kernels, or as on a CPU."""

    def make(kernels: bool = True, **settings) -> Engine:
        monkeypatch.setattr("nanorchestra.engine.engine.by_kernel", lambda x: kernels)
        options = {"num_pages": 64, "page_size": 16, "max_batch_tokens": 48}
        return Engine(model.to(DEVICE if kernels else "cpu"), **options | settings)

    return make


def ids(count: int, start: int = 5) -> list[int]:
    return [(start + 7 * i) % 300 for i in range(count)]


@pytest.mark.slow
def test_kernels_give_the_tokens_of_the_cpu(engine):
    """Prompts within a page, over pages, in chunks, in a group, with a shared prefix."""
    prompts = [ids(3), ids(40), ids(17, 50), ids(60), ids(60), ids(60)[:40] + ids(5, 9)]
    params = SamplingParams(max_tokens=4, temperature=0)
    own = engine().generate(prompts, params)
    for a, b in zip(engine(kernels=False).generate(prompts, params), own, strict=True):
        assert a.token_ids == b.token_ids
        assert a.logprobs == pytest.approx(b.logprobs, abs=1e-5)


def test_rows_that_pad_a_graph_change_nothing(engine):
    serving = engine()
    runner, params = serving.runner, SamplingParams(max_tokens=4, temperature=0)
    requests = [serving.submit(ids(n), params) for n in (5, 18)]
    serving.step()
    plan, outcomes = serving.scheduler.plan(), []
    before = runner.k_cache.clone()
    for size in (2, 4):
        order, decodes = runner._decodes(plan.decodes, size)
        hidden, tokens, _ = runner._decode_step(decodes)
        outcomes.append((hidden[:2], tokens[:2]))
    assert order == requests
    assert torch.equal(outcomes[0][1], outcomes[1][1])
    assert torch.allclose(outcomes[0][0], outcomes[1][0], atol=1e-6)
    changed = (runner.k_cache != before).flatten(3).any(3).nonzero()  # layer, page, head
    written = {request.table.pages[(len(request.ids) - 1) // 16] for request in requests}
    assert set(changed[:, 1].tolist()) <= written


def test_nan_in_the_weights_is_an_error(engine):
    serving = engine()
    weight = serving.model.embed_tokens.weight[7]  # tied: one logit is NaN
    good = weight.detach().clone()
    with torch.no_grad():
        weight.fill_(float("nan"))
    with pytest.raises(FloatingPointError, match="not finite"):
        serving.generate([[1, 2, 3]], SamplingParams(max_tokens=1))
    with torch.no_grad():
        weight.copy_(good)


def test_chunks_by_flash_attn_give_the_same_tokens(engine, monkeypatch):
    """The stand-in for the library takes any dtype."""
    monkeypatch.setattr("kernels.external.flash_attn_varlen_func", flash_attn_varlen_func)
    monkeypatch.setattr("nanorchestra.engine.gpu.choose_attention", lambda *_: ("flash-attn", ""))
    prompts = [ids(3), ids(60), ids(60)[:40] + ids(5, 9)]
    params = SamplingParams(max_tokens=2, temperature=0)
    by_flash = engine(attention="flash-attn", page_size=256, num_pages=8)
    assert by_flash.runner.prefill[0] == "flash-attn"
    own = [one.token_ids for one in by_flash.generate(prompts, params)]
    assert own == [one.token_ids for one in engine(kernels=False).generate(prompts, params)]
