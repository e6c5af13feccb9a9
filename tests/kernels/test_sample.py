"""Sampling in the output matrix: the reference's tokens, the law of the draws, their bits."""

import math

import pytest
import torch
from kernel_check import DEVICE, DTYPES, randn

from kernels import draw, sample
from kernels.sample import sample_linear, sample_logits

EXACT = 2e-5  # nats, absolute


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    monkeypatch.setattr(sample, "BLOCK_V", 32)
    monkeypatch.setattr(sample, "READY_V", 64)
    monkeypatch.setattr(sample, "CONFIGS", {80: {"BLOCK_N": 16, "num_stages": 1}})


def requests(generator, batch, temperature=None):
    """Seeds of all sizes and signs, positions beyond 2^31, some greedy temperatures."""
    seeds = torch.randint(-(2**63), 2**63 - 1, (batch,), generator=generator)
    positions = torch.randint(0, 2**40, (batch,), generator=generator)
    degrees = torch.rand(batch, generator=generator) * 1.5 + 0.2
    degrees[::3] = 0.0
    degrees = degrees if temperature is None else torch.full((batch,), temperature)
    return seeds.to(DEVICE), positions.to(DEVICE), degrees.to(DEVICE)


def keys(count, value=0):
    return torch.full((count,), value, dtype=torch.int64, device=DEVICE)


def buffers(rows, chunks):
    """What `choose` fills."""
    winners = torch.empty(rows, chunks, dtype=torch.int32, device=DEVICE)
    return torch.empty(4, rows, chunks, device=DEVICE), winners


def assert_drawn(out, logits, request, vocab):
    """The tokens are those of the reference unless two scores are nearer than rounding."""
    (tokens, logprobs), (seeds, positions, degrees) = out, request
    assert tokens.dtype == torch.int64 and logprobs.dtype == torch.float32
    wanted, _ = draw.reference(logits, seeds, positions, degrees.double(), vocab)
    warm = (degrees >= 1e-5)[:, None]
    z = logits[:, :vocab] / torch.where(warm, degrees[:, None].double(), 1.0)
    best = (z - draw.noise(seeds, positions, vocab).log() * warm).sort(-1).values
    sure = best[:, -1] - best[:, max(-2, -vocab)] > (1e-4 if vocab > 1 else -1)
    assert sure.double().mean() >= 0.5 and torch.equal(tokens[sure], wanted[sure])
    assert (logprobs - z.log_softmax(-1).gather(1, tokens[:, None])[:, 0]).abs().max() <= EXACT


@pytest.mark.parametrize("dtype", DTYPES)
def test_linear(generator, dtype):
    shapes = [(1, 16, 1, 1), (3, 48, 40, 33), (16, 32, 64, 64), (17, 16, 100, 97), (64, 16, 70, 31)]
    for batch, width, rows, vocab in shapes:
        hidden = randn(generator, batch, width, dtype=dtype)
        weight = randn(generator, rows, width, dtype=dtype, scale=0.5)
        request = requests(generator, batch)
        out = sample_linear(hidden, weight, *request, vocab=vocab)
        assert_drawn(out, hidden.double() @ weight.double().T, request, vocab)


@pytest.mark.parametrize("dtype", DTYPES)
def test_logits(generator, dtype):
    for batch, width, vocab in [(1, 1, 1), (2, 200, 63), (2, 200, 64), (3, 200, 65), (4, 200, 200)]:
        # rows farther apart than they are wide
        logits = randn(generator, batch, width + 8, dtype=dtype, scale=2.0)[:, :width]
        request = requests(generator, batch)
        out = sample_logits(logits, *request, vocab=vocab)
        assert_drawn(out, logits.double(), request, vocab)


def test_the_tiles_of_a_gpu(generator, monkeypatch):
    """Both kernels draw with the same noise; a near tie may fall either way."""
    monkeypatch.undo()
    hidden, weight = randn(generator, 7, 32), randn(generator, 300, 32, scale=0.5)
    request, logits = requests(generator, 7), hidden.double() @ weight.double().T
    linear = sample_linear(hidden, weight, *request, vocab=290)
    ready = sample_logits(logits.float(), *request, vocab=290)
    assert_drawn(linear, logits, request, 290)
    assert_drawn(ready, logits, request, 290)
    assert (linear[0] == ready[0]).sum() >= 6


