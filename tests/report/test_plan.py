"""The planner's numbers against the model itself and published figures."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from nanorchestra import formats
from nanorchestra.errors import UserError
from nanorchestra.model import lora
from nanorchestra.model.checkpoint import PRESETS
from nanorchestra.model.quantise import quantise_model
from nanorchestra.model.qwen3 import Qwen3
from nanorchestra.report.plan import Setup, memory, peak, plan
from nanorchestra.settings import load_config
from nanorchestra.training.costs import GB

CONFIGS = Path(__file__).parents[2] / "configs"
CONFIG = load_config(CONFIGS / "qwen3-8b.toml")


def setup(gpus=8, **changes):
    changes = {name.replace("__", "."): value for name, value in changes.items()}
    return Setup(CONFIG.replace(changes), gpus, PRESETS["qwen3-8b"])


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
    text, fits = plan(CONFIG, 8, None, "h100", formats.directory_of)
    assert fits and text.endswith("75.5 of 80 GB: fits")
    text, fits = plan(CONFIG, 1, None, "h100", formats.directory_of)
    assert not fits and text.endswith("of 80 GB: too much")
    text, fits = plan(load_config(None), 1, None, "4090", formats.directory_of)
    assert fits and ": fits" in text
    for arguments, words in (
        ((0, None, "h100"), "--gpus is 0"),
        ((1, 0.0, "h100"), "--memory is 0"),
    ):
        with pytest.raises(UserError, match=words):
            plan(CONFIG, *arguments, formats.directory_of)


def test_one_consumer_gpu_trains_the_8b_over_a_base_in_4_bits(monkeypatch):
    """6.95 B numbers of the layers in 4 bits and scales of 16 bits a group of 128, and 1.24 B in
    bfloat16; nothing of it twice. The model itself, without memory, has as many bytes.
    """
    qlora = load_config(CONFIGS / "qwen3-8b-qlora.toml")
    text, fits = plan(qlora, 1, None, "4090", formats.directory_of)
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
        plan(qlora, 2, None, "4090", formats.directory_of)
