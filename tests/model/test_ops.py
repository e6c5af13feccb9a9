"""The decoder's functions against float64 and against their definitions."""

import pytest
import torch
import torch.nn.functional as F

from nanorchestra.model.ops import cache_rows, linear, rms_norm, store_kv


def test_norm_rounds_before_the_weight():
    """In bf16 the order of rounding is visible; it is the one of the published models."""
    x, weight = torch.randn(64, 32).bfloat16(), torch.randn(32).bfloat16()
    exact = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)
    assert torch.equal(rms_norm(x, weight, 1e-6), exact.bfloat16() * weight)
    assert not torch.equal(rms_norm(x, weight, 1e-6), F.rms_norm(x, (32,), weight, 1e-6))


@pytest.mark.parametrize("rows", [0, 1, 8, 9])
@pytest.mark.parametrize("biased", [False, True])
def test_linear_equals_float64(rows, biased):
    """The weight is large enough for oneDNN; a result that needs gradients has them."""
    generator = torch.Generator().manual_seed(rows)
    x, weight, bias = (
        torch.randn(*shape, generator=generator) for shape in ((rows, 512), (600, 512), (600,))
    )
    bias = bias if biased else None
    exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    torch.testing.assert_close(linear(x, weight, bias).double(), exact, rtol=0, atol=2e-4)
    assert linear(x.requires_grad_(), weight, bias).requires_grad


def test_keys_and_values_go_to_their_slots():
    slots = torch.tensor([5, 0, 11])  # pages of 4 tokens
    k, v = torch.randn(3, 2, 8), torch.randn(3, 2, 8)
    caches = torch.zeros(3, 2, 4, 8), torch.zeros(3, 2, 4, 8)  # [pages, Hkv, page_size, D]
    store_kv(k, v, *caches, cache_rows(slots, 2, 4))
    for new, cache in zip((k, v), caches, strict=True):
        for i, slot in enumerate(slots.tolist()):
            assert torch.equal(cache[slot // 4, :, slot % 4], new[i])
        assert cache.count_nonzero() == new.numel()