@pytest.mark.parametrize("degree, block", [(0.5, 16), (1.0, 4)])
def test_draws_follow_the_distribution(degree, block):
    """4,000 positions over 10 ids: chi-square below its 0.999 quantile for 9 degrees of freedom."""
    count, logits = 4000, torch.linspace(-1.5, 1.5, 10)
    weight = torch.zeros(12, 16)
    weight[:, 0] = torch.cat([logits, torch.full((2,), 9.0)])  # two rows too many
    hidden = torch.eye(16)[:1].repeat(count, 1).to(DEVICE)
    request = keys(count, 1234), torch.arange(count).to(DEVICE), torch.full((count,), degree)
    partials, winners = buffers(count, -(-10 // block))
    state = partials, winners, count, 10, 16, 4096, block, 16
    sample._linear[(-(-10 // block),)](hidden, weight.to(DEVICE), *request, *state)
    # 4,000 programs of _merge would take long
    tokens = winners.gather(1, partials[0].argmax(1, keepdim=True))[:, 0]
    expected = count * (logits.double() / degree).softmax(0)
    assert ((tokens.cpu().bincount(minlength=10) - expected) ** 2 / expected).sum() < 27.88


def test_noise_is_exponential_and_independent():
    """By seed and by position: mean, variance, no correlation of neighbouring ids or rows."""
    count = torch.arange(2000, device=DEVICE)
    for seeds, positions in (
        (count, count * 0 + 5),
        (count * 0 + 5, count),
        (count * 0 - 1, count << 32),
        (count << 32, count * 0 + 2**32),
    ):
        e = draw.noise(seeds, positions, 200)
        assert abs(e.mean() - 1) < 0.01 and abs(e.var() - 1) < 0.03
        u = (torch.exp(-e) - 0.5) * math.sqrt(12)
        pairs = (u[:, 1:], u[:, :-1]), (u[1:], u[:-1]), (u[:, 16:], u[:, :-16]), (u[16:], u[:-16])
        assert all(abs((a * b).mean()) * math.sqrt(a.numel()) < 5 for a, b in pairs)


def test_a_request_has_the_same_token_in_any_batch_and_run(generator):
    request, logits = requests(generator, 20), randn(generator, 3, 70)
    hidden, weight = (randn(generator, n, 32, dtype=torch.bfloat16) for n in (20, 70))

    def linear(rows):
        return sample_linear(hidden[rows], weight, *(x[rows] for x in request), vocab=65)

    def ready(rows):
        return sample_logits(logits[rows], *(x[:3][rows] for x in request), vocab=65)

    for run, last in ((linear, 19), (ready, 2)):
        together, again = run(slice(None)), run(slice(None))
        for row in (1, last):
            for one, all_, twice in zip(run(slice(row, row + 1)), together, again, strict=True):
                assert torch.equal(one[0], all_[row]) and torch.equal(all_, twice)


def test_greedy_ties_go_to_the_lowest_id_and_near_ties_do_not():
    """Logits that differ by 1e-10 have the same exponential."""
    logits = torch.zeros(4, 200, device=DEVICE)
    logits[0, [70, 71, 130]], logits[1, [64, 199]], logits[2] = 2.0, 1.0, -3.0
    logits[3] = torch.arange(200) * 1e-10
    greedy = keys(4), keys(4), torch.zeros(4, device=DEVICE)
    tokens, logprobs = sample_logits(logits, *greedy, vocab=200)
    assert tokens.tolist() == [70, 64, 0, 199]
    exact = logits.log_softmax(-1).gather(1, tokens[:, None])[:, 0]
    assert (logprobs - exact).abs().max() <= EXACT


def test_ids_beyond_the_vocabulary_are_never_drawn(generator):
    """Padding rows may hold anything; zeros in their place would be drawn here."""
    hidden, weight = torch.ones(64, 16, device=DEVICE), torch.full((64, 16), -4.0, device=DEVICE)
    weight[40:] = float("nan")
    tokens, logprobs = sample_linear(hidden, weight, *requests(generator, 64, 1.0), vocab=40)
    assert tokens.max() < 40 and (logprobs + math.log(40)).abs().max() <= EXACT


def test_forbidden_ids(generator):
    """Whole chunks of minus infinity, as a guide leaves them."""
    logits = torch.full((4, 200), -math.inf, device=DEVICE)
    logits[:, [5, 140, 190]] = randn(generator, 4, 3)
    request = requests(generator, 4)
    tokens, logprobs = sample_logits(logits, *request, vocab=200)
    assert set(tokens.tolist()) <= {5, 140, 190}
    degrees = torch.where(request[2] < 1e-5, 1.0, request[2])[:, None].double()
    exact = (logits.double() / degrees).log_softmax(-1).gather(1, tokens[:, None])[:, 0]
    assert (logprobs - exact).abs().max() <= EXACT


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_broken_logits_show(bad):
    """The log-probability is NaN, and the token can still be looked up."""
    for ids in [range(130)] if bad == -math.inf else [[129], range(0, 130, 2)]:
        logits = torch.zeros(1, 130, device=DEVICE)
        logits[0, list(ids)] = bad
        request = keys(1, 1), keys(1, 1), torch.ones(1, device=DEVICE)
        token, logprob = sample_logits(logits, *request, vocab=130)
        assert logprob.isnan().all() and 0 <= token.item() < 130


def test_offsets_beyond_32_bits(monkeypatch):
    """Three rows 1.2e9 elements apart: the third begins beyond 2^31. Few pages take memory."""
    monkeypatch.setattr(sample, "READY_V", 16)
    base = torch.empty(2 * 1_200_000_000 + 64, dtype=torch.float16, device=DEVICE)
    logits = base.as_strided((3, 16), (1_200_000_000, 1))
    logits.zero_()
    logits[[0, 1, 2], [3, 9, 14]] = 5.0
    greedy = keys(3), keys(3), torch.zeros(3, device=DEVICE)
    assert sample_logits(logits, *greedy, vocab=16)[0].tolist() == [3, 9, 14]
