"""The chunked heads against the plain formula and finite differences, and what they allocate."""

from __future__ import annotations

import math

import pytest
import torch
from kernel_check import DEVICE, GRADIENT, assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from nanorchestra.training import logprobs as module
from nanorchestra.training.logprobs import token_logprobs


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
    logprobs, entropy, _ = token_logprobs(hidden, weight, targets, **options)
    logp = plain(hidden, weight, temperature, limit)
    picked = logp.gather(1, targets[:, None])[:, 0]
    weights = torch.linspace(-1, 2, len(targets), dtype=torch.float64, device=DEVICE)
    ours = torch.autograd.grad((logprobs * weights).sum(), (hidden, weight))
    theirs = torch.autograd.grad((picked * weights).sum(), (hidden, weight), retain_graph=True)
    assert torch.allclose(logprobs, picked, atol=1e-12) and not entropy.requires_grad
    assert torch.allclose(entropy, torch.special.entr(logp.exp()).sum(-1), atol=1e-12)
    assert all(torch.allclose(a, b, atol=1e-12) for a, b in zip(ours, theirs, strict=False))

    ref_hidden.requires_grad_()
    reference = ref_hidden, ref_weight
    logprobs, entropy, kl = token_logprobs(hidden, weight, targets, reference=reference, **options)
    assert torch.allclose(logprobs, picked, atol=1e-12) and not entropy.requires_grad
    logp = plain(hidden, weight, temperature, limit)[:, :limit]
    logq = plain(ref_hidden, ref_weight, temperature, limit)[:, :limit]
    expected = (logp.exp() * (logp - logq)).sum(-1)
    assert torch.allclose(kl, expected, atol=1e-12) and (kl > 0).all()
    loss, expected_loss = (
        ((log_p + 2 * divergence) * weights).sum()
        for log_p, divergence in ((logprobs, kl), (picked, expected))
    )
    ours = torch.autograd.grad(loss, (hidden, weight, ref_hidden), allow_unused=True)
    assert ours[2] is None  # the reference is constant
    theirs = torch.autograd.grad(expected_loss, (hidden, weight))
    assert all(torch.allclose(a, b, atol=1e-12) for a, b in zip(ours, theirs, strict=False))


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("trained", [(0, 1), (0,), (1,)])
def test_gradients_are_finite_differences(trained):
    """Of hidden and weight, and of either where the other is frozen."""
    *factors, targets, ref_hidden, ref_weight = head(count=4)
    for index, factor in enumerate(factors):
        factor.requires_grad_(index in trained)
    options = {"temperature": 0.8, "vocab_limit": 7}
    for reference in (None, (ref_hidden, ref_weight)):

        def results(hidden, weight, reference=reference):
            logprobs, _, kl = token_logprobs(
                hidden, weight, targets, reference=reference, **options
            )
            return logprobs if kl is None else (logprobs, kl)

        assert torch.autograd.gradcheck(results, factors)


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
    exact = plain(*doubles, 1.0, 2800).gather(1, targets[:, None])[:, 0]
    theirs = torch.autograd.grad(exact.sum(), doubles)
    assert 1e-5 < -exact[0] < 2e-3
    for reference in (None, (ref_hidden, ref_weight)):
        logprobs, entropy, kl = token_logprobs(
            hidden, weight, targets, reference=reference, vocab_limit=2800
        )
        assert logprobs.dtype == entropy.dtype == torch.float32
        assert torch.allclose(logprobs.double(), exact, atol=1e-5)
        ours = torch.autograd.grad(logprobs.sum(), (hidden, weight), retain_graph=True)
        for got, want in zip((*ours, ours[0][:1]), (*theirs, theirs[0][:1]), strict=True):
            assert_close(got, want, GRADIENT)
    kl.sum().backward()
    assert hidden.grad.dtype == weight.grad.dtype == torch.bfloat16 and weight.grad.isfinite().all()


class LargestTensor(TorchDispatchMode):
    """`nbytes` of the largest tensor that is made under it."""

    nbytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, torch.Tensor):
                self.nbytes = max(self.nbytes, tensor.untyped_storage().nbytes())
        return result


@pytest.mark.parametrize("exact_kl", [False, True])
def test_the_logits_of_all_ids_never_exist(monkeypatch, exact_kl):
    """Qwen3's vocabulary and 8192 ids in small."""
    tokens, vocab, workspace = 512, 9496, 1 << 20
    monkeypatch.setattr(module, "WORKSPACE", workspace)
    monkeypatch.setattr(module, "FULL_TILES", 16)
    hidden = torch.randn(tokens, 4, requires_grad=True)
    weight = torch.randn(vocab, 4, requires_grad=True)
    targets = torch.randint(vocab, (tokens,))
    with LargestTensor() as largest:
        reference = (hidden.detach() * 0.9, weight.detach()) if exact_kl else None
        logprobs, _, kl = token_logprobs(
            hidden, weight, targets, reference=reference, vocab_limit=vocab
        )
        torch.autograd.grad(sum(x.sum() for x in (logprobs, kl) if x is not None), (hidden, weight))
    assert weight.nbytes <= largest.nbytes <= workspace < tokens * vocab * 4 / 10
