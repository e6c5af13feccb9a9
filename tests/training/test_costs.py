"""What a decoder computes, against torch's own counts."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from nanorchestra.model.attention import PackedAttention, Segment
from nanorchestra.training.costs import model_flops


def test_model_flops_are_what_torch_counts_in_the_products(nano_model):
    """Attention is counted by hand: 4 FLOPs a pair, head and dimension, forward."""
    config, tokens, sampled = nano_model.config, 40, 13
    with FlopCounterMode(display=False) as counted:
        attention = PackedAttention([Segment(0, tokens)])
        hidden = nano_model(torch.arange(tokens), torch.arange(tokens), attention)
        (hidden[:sampled] @ nano_model.output_weight.T).sum().backward()
    counts = counted.get_flop_counts()["Global"].items()
    products = sum(n for op, n in counts if "mm" in str(op) and "bmm" not in str(op))
    pairs = sum(range(1, tokens + 1))
    attention = 4 * pairs * config.num_hidden_layers * config.num_attention_heads * config.head_dim
    assert model_flops(config, tokens, pairs, sampled) == pytest.approx(products + 3 * attention)
