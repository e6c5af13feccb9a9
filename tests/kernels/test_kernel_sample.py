"""Sampling in the output matrix: every token as the torch reference draws it from the same noise, the law of the draws, and their invariance."""

from __future__ import annotations

import math

import pytest
import torch
from kernel_check import DEVICE, DTYPES, randn

from kernels import noise, sample
from kernels.sample import sample_linear, sample_logits

SMALL, READY = {"BLOCK_V": 32, "BLOCK_N": 16}, {"BLOCK_V": 64}
EXACT = 2e-5  # nats, absolute


def requests(generator, batch, temperature=None):
    """Seeds of all sizes and signs, positions beyond 2^31, temperatures of which some are greedy."""
    seeds = torch.randint(-(2**63), 2**63 - 1, (batch,), generator=generator)
    positions = torch.randint(0, 2**40, (batch,), generator=generator)
    degrees = torch.rand(batch, generator=generator) * 1.5 + 0.2
    degrees[::3] = 0.0
    degrees = degrees if temperature is None else torch.full((batch,), temperature)
    return seeds.to(DEVICE), positions.to(DEVICE), degrees.to(DEVICE)


def assert_drawn(out, logits, request, vocab):
    """The tokens are those of the reference, unless its two best scores are nearer than rounding; log-probabilities are exact."""
    (tokens, logprobs), (seeds, positions, degrees) = out, request
    assert tokens.dtype == torch.int64 and logprobs.dtype == torch.float32
    wanted, _ = sample.reference(logits, seeds, positions, degrees.double(), vocab)
    warm = (degrees >= 1e-5)[:, None]
    z = logits[:, :vocab] / torch.where(warm, degrees[:, None].double(), 1.0)
    best = (
        (z - noise.reference(seeds, positions, vocab).log() * warm).sort(-1, descending=True).values
    )
    sure = (
        best[:, 0] - best[:, min(1, vocab - 1)] > 1e-4
        if vocab > 1
        else torch.ones(len(best), dtype=torch.bool, device=DEVICE)
    )
    assert sure.double().mean() >= 0.5 and torch.equal(tokens[sure], wanted[sure])
    assert (logprobs - z.log_softmax(-1).gather(1, tokens[:, None])[:, 0]).abs().max() <= EXACT


@pytest.fixture
def poison(monkeypatch):
    """Memory that no kernel has written holds NaN, or an id that does not exist."""
    empty = torch.empty

    def poisoned(*args, **kwargs):
        out = empty(*args, **kwargs)
        return out.fill_(float("nan") if out.is_floating_point() else -7)

    monkeypatch.setattr(torch, "empty", poisoned)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "batch, width, rows, vocab",
    [(1, 16, 1, 1), (3, 48, 40, 33), (16, 32, 64, 64), (17, 16, 100, 97), (64, 16, 70, 31)],
)
def test_linear(generator, poison, dtype, batch, width, rows, vocab):
    hidden, weight = (
        randn(generator, batch, width, dtype=dtype),
        randn(generator, rows, width, dtype=dtype, scale=0.5),
    )
    request = requests(generator, batch)
    out = sample_linear(hidden, weight, *request, vocab=vocab, config=SMALL)
    assert_drawn(out, hidden.double() @ weight.double().T, request, vocab)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "batch, width, vocab", [(1, 1, 1), (2, 200, 63), (2, 200, 64), (3, 200, 65), (4, 200, 200)]
)
def test_logits(generator, poison, dtype, batch, width, vocab):
    logits = randn(generator, batch, width + 8, dtype=dtype, scale=2.0)[
        :, :width
    ]  # rows farther apart than they are wide
    request = requests(generator, batch)
    assert_drawn(
        sample_logits(logits, *request, vocab=vocab, config=READY), logits.double(), request, vocab
    )


def test_of_any_shape_with_the_tiles_it_would_use(generator, poison):
    batch, vocab = (
        int(torch.randint(low, high, (), generator=generator)) for low, high in ((1, 8), (1, 300))
    )
    hidden, weight, request = (
        randn(generator, batch, 32),
        randn(generator, 300, 32, scale=0.5),
        requests(generator, batch),
    )
    logits = hidden.double() @ weight.double().T
    linear = sample_linear(hidden, weight, *request, vocab=vocab)
    assert_drawn(linear, logits, request, vocab)
    ready = sample_logits(logits.float(), *request, vocab=vocab)
    assert_drawn(ready, logits, request, vocab)
    assert (
        linear[0] == ready[0]
    ).sum() >= batch - 1  # the same noise; a near tie may fall either way


