"""Draws from logits: the reference's tokens, the law of the draws, their bits, truncation."""

import math

import pytest
import torch
from kernel_check import DEVICE, DTYPES, randn

from kernels import sample, truncate
from kernels.sample import reference
from kernels.truncate import truncation
from nanorchestra.engine.sequence import SamplingParams
from nanorchestra.engine.sampler import draw_tokens, uniforms

EXACT = 2e-5  # nats, absolute


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    monkeypatch.setattr(sample, "BLOCK", 64)
    monkeypatch.setattr(truncate, "BLOCK", 128)


def requests(generator, batch, temperature=None):
    """Noise of all sizes, some greedy temperatures."""
    uniform = torch.rand(batch, dtype=torch.float64, generator=generator)
    degrees = torch.rand(batch, generator=generator) * 1.5 + 0.2
    degrees[::3] = 0.0
    degrees = degrees if temperature is None else torch.full((batch,), temperature)
    return uniform.to(DEVICE), degrees.to(DEVICE)


@pytest.mark.parametrize("dtype", DTYPES)
def test_tokens_and_log_probabilities(generator, monkeypatch, dtype):
    """Within a block and over several, rows farther apart than they are wide."""
    for batch, width, vocab in [(1, 1, 1), (2, 200, 63), (2, 200, 64), (9, 200, 65), (4, 200, 200)]:
        logits = randn(generator, batch, width + 8, dtype=dtype, scale=2.0)[:, :width]
        uniform, degrees = requests(generator, batch)
        tokens, logprobs = sample.sample(logits, uniform, degrees, vocab)
        wanted, exact = reference(logits.double(), uniform, degrees.double(), vocab)
        assert torch.equal(tokens, wanted)
        assert ((logprobs - exact).abs() <= EXACT).all()
    monkeypatch.undo()  # the tiles of a GPU
    logits, (uniform, degrees) = randn(generator, 3, 5000), requests(generator, 3)
    tokens, _ = sample.sample(logits, uniform, degrees, 4999)
    assert torch.equal(tokens, reference(logits.double(), uniform, degrees.double(), 4999)[0])


def test_the_same_seed_draws_the_same_token_as_on_the_cpu(generator):
    """Greedy, warm, truncated: the kernels and draw_tokens, with their own logits and noise."""
    rows, vocab = 12, 300
    logits = randn(generator, rows, vocab, scale=2.0)
    kinds = [{}, {"temperature": 0.0}, {"temperature": 0.6}, {"top_k": 5}, {"top_p": 0.7}]
    kinds.append({"top_k": 40, "top_p": 0.9, "temperature": 0.8})
    params = [SamplingParams(seed=i - 3, **kinds[i % 6]) for i in range(rows)]
    places = [100 * i for i in range(rows)]
    wanted = draw_tokens(logits.cpu(), vocab, params, places, [None] * rows)
    noise = torch.from_numpy(uniforms([p.seed for p in params], places)).to(DEVICE)
    degrees, top_p = (
        torch.tensor([getattr(p, name) for p in params], device=DEVICE)
        for name in ("temperature", "top_p")
    )
    top_k = torch.tensor([p.top_k for p in params], dtype=torch.int32, device=DEVICE)
    floors = truncation(logits, degrees, top_k, top_p, vocab)
    tokens, logprobs = sample.sample(logits, noise, degrees, vocab, floors)
    assert tokens.tolist() == [draw.token for draw in wanted]
    assert logprobs.tolist() == pytest.approx([draw.logprob for draw in wanted], abs=EXACT)


def test_truncation_keeps_what_a_sort_would(generator):
    """All combinations of limits, ties, forbidden ids, an odd vocabulary, padding beyond it."""
    logits = randn(generator, 8, 310, scale=3.0)
    logits[:, 301:] = 50.0  # padding
    logits[5, 100:] = -math.inf
    logits[6, :300] = logits[6, :300].round()  # many ties
    cases = [(0, 1.0), (1, 1.0), (7, 1.0), (0, 0.5), (300, 0.99), (20, 0.9), (9, 0.8), (0, 1e-6)]
    top_k, top_p = (torch.tensor(x, device=DEVICE) for x in zip(*cases, strict=True))
    degrees = torch.full((8,), 0.7, device=DEVICE)
    floors = truncation(logits, degrees, top_k.int(), top_p, 301)
    for row, (k, p) in enumerate(cases):
        z = logits[row, :301]
        best = z.sort(descending=True).values
        within = best[k - 1 if k else -1]  # ties of the k-th are kept
        kept = torch.where(z >= within, z, -math.inf).double()
        share = (kept / 0.7).softmax(0)
        above = torch.stack([share[kept > one].sum() for one in best.double()])
        least = best[(above < p) & (best >= within) & (best > -math.inf)].min()
        assert ((z >= floors[row]) == (z >= least))[z > -math.inf].all(), (k, p)
    greedy = truncation(logits, degrees * 0, top_k.int(), top_p, 301)
    assert (greedy == -math.inf).all() and floors[0] == -math.inf


