"""Draws from logits: the tokens of the naive version and of the CPU's sampler, limits, bits."""

import math

import pytest
import torch
from kernel_check import DEVICE, randn
from reserved_memory import reserved

from kernels import sample as kernel
from kernels.sample import naive_sample, naive_truncation_floor, sample, truncation_floor
from nanorchestra.engine.sampler import draw_tokens, uniforms
from nanorchestra.engine.sequence import SamplingParams

EXACT = 2e-5  # nats, absolute
# (top_k, top_p): every combination of limits, and limits that keep one id or nearly all.
LIMITS = [(0, 1.0), (1, 1.0), (7, 1.0), (0, 0.5), (300, 0.99), (20, 0.9), (9, 0.8), (0, 1e-6)]


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    monkeypatch.setattr(kernel, "BLOCK", 64)
    monkeypatch.setattr(kernel, "GROUP", 16)
    monkeypatch.setattr(kernel, "GROUPS", 4)
    monkeypatch.setattr(kernel, "TILE", 128)


def noise(generator, batch):
    return torch.rand(batch, dtype=torch.float64, generator=generator).to(DEVICE)


def temperatures(generator, batch, every=None):
    """Of all sizes, a third of them greedy; or the same for every row."""
    if every is not None:
        return torch.full((batch,), every, device=DEVICE)
    drawn = torch.rand(batch, generator=generator) * 1.5 + 0.2
    drawn[::3] = 0.0
    return drawn.to(DEVICE)


def limits(batch, cases=((0, 1.0),)):
    """Returns top_k [B] and top_p [B] that take turns through the cases."""
    chosen = [cases[row % len(cases)] for row in range(batch)]
    top_k = torch.tensor([k for k, _ in chosen], dtype=torch.int32, device=DEVICE)
    top_p = torch.tensor([p for _, p in chosen], device=DEVICE)
    return top_k, top_p


def assert_naive(logits, uniform, temperature, top_k, top_p, vocab):
    tokens, logprobs = sample(logits, uniform, temperature, top_k, top_p, vocab)
    exact = naive_sample(logits.double(), uniform, temperature.double(), top_k, top_p, vocab)
    assert torch.equal(tokens, exact[0])
    assert ((logprobs - exact[1]).abs() <= EXACT).all()


def test_tokens_and_log_probabilities(generator, monkeypatch):
    """Within a block and over several, rows farther apart than they are wide; a GPU's tiles."""
    for batch, vocab in [(1, 1), (2, 63), (2, 64), (9, 65), (4, 200)]:
        logits = randn(generator, batch, 208, scale=2.0)[:, :200]
        inputs = noise(generator, batch), temperatures(generator, batch)
        assert_naive(logits, *inputs, *limits(batch), vocab)
    monkeypatch.undo()
    logits = randn(generator, 5, 5000)
    inputs = noise(generator, 5), temperatures(generator, 5, 0.9)
    assert_naive(logits, *inputs, *limits(5, [(0, 1.0), (20, 0.95), (0, 0.3)]), 4999)


def test_the_same_seed_draws_the_same_token_as_on_the_cpu(generator):
    """Greedy, warm, truncated: the kernels and draw_tokens, with their own logits and noise."""
    rows, vocab = 7, 130
    logits = randn(generator, rows, vocab, scale=2.0)
    kinds = [{}, {"temperature": 0.0}, {"temperature": 0.6}, {"top_k": 5}, {"top_p": 0.7}]
    kinds.append({"top_k": 40, "top_p": 0.9, "temperature": 0.8})
    params = [SamplingParams(seed=row - 3, **kinds[row % 6]) for row in range(rows)]
    positions = [100 * row for row in range(rows)]
    expected = draw_tokens(logits.cpu(), vocab, params, positions, [None] * rows)
    tokens, logprobs = sample(
        logits,
        torch.from_numpy(uniforms([p.seed for p in params], positions)).to(DEVICE),
        torch.tensor([p.temperature for p in params], device=DEVICE),
        torch.tensor([p.top_k for p in params], dtype=torch.int32, device=DEVICE),
        torch.tensor([p.top_p for p in params], device=DEVICE),
        vocab,
    )
    assert tokens.tolist() == [draw.token for draw in expected]
    assert logprobs.tolist() == pytest.approx([draw.logprob for draw in expected], abs=EXACT)


