"""The sampler: its distribution, its log-probabilities, and noise by (seed, position) alone."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from nanorchestra.engine.sampler import draw_tokens, uniforms
from nanorchestra.engine.sequence import SamplingParams


def draw(logits: torch.Tensor, params: list[SamplingParams], vocab: int, allowed=None):
    """One draw a row, at positions 0.., as arrays of tokens and log-probabilities."""
    rows = len(params)
    allowed = allowed or [None] * rows
    drawn = draw_tokens(logits.expand(rows, -1), vocab, params, range(rows), allowed)
    return drawn.tokens.numpy(), drawn.logprobs.numpy()


def kept(logits: torch.Tensor, temperature=1.0, top_k=0, top_p=1.0) -> np.ndarray:
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
    return (chosen / chosen.sum()).numpy()


@pytest.mark.parametrize("vocab", [16, 150])  # within a block of the sampler's, and over several
@pytest.mark.parametrize(
    "params",
    [{}, {"temperature": 0.5}, {"top_k": 5}, {"top_p": 0.7}, {"top_k": 12, "top_p": 0.95}],
    ids=str,
)
def test_draws_follow_the_distribution_they_are_said_to_come_from(params, vocab):
    torch.manual_seed(0)
    logits, n = 2 * torch.randn(vocab), 20_000
    expected = kept(logits, **params)
    tokens, logprobs = draw(logits, [SamplingParams(**params)] * n, vocab)
    counts, support = np.bincount(tokens, minlength=vocab), expected > 0
    assert counts[~support].sum() == 0
    chi2 = ((counts - n * expected)[support] ** 2 / (n * expected[support])).sum()
    freedom = support.sum() - 1
    assert chi2 < freedom + 4 * math.sqrt(2 * freedom) + 6, "chi-square far beyond its expectation"
    assert np.allclose(logprobs, np.log(expected[tokens]), atol=2e-6)


def test_noise_is_uniform_and_independent_in_seed_and_position():
    seeds, positions = np.repeat(np.arange(200), 200), np.tile(np.arange(200), 200)
    u = uniforms(seeds.tolist(), positions.tolist()).reshape(200, 200)
    assert u.min() >= 0 and u.max() < 1 and len(np.unique(u)) == 40_000
    assert np.abs(np.histogram(u, 20, (0, 1))[0] - 2000).max() < 220
    for neighbours in (u[1:] - u[:-1], u[:, 1:] - u[:, :-1]):
        assert abs(neighbours.var() - 1 / 6) < 0.005, "the variance of independent ones"
    assert uniforms([-1], [3]) == uniforms([2**64 - 1], [3])


def test_greedy_is_the_argmax_with_the_lowest_id_on_ties_and_logprob_at_temperature_one():
    logits = torch.tensor([0.0, 3.0, 3.0, 1.0])
    params = [SamplingParams(temperature=t, top_k=1) for t in (0.0, 1e-6)]
    tokens, logprobs = draw(logits, params, 4)
    assert tokens.tolist() == [1, 1]
    assert np.allclose(logprobs, logits.log_softmax(0)[1], atol=1e-6)


def test_ids_beyond_the_tokenizer_are_neither_drawn_nor_normalised_over():
    logits = torch.zeros(100)
    logits[70:] = 50.0
    for params in ({}, {"temperature": 0.0}, {"top_k": 90, "top_p": 0.999}):
        tokens, logprobs = draw(logits, [SamplingParams(**params)] * 500, 70)
        assert tokens.max() < 70
        assert params or np.allclose(logprobs, -math.log(70), atol=1e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_row_of_logits_that_are_not_finite_has_no_finite_logprob(bad):
    logits = torch.zeros(150)
    logits[5] = bad
    assert not np.isfinite(draw(logits, [SamplingParams()] * 2, 150)[1]).any()


def test_the_most_probable_ids_are_those_of_the_distribution_drawn_from():
    logits = torch.arange(150.0) / 50
    params = SamplingParams(temperature=0.5, top_logprobs=3)
    expected = (logits / 0.5).log_softmax(0)[-3:].flip(0).tolist()
    both = [SamplingParams(), params]
    drawn = draw_tokens(logits.expand(2, -1), 150, both, [0, 1], [None] * 2)
    plain, with_top = drawn.listed(both)
    ids, values = zip(*with_top.top_logprobs, strict=True)
    assert ids == (149, 148, 147) and np.allclose(values, expected) and plain.top_logprobs == []


def test_only_allowed_ids_are_drawn_and_normalised_over():
    mask, logits = np.zeros(150, bool), torch.zeros(150)
    mask[[3, 140]] = True
    logits[7] = 9.0
    params = [SamplingParams(seed=i, temperature=float(i % 3 > 0)) for i in range(60)]
    tokens, logprobs = draw(logits, params, 150, [None] + [mask] * 59)
    assert tokens[0] == 7 and set(tokens[1:]) == {3, 140}
    assert np.allclose(logprobs[1:], -math.log(2), atol=1e-6)
