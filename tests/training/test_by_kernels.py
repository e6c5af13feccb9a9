"""A training pass by kernels, in the interpreter where there is no GPU, against plain PyTorch."""

from __future__ import annotations

import copy

import pytest
import torch
from groups import grouped
from kernel_check import DEVICE

from nanorchestra.model import attention, ops
from nanorchestra.training import logprobs as head
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
        for module in (ops, attention, head):
            monkeypatch.setattr(module, "by_kernel", lambda x, answer=by_kernel: answer)
        model = copy.deepcopy(nano_model).to(DEVICE)
        packed = pack(groups, DEVICE)
        hidden = model(packed.tokens, packed.positions, packed.attention)[packed.source]
        logprobs, entropy = head.token_logprobs(
            hidden, model.output_weight, packed.targets, vocab_limit=690
        )
        (-logprobs.mean()).backward()
        gradients.append([logprobs.detach(), entropy, *(p.grad for p in model.parameters())])
    for plain, own in zip(*gradients, strict=True):
        assert torch.allclose(plain, own, atol=2e-6 + 1e-4 * plain.abs().max())
