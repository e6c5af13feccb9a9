"""The planner's numbers against the model itself and published figures."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from nanorchestra import formats
from nanorchestra.model import lora
from nanorchestra.model.checkpoint import PRESETS
from nanorchestra.model.quantise import quantise_model
from nanorchestra.model.qwen3 import Qwen3
from nanorchestra.report.plan import Setup, memory, plan
from nanorchestra.settings import load_config

CONFIGS = Path(__file__).parents[2] / "configs"
CONFIG = load_config(CONFIGS / "qwen3-8b.toml")


def test_memory_of_the_8b_is_what_others_calculate():
    """15.3 GiB of fp32 states on each of eight GPUs, an engine of 15.3 GiB, and 2.25 GiB of layer
    inputs for 8192 tokens.
    """
    text, fits = plan(CONFIG, 8, None, "h100", formats.directory_of)
    assert fits and text.endswith("75.7 of 80 GB: fits")
    parts = memory(Setup(CONFIG, 8, PRESETS["qwen3-8b"]))
    states = sum(parts[name][1] for name in ("weights", "gradients", "moments"))
    assert states / 2**30 == pytest.approx(15.3, rel=0.01)
    assert parts["engine's copy"][0] / 2**30 == pytest.approx(15.3, rel=0.01)
    fewer = memory(Setup(CONFIG.replace({"grpo.token_budget": 24576}), 8, PRESETS["qwen3-8b"]))
    inputs = parts["activations"][1] - fewer["activations"][1]
    assert 2.25 < inputs / 2**30 < 2.25 + 2  # and those of the layer that is recomputed
    assert parts["KV pages"] == (1600 * 64 * 144 * 1024,) * 2


def test_one_consumer_gpu_trains_the_8b_over_a_base_in_4_bits(monkeypatch):
    """The model itself, without memory, has as many bytes as the plan."""
    qlora = load_config(CONFIGS / "qwen3-8b-qlora.toml")
    assert plan(qlora, 1, None, "4090", formats.directory_of)[1]
    parts = memory(Setup(qlora, 1, PRESETS["qwen3-8b"]))
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
    assert parts["moments"][1] == pytest.approx(2 * counted["adapters"], rel=1e-3)
    assert parts["engine's copy"][0] == pytest.approx(counted["engine"], rel=1e-3)
    assert not any(parts["gathered layers"])


@pytest.mark.parametrize("name", ["qwen3-0.6b", "qwen3-8b"], ids=["tied", "with a head"])
def test_an_engine_in_int8_has_as_many_bytes_as_the_model_itself(name):
    config = load_config(CONFIGS / f"{name}.toml", {"rollout.weights": "int8"})
    parts = memory(Setup(config, 1, PRESETS[name]))
    with torch.device("meta"):
        model = Qwen3(PRESETS[name]).to(torch.bfloat16)
        quantise_model(model, "int8")
    counted = sum(tensor.nbytes for tensor in [*model.parameters(), *model.buffers()])
    assert parts["engine's copy"] == pytest.approx((counted,) * 2, rel=3e-3)
    gate_up = 2 * model.layers[0].gate_up_proj.values.numel()
    assert parts["widened matrix"][0] >= gate_up, "of a prefill"