@pytest.mark.parametrize("candidates", [16384, 10], ids=["list", "row"])
def test_truncation_keeps_what_a_sort_would(generator, monkeypatch, candidates):
    """Ties, forbidden ids, an odd vocabulary, padding beyond it; lists that overflow."""
    monkeypatch.setattr(kernel, "CANDIDATES", candidates)
    logits = randn(generator, 8, 310, scale=3.0)
    logits[:, 301:] = 50.0  # padding
    logits[4, 200:300] = math.nextafter(float(logits[4, 200]), -math.inf)  # neighbours in fp32
    logits[5, 100:] = -math.inf
    logits[6, :300] = logits[6, :300].round()  # many ties
    temperature = temperatures(generator, 8, 0.7)
    top_k, top_p = limits(8, LIMITS)
    floors = truncation_floor(logits, temperature, top_k, top_p, 301)
    exact = naive_truncation_floor(logits.double(), temperature, top_k, top_p, 301)
    for row, case in enumerate(LIMITS):
        finite = logits[row, :301][logits[row, :301] > -math.inf]
        assert torch.equal(finite >= floors[row], finite >= exact[row]), case
    greedy = truncation_floor(logits, temperature * 0, top_k, top_p, 301)
    assert (greedy == -math.inf).all() and floors[0] == -math.inf


def test_a_top_k_beyond_the_vocabulary_keeps_all(generator):
    """2^19 and more do not fit the units that the search counts in."""
    logits = randn(generator, 4, 200, scale=2.0)
    temperature = temperatures(generator, 4, 1.0)
    runs = []
    for top_k in (0, 200, 2**19, 2**20 + 20, 2**31 - 1):
        limits_of_rows = limits(4, [(top_k, 1.0), (top_k, 0.5)])
        runs.append(truncation_floor(logits, temperature, *limits_of_rows, 200))
    for floors in runs[1:]:
        assert torch.equal(floors[1::2], runs[0][1::2]), "with top-p"
        assert (logits >= floors[:, None])[::2].all(), "without"


def test_flat_and_peaked_rows_lose_no_candidate(generator):
    """The bound of step 2 is tight where all ids are alike, and where one has all the weight."""
    flat = 1e-4 * torch.randn(130, generator=generator)
    peaked = torch.full((130,), -8.0)
    peaked[77] = 9.0
    negative = -1e4 + 50 * torch.rand(130, generator=generator)
    logits = torch.stack([flat, flat, peaked, peaked, negative, negative]).to(DEVICE)
    top_k, top_p = limits(6, [(0, 0.999), (120, 0.5), (0, 0.999), (0, 0.5)])
    temperature = temperatures(generator, 6, 1.3)
    floors = truncation_floor(logits, temperature, top_k, top_p, 130)
    exact = naive_truncation_floor(logits.double(), temperature, top_k, top_p, 130)
    kept = (logits >= floors[:, None]).sum(1)
    assert ((kept - (logits >= exact[:, None]).sum(1)).abs() <= 1).all()  # a sum at the very edge
    assert kept[2:4].tolist() == [1, 1]


def test_draws_follow_the_distribution():
    """60 even steps of the noise over 10 ids: each has its share, rounded."""
    logits = torch.linspace(-1.5, 1.5, 10)
    logits = torch.cat([logits, torch.full((2,), 9.0)]).expand(60, -1).to(DEVICE)
    uniform = (torch.arange(60, dtype=torch.float64) / 60).to(DEVICE)
    temperature = torch.full((60,), 0.5, device=DEVICE)
    tokens, _ = sample(logits, uniform, temperature, *limits(60), 10)
    expected = 60 * (logits[0, :10].double() / 0.5).softmax(0)
    assert (tokens.bincount(minlength=10) - expected).abs().max() <= 1


def test_a_request_has_the_same_token_in_any_batch_and_run(generator):
    logits, uniform = randn(generator, 3, 170), noise(generator, 3)
    temperature = temperatures(generator, 3, 0.8)
    top_k, top_p = limits(3, [(0, 1.0), (9, 0.8), (0, 0.6)])

    def run(rows):
        return sample(*(x[rows] for x in (logits, uniform, temperature, top_k, top_p)), 165)

    together, again = run(slice(None)), run(slice(None))
    for row in range(3):
        for one, all_, twice in zip(run(slice(row, row + 1)), together, again, strict=True):
            assert torch.equal(one[0], all_[row]) and torch.equal(all_, twice)