def test_draws_follow_the_distribution():
    """60 even steps of the noise over 10 ids: each has its share, rounded."""
    logits, steps, degree = torch.linspace(-1.5, 1.5, 10), 60, 0.5
    logits = torch.cat([logits, torch.full((2,), 9.0)]).expand(steps, -1).to(DEVICE)
    uniform = (torch.arange(steps, dtype=torch.float64) / steps).to(DEVICE)
    degrees = torch.full((steps,), degree, device=DEVICE)
    tokens, _ = sample.sample(logits, uniform, degrees, 10)
    expected = steps * (logits[0, :10].double() / degree).softmax(0)
    assert (tokens.bincount(minlength=10) - expected).abs().max() <= 1


def test_a_request_has_the_same_token_in_any_batch_and_run(generator):
    (uniform, degrees), logits = requests(generator, 3), randn(generator, 3, 70)

    def run(rows):
        return sample.sample(logits[rows], uniform[rows], degrees[rows], 65)

    together, again = run(slice(None)), run(slice(None))
    for row in (1, 2):
        for one, all_, twice in zip(run(slice(row, row + 1)), together, again, strict=True):
            assert torch.equal(one[0], all_[row]) and torch.equal(all_, twice)


def test_greedy_ties_go_to_the_lowest_id_and_near_ties_do_not():
    """Logits that differ by 1e-10 have the same exponential."""
    logits = torch.zeros(4, 200, device=DEVICE)
    logits[0, [70, 71, 130]], logits[1, [64, 199]], logits[2] = 2.0, 1.0, -3.0
    logits[3] = torch.arange(200) * 1e-10
    greedy = torch.full((4,), 0.7, dtype=torch.float64), torch.zeros(4)
    tokens, logprobs = sample.sample(logits, *(x.to(DEVICE) for x in greedy), 200)
    assert tokens.tolist() == [70, 64, 0, 199]
    exact = logits.log_softmax(-1).gather(1, tokens[:, None])[:, 0]
    assert (logprobs - exact).abs().max() <= EXACT


def test_forbidden_ids_and_the_edges_of_the_noise(generator):
    """Whole blocks of minus infinity, as a guide leaves them; u at 0 and just below 1."""
    logits = torch.full((4, 200), -math.inf, device=DEVICE)
    logits[:, [5, 140, 190]] = randn(generator, 4, 3)
    uniform, degrees = requests(generator, 4, 1.0)
    uniform[:2] = torch.tensor([0.0, 1 - 2**-53])
    tokens, logprobs = sample.sample(logits, uniform, degrees, 200)
    assert tokens[:2].tolist() == [5, 190] and set(tokens.tolist()) <= {5, 140, 190}
    exact = logits.double().log_softmax(-1).gather(1, tokens[:, None])[:, 0]
    assert (logprobs - exact).abs().max() <= EXACT


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_broken_logits_show(bad):
    """The log-probability is NaN, and the token can still be looked up."""
    for ids in [range(130)] if bad == -math.inf else [[129], range(0, 130, 2)]:
        logits = torch.zeros(1, 130, device=DEVICE)
        logits[0, list(ids)] = bad
        uniform, degrees = torch.full((1,), 0.5, dtype=torch.float64), torch.ones(1)
        token, logprob = sample.sample(logits, uniform.to(DEVICE), degrees.to(DEVICE), 130)
        assert logprob.isnan().all() and 0 <= token.item() < 130


def test_offsets_beyond_32_bits(monkeypatch):
    """Three rows 1.2e9 elements apart: the third begins beyond 2^31. Few pages take memory."""
    monkeypatch.setattr(sample, "BLOCK", 16)
    base = torch.empty(2 * 1_200_000_000 + 64, dtype=torch.float16, device=DEVICE)
    logits = base.as_strided((3, 16), (1_200_000_000, 1))
    logits.zero_()
    logits[[0, 1, 2], [3, 9, 14]] = 5.0
    greedy = torch.zeros(3, dtype=torch.float64), torch.zeros(3)
    tokens, _ = sample.sample(logits, *(x.to(DEVICE) for x in greedy), 16)
    assert tokens.tolist() == [3, 9, 14]
