"""The invariant mode: a request's tokens and log-probabilities are the same bits alone, in company, chunked, preempted, resumed, scored."""

from __future__ import annotations

import copy
import random

import pytest
import torch
import torch.nn.functional as F

from nanorchestra.engine import invariant
from nanorchestra.engine.engine import Engine, SamplingParams
from nanorchestra.model.ops import (
    Segment,
    apply_rope,
    packed_attention,
    rms_norm,
    rope_frequencies,
    rope_tables,
    swiglu,
)
from nanorchestra.model.qwen3 import PRESETS, ModelConfig, Qwen3

SHAPES = {
    "nano": PRESETS["nano"],
    "odd": ModelConfig(vocab_size=901, hidden_size=200, intermediate_size=331, num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=3,
                       head_dim=34, attention_bias=True),
}  # fmt: skip


def make_model(config: ModelConfig) -> Qwen3:
    model, generator = Qwen3(config), torch.Generator().manual_seed(0)
    model.init_weights(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3) if parameter.dim() == 2 else parameter.add_(
                torch.randn(parameter.shape, generator=generator) / 8
            )
    return model


def invariant_engine(model: Qwen3, **settings) -> Engine:
    return Engine(model, invariant=True, **{"num_pages": 400} | settings)


def make_requests(config: ModelConfig) -> list[tuple[list[int], SamplingParams]]:
    """32 of them: equal prompts, prompts with a common beginning, lengths around multiples of a split, greedy and sampled ones."""
    rng = random.Random(config.hidden_size)
    word = lambda n: [rng.randrange(config.vocab_size) for _ in range(n)]  # noqa: E731
    common = word(130)
    prompts = [
        common + [7],
        common + [7],
        common + word(1),
        word(1),
        common[:70],
        word(63),
        word(64),
        word(65),
    ]
    prompts += [word(rng.randrange(1, 50)) for _ in range(32 - len(prompts))]
    kinds = ({}, {"temperature": 0.7}, {"temperature": 0.0}, {"top_p": 0.9})
    return [
        (
            prompt,
            SamplingParams(max_tokens=3 + i * 7 % 12, seed=rng.randrange(1 << 40), **kinds[i % 4]),
        )
        for i, prompt in enumerate(prompts)
    ]


def sample(
    engine: Engine, requests: list[tuple[list[int], SamplingParams]]
) -> list[tuple[list[int], list[float]]]:
    return [(c.token_ids, c.logprobs) for c in engine.generate(*map(list, zip(*requests)))]


@pytest.fixture(scope="module", params=SHAPES.values(), ids=SHAPES)
def case(request):
    """A model, 32 requests, and what the first eight come to alone."""
    model, requests = make_model(request.param), make_requests(request.param)
    return model, requests, [sample(invariant_engine(model), [one])[0] for one in requests[:8]]


def test_the_result_is_the_models(case):
    model, requests, alone = case
    for (prompt, params), (tokens, logprobs) in zip(requests[:8:3], alone[::3]):
        ids = prompt + tokens
        with torch.inference_mode():
            logits = model.logits(
                model(
                    torch.tensor(ids),
                    torch.arange(len(ids)),
                    packed_attention([Segment(0, len(ids))]),
                )
            )
        expected = (
            logits[len(prompt) - 1 : -1]
            .div(params.temperature or 1)
            .log_softmax(1)
            .gather(1, torch.tensor(tokens)[:, None])[:, 0]
        )
        if params.top_p == 1:
            assert torch.tensor(logprobs) == pytest.approx(expected, abs=2e-5)


@pytest.mark.parametrize("members", [(0, 1), (2, 6), (4, 7), range(8), range(32)], ids=str)
def test_in_any_company(case, members):
    model, requests, alone = case
    for i, result in zip(members, sample(invariant_engine(model), [requests[i] for i in members])):
        assert i >= 8 or result == alone[i]


