"""The linear layer against float64."""

import pytest
import torch
import torch.nn.functional as F

from nanorchestra.model.ops import linear


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
