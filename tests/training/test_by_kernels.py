"""A training pass by kernels, in the interpreter where there is no GPU, against plain PyTorch.

And one in FSDP2's mixed precision, which must leave the rotation in float32.
"""

from __future__ import annotations

import copy

import pytest
import torch
from groups import grouped
from kernel_check import DEVICE

from nanorchestra.model import ops
from nanorchestra.model.attention import PackedAttention, Segment
from nanorchestra.training import logprobs as head
from nanorchestra.training.distributed import Ranks, shard_model
from nanorchestra.training.packing import Sample, pack


def ids(count: int, start: int = 5) -> list[int]:
    return [(start + 7 * i) % 300 for i in range(count)]


@pytest.mark.slow
def test_gradients_by_kernels_are_those_of_plain_pytorch(monkeypatch, nano_model):
    twins = [
        Sample(ids(20, 3), [True] * 20, [0.0] * 20),
        Sample(ids(20, 3)[:17] + [1, 2], [False] * 4 + [True] * 15, [0.0] * 19),
    ]
    single = Sample(ids(7), [True] * 7, [0.0] * 7)
    groups = [grouped(ids(9), twins), grouped(ids(9)[:5] + [8], [single])]
    gradients = []
    for by_kernel in (False, True):
        monkeypatch.setattr(ops, "by_kernel", lambda x, answer=by_kernel: answer)
        model = copy.deepcopy(nano_model).to(DEVICE)
        packed = pack(groups, DEVICE)
        hidden = model(packed.tokens, packed.positions, packed.attention)[packed.source]
        logprobs, entropy, _ = head.token_logprobs(
            hidden, model.output_weight, packed.targets, vocab_limit=690
        )
        (-logprobs.mean()).backward()
        gradients.append([logprobs.detach(), entropy, *(p.grad for p in model.parameters())])
    for plain, own in zip(*gradients, strict=True):
        assert torch.allclose(plain, own, atol=2e-6 + 1e-4 * plain.abs().max())


def test_mixed_precision_casts_the_layers_and_not_the_rotation(nano_model):
    """Cosines that are rounded to bf16 put positions beyond 256 together."""
    seen = []

    class Watched(PackedAttention):
        def __call__(self, layer, qkv, rotation):
            seen.append((qkv.dtype, layer.q_norm.dtype, rotation))
            return super().__call__(layer, qkv, rotation)

    tokens, positions = torch.tensor(ids(12)), torch.arange(5000, 5012)
    expected = nano_model.rotation(positions)
    ranks = Ranks.start("cpu", mixed_precision=True)  # one rank of gloo
    try:
        shard_model(nano_model, ranks, torch.bfloat16)
        for block in nano_model.layers:
            block.recompute = True
        hidden = nano_model(tokens, positions, Watched([Segment(0, 12)]))
        hidden.float().sum().backward()
    finally:
        ranks.close()
    assert len(seen) == 2 * len(nano_model.layers), "each layer is computed again"
    for qkv_dtype, norm_dtype, rotation in seen:
        assert qkv_dtype == norm_dtype == torch.bfloat16
        assert torch.equal(rotation.cos, expected.cos) and torch.equal(rotation.sin, expected.sin)
        assert rotation.cos.dtype == rotation.sin.dtype == torch.float32
