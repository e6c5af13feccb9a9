"""Fused linear log-probabilities: against float64, against the trainer's torch code, and what they promise about memory and bits."""

from __future__ import annotations

import math

import pytest
import torch
from kernel_check import DEVICE, DTYPES, GRADIENT, assert_close, randn
from torch.nn.functional import one_hot

from kernels import logprob, logprob_backward
from kernels.logprob import linear_logprob, logprob_forward
from nanorchestra.training.logprobs import token_logprobs

SMALL = {"BLOCK_T": 16, "BLOCK_V": 32, "BLOCK_N": 16, "GROUP": 2}
EXACT = 2e-5  # nats, absolute


def problem(generator, tokens, width, rows, vocab, dtype=torch.float32, scale=0.5):
    hidden, weight = (
        randn(generator, tokens, width, dtype=dtype),
        randn(generator, rows, width, dtype=dtype, scale=scale),
    )
    return hidden, weight, torch.randint(vocab, (tokens,), generator=generator).to(DEVICE)


def assert_exact(results, expected):
    for have, want in zip(results, expected):
        assert (
            have.dtype == torch.float32 and have.shape == want.shape and torch.isfinite(have).all()
        )
        assert (have.double() - want).abs().max() <= EXACT


@pytest.fixture
def poison(monkeypatch):
    """Memory that no kernel has written holds NaN."""
    empty = torch.empty

    def poisoned(*args, **kwargs):
        out = empty(*args, **kwargs)
        return out.fill_(float("nan")) if out.is_floating_point() else out

    monkeypatch.setattr(torch, "empty", poisoned)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "tokens, width, rows, vocab",
    [(1, 16, 1, 1), (15, 32, 40, 33), (16, 48, 32, 32), (17, 16, 100, 97), (35, 64, 70, 31)],
)
def test_forward(generator, poison, dtype, tokens, width, rows, vocab):
    hidden, weight, targets = problem(generator, tokens, width, rows, vocab, dtype)
    out = logprob_forward(hidden, weight, targets, 0.7, vocab, config=SMALL)
    assert_exact(out[:2], logprob.reference(hidden.double(), weight.double(), targets, 0.7, vocab))
    assert_exact(out[2:], [(hidden.double() @ weight[:vocab].double().T / 0.7).logsumexp(-1)])


@pytest.mark.parametrize("dtype", DTYPES)
def test_forward_of_any_shape_with_the_tiles_it_would_use(generator, poison, dtype):
    tokens, vocab, rows = (
        int(torch.randint(low, high, (), generator=generator))
        for low, high in ((1, 20), (1, 300), (300, 310))
    )
    hidden, weight, targets = problem(generator, tokens, 48, rows, vocab, dtype)
    out = linear_logprob(hidden, weight, targets, temperature=1.3, vocab=vocab)
    assert_exact(out, logprob.reference(hidden.double(), weight.double(), targets, 1.3, vocab))


def test_large_logits(generator):
    """Around 100, where exp overflows fp32, and exact, so that any loss is that of the sums and of the entropy, which must not cancel."""
    hidden, weight = (
        torch.eye(16, device=DEVICE),
        ((100 + 4 * randn(generator, 90, 16)) * 8).round() / 8,
    )
    targets = torch.arange(16, device=DEVICE)
    out = logprob_forward(hidden, weight, targets, 1.0, 90, config=SMALL)
    assert_exact(out[:2], logprob.reference(hidden.double(), weight.double(), targets, 1.0, 90))


def test_every_target_of_every_chunk(generator):
    hidden, weight, _ = problem(generator, 1, 16, 80, 70)
    targets = torch.arange(70, device=DEVICE)
    tile = SMALL | {"BLOCK_T": 128}
    out = logprob_forward(hidden.repeat(70, 1), weight, targets, 1.0, 70, config=tile)[0]
    assert_exact([out], [(hidden.double() @ weight[:70].double().T).log_softmax(-1)[0]])
    assert abs(out.double().exp().sum().item() - 1) < 1e-5


def test_rows_beyond_the_vocabulary_do_not_count(generator):
    """Padding rows of the output matrix may hold anything, and have no probability; zeros in their place would have some."""
    hidden, weight, targets = problem(generator, 5, 32, 64, 40)
    clean = logprob_forward(hidden, weight[:40].contiguous(), targets, 1.0, 40, config=SMALL)
    weight[40:] = float("nan")
    for have, want in zip(logprob_forward(hidden, weight, targets, 1.0, 40, config=SMALL), clean):
        assert torch.equal(have, want)
    hidden[:, 0], weight[:40] = 3.0, 0.0
    weight[:40, 0] = -9.0  # all logits of the vocabulary far below 0
    assert_exact(
        [logprob_forward(hidden, weight, targets, 1.0, 40, config=SMALL)[0]],
        [torch.full((5,), -math.log(40), dtype=torch.float64)],
    )


