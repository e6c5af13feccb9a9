"""The sampler: its distribution, its log-probabilities, and noise by (seed, position) alone."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from nanorchestra.engine.request import SamplingParams
from nanorchestra.engine.sampler import Sampler, uniforms

VOCAB = 150  # not a multiple of the sampler's block


def draws(
    logits: torch.Tensor, params: dict, count: int, vocab: int | None = None
) -> tuple[list[int], list[float]]:
    """`count` draws from one row of logits: seed 0 at positions 0..count-1."""
    sampler = Sampler(vocab or len(logits))
    rows = [SamplingParams(**params)] * count
    drawn = sampler(logits.expand(count, -1), rows, range(count), [None] * count)
    return [draw.token for draw in drawn], [draw.logprob for draw in drawn]


def kept(logits: torch.Tensor, temperature=1.0, top_k=0, top_p=1.0) -> torch.Tensor:
    """The distribution by its definition: temperature, then top-k and top-p, float64."""
    p = torch.softmax(logits.double() / temperature, 0)
    order = p.argsort(descending=True, stable=True)
    if top_k:
        p[order[top_k:]] = 0
    before, chosen = 0.0, torch.zeros_like(p)
    for i in order.tolist():
        if p[i] > 0 and before < top_p * p.sum():
            chosen[i] = p[i]
        before += p[i].item()
    return chosen / chosen.sum()


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 2.0},
        {"top_k": 5},
        {"top_p": 0.7},
        {"temperature": 1.5, "top_k": 12, "top_p": 0.95},
    ],
)
def test_draws_follow_the_distribution_they_are_said_to_come_from(params):
    torch.manual_seed(0)
    logits, n = 2 * torch.randn(16), 20_000
    expected = kept(logits, **params)
    tokens, logprobs = draws(logits, params, n)
    counts = np.bincount(tokens, minlength=16)
    assert counts[expected.numpy() == 0].sum() == 0
    support = expected.numpy() > 0
    chi2 = ((counts - n * expected.numpy())[support] ** 2 / (n * expected.numpy()[support])).sum()
    freedom = support.sum() - 1
    assert chi2 < freedom + 4 * math.sqrt(2 * freedom) + 6, "chi-square far beyond its expectation"
    assert np.allclose(logprobs, expected.log()[tokens].numpy(), atol=2e-6)


def test_draws_follow_the_distribution_across_blocks():
    torch.manual_seed(1)
    logits, n = torch.randn(VOCAB), 40_000
    counts = np.bincount(draws(logits, {}, n)[0], minlength=VOCAB)
    p = torch.softmax(logits.double(), 0).numpy()
    assert ((counts - n * p) ** 2 / (n * p)).sum() < VOCAB + 4 * math.sqrt(2 * VOCAB)


def test_noise_is_uniform_and_independent_in_seed_and_position():
    u = uniforms(
        np.repeat(np.arange(200), 200).tolist(), np.tile(np.arange(200), 200).tolist()
    ).reshape(200, 200)
    assert u.min() >= 0 and u.max() < 1 and len(np.unique(u)) == 40_000
    assert abs(u.mean() - 0.5) < 0.01 and np.abs(np.histogram(u, 20, (0, 1))[0] - 2000).max() < 220
    for shifted in (
        u[1:] - u[:-1],
        u[:, 1:] - u[:, :-1],
    ):  # neighbours are independent: the difference has variance 1/6
        assert abs(shifted.var() - 1 / 6) < 0.005
    assert (
        uniforms([-1, 2**64 - 1, 2**64 + 5, 5], [3, 3, 3, 3]).tolist()[::2]
        == uniforms([2**64 - 1, 5], [3, 3]).tolist()
    )


def test_a_draw_does_not_depend_on_the_other_rows():
    torch.manual_seed(2)
    logits, sampler = torch.randn(24, VOCAB), Sampler(VOCAB)
    params = [
        SamplingParams(
            seed=i,
            temperature=[0.0, 0.7, 1.0][i % 3],
            top_k=[0, 9][i % 2],
            top_p=[1.0, 0.5][i // 2 % 2],
        )
        for i in range(24)
    ]
    drawn = sampler(logits, params, range(100, 124), [None] * 24)
    for i in range(24):
        (alone,) = Sampler(VOCAB)(logits[i : i + 1], [params[i]], [100 + i], [None])
        assert alone.token == drawn[i].token and alone.logprob == pytest.approx(
            drawn[i].logprob, abs=1e-6
        )
    order = list(reversed(range(24)))
    assert [
        draw.token
        for draw in sampler(
            logits[order], [params[i] for i in order], [100 + i for i in order], [None] * 24
        )
    ] == [draw.token for draw in drawn[::-1]]


def test_greedy_is_the_argmax_with_the_lowest_id_on_ties_and_logprob_at_temperature_one():
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0]])
    for temperature in (0.0, 1e-6):
        (draw,) = Sampler(4)(
            logits, [SamplingParams(temperature=temperature, top_k=1)], [0], [None]
        )
        assert draw.token == 1 and draw.logprob == pytest.approx(
            logits.log_softmax(1)[0, 1].item(), abs=1e-6
        )


def test_ids_beyond_the_tokenizer_are_neither_drawn_nor_normalised_over():
    logits = torch.zeros(100)
    logits[70:] = 50.0
    tokens, logprobs = draws(logits, {}, 500, vocab=70)
    assert max(tokens) < 70 and np.allclose(logprobs, -math.log(70), atol=1e-6)
    assert draws(logits, {"temperature": 0.0}, 1, vocab=70)[0][0] < 70
    assert max(draws(logits, {"top_k": 90, "top_p": 0.999}, 500, vocab=70)[0]) < 70


def test_a_memory_that_is_reused_keeps_nothing():
    sampler, params = Sampler(70), SamplingParams(temperature=0.5)
    torch.manual_seed(3)
    big, small = 5 * torch.randn(9, 80), torch.randn(4, 80)
    sampler(big, [params] * 9, range(9), [None] * 9)
    rows = small, [params] * 4, range(4), [None] * 4
    assert sampler(*rows) == Sampler(70)(*rows)


def test_extreme_logits_are_sampled_correctly():
    logits = torch.full((VOCAB,), -1e4)
    logits[77] = 1e4
    tokens, logprobs = draws(logits, {"temperature": 0.01}, 50)
    assert set(tokens) == {77} and set(logprobs) == {0.0}
    logits = torch.full((VOCAB,), -math.inf)
    logits[[3, 149]] = 0.0
    assert set(draws(logits, {}, 100)[0]) == {3, 149}


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_not_finite_are_an_error(bad):
    logits = torch.zeros(2, VOCAB)
    logits[1, 5] = bad
    with pytest.raises(FloatingPointError, match="not finite"):
        Sampler(VOCAB)(logits, [SamplingParams()] * 2, [0, 0], [None] * 2)


def test_half_precision_logits_are_sampled_in_single_precision():
    logits = torch.randn(3, VOCAB).bfloat16()
    drawn = Sampler(VOCAB)(
        logits, [SamplingParams(seed=i) for i in range(3)], [0, 0, 0], [None] * 3
    )
    expected = (
        logits.float()
        .log_softmax(1)
        .gather(1, torch.tensor([draw.token for draw in drawn])[:, None])[:, 0]
    )
    assert np.allclose([draw.logprob for draw in drawn], expected.numpy(), atol=1e-5)


def test_only_allowed_ids_are_drawn_and_normalised_over():
    mask = np.zeros(VOCAB, bool)
    mask[[3, 140]] = True
    logits = torch.zeros(60, VOCAB)
    logits[:, 7] = 9.0
    params = [SamplingParams(seed=i, temperature=float(i % 3 > 0), top_k=i % 2) for i in range(60)]
    drawn = Sampler(VOCAB)(logits, params, range(60), [mask if i % 4 else None for i in range(60)])
    for i, draw in enumerate(drawn):
        if i % 4:
            assert draw.token in (3, 140) and draw.logprob == pytest.approx(
                0.0 if params[i].top_k and params[i].temperature else -math.log(2), abs=1e-6
            )
    assert drawn[0].token == 7 and {draw.token for i, draw in enumerate(drawn) if i % 4} == {3, 140}
