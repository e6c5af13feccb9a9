"""What a decoder computes and keeps, against autograd and torch's own counts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from kernel_check import DEVICE
from torch.utils.flop_counter import FlopCounterMode

from nanorchestra.model import ops
from nanorchestra.model.attention import PackedAttention, Segment
from nanorchestra.model.checkpoint import PRESETS
from nanorchestra.model.qwen3 import Qwen3
from nanorchestra.training.costs import Costs, model_flops, peak_flops


def test_activations_are_what_autograd_keeps(monkeypatch):
    """Counted by storage, with the kernels.

    The log-sum-exps, one a query head, come on top, and one number of each norm. On a CPU torch
    keeps the normalised row of each norm too.
    """
    monkeypatch.setattr(ops, "by_kernel", lambda x: True)
    shape = replace(PRESETS["nano"], hidden_size=64, intermediate_size=160, head_dim=16)
    tokens = 32

    def kept(layers):
        model = Qwen3(replace(shape, num_hidden_layers=layers)).to(DEVICE)
        weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
        storages = {}

        def keep(tensor):
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage
            return tensor

        ids = torch.arange(tokens, device=DEVICE)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            hidden = model(ids, ids, PackedAttention([Segment(0, tokens)]))
        assert hidden.requires_grad
        return sum(x.nbytes() / 4 for at, x in storages.items() if at not in weights)

    of_a_layer = kept(2) - kept(1)
    of_norms = 2 if DEVICE == "cuda" else 2 * (1 + shape.hidden_size)
    expected = Costs.of(shape).activations + shape.num_attention_heads + of_norms
    assert of_a_layer == tokens * expected


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
    forward = model_flops(config, tokens, pairs, sampled) / 3
    with_reference = model_flops(config, tokens, pairs, sampled, reference=True)
    with_adapters = model_flops(config, tokens, pairs, sampled, adapters=True)
    assert with_reference == pytest.approx(4 * forward)
    assert with_adapters == pytest.approx(2 * forward + attention)


def test_the_peak_of_a_cpu_is_measured_and_that_of_a_gpu_is_its_own(monkeypatch):
    assert 1e8 < peak_flops(torch.device("cpu"), torch.float32) < 1e14
    bf16 = torch.bfloat16
    for name, dtype, expected in (
        ("NVIDIA H100 80GB HBM3", bf16, 989e12),
        ("NVIDIA H100 PCIe", bf16, None),
        ("NVIDIA H200", torch.float32, None),
        ("Tesla T4", bf16, None),
    ):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
        assert peak_flops(torch.device("cuda"), dtype) == expected
