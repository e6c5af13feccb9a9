"""Fused linear log-probabilities: against float64, and what they promise about memory and bits."""

import math
import weakref

import pytest
import torch
from kernel_check import DEVICE, DTYPES, GRADIENT, assert_close, randn
from reserved_memory import reserved

from kernels import logprob
from kernels.common import TILES
from kernels.logprob import linear_logprob, naive_linear_logprob

EXACT = 2e-5  # nats, absolute
TILE = {"BLOCK_T": 16, "BLOCK_V": 32, "BLOCK_N": 16}


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    monkeypatch.setitem(TILES, "logprob_forward", {"80": TILE})
    monkeypatch.setattr(logprob, "GROUP", 2)
    monkeypatch.setattr(logprob, "BLOCK", 64)


def problem(generator, tokens, width, rows, vocab, dtype=torch.float32, scale=0.5):
    hidden = randn(generator, tokens, width, dtype=dtype)
    weight = randn(generator, rows, width, dtype=dtype, scale=scale)
    return hidden, weight, torch.randint(vocab, (tokens,), generator=generator).to(DEVICE)


def assert_exact(results, expected):
    for have, want in zip(results, expected, strict=True):
        assert have.dtype == torch.float32 and have.shape == want.shape
        assert torch.isfinite(have).all() and ((have.double() - want).abs() <= EXACT).all()


def exact(hidden, weight, targets, temperature, vocab):
    return naive_linear_logprob(hidden.double(), weight.double(), targets, temperature, vocab)


@pytest.mark.parametrize("dtype", DTYPES)
def test_forward(generator, monkeypatch, dtype):
    shapes = [
        (1, 16, 1, 1),
        (15, 32, 40, 33),
        (16, 48, 32, 32),
        (17, 16, 100, 97),
        (35, 64, 70, 31),
    ]
    for tokens, width, rows, vocab in shapes:
        data = problem(generator, tokens, width, rows, vocab, dtype)
        assert_exact(linear_logprob(*data, 0.7, vocab), exact(*data, 0.7, vocab))
    monkeypatch.undo()  # the tiles of a GPU
    data = problem(generator, 19, 48, 310, 301, dtype)
    assert_exact(linear_logprob(*data, 1.3, 301), exact(*data, 1.3, 301))


def test_large_logits(generator):
    """Around 100, where exp overflows fp32; the entropy must not cancel."""
    weight = ((100 + 4 * randn(generator, 90, 16)) * 8).round() / 8
    data = torch.eye(16, device=DEVICE), weight, torch.arange(16, device=DEVICE)
    assert_exact(linear_logprob(*data, 1.0, 90), exact(*data, 1.0, 90))


def test_no_call_keeps_its_hidden_states(generator):
    """Triton keeps the allocator of the last call; a whole graph hung on it once."""
    hidden, weight, targets = problem(generator, 5, 32, 64, 40)
    kept = weakref.ref(hidden)
    linear_logprob(hidden, weight, targets, 1.0, 40)
    del hidden
    assert kept() is None


def test_rows_beyond_the_vocabulary_do_not_count(generator):
    """Padding rows may hold anything and have no probability; zeros in their place would have."""
    hidden, weight, targets = problem(generator, 5, 32, 64, 40)
    clean = linear_logprob(hidden, weight[:40].contiguous(), targets, 1.0, 40)
    weight[40:] = float("nan")
    for have, want in zip(linear_logprob(hidden, weight, targets, 1.0, 40), clean, strict=True):
        assert torch.equal(have, want)
    missing = torch.tensor([3, 40, 63, 40, 5], device=DEVICE)
    logprobs = linear_logprob(hidden, weight, missing, 1.0, 40)[0].tolist()
    assert logprobs[1:4] == [-math.inf] * 3 and math.isfinite(sum(logprobs[::4]))
    hidden[:, 0], weight[:40] = 3.0, 0.0
    weight[:40, 0] = -9.0  # all logits of the vocabulary far below 0
    expected = torch.full((5,), -math.log(40), dtype=torch.float64)
    assert_exact(linear_logprob(hidden, weight, targets, 1.0, 40)[:1], [expected])


def test_a_row_has_the_same_bits_in_any_batch_and_run(generator):
    hidden, weight, targets = problem(generator, 18, 32, 70, 65, torch.bfloat16)

    def run(rows):
        return linear_logprob(hidden[rows], weight, targets[rows], 0.9, 65)

    together, again = run(slice(None)), run(slice(None))
    for row in (0, 17):
        for one, all_, twice in zip(run(slice(row, row + 1)), together, again, strict=True):
            assert torch.equal(one[0], all_[row]) and torch.equal(all_, twice)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("chunk_bytes", [1, 1 << 30])
def test_gradients(generator, monkeypatch, dtype, chunk_bytes):
    """Over one chunk of the vocabulary and over two, one of them partial."""
    monkeypatch.setattr(logprob, "CHUNK_BYTES", chunk_bytes)
    hidden, weight, targets = problem(generator, 32, 48, 330, 321, dtype, scale=0.2)
    grad = randn(generator, 32).sign() * (0.75 + 0.5 * torch.rand(32, generator=generator))
    factors = [x.requires_grad_() for x in (hidden, weight)]
    logprobs, entropy = linear_logprob(*factors, targets, 0.7, 321)
    assert logprobs.requires_grad and not entropy.requires_grad
    doubles = [x.detach().double().requires_grad_() for x in factors]
    wanted = exact(*doubles, targets, 0.7, 321)[0]
    wanted = torch.autograd.grad(wanted, doubles, grad.double())
    got = torch.autograd.grad(logprobs, factors, grad)
    for have, want in zip(got, wanted, strict=True):
        assert_close(have, want, GRADIENT)
    assert (got[1][321:] == 0).all()


