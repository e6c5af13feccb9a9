"""The GPU's paths through engine and trainer, run in Triton's interpreter where there is no GPU: the same results as the CPU's paths."""

from __future__ import annotations

import dataclasses
import sys
from types import SimpleNamespace

import pytest
import torch
from kernel_check import DEVICE

from nanorchestra.engine.engine import Engine, SamplingParams
from nanorchestra.engine.gpu import SIZES, GpuRunner
from nanorchestra.model import ops, quantise
from nanorchestra.model.qwen3 import PRESETS, Qwen3
from nanorchestra.training import logprobs as head
from nanorchestra.training.packing import Group, Sample, pack

SHAPE = dataclasses.replace(
    PRESETS["nano"],
    vocab_size=320,
    hidden_size=32,
    intermediate_size=48,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
)


@pytest.fixture(scope="module")
def model():
    model = Qwen3(SHAPE)
    model.init_weights(0)
    return model.to(DEVICE)


def engine(model, **settings) -> Engine:
    return Engine(model, **dict(num_pages=64, page_size=16, max_batch_tokens=48) | settings)


def ids(count: int, start: int = 5) -> list[int]:
    return [(start + 7 * i) % 300 for i in range(count)]


@pytest.mark.slow
def test_kernels_give_the_tokens_of_plain_pytorch(model):
    """Prompts within a page, over pages, in chunks, shared by a group, and one that shares only its beginning."""
    prompts = [ids(3), ids(40), ids(17, 50), ids(60), ids(60), ids(60)[:40] + ids(5, 9)]
    params = SamplingParams(max_tokens=4, temperature=0)
    plain, by_kernel = (
        engine(model, kernels=kernels).generate(prompts, params) for kernels in (False, True)
    )
    for a, b in zip(plain, by_kernel):
        assert a.token_ids == b.token_ids
        assert torch.allclose(torch.tensor(a.logprobs), torch.tensor(b.logprobs), atol=1e-5)


@pytest.mark.slow
def test_a_request_draws_the_same_alone_and_beside_others_of_any_kind(model):
    mine = SamplingParams(max_tokens=3, seed=7)
    alone = engine(model, kernels=True).generate([ids(20)], mine)[0]
    others = [
        SamplingParams(max_tokens=3, seed=1, top_k=3),
        SamplingParams(max_tokens=3, seed=2, temperature=0.5, top_logprobs=2),
    ]
    together = engine(model, kernels=True).generate(
        [ids(30), ids(20), ids(9)], [others[0], mine, others[1]]
    )
    assert together[1].token_ids == alone.token_ids
    assert torch.allclose(
        torch.tensor(together[1].logprobs), torch.tensor(alone.logprobs), atol=1e-5
    )
    assert [len(top) for top in together[2].top_logprobs] == [2, 2, 2]


