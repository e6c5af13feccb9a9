"""The chunked heads against the plain formula and finite differences, and what they allocate."""

from __future__ import annotations

import math
import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nanorchestra.training import logprobs as module
from nanorchestra.training.logprobs import full_kl, token_logprobs


def head(count=11, vocab=9, width=5, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    options = {"generator": generator, "dtype": torch.float64}
    hidden, ref_hidden = torch.randn(2, count, width, **options).to(dtype)
    weight, ref_weight = torch.randn(2, vocab, width, **options).to(dtype)
    targets = torch.randint(0, vocab - 2, (count,), generator=generator)
    return hidden.requires_grad_(), weight.requires_grad_(), targets, ref_hidden, ref_weight


def plain(hidden, weight, temperature, limit):
    """Log-softmax of all logits at once; ids from `limit` on have no probability."""
    logits = hidden @ weight.T / temperature
    return logits.masked_fill(torch.arange(len(weight)) >= limit, -math.inf).log_softmax(-1)


@pytest.mark.parametrize("chunk", [1, 4, 100])
@pytest.mark.parametrize("temperature, limit", [(1.0, 9), (0.6, 7)])
def test_both_heads_equal_the_plain_formula(monkeypatch, chunk, temperature, limit):
    monkeypatch.setattr(module, "WORKSPACE", 8 * limit * 5 * chunk)
    hidden, weight, targets, ref_hidden, ref_weight = head()
    options = {"temperature": temperature, "vocab_limit": limit}
    logprobs, entropy = token_logprobs(hidden, weight, targets, **options)
    logp = plain(hidden, weight, temperature, limit)
    picked = logp.gather(1, targets[:, None])[:, 0]
    weights = torch.linspace(-1, 2, len(targets), dtype=torch.float64)
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


def test_ids_beyond_the_tokenizer_have_no_probability_and_no_gradient():
    """The padded rows of an embedding, which the sampler masks as well."""
    hidden, weight, targets, ref_hidden, ref_weight = head()
    spoiled = weight.detach().clone()
    spoiled[7:] = 1e4
    spoiled.requires_grad_()
    same, _ = token_logprobs(hidden, weight, targets, vocab_limit=7)
    logprobs, entropy = token_logprobs(hidden, spoiled, targets, vocab_limit=7)
    kl = full_kl(hidden, ref_hidden, spoiled, ref_weight, vocab_limit=7)
    (logprobs.sum() + kl.sum()).backward()
    assert torch.equal(logprobs, same) and entropy.isfinite().all()
    assert not spoiled.grad[7:].any()


def test_half_precision_weights_give_fp32_logprobs():
    """bf16 logits would be off by about 1e-2."""
    hidden, weight, targets, ref_hidden, ref_weight = head(dtype=torch.bfloat16)
    logprobs, entropy = token_logprobs(hidden, weight, targets, vocab_limit=len(weight))
    exact = plain(hidden.double(), weight.double(), 1.0, 9).gather(1, targets[:, None])[:, 0]
    assert logprobs.dtype == entropy.dtype == torch.float32
    assert torch.allclose(logprobs.double(), exact, atol=1e-5)
    (
        logprobs.sum() + full_kl(hidden, ref_hidden, weight, ref_weight, vocab_limit=9).sum()
    ).backward()
    assert hidden.grad.dtype == weight.grad.dtype == torch.bfloat16 and weight.grad.isfinite().all()


def test_without_sampled_ids_there_is_a_graph_and_a_zero_gradient():
    """A rank without work still takes part in the backward pass."""
    hidden, weight = torch.zeros(0, 4, requires_grad=True), torch.randn(6, 4, requires_grad=True)
    targets = torch.zeros(0, dtype=torch.int64)
    logprobs, entropy = token_logprobs(hidden, weight, targets, vocab_limit=6)
    (logprobs.sum() + full_kl(hidden, hidden, weight, weight, vocab_limit=6).sum()).backward()
    assert entropy.shape == (0,) and torch.equal(weight.grad, torch.zeros(6, 4))


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
    is wider than the workspace, and is made in pieces.
    """
    workspace = module.WORKSPACE // fraction
    monkeypatch.setattr(module, "WORKSPACE", workspace)
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