def test_greedy_ties_go_to_the_lowest_id_and_near_ties_do_not():
    """Logits that differ by 1e-10 have the same exponential."""
    logits = torch.zeros(4, 200, device=DEVICE)
    logits[0, [70, 71, 130]] = 2.0
    logits[1, [64, 199]] = 1.0
    logits[2] = -3.0
    logits[3] = torch.arange(200) * 1e-10
    uniform = torch.full((4,), 0.7, dtype=torch.float64, device=DEVICE)
    temperature = torch.zeros(4, device=DEVICE)
    tokens, logprobs = sample(logits, uniform, temperature, *limits(4, [(5, 0.5)]), 200)
    assert tokens.tolist() == [70, 64, 0, 199]
    exact = logits.log_softmax(-1).gather(1, tokens[:, None])[:, 0]
    assert (logprobs - exact).abs().max() <= EXACT


def test_forbidden_ids_and_the_edges_of_the_noise(generator):
    """Whole blocks of minus infinity, as a guide leaves them; u at 0 and just below 1."""
    logits = torch.full((4, 200), -math.inf, device=DEVICE)
    logits[:, [5, 140, 190]] = randn(generator, 4, 3)
    uniform, temperature = noise(generator, 4), temperatures(generator, 4, 1.0)
    uniform[:2] = torch.tensor([0.0, 1 - 2**-53])
    tokens, logprobs = sample(logits, uniform, temperature, *limits(4), 200)
    assert tokens[:2].tolist() == [5, 190] and set(tokens.tolist()) <= {5, 140, 190}
    exact = logits.double().log_softmax(-1).gather(1, tokens[:, None])[:, 0]
    assert (logprobs - exact).abs().max() <= EXACT
    tokens, _ = sample(logits, uniform, temperature, *limits(4, [(20, 0.95), (2, 1.0)]), 200)
    assert set(tokens.tolist()) <= {5, 140, 190}


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("limit", [(0, 1.0), (20, 0.95), (0, 0.9)], ids=str)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_broken_logits_show(bad, limit):
    """The log-probability is NaN, and the token can still be looked up."""
    for ids in [range(130)] if bad == -math.inf else [[129], range(0, 130, 2)]:
        logits = torch.zeros(1, 130, device=DEVICE)
        logits[0, list(ids)] = bad
        uniform = torch.full((1,), 0.5, dtype=torch.float64, device=DEVICE)
        token, logprob = sample(
            logits, uniform, torch.ones(1, device=DEVICE), *limits(1, [limit]), 130
        )
        assert logprob.isnan().all() and 0 <= token.item() < 130


def test_offsets_beyond_32_bits():
    """Three rows 1.1e9 logits apart: the third begins beyond 2^31. Few pages take memory."""
    stride = 1_100_000_000
    base = reserved(2 * stride + 64, torch.float32)
    logits = base.as_strided((3, 16), (stride, 1))
    logits.zero_()
    logits[[0, 1, 2], [3, 9, 14]] = 5.0
    uniform = torch.full((3,), 0.5, dtype=torch.float64, device=DEVICE)
    temperature = torch.ones(3, device=DEVICE)
    tokens, _ = sample(logits, uniform, temperature, *limits(3, [(1, 1.0), (0, 0.5)]), 16)
    assert tokens.tolist() == [3, 9, 14]


def test_wrong_shapes_are_refused():
    logits, ones = torch.zeros(4, 32), torch.ones(4)
    for vocab in (0, 33):
        with pytest.raises(ValueError, match=f"vocab is {vocab}; expected 1 to 32"):
            sample(logits, ones.double(), ones, ones.int(), ones, vocab)
    with pytest.raises(ValueError, match="uniform is torch.float32; expected torch.float64"):
        sample(logits, ones, ones, ones.int(), ones, 32)
    with pytest.raises(ValueError, match="logits is torch.bfloat16; expected torch.float32"):
        sample(logits.bfloat16(), ones.double(), ones, ones.int(), ones, 32)
