"""Checkpoints of AutoAWQ load with the weights that its formula gives."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from nanorchestra.formats.load import load_model
from nanorchestra.model.checkpoint import named_hf_tensors, save_checkpoint
from nanorchestra.model.quantise import QuantisedLinear, linears
from nanorchestra.model.qwen3 import ModelConfig, Qwen3

CONFIG = ModelConfig(vocab_size=41, hidden_size=64, intermediate_size=96, num_hidden_layers=1,
    head_dim=16, num_attention_heads=4, num_key_value_heads=2)  # fmt: skip
AWQ = {"quant_method": "awq", "bits": 4, "zero_point": True, "version": "gemm"}


def packed(numbers):
    """int32 [N, M / 8] of numbers 0 .. 15 [N, M], as AutoAWQ's gemm packs eight columns."""
    words = numbers.unflatten(1, (-1, 8))[..., [0, 2, 4, 6, 1, 3, 5, 7]]
    words = (words << torch.arange(0, 32, 4)).sum(2)
    return (words - 2**32 * (words >= 2**31)).int()


def awq_checkpoint(directory, group, kept):
    """Writes a model of random matrices as AutoAWQ does, and returns its weights.

    group: of inputs, which share a scale. kept: endings of modules that are not converted.
    """
    model = Qwen3(CONFIG)
    model.init_weights(0)
    torch.manual_seed(0)
    save_checkpoint(model, None, directory)
    stored, exact = {}, {}
    for name, tensor in load_file(directory / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if not module.endswith("_proj") or module.endswith(kept):
            stored[name] = exact[name] = tensor
            continue
        out, inputs = tensor.shape
        each = inputs if group == -1 else group
        q = torch.randint(16, (inputs, out))
        zeros, scales = torch.randint(16, (inputs // each, out)), torch.rand(inputs // each, out)
        parts = {"qweight": packed(q), "qzeros": packed(zeros), "scales": (scales / 200).half()}
        stored |= {f"{module}.{part}": tensor for part, tensor in parts.items()}
        zeros, scales = (x.repeat_interleave(each, 0) for x in (zeros, parts["scales"].float()))
        exact[name] = ((q - zeros) * scales).T
    save_file(stored, directory / "model.safetensors")
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = AWQ | {"group_size": group}
    (directory / "config.json").write_text(json.dumps(config))
    return exact


@pytest.mark.parametrize("group, kept", [(32, ("down_proj",)), (-1, ())])
def test_matrices_of_autoawq_are_exact_widened_and_in_4_bits(tmp_path, group, kept):
    """In float32, and held in 4 bits if the group is one that int4 has."""
    exact = awq_checkpoint(tmp_path, group, kept)
    loaded = dict(named_hf_tensors(load_model(tmp_path)[0]))
    assert loaded.keys() == exact.keys()
    for name, tensor in exact.items():
        assert torch.equal(loaded[name], tensor), name
    model, _ = load_model(tmp_path, quantise="int4")
    own = dict(linears(model.layers, QuantisedLinear))["0.self_attn.qkv_proj"]
    rows = torch.cat([exact[f"model.layers.0.self_attn.{x}_proj.weight"] for x in "qkv"])
    assert torch.equal(own.dequantise(torch.float32), rows) == (group > 0)
    torch.testing.assert_close(own.dequantise(torch.float32), rows, rtol=0, atol=0.01)
