"""The decoder's functions against float64 and against their definitions."""

import pytest
import torch
import torch.nn.functional as F

from nanorchestra.model.ops import linear, rms_norm


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
