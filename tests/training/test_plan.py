"""The planner's numbers against the model itself and published figures."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from kernel_check import DEVICE
from torch.utils.flop_counter import FlopCounterMode

from nanorchestra import formats
from nanorchestra.errors import UserError
from nanorchestra.model import lora, ops
from nanorchestra.model.attention import PackedAttention, Segment
from nanorchestra.model.checkpoint import PRESETS
from nanorchestra.model.quantise import quantise_model
from nanorchestra.model.qwen3 import Qwen3
from nanorchestra.settings import load_config
from nanorchestra.training.costs import GB, Costs, model_flops, peak_flops
from nanorchestra.training.plan import Setup, memory, peak, plan

CONFIGS = Path(__file__).parents[2] / "configs"
CONFIG = load_config(CONFIGS / "qwen3-8b.toml")


def setup(gpus=8, **changes):
    changes = {name.replace("__", "."): value for name, value in changes.items()}
    return Setup(CONFIG.replace(changes), gpus, PRESETS["qwen3-8b"])


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


def test_memory_of_the_8b_is_what_others_calculate():
    """15.3 GiB of fp32 states on each of eight GPUs, an engine of 15.3 GiB, and 2.25 GiB of layer
    inputs for 8192 tokens.
    """
    parts = memory(setup())
    states = sum(parts[name][1] for name in ("weights", "gradients", "moments"))
    assert states / 2**30 == pytest.approx(15.3, rel=0.01)
    assert parts["engine's copy"][0] / 2**30 == pytest.approx(15.3, rel=0.01)
    inputs = parts["activations"][1] - memory(setup(grpo__token_budget=24576))["activations"][1]
    assert 2.25 < inputs / 2**30 < 2.25 + 2  # and those of the layer that is recomputed
    assert parts["KV pages"] == (1600 * 64 * 144 * 1024,) * 2


def test_memory_falls_with_every_saving_and_is_divided_by_ranks():
    plain = {"parallel__activation_checkpointing": False}
    for changes in (
        {"parallel__activation_checkpointing": True},
        {"grpo__token_budget": 16384},
        {"parallel__cpu_offload": True},
        {"lora__rank": 32},
        {"gpus": 16},
    ):
        assert peak(setup(**plain | changes)) < peak(setup(**plain)), changes
    one, eight, node = memory(setup(1)), memory(setup()), memory(setup(16, parallel__shard="node"))
    for name in ("weights", "gradients", "moments"):
        assert one[name][1] == pytest.approx(8 * eight[name][1])
        assert node[name] == eight[name]  # a replica on every eight
    frozen = memory(setup(grpo__kl_coef=0.1))["reference"][1]
    assert frozen > 0 == memory(setup(grpo__kl_coef=0.1, lora__rank=8))["reference"][1]


def test_a_plan_says_whether_the_memory_of_a_gpu_is_enough():
    text, fits = plan(CONFIG, 8, None, "h100", formats.open)
    assert fits and text.endswith("75.9 of 80 GB: fits")
    text, fits = plan(CONFIG, 1, None, "h100", formats.open)
    assert not fits and text.endswith("of 80 GB: too much")
    text, fits = plan(load_config(None), 1, None, "4090", formats.open)
    assert fits and ": fits" in text
    for arguments, words in (
        ((0, None, "h100"), "--gpus is 0"),
        ((1, 0.0, "h100"), "--memory is 0"),
    ):
        with pytest.raises(UserError, match=words):
            plan(CONFIG, *arguments, formats.open)


def test_one_consumer_gpu_trains_the_8b_over_a_base_in_4_bits(monkeypatch):
    """6.95 B numbers of the layers in 4 bits and scales of 16 bits a group of 128, and 1.24 B in
    bfloat16; nothing of it twice. The model itself, without memory, has as many bytes.
    """
    qlora = load_config(CONFIGS / "qwen3-8b-qlora.toml")
    text, fits = plan(qlora, 1, None, "4090", formats.open)
    assert fits and "fits" in text
    parts = memory(Setup(qlora, 1, PRESETS["qwen3-8b"]))
    adapters = 87.3e6  # of rank 32
    base = 6.946e9 * (0.5 + 2 / 128) + 2 * 2 * 151936 * 4096
    assert parts["weights"][0] == pytest.approx(base + 4 * adapters, rel=1e-3)
    spread = adapters + 36 * 32 * (2 * 6144 + 24576)  # twice zeros beside q, k and v; gate and up
    assert parts["engine's copy"] == pytest.approx((2 * spread, 2 * spread), rel=1e-3)
    assert parts["moments"][1] == pytest.approx(8 * adapters, rel=1e-3)
    assert not any(parts["gathered layers"]) and parts["widened matrix"][1] > 0.4e9
    counted = {"base": 0, "adapters": 0, "engine": 0}
    monkeypatch.setattr(lora, "reset", lambda model, seed: None)
    with torch.device("meta"):
        model = Qwen3(PRESETS["qwen3-8b"]).to(torch.bfloat16)
        quantise_model(model.layers, "int4")
        lora.add_adapters(model, 32, 64.0, 0)
        shared = lora.on_the_same_base(model, torch.bfloat16)
    for which, part in (("adapters", model), ("engine", shared)):
        for name, tensor in [*part.named_parameters(), *part.named_buffers()]:
            if ".lora_" in name:
                counted[which] += tensor.nbytes
            elif part is model:
                counted["base"] += tensor.nbytes
    assert parts["weights"][0] == pytest.approx(counted["base"] + counted["adapters"], rel=1e-3)
    assert parts["engine's copy"][0] == pytest.approx(counted["engine"], rel=1e-3)
    full = Setup(qlora.replace({"lora.base": "full"}), 1, PRESETS["qwen3-8b"])
    assert peak(full) > 45 * GB
    with pytest.raises(UserError, match="--gpus is 2; with lora.base int4 it must be 1"):
        plan(qlora, 2, None, "4090", formats.open)


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
