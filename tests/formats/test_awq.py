"""Checkpoints of AutoAWQ load with the weights that its formula gives."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from nanorchestra.errors import UserError
from nanorchestra.formats.load import load_model
from nanorchestra.model.checkpoint import named_hf_tensors, save_checkpoint
from nanorchestra.model.quantise import QuantisedLinear, linears
from nanorchestra.model.qwen3 import ModelConfig, Qwen3

CONFIG = ModelConfig(vocab_size=41, hidden_size=64, intermediate_size=96, num_hidden_layers=1,
    head_dim=16, num_attention_heads=4, num_key_value_heads=2)  # fmt: skip
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}


def packed(numbers):
    """int32 [N, M / 8] of numbers 0 .. 15 [N, M], as AutoAWQ's gemm packs eight columns."""
    words = numbers.unflatten(1, (-1, 8))[..., [0, 2, 4, 6, 1, 3, 5, 7]].long()
    words = (words << torch.arange(0, 32, 4)).sum(2)
    return (words - 2**32 * (words >= 2**31)).int()


def awq(weight, group):
    """Tensors of a module of AutoAWQ, and the matrix they stand for: nearly weight [out, in]."""
    blocks = weight.T.unflatten(0, (-1, group))  # [groups, group, out]
    low, high = blocks.amin(1).clamp(max=0), blocks.amax(1).clamp(min=0)
    scales = ((high - low) / 15).half()
    zeros = (-low / scales).round().clamp(0, 15)
    q = (blocks / scales[:, None] + zeros[:, None]).round().clamp(0, 15)
    matrix = ((q - zeros[:, None]) * scales[:, None].float()).flatten(0, 1).T
    assert (matrix - weight).abs().max() < 0.6 * weight.abs().max() / 7
    return {"qweight": packed(q.flatten(0, 1)), "qzeros": packed(zeros), "scales": scales}, matrix


def awq_checkpoint(directory, group=32, kept=(), **changes):
    """Writes a model as AutoAWQ does, parts of a matrix in two shards; returns its weights.

    kept: endings of modules that are not converted.
    """
    model = Qwen3(CONFIG)
    model.init_weights(0)
    save_checkpoint(model, None, directory)
    stored, exact = {}, {}
    for name, tensor in load_file(directory / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if not module.endswith("_proj") or module.endswith(kept):
            stored[name] = exact[name] = tensor
            continue
        parts, exact[name] = awq(tensor, tensor.shape[1] if group == -1 else group)
        stored |= {f"{module}.{part}": x.contiguous() for part, x in parts.items()}
    weight_map = {}
    for file, names in (("a", sorted(stored)[::2]), ("b", sorted(stored)[1::2])):
        save_file({name: stored[name] for name in names}, directory / f"{file}.safetensors")
        weight_map |= dict.fromkeys(names, f"{file}.safetensors")
    index = {"weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = AWQ | {"group_size": group} | changes
    (directory / "config.json").write_text(json.dumps(config))
    return exact


@pytest.mark.parametrize(
    "group, kept", [(32, ()), (64, ("down_proj", "gate_proj", "up_proj", "o_proj")), (-1, ())]
)
def test_matrices_of_autoawq_are_exact_widened_and_in_4_bits(tmp_path, group, kept):
    """In float32, and held in 4 bits if the group is one that int4 has."""
    exact = awq_checkpoint(tmp_path / "model", group, kept)
    loaded = dict(named_hf_tensors(load_model(tmp_path / "model")[0]))
    assert loaded.keys() == exact.keys()
    for name, tensor in exact.items():
        assert torch.equal(loaded[name], tensor), name
    model, _ = load_model(tmp_path / "model", quantise="int4")
    own = dict(linears(model.layers, QuantisedLinear))["0.self_attn.qkv_proj"]
    rows = torch.cat([exact[f"model.layers.0.self_attn.{x}_proj.weight"] for x in "qkv"])
    assert torch.equal(own.dequantise(torch.float32), rows) == (group > 0)
    torch.testing.assert_close(own.dequantise(torch.float32), rows, rtol=0, atol=0.01)


@pytest.mark.parametrize("change", [{"version": "gemv"}, {"bits": 3}], ids=str)
def test_another_form_of_awq_is_refused_in_one_line(tmp_path, change):
    awq_checkpoint(tmp_path / "model", **change)
    with pytest.raises(UserError) as refusal:
        load_model(tmp_path / "model")
    (value,) = change.values()
    assert str(value) in str(refusal.value) and "expected gemm in 4" in str(refusal.value)
    assert str(tmp_path / "model" / "config.json") in str(refusal.value)
