"""The chunked heads against the plain formula and finite differences, and what they allocate.

Where there is a GPU they run there, and their element-wise functions are compiled.
"""

from __future__ import annotations

import math
import weakref

import pytest
import torch
from kernel_check import DEVICE, GRADIENT, assert_close
from torch._dynamo.testing import CompileCounter
from torch.utils._python_dispatch import TorchDispatchMode

from nanorchestra.training import logprobs as module
from nanorchestra.training.logprobs import full_kl, token_logprobs


def head(count=11, vocab=9, width=5, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    options = {"generator": generator, "dtype": torch.float64}
    hidden, ref_hidden = torch.randn(2, count, width, **options).to(DEVICE, dtype)
    weight, ref_weight = torch.randn(2, vocab, width, **options).to(DEVICE, dtype)
    targets = torch.randint(0, vocab - 2, (count,), generator=generator).to(DEVICE)
    return hidden.requires_grad_(), weight.requires_grad_(), targets, ref_hidden, ref_weight


def plain(hidden, weight, temperature, limit):
    """Log-softmax of all logits at once; ids from `limit` on have no probability."""
    logits = hidden @ weight.T / temperature
    beyond = torch.arange(len(weight), device=DEVICE) >= limit
    return logits.masked_fill(beyond, -math.inf).log_softmax(-1)


@pytest.fixture(params=[1, 4, 100])
def small_chunks(monkeypatch, request):
    """Chunks of one id, of four, and one chunk of all."""
    monkeypatch.setattr(module, "WORKSPACE", 0)
    monkeypatch.setattr(module, "FULL_TILES", request.param)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("temperature, limit", [(1.0, 9), (0.6, 7)])
def test_both_heads_equal_the_plain_formula(temperature, limit):
    hidden, weight, targets, ref_hidden, ref_weight = head()
    options = {"temperature": temperature, "vocab_limit": limit}
    logprobs, entropy = token_logprobs(hidden, weight, targets, **options)
    logp = plain(hidden, weight, temperature, limit)
    picked = logp.gather(1, targets[:, None])[:, 0]
    weights = torch.linspace(-1, 2, len(targets), dtype=torch.float64, device=DEVICE)
    ours = torch.autograd.grad((logprobs * weights).sum(), (hidden, weight))
    theirs = torch.autograd.grad((picked * weights).sum(), (hidden, weight), retain_graph=True)
    assert torch.allclose(logprobs, picked, atol=1e-12) and not entropy.requires_grad
    assert torch.allclose(entropy, torch.special.entr(logp.exp()).sum(-1), atol=1e-12)
    assert all(torch.allclose(a, b, atol=1e-12) for a, b in zip(ours, theirs, strict=False))

    ref_hidden.requires_grad_()
    kl = full_kl(hidden, ref_hidden, weight, ref_weight, **options)
    logp = plain(hidden, weight, temperature, limit)[:, :limit]
    logq = plain(ref_hidden, ref_weight, temperature, limit)[:, :limit]
    expected = (logp.exp() * (logp - logq)).sum(-1)
    assert torch.allclose(kl, expected, atol=1e-12) and (kl > 0).all()
    ours = torch.autograd.grad(
        (kl * weights).sum(), (hidden, weight, ref_hidden), allow_unused=True
    )
    assert ours[2] is None  # the reference is constant
    theirs = torch.autograd.grad((expected * weights).sum(), (hidden, weight))
    assert all(torch.allclose(a, b, atol=1e-12) for a, b in zip(ours, theirs, strict=False))


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("trained", [(0, 1), (0,), (1,)])
def test_gradients_are_finite_differences(trained):
    """Of hidden and weight, and of either where the other is frozen."""
    *factors, targets, ref_hidden, ref_weight = head(count=4)
    for index, factor in enumerate(factors):
        factor.requires_grad_(index in trained)
    options = {"temperature": 0.8, "vocab_limit": 7}
    for value in (
        lambda hidden, weight: token_logprobs(hidden, weight, targets, **options)[0],
        lambda hidden, weight: full_kl(hidden, ref_hidden, weight, ref_weight, **options),
    ):
        assert torch.autograd.gradcheck(value, factors)


def test_ids_beyond_the_tokenizer_have_no_probability_and_no_gradient():
    """The padded rows of an embedding, which the sampler masks as well."""
    hidden, weight, targets, ref_hidden, ref_weight = head()
    spoiled = weight.detach().clone()
    spoiled[7:] = math.nan
    spoiled.requires_grad_()
    same, _ = token_logprobs(hidden, weight, targets, vocab_limit=7)
    logprobs, entropy = token_logprobs(hidden, spoiled, targets, vocab_limit=7)
    kl = full_kl(hidden, ref_hidden, spoiled, ref_weight, vocab_limit=7)
    (logprobs.sum() + kl.sum()).backward()
    assert torch.equal(logprobs, same) and entropy.isfinite().all()
    assert not spoiled.grad[7:].any()


@pytest.mark.parametrize("size", [30, 100])
def test_large_logits_cost_no_digits(monkeypatch, size):
    """The entropy is the small difference of a large logsumexp and a large mean."""
    monkeypatch.setattr(module, "WORKSPACE", 0)
    monkeypatch.setattr(module, "FULL_TILES", 16)
    noise = torch.randn(90, 16, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    weight = ((size + 4 * noise) * 8).round() / 8  # so that products with the identity are exact
    targets = torch.arange(16, device=DEVICE)
    got = token_logprobs(torch.eye(16, device=DEVICE), weight, targets, vocab_limit=90)
    logp = weight.T.double().log_softmax(-1)
    expected = logp.gather(1, targets[:, None])[:, 0], torch.special.entr(logp.exp()).sum(-1)
    for have, want in zip(got, expected, strict=True):
        assert have.dtype == torch.float32 and (have.double() - want).abs().max() < 2e-5


def test_half_precision_has_logits_in_fp32_and_gradients_that_are_rounded_once(monkeypatch):
    """bf16 logits would be off by about 1e-2, and gradients if rounded after each of 11 chunks.

    The first position is sure of its target: what rounding its p loses is more than its 1 - p.
    """
    monkeypatch.setattr(module, "WORKSPACE", 0)
    hidden, weight, targets, ref_hidden, ref_weight = head(16, 2800, 64, torch.bfloat16)
    with torch.no_grad():
        weight *= 0.2
        hidden[0] = 8 * weight[targets[0]]
    doubles = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    logprobs, entropy = token_logprobs(hidden, weight, targets, vocab_limit=2800)
    exact = plain(*doubles, 1.0, 2800).gather(1, targets[:, None])[:, 0]
    assert 1e-5 < -exact[0] < 2e-3
    assert logprobs.dtype == entropy.dtype == torch.float32
    assert torch.allclose(logprobs.double(), exact, atol=1e-5)
    ours = torch.autograd.grad(logprobs.sum(), (hidden, weight))
    theirs = torch.autograd.grad(exact.sum(), doubles)
    for got, want in zip((*ours, ours[0][:1]), (*theirs, theirs[0][:1]), strict=True):
        assert_close(got, want, GRADIENT)
    full_kl(hidden, ref_hidden, weight, ref_weight, vocab_limit=2800).sum().backward()
    assert hidden.grad.dtype == weight.grad.dtype == torch.bfloat16 and weight.grad.isfinite().all()


def test_without_sampled_ids_there_is_a_graph_and_a_zero_gradient():
    """A rank without work still takes part in the backward pass."""
    hidden, weight = torch.zeros(0, 4, requires_grad=True), torch.randn(6, 4, requires_grad=True)
    targets = torch.zeros(0, dtype=torch.int64)
    logprobs, entropy = token_logprobs(hidden, weight, targets, vocab_limit=6)
    (logprobs.sum() + full_kl(hidden, hidden, weight, weight, vocab_limit=6).sum()).backward()
    assert entropy.shape == (0,) and torch.equal(weight.grad, torch.zeros(6, 4))


@pytest.mark.parametrize("name", ["_softmax_mean", "_softmax_times"])
def test_one_compilation_serves_any_number_of_positions_and_ids_and_any_temperature(name):
    """On a GPU, where it takes seconds. Here compilations are counted only."""
    function = getattr(module, name).__wrapped__
    counter = CompileCounter()
    counted = torch.compile(function, dynamic=True, fullgraph=True, backend=counter)
    for positions, ids, temperature in ((7, 50, 1.0), (8, 51, 0.7), (300, 12, 1.3)):
        logits = torch.randn(positions, ids)
        if name == "_softmax_mean":
            counted(logits, logits, temperature)
        else:
            counted(logits[:, :1], logits, logits[:, :1], temperature, torch.bfloat16)
    assert counter.frame_count == 1


class LiveBytes(TorchDispatchMode):
    """The most bytes alive at once in tensors made under it, besides the given ones."""

    def __init__(self, *given):
        super().__init__()
        self.alive = {tensor.untyped_storage()._cdata: 0 for tensor in given}
        self.now = self.most = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            storage = tensor.untyped_storage() if isinstance(tensor, torch.Tensor) else None
            if storage is not None and storage._cdata not in self.alive:
                self.alive[storage._cdata] = storage.nbytes()
                weakref.finalize(storage, self._freed, storage._cdata)
                self.now += storage.nbytes()
                self.most = max(self.most, self.now)
        return result

    def _freed(self, key):
        self.now -= self.alive.pop(key, 0)


@pytest.mark.parametrize("exact_kl", [False, True])
@pytest.mark.parametrize(
    "tokens, vocab, width, fraction",
    [(512, 9496, 4, 256), (256, 18992, 4, 256), (64, 4096, 256, 512)],
)
def test_the_heads_hold_their_workspace_and_no_more(
    monkeypatch, exact_kl, tokens, vocab, width, fraction
):
    """Qwen3's vocabulary and 8192 ids in small. In the last case the gradient of the output matrix
    is larger than the workspace.
    """
    workspace = module.WORKSPACE // fraction
    monkeypatch.setattr(module, "WORKSPACE", workspace)
    monkeypatch.setattr(module, "FULL_TILES", 16)
    hidden, weight = torch.randn(tokens, width), torch.randn(vocab, width)
    hidden.requires_grad_(), weight.requires_grad_()
    targets, reference = torch.randint(vocab, (tokens,)), hidden.detach() * 0.9
    with LiveBytes(hidden, weight, reference, targets) as live:
        if exact_kl:
            value = full_kl(hidden, reference, weight, weight.detach(), vocab_limit=vocab)
        else:
            value = token_logprobs(hidden, weight, targets, vocab_limit=len(weight))[0]
        gradients = torch.autograd.grad(value.sum(), (hidden, weight))
    results = sum(gradient.nbytes for gradient in gradients)
    assert 0.3 * workspace < live.most - results < 1.3 * workspace