def test_target_that_does_not_exist_has_no_probability(generator, poison):
    hidden, weight, targets = problem(generator, 3, 16, 64, 40)
    targets[:] = torch.tensor([-1, 40, 63])
    assert (
        logprob_forward(hidden, weight, targets, 1.0, 40, config=SMALL)[0].tolist()
        == [-math.inf] * 3
    )


def test_replaces_the_torch_code_of_the_trainer(generator):
    hidden, weight, targets = problem(generator, 9, 32, 70, 61)
    upstream = randn(generator, 9)
    results = []
    for run in (
        lambda h, w: linear_logprob(h, w, targets, temperature=0.6, vocab=61),
        lambda h, w: token_logprobs(h, w, targets, temperature=0.6, vocab_limit=61),
    ):
        h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        logprobs, entropy = run(h, w)
        results.append([logprobs, entropy, *torch.autograd.grad(logprobs @ upstream, [h, w])])
    for ours, theirs in zip(*results):
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, theirs, atol=EXACT, rtol=1e-4)


def test_a_row_alone_and_twice_is_bitwise_the_same(generator):
    hidden, weight, targets = problem(generator, 18, 32, 70, 65, torch.bfloat16)
    run = lambda rows: logprob_forward(hidden[rows], weight, targets[rows], 0.9, 65, config=SMALL)
    together, again = run(slice(None)), run(slice(None))
    for row in (0, 17):
        for one, all_, twice in zip(run(slice(row, row + 1)), together, again):
            assert torch.equal(one[0], all_[row]) and torch.equal(all_, twice)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("chunk_bytes", [1, 1 << 30])
def test_gradients(generator, poison, monkeypatch, dtype, chunk_bytes):
    """Of both results at once, over one chunk of the vocabulary and over two, one of them partial. Many rows of like size: of a gradient that a
    few numbers make up, chance alone could round all of them badly."""
    monkeypatch.setattr(logprob_backward, "CHUNK_BYTES", chunk_bytes)
    hidden, weight, targets = problem(generator, 32, 48, 330, 321, dtype, scale=0.2)
    upstream = [
        (
            randn(generator, 32).sign()
            * (0.75 + 0.5 * torch.rand(32, generator=generator).to(DEVICE))
        )
        for _ in range(2)
    ]
    hidden.requires_grad_(), weight.requires_grad_()
    logprobs, entropy = linear_logprob(hidden, weight, targets, temperature=0.7, vocab=321)
    grads = torch.autograd.grad([logprobs, entropy], [hidden, weight], upstream)
    exact = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    for have, want in zip(
        grads,
        torch.autograd.grad(
            logprob.reference(*exact, targets, 0.7, 321), exact, [x.double() for x in upstream]
        ),
    ):
        assert_close(have, want, GRADIENT)
    assert (grads[1][321:] == 0).all()


def test_dhidden_is_summed_in_fp32_over_the_chunks(generator, monkeypatch):
    """Rounded after each of eleven chunks, the sum would be off by more than GRADIENT allows."""
    monkeypatch.setattr(logprob_backward, "CHUNK_BYTES", 1)
    hidden, weight, targets = problem(generator, 16, 64, 2800, 2800, torch.bfloat16, scale=0.2)
    upstream, zeros = (
        0.75 + 0.5 * torch.rand(16, generator=generator).to(DEVICE),
        torch.zeros(16, device=DEVICE),
    )
    entropy, logsumexp = (
        torch.zeros(16, device=DEVICE),
        (hidden.double() @ weight.double().T).logsumexp(-1).float(),
    )
    grad, _ = logprob_backward.logprob_backward(
        hidden, weight, targets, entropy, logsumexp, upstream, zeros, 1.0, 2800, True, False
    )
    exact = logprob_backward.reference(
        hidden.double(), weight.double(), targets, upstream.double(), zeros.double(), 1.0, 2800
    )[0]
    assert_close(grad, exact, GRADIENT)


def test_the_formula_of_the_gradient_is_that_of_autograd(generator):
    hidden, weight, targets = (
        x.double() if x.is_floating_point() else x for x in problem(generator, 6, 16, 30, 25)
    )
    upstream = randn(generator, 6).double(), randn(generator, 6).double()
    hidden.requires_grad_(), weight.requires_grad_()
    wanted = torch.autograd.grad(
        logprob.reference(hidden, weight, targets, 0.7, 25), [hidden, weight], upstream
    )
    for have, want in zip(
        logprob_backward.reference(hidden, weight, targets, *upstream, 0.7, 25), wanted
    ):
        torch.testing.assert_close(have, want)


