"""The drafted induction circuit: heads that look back, heads that find earlier occurrences."""

from __future__ import annotations

import pytest
import torch

from nanorchestra.model.attention import PackedAttention, Segment
from nanorchestra.model.checkpoint import PRESETS
from nanorchestra.model.qwen3 import Qwen3
from nanorchestra.training.induction import draft_induction


def initial_attention(preset, tokens):
    """Layer -> [heads, query, key]: the attention weights before any training."""
    model, weights, count = Qwen3(PRESETS[preset]), {}, len(tokens)
    draft_induction(model, model.init_weights(0))

    class Watched(PackedAttention):
        def __call__(self, layer, qkv, rotation):
            self.index = layer.index
            return super().__call__(layer, qkv, rotation)

        def attend(self, q, k, v):
            scores = (
                torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(q.shape[1] // k.shape[1], 1))
                / q.shape[-1] ** 0.5
            )
            future = torch.ones(count, count).triu(1).bool()
            weights[self.index] = scores.masked_fill(future, -torch.inf).softmax(-1)
            return super().attend(q, k, v)

    with torch.no_grad():
        model(tokens, torch.arange(300, 300 + count), Watched([Segment(0, count)]))
    return weights


@pytest.mark.parametrize("preset", ["nano", "domains"])
def test_heads_start_by_looking_back_and_by_finding_what_followed_the_same_ids(preset):
    once = torch.randperm(896, generator=torch.Generator().manual_seed(0))[:60]
    back, copy, *_ = initial_attention(preset, once.repeat(2)).values()
    queries = torch.arange(70, 119)
    group = len(back) // PRESETS[preset].num_key_value_heads
    for head in range(group):
        offsets = back[head, queries[:, None], queries[:, None] - torch.arange(8)].mean(0)
        assert offsets.argmax() == head + 1 and offsets.max() > 0.7
    followed = copy[:, queries, queries - 59].mean(1)  # uniform attention gives 0.01
    assert followed[:2].min() > 1.5 * followed[2:].max(), followed
