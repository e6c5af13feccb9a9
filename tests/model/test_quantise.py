"""Weights in 8 and 4 bits: nearest step, packed as written, small enough."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

from nanorchestra.errors import UserError
from nanorchestra.model.checkpoint import (
    copy_weights,
    load_checkpoint,
    named_hf_tensors,
    save_checkpoint,
)
from nanorchestra.model.quantise import QuantisedLinear, linears, quantise_model
from nanorchestra.model.qwen3 import ModelConfig, Qwen3

WIDE = ModelConfig(  # every matrix divides into groups of 128
    61, 128, 256, 2, 4, 2, head_dim=32, max_position_embeddings=64
)
SMALL = ModelConfig(61, 64, 96, 2, 4, 2, head_dim=16, max_position_embeddings=64)  # of 32 only


def a_model(seed: int = 0, config: ModelConfig = WIDE, **changes) -> Qwen3:
    model = Qwen3(ModelConfig(**vars(config) | changes))
    model.init_weights(seed)
    return model


def quantised(model: Qwen3, mode: str) -> Qwen3:
    rounded = copy.deepcopy(model)
    quantise_model(rounded, mode)
    copy_weights(rounded, named_hf_tensors(model))
    return rounded


@pytest.mark.parametrize("magnitude", [0.0, 1e-7, 3e-6, 2e-2, 1e3], ids="{:g}".format)
@pytest.mark.parametrize(
    "kind, group, largest",
    [(torch.int8, 384, 127), (torch.uint8, 128, 7)],
    ids=["int8", "int4"],
)
def test_no_weight_moves_by_more_than_half_a_step(kind, group, largest, magnitude):
    """For all magnitudes down to where fp16 cannot hold the scale, and rows beyond one block."""
    weight = magnitude * torch.randn(1500, 384, generator=torch.Generator().manual_seed(1))
    module = QuantisedLinear(nn.Linear(384, 1500, bias=False), kind, group)
    module.write(slice(0, 1500), weight)
    step = module.scales.float().repeat_interleave(group, dim=1)
    assert torch.all((module.dequantise(torch.float32) - weight).abs() <= 0.5001 * step)
    coarsest = weight.unflatten(1, (-1, group)).abs().amax(2) / largest
    assert torch.all(module.scales <= (coarsest * 1.001 + 2.0**-24).clamp(min=2.0**-21))


@pytest.mark.parametrize("mode", ["int8", "int4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_forward_is_the_product_with_the_weights_rounded_once(monkeypatch, dtype, mode):
    """Beyond the rows of the kernel also on a GPU."""
    linear = nn.Linear(256, 40, bias=False).to(dtype)
    holder = nn.ModuleDict({"proj": linear})
    quantise_model(holder, mode)
    holder["proj"].write(slice(0, 40), linear.weight)
    x, weight = torch.randn(7, 256).to(dtype), holder["proj"].dequantise(torch.float32)
    expected = nn.functional.linear(x, weight.to(dtype))
    assert torch.equal(holder["proj"](x), expected)
    monkeypatch.setattr("nanorchestra.model.ops.by_kernel", lambda x: True)
    x = x.expand(10, -1, -1).flatten(0, 1)
    expected = nn.functional.linear(x, weight.to(dtype))
    assert torch.equal(holder["proj"](x), expected)


@pytest.mark.parametrize("mode", ["int8", "int4"])
def test_loading_quantised_is_loading_and_quantising(mode, tmp_path):
    save_checkpoint(a_model(3), None, tmp_path / "out")
    loaded, _ = load_checkpoint(tmp_path / "out", dtype="bfloat16", quantise=mode)
    full, _ = load_checkpoint(tmp_path / "out")
    expected = quantised(full, mode)
    assert all(
        torch.equal(module.values, expected.get_submodule(name).values)
        for name, module in linears(loaded, QuantisedLinear)
    )
    assert loaded.embed_tokens.weight.dtype == torch.bfloat16


def test_rows_that_128_does_not_divide_have_smaller_groups(tmp_path):
    shape = {"hidden_size": 96, "intermediate_size": 192, "tie_word_embeddings": True}
    save_checkpoint(a_model(**shape), None, tmp_path / "out")
    layers = load_checkpoint(tmp_path / "out", quantise="int4")[0].layers
    assert layers[0].self_attn.qkv_proj.group == 32 and layers[0].down_proj.group == 64
    save_checkpoint(a_model(**shape | {"hidden_size": 80}), None, tmp_path / "odd")
    with pytest.raises(UserError, match="qkv_proj has 80 columns; expected a multiple of 32"):
        load_checkpoint(tmp_path / "odd", quantise="int4")


def test_what_cannot_be_quantised_or_saved_is_refused(tmp_path):
    save_checkpoint(a_model(config=SMALL), None, tmp_path / "out")
    with pytest.raises(UserError, match="quantise = 'int3': expected one of int8, int4"):
        load_checkpoint(tmp_path / "out", quantise="int3")
    with pytest.raises(UserError, match="quantised"):
        save_checkpoint(quantised(a_model(), "int8"), None, tmp_path / "new")
    assert not (tmp_path / "new").exists()


@torch.no_grad()
def test_a_bias_is_added_unrounded():
    shape = replace(SMALL, qk_norm=False, attention_bias=True)
    plain, model = Qwen3(shape), Qwen3(shape)
    plain.init_weights(0)
    plain.layers[0].self_attn.qkv_proj.bias.normal_()
    quantise_model(model, "int8")
    copy_weights(model, named_hf_tensors(plain))
    x = torch.randn(3, shape.hidden_size)
    rounded, exact = (each.layers[0].self_attn.qkv_proj for each in (model, plain))
    assert torch.equal(rounded(x), rounded.product(x, x.dtype) + exact.bias)
    torch.testing.assert_close(rounded(x), exact(x), rtol=0.05, atol=0.05)