SETTINGS = {
    "chunks of 21": {"max_batch_tokens": 21},
    "chunks of 100": {"max_batch_tokens": 100},
    "three at a time": {"max_running": 3, "max_batch_tokens": 40},
    "pages of 1": {"page_size": 1, "num_pages": 2000},
    "pages of 24": {"page_size": 24},
    "pages of 100": {"page_size": 100, "num_pages": 40},
    "a tiny pool": {"page_size": 4, "num_pages": 36, "max_batch_tokens": 200},
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_however_it_is_computed(case, settings):
    """In other chunks and pages, preempted and computed again, and from the pages that an earlier request left."""
    model, requests, alone = case
    engine = invariant_engine(model, **settings)
    assert sample(engine, requests[:8]) == alone
    assert engine.stats["preemptions"] > 0 or settings.get("num_pages") != 36
    assert sample(engine, requests[:3]) == alone[:3] and engine.stats["cached_tokens"] > 2 * 100


@pytest.mark.parametrize("seed", range(3))
def test_arriving_at_any_time(case, seed):
    model, requests, alone = case
    rng = random.Random(seed)
    engine, order = (
        invariant_engine(model, max_batch_tokens=rng.choice((30, 90, 4096))),
        rng.sample(range(20), 20),
    )
    served = {}
    while len(served) < len(order) or engine.has_work:
        for i in order[len(served) : len(served) + rng.randrange(3)]:
            served[i] = engine.submit(*requests[i])
        engine.step()
    assert [
        (served[i].completion.token_ids, served[i].completion.logprobs) for i in range(8)
    ] == alone


def test_a_session_that_goes_on(case):
    """Each turn is that of a request for the whole history, though it computes only what is new, or all of it when its pages were taken."""
    model, requests, _ = case
    engine, (prompt, _) = invariant_engine(model, num_pages=24), requests[2]
    session = engine.session(prompt[:90])
    for turn in range(3):
        params = SamplingParams(max_tokens=5, seed=turn)
        expected = sample(invariant_engine(model), [(list(session.ids), params)])[0]
        company = engine.submit(*requests[turn + 3])
        completion = session.sample(params)
        assert (completion.token_ids, completion.logprobs) == expected
        engine.abort(company)
        if turn == 1:
            engine.generate([prompt[:1] * 340], SamplingParams(max_tokens=1))
        session.append(prompt[90 : 90 + 20 * turn])
    assert engine.stats["revocations"] == 1


def test_scores_are_what_the_sampler_reported(case):
    model, requests, _ = case
    engine, requests = (
        invariant_engine(model),
        [
            (prompt, SamplingParams(max_tokens=6, seed=i))
            for i, (prompt, _) in enumerate(requests[:8])
        ],
    )
    completions = engine.generate(*map(list, zip(*requests)))
    scores = engine.score([prompt + c.token_ids for (prompt, _), c in zip(requests, completions)])
    assert [values[-6:] for values in scores] == [c.logprobs for c in completions]


def test_with_two_threads(case):
    model, requests, alone = case
    torch.set_num_threads(2)
    try:
        assert sample(invariant_engine(model, max_batch_tokens=50), requests[2:5]) == alone[2:5]
    finally:
        torch.set_num_threads(1)


def test_in_bfloat16(case):
    model, requests, _ = case
    model = copy.deepcopy(model).to(torch.bfloat16)
    together = sample(invariant_engine(model, max_batch_tokens=50), requests[:12])
    assert together[2:8:5] == [sample(invariant_engine(model), [one])[0] for one in requests[2:8:5]]


def test_the_usual_mode_does_not_pass(case):
    """Else these tests would prove nothing."""
    model, requests, _ = case
    alone = [sample(Engine(model, num_pages=400), [one])[0] for one in requests[:4]]
    assert sample(Engine(model, num_pages=400), requests)[:4] != alone


@pytest.mark.parametrize("threads", (1, 2, 3))
@pytest.mark.parametrize(
    "inner, outer",
    [
        (32, 97),
        (200, 407),
        (256, 1024),
        (512, 256),
        (331, 200),
        (1037, 704),
        (256, 896),
        (3072, 1024),
    ],
)
def test_a_rows_place_in_a_tile_does_not_matter(inner, outer, threads):
    """What the mode takes on trust from the libraries, for every function of rows in the model."""
    generator = torch.Generator().manual_seed(inner)
    x, weight, bias = (
        torch.randn(*shape, generator=generator)
        for shape in ((invariant.TILE, inner), (outer, inner), (outer,))
    )
    wide = torch.randn(invariant.TILE, 2 * inner, generator=generator)
    heads = torch.randn(invariant.TILE, 7, 34, generator=generator)
    positions = torch.randint(0, 40_000, (invariant.TILE,), generator=generator)
    frequencies, factor = rope_frequencies(34, 1e6)
    order = torch.randperm(invariant.TILE, generator=generator)
    torch.set_num_threads(threads)
    try:
        with torch.inference_mode(), invariant._SameEverywhere():
            for function, *inputs in (
                (lambda x: F.linear(x, weight), x),
                (lambda x: F.linear(x, weight, bias), x),
                (lambda x: rms_norm(x, weight[0], 1e-6), x),
                (swiglu, wide),
                (lambda x, p: apply_rope(rms_norm(x[:, :5], heads[0, :5], 1e-6), *rope_tables(p, frequencies, factor, x.dtype)), heads, positions),
            ):  # fmt: skip
                assert torch.equal(function(*(x[order] for x in inputs)), function(*inputs)[order])
    finally:
        torch.set_num_threads(1)
