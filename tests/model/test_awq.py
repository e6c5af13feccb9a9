"""Checkpoints of AutoAWQ load with the weights that its formula gives."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3ForCausalLM

from nanorchestra.errors import UserError
from nanorchestra.model.attention import PackedAttention, Segment
from nanorchestra.model.quantise import QuantisedLinear, linears
from nanorchestra.model.qwen3 import ModelConfig, Qwen3
from nanorchestra.model.saving import save_checkpoint
from nanorchestra.model.weights import load_model, named_hf_tensors

CONFIG = ModelConfig(vocab_size=41, hidden_size=64, intermediate_size=96, num_hidden_layers=1,
    head_dim=16, num_attention_heads=4, num_key_value_heads=2)  # fmt: skip


@pytest.fixture
def directory(tmp_path):
    model = Qwen3(CONFIG)
    model.init_weights(0)
    save_checkpoint(model, None, tmp_path / "model")
    return tmp_path / "model"


def write(directory, stored, quantization):
    """Replace the weights by these tensors, in two shards with parts of a matrix on either side."""
    names = sorted(stored)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, members in shards.items():
        save_file({name: stored[name].contiguous() for name in members}, directory / file)
    where = {name: file for file, members in shards.items() for name in members}
    index = {"weight_map": where}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = quantization
    (directory / "config.json").write_text(json.dumps(config))


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}


def awq_word(values):
    """Eight numbers of 0 .. 15, of the columns 0 .. 7, in an int32, as AutoAWQ's gemm packs."""
    word = 0
    for place, column in enumerate((0, 2, 4, 6, 1, 3, 5, 7)):
        word |= values[column] << 4 * place
    return word - 2**32 if word >= 2**31 else word


def awq_packed(numbers):
    """int32 [N, M / 8] of numbers [N, M]."""
    words = [[awq_word(row[i : i + 8]) for i in range(0, len(row), 8)] for row in numbers.tolist()]
    return torch.tensor(words, dtype=torch.int32)


def awq(weight, group):
    """Tensors of a module of AutoAWQ, and the matrix they stand for: nearly weight [out, in]."""
    blocks = weight.T.unflatten(0, (-1, group))  # [groups, group, out]
    low, high = blocks.amin(1).clamp(max=0), blocks.amax(1).clamp(min=0)
    scales = ((high - low) / 15).half()
    zeros = (-low / scales).round().clamp(0, 15)
    q = (blocks / scales[:, None] + zeros[:, None]).round().clamp(0, 15)
    parts = {
        "qweight": awq_packed(q.flatten(0, 1).int()),
        "qzeros": awq_packed(zeros.int()),
        "scales": scales,
    }
    matrix = (q - zeros[:, None]) * scales[:, None].float()
    return parts, matrix.flatten(0, 1).T


def awq_checkpoint(directory, group, kept=()):
    """Rewrite a checkpoint as AutoAWQ does; returns the weights that it stands for.

    kept: endings of modules that are not converted.
    """
    stored, exact = {}, {}
    for name, tensor in load_file(directory / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if not module.endswith("_proj") or module.endswith(kept):
            stored[name] = exact[name] = tensor
            continue
        size = tensor.shape[1] if group == -1 else group
        parts, exact[name] = awq(tensor, size)
        stored |= {f"{module}.{part}": x for part, x in parts.items()}
        assert (exact[name] - tensor).abs().max() < 0.6 * tensor.abs().max() / 7
    config = AWQ | {"group_size": group, "modules_to_not_convert": list(kept) or None}
    write(directory, stored, config)
    return exact


@pytest.mark.parametrize("group, kept", [(32, ()), (64, ("down_proj", "gate_proj")), (-1, ())])
def test_matrices_of_autoawq_are_exact_widened_and_in_4_bits(directory, group, kept):
    """In float32, and held in 4 bits if the group is one that int4 has."""
    if group == 64:
        kept += ("up_proj", "o_proj")
    exact = awq_checkpoint(directory, group, kept)
    loaded = dict(named_hf_tensors(load_model(directory)[0]))
    assert loaded.keys() == exact.keys()
    for name, tensor in exact.items():
        assert torch.equal(loaded[name], tensor), name
    model, _ = load_model(directory, quantise="int4")
    held = {name: module for name, module in linears(model.layers, QuantisedLinear)}
    own = held["0.self_attn.qkv_proj"]
    rows = torch.cat([exact[f"model.layers.0.self_attn.{x}_proj.weight"] for x in "qkv"])
    assert torch.equal(own.dequantise(torch.float32), rows) == (group > 0)
    torch.testing.assert_close(own.dequantise(torch.float32), rows, rtol=0, atol=0.01)
    x = torch.randn(5, 64)
    torch.testing.assert_close(own(x), x @ own.dequantise(torch.float32).T)


def test_logits_of_an_awq_checkpoint_are_those_of_transformers_with_its_weights(directory):
    exact = awq_checkpoint(directory, 32)
    tokens = torch.tensor([3, 1, 4, 1, 5, 9, 2, 6])
    model, _ = load_model(directory)
    plain = directory.with_name("plain")
    save_checkpoint(Qwen3(CONFIG), None, plain)
    save_file(exact, plain / "model.safetensors", {"format": "pt"})
    theirs = Qwen3ForCausalLM.from_pretrained(plain)(tokens[None]).logits[0]
    for ours in (model, load_model(directory, quantise="int4")[0]):
        if linears(ours, QuantisedLinear):
            ours.lm_head = model.lm_head  # int4 holds it in 8 bits
        hidden = ours(tokens, torch.arange(8), PackedAttention([Segment(0, 8)]))
        torch.testing.assert_close(ours.logits(hidden), theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "change, words",
    [
        ({"version": "gemv"}, "quantization_config.version = 'gemv': expected 'gemm'"),
        ({"bits": 3}, "quantization_config.bits = 3: expected 4"),
    ],
)
def test_another_form_of_awq_is_refused_in_one_line(directory, change, words):
    awq_checkpoint(directory, 32)
    file = directory / "config.json"
    config = json.loads(file.read_text())
    config["quantization_config"] |= change
    file.write_text(json.dumps(config))
    with pytest.raises(UserError) as refusal:
        load_model(directory)
    message = str(refusal.value)
    assert message.startswith(str(directory)) and words in message and "\n" not in message