def test_rows_that_pad_a_graph_change_nothing(model):
    serving = engine(model, kernels=True)
    runner = serving.runner
    requests = [
        serving.submit(ids(n), SamplingParams(max_tokens=4, temperature=0)) for n in (5, 18)
    ]
    serving.step()
    plan = serving.scheduler.plan()
    caches = runner.k_cache.clone(), runner.v_cache.clone()
    outcomes = []
    for size in (2, 4):
        order, decodes = runner._decodes(plan.decodes, size)
        hidden, tokens, _ = runner._decode_step(decodes)
        outcomes.append((hidden[:2], tokens[:2]))
    assert [request.id for request in order] == [request.id for request in requests]
    assert torch.equal(outcomes[0][1], outcomes[1][1]) and torch.allclose(
        outcomes[0][0], outcomes[1][0], atol=1e-6
    )
    changed = (runner.k_cache != caches[0]).flatten(3).any(3).nonzero()  # layer, page, head
    assert set(changed[:, 1].tolist()) <= {
        request.table.pages[(len(request.ids) - 1) // 16] for request in requests
    }


def test_samples_of_one_prompt_form_a_group_of_neighbours():
    model = Qwen3(dataclasses.replace(SHAPE, num_hidden_layers=1))
    model.init_weights(0)
    runner = GpuRunner(model.to(DEVICE), 64, 16, 320, graphs=False)

    class Fake:
        def __init__(self, pages, length):
            self.table, self.ids = type("Table", (), {"pages": pages}), [1] * length

    shared = list(range(20))
    a, b, c = Fake(shared + [30], 330), Fake([40, 41], 20), Fake(shared + [31], 325)
    order, groups = runner._group([a, b, c])
    assert (
        groups.tolist() == [[order.index(a), 2, 256]] and abs(order.index(a) - order.index(c)) == 1
    )  # 20 pages of 16, down to a whole split
    assert len(order) == 3 and SIZES == tuple(sorted(SIZES))


def test_nan_in_the_weights_is_an_error():
    model = Qwen3(SHAPE)
    model.init_weights(0)
    model.embed_tokens.weight.data[7] = float("nan")
    with pytest.raises(FloatingPointError, match="not finite"):
        engine(model.to(DEVICE), kernels=True).generate([[1, 2, 3]], SamplingParams(max_tokens=1))


@pytest.mark.slow
def test_the_trainer_by_kernels_has_the_gradients_of_plain_pytorch(model, monkeypatch):
    groups = [
        Group(
            ids(9),
            [
                Sample(ids(20, 3), [True] * 20),
                Sample(ids(20, 3)[:17] + [1, 2], [False] * 4 + [True] * 15),
            ],
        ),
        Group(ids(9)[:5] + [8], [Sample(ids(7), [True] * 7)]),
    ]
    gradients = []
    for by_kernel in (False, True):
        for module in (ops, head):
            monkeypatch.setattr(module, "by_kernel", lambda x, answer=by_kernel: answer)
        trained = Qwen3(SHAPE)
        trained.load_state_dict(model.state_dict())
        trained.to(DEVICE)
        packed = pack(groups, DEVICE)
        hidden = trained(packed.tokens, packed.positions, packed.attend)[packed.source]
        logprobs, entropy = head.token_logprobs(
            hidden, trained.output_weight, packed.targets, vocab_limit=300
        )
        (-logprobs.mean()).backward()
        gradients.append([logprobs.detach(), entropy, *(p.grad for p in trained.parameters())])
    for plain, own in zip(*gradients):
        assert torch.allclose(plain, own, atol=2e-6 + 1e-4 * plain.abs().max())


@pytest.mark.parametrize("mode", ["int8", "int4"])
def test_quantised_layers_by_kernels_equal_plain_pytorch(mode, monkeypatch):
    torch.manual_seed(0)
    linear = torch.nn.Sequential(torch.nn.Linear(256, 48).to(DEVICE))
    quantise.quantise_model(linear, mode)
    x = torch.randn(3, 256, device=DEVICE)
    results = []
    for by_kernel in (False, True):
        monkeypatch.setattr(quantise, "by_kernel", lambda x: by_kernel)
        results.append(linear(x))
    assert torch.allclose(*results, atol=1e-5)


def test_chunks_by_flash_attn_give_the_same_tokens(model, monkeypatch):
    """Its stand-in (test_external.py) takes any dtype."""
    from test_external import flash_attn_varlen_func

    monkeypatch.setitem(
        sys.modules, "flash_attn", SimpleNamespace(flash_attn_varlen_func=flash_attn_varlen_func)
    )
    monkeypatch.setattr("kernels.external.unfit", lambda dtype, dim, page_size: "")
    prompts, params = (
        [ids(3), ids(60), ids(60)[:40] + ids(5, 9)],
        SamplingParams(max_tokens=2, temperature=0),
    )
    by_flash = engine(model, kernels=True, attention="flash-attn", page_size=256, num_pages=8)
    assert by_flash.runner.prefill == ("flash-attn", "as asked")
    plain = engine(model, kernels=False).generate(prompts, params)
    assert [one.token_ids for one in by_flash.generate(prompts, params)] == [
        one.token_ids for one in plain
    ]