@pytest.mark.parametrize("which", [0, 1])
def test_gradients_where_only_one_is_asked_for(generator, which):
    """The other result's and the other factor's are absent; .sum() passes a gradient of stride 0."""
    factors, targets = list(problem(generator, 6, 32, 40, 40)[:2]), torch.arange(6, device=DEVICE)
    factors[which].requires_grad_()
    linear_logprob(*factors, targets)[which].sum().backward()
    exact = [x.detach().double().requires_grad_() for x in factors]
    want = torch.autograd.grad(
        logprob.reference(*exact, targets, 1.0, 40)[which].sum(), exact[which]
    )[0]
    assert_close(factors[which].grad, want, GRADIENT)
    assert factors[1 - which].grad is None


def test_gradient_of_logits_writes_everything(generator):
    logits, targets = randn(generator, 3, 70), torch.tensor([0, 75, 169], device=DEVICE)
    f = [
        randn(generator, 3).abs() + 3 for _ in range(4)
    ]  # entropy, logsumexp, and the two gradients
    out = torch.full((3, 70), float("nan"), device=DEVICE)
    logprob_backward.gradient_of_logits(logits, out, targets, *f, 0.5, 100, config={"BLOCK": 32})
    entropy, logsumexp, of_logprob, of_entropy = (x.double()[:, None] for x in f)
    logp = logits.double() / 0.5 - logsumexp
    onehot = one_hot(targets, 170)[:, 100:]
    assert_close(
        out,
        (of_logprob * (onehot - logp.exp()) - of_entropy * logp.exp() * (logp + entropy)) / 0.5,
        GRADIENT,
    )


def test_chunks_fit_the_memory_they_are_given():
    width = logprob_backward.chunk_width(8192, 151936, 2)
    assert width == 10240 and 8192 * (width * (4 + 2) + 4096 * 4) < 650e6
    assert (
        logprob_backward.chunk_width(1, 151936, 2) == 151936
        and logprob_backward.chunk_width(10**6, 151936, 2) == 256
    )


def test_no_tokens():
    hidden, weight = (
        torch.empty(0, 32, device=DEVICE, requires_grad=True),
        torch.ones(40, 32, device=DEVICE, requires_grad=True),
    )
    logprobs, entropy = linear_logprob(
        hidden, weight, torch.empty(0, dtype=torch.int64, device=DEVICE)
    )
    (logprobs.sum() + entropy.sum()).backward()
    assert (
        logprobs.shape == entropy.shape == (0,)
        and hidden.grad.shape == (0, 32)
        and (weight.grad == 0).all()
    )


@pytest.mark.slow
def test_registration(generator):
    hidden, weight, targets = problem(generator, 3, 16, 20, 18)
    hidden.requires_grad_(), weight.requires_grad_()
    torch.library.opcheck(
        torch.ops.nanorchestra.linear_logprob.default, (hidden, weight, targets, 0.5, 18)
    )


@pytest.mark.parametrize(
    "change, message",
    [
        ({"hidden": torch.ones(4, 24)}, "hidden size is 24; it must be a multiple of 16"),
        ({"hidden": torch.ones(4, 32).double()}, "hidden is torch.float64"),
        ({"hidden": torch.ones(4, 64)[:, ::2]}, "hidden has strides"),
        ({"weight": torch.ones(40, 16)}, r"weight has shape \(40, 16\); expected \[\*, 32\]"),
        (
            {"weight": torch.ones(40, 32).bfloat16()},
            "weight is torch.bfloat16; expected torch.float32",
        ),
        ({"weight": torch.ones(32, 40).T}, "weight has strides"),
        ({"targets": torch.zeros(3, dtype=torch.int64)}, r"targets has shape \(3,\)"),
        ({"targets": torch.zeros(4, dtype=torch.int32)}, "targets is torch.int32"),
        ({"temperature": 0.0}, "temperature is 0.0; it must be positive"),
        ({"vocab": 41}, r"vocab is 41; it must lie in 1..40"),
        ({"vocab": 0}, "vocab is 0"),
    ],
)
def test_refusals(change, message):
    given = {
        "hidden": torch.ones(4, 24 + 8),
        "weight": torch.ones(40, 32),
        "targets": torch.zeros(4, dtype=torch.int64),
        "temperature": 1.0,
        "vocab": None,
    } | change
    if given["hidden"].shape[1] == 24:
        given["weight"] = torch.ones(40, 24)
    given = {name: x.to(DEVICE) if isinstance(x, torch.Tensor) else x for name, x in given.items()}
    with pytest.raises(ValueError, match=message):
        linear_logprob(given.pop("hidden"), given.pop("weight"), given.pop("targets"), **given)
