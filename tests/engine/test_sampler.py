"""The sampler: its distribution, its log-probabilities, and noise by (seed, position) alone."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from nanorchestra.engine import sampler
from nanorchestra.engine.sampler import draw_tokens, score_tokens, uniforms
from nanorchestra.engine.sequence import SamplingParams


@pytest.fixture(autouse=True, params=["C", "torch"])
def computed_by(request, monkeypatch):
    """A test runs with sampler.c, and with torch, as on a GPU or without a compiler."""
    if request.param == "torch":
        monkeypatch.setattr(sampler, "_library", lambda device: None)
    elif sampler._library("cpu") is None:
        pytest.skip("there is no C compiler")


def draw(logits: torch.Tensor, params: list[SamplingParams], vocab: int):
    """One draw a row, at positions 0.., as arrays of tokens and log-probabilities."""
    rows = len(params)
    drawn = draw_tokens(logits.expand(rows, -1), vocab, params, range(rows), [None] * rows)
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


@pytest.mark.parametrize(
    "vocab, params",
    [
        (16, {}),  # within a block of the sampler's; the others are over several
        (150, {"temperature": 0.5}),
        (150, {"top_k": 5}),
        (150, {"top_p": 0.7}),
        (150, {"top_k": 12, "top_p": 0.95}),
    ],
    ids=str,
)
def test_draws_follow_the_distribution_they_are_said_to_come_from(vocab, params):
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


def test_only_allowed_ids_are_drawn_normalised_over_and_reported_as_the_most_probable():
    mask, logits = np.zeros(150, bool), torch.zeros(150)
    mask[[3, 140]] = True
    logits[7], logits[140] = 9.0, 1.0
    params = [SamplingParams(seed=i, temperature=0.5, top_logprobs=2) for i in range(60)]
    masks = [None] + [mask] * 59
    drawn = draw_tokens(logits.expand(60, -1), 150, params, range(60), masks).listed(params)
    expected = dict(zip((3, 140), torch.tensor([0.0, 2.0]).log_softmax(0).tolist(), strict=True))
    assert drawn[0].token == 7 and {draw.token for draw in drawn[1:]} == expected.keys()
    for draw in drawn[1:]:
        assert draw.logprob == pytest.approx(expected[draw.token], abs=1e-6)
        assert [token for token, _ in draw.top_logprobs] == [140, 3]
        assert dict(draw.top_logprobs) == pytest.approx(expected, abs=1e-6)


def test_a_row_without_finite_logits_draws_an_id_with_no_finite_logprob_and_harms_no_other():
    logits = torch.zeros(4, 150)
    logits[0, 70], logits[1], logits[2, 3] = torch.nan, -torch.inf, torch.inf
    params = [SamplingParams(seed=row) for row in range(4)]
    drawn = draw_tokens(logits, 150, params, range(4), [None] * 4)
    assert drawn.tokens[:3].tolist() == [0, 0, 0]
    assert not drawn.logprobs[:3].isfinite().any()
    assert drawn.logprobs[3].item() == pytest.approx(-math.log(150))


def test_a_row_has_the_same_bits_alone_and_beside_others_and_on_any_threads_and_when_scored(
    monkeypatch,
):
    logits = torch.randn(40, 200).to(torch.bfloat16)
    params = [SamplingParams(seed=row, temperature=float(row % 7 > 0)) for row in range(40)]
    together = draw_tokens(logits, 197, params, range(40), [None] * 40)
    monkeypatch.setattr(sampler, "WORTH_THREADS", 0)
    by_threads = draw_tokens(logits.T.contiguous().T, 197, params, range(40), [None] * 40)
    for row in range(40):
        alone = draw_tokens(logits[row][None], 197, [params[row]], [row], [None])
        for other in (alone.tokens[0], by_threads.tokens[row]):
            assert other == together.tokens[row]
        for other in (alone.logprobs[0], by_threads.logprobs[row]):
            assert other == together.logprobs[row]
    assert score_tokens(logits, 197, together.tokens) == together.logprobs.tolist()