def test_an_ignored_target_counts_nothing_also_under_a_mask(generator):
    """Its log-probability times a mask of 0 is 0, not NaN, and it has no gradient."""
    hidden, weight, targets = problem(generator, 5, 32, 64, 40)
    targets[[1, 4]] = torch.tensor([-1, -100], device=DEVICE)
    hidden.requires_grad_()
    logprobs, _ = linear_logprob(hidden, weight, targets, 1.0, 40)
    assert logprobs[[1, 4]].tolist() == [0, 0] and torch.isfinite(logprobs * (targets >= 0)).all()
    (gradient,) = torch.autograd.grad(logprobs.sum(), hidden)
    assert (gradient[[1, 4]] == 0).all() and (gradient[[0, 2, 3]].abs().sum(1) > 0).all()


def test_gradient_of_one_factor(generator, monkeypatch):
    """A frozen weight has none; .sum() passes a gradient of stride 0.

    Rounded after each of eleven chunks, dhidden would be off by more than GRADIENT allows.
    """
    monkeypatch.setattr(logprob, "CHUNK_BYTES", 1)
    monkeypatch.setattr(logprob, "BLOCK", 256)
    monkeypatch.setitem(TILES, "logprob_forward", {"80": TILE | {"BLOCK_V": 256}})
    *data, targets = problem(generator, 16, 64, 2800, 2800, torch.bfloat16, scale=0.2)
    for which in (0, 1):
        factors = [x.clone().requires_grad_(i == which) for i, x in enumerate(data)]
        linear_logprob(*factors, targets, 1.0, 2800)[0].sum().backward()
        doubles = [x.detach().double().requires_grad_() for x in factors]
        want = exact(*doubles, targets, 1.0, 2800)[0].sum()
        assert_close(factors[which].grad, torch.autograd.grad(want, doubles[which])[0], GRADIENT)
        assert factors[1 - which].grad is None


def test_chunks_fit_the_memory_they_are_given():
    width = logprob.chunk_width(8192, 151936, 2)
    assert width == 10240 and 8192 * (width * (4 + 2) + 4096 * 4) < 650e6
    assert logprob.chunk_width(1, 151936, 2) == 151936
    assert logprob.chunk_width(10**6, 151936, 2) == 256


def test_offsets_beyond_32_bits_in_the_partial_results(generator):
    """Of 8e8 tokens the first 16: the sums of their chunk lie from element 2.4e9 on."""
    tokens = 800_000_000
    hidden, weight, targets = problem(generator, 16, 16, 20, 20)
    partials = reserved(3 * tokens + 64, torch.float32)
    results = [torch.full((16,), math.nan, device=DEVICE) for _ in range(3)]

    def launch(partials):
        logprob._logprob_chunks[(1,)](
            hidden, weight, targets, partials, 1.0, tokens, 20, 16, 1, **TILE, num_warps=8
        )
        inputs = partials, targets, *results, tokens, 20, 1, 1, TILE["BLOCK_V"]
        logprob._logprob_merge[(16,)](*inputs)

    launch(partials)
    assert_exact(results[:2], exact(hidden, weight, targets, 1.0, 20))


def test_offsets_beyond_32_bits_in_the_logits():
    """Of [3, 1.1e9] logits the first 16 ids: the third row begins beyond 2^31, as T 16,384 would.

    16,384 rows of 151,936 logits are 2.5e9.
    """
    width = 1_100_000_000
    logits = reserved(2 * width + 64, torch.float32)
    rows = logits.as_strided((3, 16), (width, 1))
    rows.zero_()
    targets = torch.tensor([3, 9, 14], device=DEVICE)
    logsumexp = torch.full((3,), math.log(16), device=DEVICE)
    grad = torch.tensor([1.0, 2.0, 3.0], device=DEVICE)

    def launch(logits):
        inputs = logits, logits, targets, logsumexp, grad, 1.0, 0, width, 16
        logprob._logit_gradients[(3, 1)](*inputs)  # in place

    launch(logits)
    expected = torch.full((3, 16), -1 / 16, device=DEVICE)
    expected[[0, 1, 2], targets] += 1
    assert (rows - expected * grad[:, None]).abs().max() <= 1e-6


def test_wrong_shapes_are_refused():
    ids = torch.zeros(4, dtype=torch.int64)
    hidden, weight = torch.ones(4, 32), torch.ones(40, 32)
    with pytest.raises(ValueError, match="hidden size is 8; expected a multiple of 16"):
        linear_logprob(torch.ones(4, 8), torch.ones(4, 8), ids, 1.0, 4)
    with pytest.raises(ValueError, match="vocab is 41; expected 1 to 40"):
        linear_logprob(hidden, weight, ids, 1.0, 41)
    with pytest.raises(ValueError, match=r"weight has shape \[40, 16\]; expected \[None, 32\]"):
        linear_logprob(hidden, weight[:, :16], ids, 1.0, 40)