@pytest.mark.parametrize("degree, block", [(0.5, 16), (1.0, 4)])
def test_draws_follow_the_distribution(degree, block):
    """4,000 positions of one request over 10 ids, in one chunk or three: chi-square below its 0.999 quantile for 9 degrees of freedom."""
    draws, chunks, logits = 4000, -(-10 // block), torch.linspace(-1.5, 1.5, 10)
    weight = torch.zeros(12, 16)
    weight[:, 0] = torch.cat(
        [logits, torch.full((2,), 9.0)]
    )  # two rows too many, the most probable
    hidden = torch.eye(16)[:1].repeat(draws, 1).to(DEVICE)
    request = [
        x.to(DEVICE)
        for x in (torch.full((draws,), 1234), torch.arange(draws), torch.full((draws,), degree))
    ]
    partials, winners, _, _ = sample._buffers(draws, 12, block, *request, 10, None)
    sample._linear[(chunks,)](
        hidden,
        weight.to(DEVICE),
        *request,
        partials,
        winners,
        draws,
        10,
        N=16,
        BLOCK_B=4096,
        BLOCK_V=block,
        BLOCK_N=16,
    )
    tokens = winners.gather(1, partials[0].argmax(1, keepdim=True))[
        :, 0
    ]  # 4,000 programs of _merge would take long
    expected = draws * (logits.double() / degree).softmax(0)
    assert ((tokens.cpu().bincount(minlength=10) - expected) ** 2 / expected).sum() < 27.88


def test_noise_is_uniform_and_independent():
    """By seed and by position: the mean and variance of an exponential, and no correlation between neighbouring ids or rows."""
    count = torch.arange(2000, device=DEVICE)
    for seeds, positions in (
        (count, count * 0 + 5),
        (count * 0 + 5, count),
        (count * 0 - 1, count + 2**32),
    ):
        e = noise.reference(seeds, positions, 200)
        assert abs(e.mean() - 1) < 0.01 and abs(e.var() - 1) < 0.03
        u = (torch.exp(-e) - 0.5) * math.sqrt(12)
        for a, b in (
            (u[:, 1:], u[:, :-1]),
            (u[1:], u[:-1]),
            (u[:, 16:], u[:, :-16]),
            (u[16:], u[:-16]),
        ):
            assert abs((a * b).mean()) * math.sqrt(a.numel()) < 5


@pytest.mark.parametrize("rows, chunks, block", [(2, 4, 32), (1, 1, 2**17)])
def test_noise_of_the_kernel_is_that_of_torch(generator, rows, chunks, block):
    """Over equal logits the draw is the smallest E; its value shows in the score that the kernel keeps. Of 131,072, it is about 1e-5."""
    vocab = chunks * block
    request = *requests(generator, rows)[:2], torch.ones(rows, device=DEVICE)
    partials, winners, _, _ = sample._buffers(rows, vocab, block, *request, vocab, None)
    sample._ready[(chunks, rows)](
        torch.zeros(rows, vocab, device=DEVICE),
        vocab,
        vocab,
        *request,
        partials,
        winners,
        rows,
        vocab,
        BLOCK_V=block,
    )
    exact = noise.reference(*request[:2], vocab).view(rows, chunks, block)
    torch.testing.assert_close(
        partials[0].double(), -exact.min(-1).values.log(), atol=1e-5, rtol=1e-6
    )
    assert torch.equal(
        winners.long(), exact.argmin(-1) + torch.arange(chunks, device=DEVICE) * block
    )


def test_every_part_of_the_key_counts():
    """Draws differ with the position, with its high half, with the seed, and with its high half."""
    count = torch.arange(200, device=DEVICE)
    for seeds, positions in (
        (count * 0, count),
        (count * 0, count << 32),
        (count, count * 0),
        (count << 32, count * 0),
    ):
        draws = noise.reference(seeds, positions, 64).argmin(-1)
        assert (
            (draws.bincount(minlength=64) - 200 / 64) ** 2 / (200 / 64)
        ).sum() < 103.5  # the 0.999 quantile for 63 degrees


def test_the_same_request_draws_the_same_token_whatever_its_neighbours(generator):
    hidden, weight, request = (
        randn(generator, 20, 32, dtype=torch.bfloat16),
        randn(generator, 70, 32, dtype=torch.bfloat16),
        requests(generator, 20),
    )
    logits = randn(generator, 3, 70)
    linear = lambda rows: sample_linear(
        hidden[rows], weight, *(x[rows] for x in request), vocab=65, config=SMALL
    )
    ready = lambda rows: sample_logits(
        logits[rows], *(x[:3][rows] for x in request), vocab=65, config=READY
    )
    for run, last in ((linear, 19), (ready, 2)):
        together, again = run(slice(None)), run(slice(None))
        for row in (1, last):
            for one, all_, twice in zip(run(slice(row, row + 1)), together, again):
                assert torch.equal(one[0], all_[row]) and torch.equal(all_, twice)


def test_greedy_ties_go_to_the_lowest_id():
    logits = torch.zeros(3, 200, device=DEVICE)
    logits[0, [70, 71, 130]], logits[1, [64, 199]], logits[2] = 2.0, 1.0, -3.0
    zeros = torch.zeros(3, dtype=torch.int64, device=DEVICE)
    tokens, logprobs = sample_logits(
        logits, zeros, zeros, torch.zeros(3, device=DEVICE), vocab=200, config=READY
    )
    assert tokens.tolist() == [70, 64, 0]
    assert (logprobs - logits.log_softmax(-1).gather(1, tokens[:, None])[:, 0]).abs().max() <= EXACT


def test_greedy_tells_logits_apart_that_exponentials_would_not():
    logits = torch.arange(100, device=DEVICE)[None] * 1e-10
    zero = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    assert (
        sample_logits(logits, zero, zero, torch.zeros(1, device=DEVICE), vocab=100, config=READY)[
            0
        ].item()
        == 99
    )


def test_ids_beyond_the_vocabulary_are_never_drawn(generator):
    """Padding rows may hold anything; zeros in their place would be drawn here, where all real logits lie far below."""
    hidden, weight = torch.ones(64, 16, device=DEVICE), torch.full((64, 16), -4.0, device=DEVICE)
    weight[40:] = float("nan")
    tokens, logprobs = sample_linear(
        hidden, weight, *requests(generator, 64, 1.0), vocab=40, config=SMALL
    )
    assert tokens.max() < 40 and (logprobs + math.log(40)).abs().max() <= EXACT


def test_forbidden_ids(generator):
    """Whole chunks of minus infinity, as a guide leaves them."""
    logits = torch.full((4, 200), -math.inf, device=DEVICE)
    logits[:, [5, 140, 190]] = randn(generator, 4, 3)
    request = requests(generator, 4)
    tokens, logprobs = sample_logits(logits, *request, vocab=200, config=READY)
    assert set(tokens.tolist()) <= {5, 140, 190}
    exact = (
        logits.double() / torch.where(request[2] < 1e-5, 1.0, request[2])[:, None].double()
    ).log_softmax(-1)
    assert (logprobs - exact.gather(1, tokens[:, None])[:, 0]).abs().max() <= EXACT


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(
    "bad, ids",
    [
        (math.nan, [129]),
        (math.nan, range(0, 130, 2)),
        (math.inf, [129]),
        (math.inf, range(0, 130, 2)),
        (-math.inf, range(130)),
    ],
)
def test_broken_logits_show(bad, ids):
    """A NaN or an infinity, or nothing but minus infinity: the log-probability is NaN, and the token can still be looked up."""
    logits = torch.zeros(1, 130, device=DEVICE)
    logits[0, list(ids)] = bad
    key = torch.ones(1, dtype=torch.int64, device=DEVICE)
    token, logprob = sample_logits(
        logits, key, key, torch.ones(1, device=DEVICE), vocab=130, config=READY
    )
    assert logprob.isnan().all() and 0 <= token.item() < 130
    if bad != math.inf:  # scores of NaN alone, which the interpreter refuses
        token, _ = sample_logits(
            logits[:, :5].fill_(bad), key, key, torch.ones(1, device=DEVICE), vocab=5, config=READY
        )
        assert 0 <= token.item() < 5


def test_results_go_where_they_are_wanted(generator):
    hidden, weight, request = (
        randn(generator, 4, 16),
        randn(generator, 40, 16),
        requests(generator, 4),
    )
    out = torch.full((4,), -7, device=DEVICE), torch.full((4,), math.nan, device=DEVICE)
    returned = sample_linear(hidden, weight, *request, vocab=40, out=out, config=SMALL)
    assert returned[0] is out[0] and returned[1] is out[1]
    assert_drawn(out, hidden.double() @ weight.double().T, request, 40)


def test_empty_batch():
    none, weight = (
        torch.empty(0, dtype=torch.int64, device=DEVICE),
        torch.ones(40, 16, device=DEVICE),
    )
    degrees = torch.empty(0, device=DEVICE)
    assert sample_linear(
        torch.empty(0, 16, device=DEVICE), weight, none, none, degrees, vocab=40, config=SMALL
    )[0].shape == (0,)
    assert sample_logits(torch.empty(0, 40, device=DEVICE), none, none, degrees, vocab=40)[
        1
    ].shape == (0,)


def test_rows_that_32_bits_cannot_reach():
    """Three rows 1.2e9 elements apart in memory that is reserved, never touched: the third begins beyond 2^31."""
    base = torch.empty(2 * 1_200_000_000 + 64, dtype=torch.float16, device=DEVICE)
    logits = base.as_strided((3, 16), (1_200_000_000, 1))
    logits.zero_()
    logits[[0, 1, 2], [3, 9, 14]] = 5.0
    zeros = torch.zeros(3, dtype=torch.int64, device=DEVICE)
    tokens = sample_logits(
        logits, zeros, zeros, torch.zeros(3, device=DEVICE), vocab=16, config={"BLOCK_V": 16}
    )[0]
    assert tokens.tolist() == [3, 9, 14]


GOOD = {
    "hidden": torch.ones(4, 32),
    "weight": torch.ones(40, 32),
    "seeds": torch.zeros(4, dtype=torch.int64),
    "positions": torch.zeros(4, dtype=torch.int64),
    "temperature": torch.ones(4),
    "vocab": 40,
}


@pytest.mark.parametrize(
    "change, message",
    [
        ({"hidden": torch.ones(65, 32)}, "the batch has 65 rows; at most 64"),
        (
            {"hidden": torch.ones(4, 24), "weight": torch.ones(40, 24)},
            "the hidden size is 24; it must be a multiple of 16",
        ),
        ({"hidden": torch.ones(4, 64)[:, ::2]}, "hidden has strides"),
        ({"weight": torch.ones(40, 32).half()}, "weight is torch.float16; expected torch.float32"),
        ({"weight": torch.ones(40, 64)[:, :32]}, "weight has strides"),
        ({"seeds": torch.zeros(4, dtype=torch.int32)}, "seeds is torch.int32"),
        ({"positions": torch.zeros(5, dtype=torch.int64)}, r"positions has shape \(5,\)"),
        ({"temperature": torch.ones(4).double()}, "temperature is torch.float64"),
        ({"vocab": 41}, "vocab is 41; it must lie in 1..40"),
        ({"vocab": 0}, "vocab is 0"),
        (
            {"out": (torch.zeros(4, dtype=torch.int32), torch.ones(4))},
            r"out\[0\], the tokens, is torch.int32",
        ),
        (
            {"out": (torch.zeros(4, dtype=torch.int64), torch.ones(8)[::2])},
            r"out\[1\], the log-probabilities, has strides",
        ),
    ],
)
def test_refusals(change, message):
    on_device = lambda x: x.to(DEVICE) if isinstance(x, torch.Tensor) else x
    with pytest.raises(ValueError, match=message):
        sample_linear(**{name: on_device(x) for name, x in (GOOD | change).items()})


def test_refusals_of_ready_logits():
    rest = [GOOD[name].to(DEVICE) for name in ("seeds", "positions", "temperature")]
    with pytest.raises(ValueError, match="vocab is 41; it must lie in 1..40"):
        sample_logits(torch.ones(4, 40, device=DEVICE), *rest, vocab=41)
    with pytest.raises(ValueError, match="logits has strides"):
        sample_logits(torch.ones(40, 4, device=DEVICE).T, *rest, vocab=40)
    with pytest.raises(ValueError, match="logits is torch.int64"):
        sample_logits(torch.ones(4, 40, dtype=torch.int64, device=DEVICE), *rest, vocab=40)
