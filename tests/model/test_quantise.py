"""Weights in 8 and 4 bits: nearest step, packed as written, small enough."""

import copy

import pytest
import torch
from torch import nn

from kernels.quantised import ROWS
from nanorchestra.errors import UserError
from nanorchestra.model.checkpoint import (
    copy_weights,
    load_checkpoint,
    named_hf_tensors,
    save_checkpoint,
)
from nanorchestra.model.quantise import QuantisedLinear, linears, quantise_model


@pytest.mark.parametrize("magnitude", [0.0, 1e-7, 2e-2, 1e3], ids="{:g}".format)
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
@pytest.mark.parametrize("by_kernel", [False, True])
def test_forward_is_the_product_with_the_weights_rounded_once(monkeypatch, by_kernel, mode):
    """On a GPU beyond the rows of the kernel."""
    monkeypatch.setattr("nanorchestra.model.ops.by_kernel", lambda x: by_kernel)
    linear = nn.Linear(256, 40, bias=False).bfloat16()
    holder = nn.ModuleDict({"proj": linear})
    quantise_model(holder, mode)
    holder["proj"].write(slice(0, 40), linear.weight)
    x, weight = torch.randn(ROWS + 1, 256).bfloat16(), holder["proj"].dequantise(torch.float32)
    assert torch.equal(holder["proj"](x), nn.functional.linear(x, weight.bfloat16()))


def test_loading_quantised_is_loading_and_quantising_and_is_not_saved_again(nano_model, tmp_path):
    save_checkpoint(nano_model, None, tmp_path / "out")
    loaded, _ = load_checkpoint(tmp_path / "out", quantise="int4")
    expected = copy.deepcopy(nano_model)
    quantise_model(expected, "int4")
    copy_weights(expected, named_hf_tensors(nano_model))
    for name, module in linears(loaded, QuantisedLinear):
        assert torch.equal(module.values, expected.get_submodule(name).values)
    assert loaded.layers[0].down_proj.group == 32, "of 96 columns"
    with pytest.raises(UserError, match="quantised"):
        save_checkpoint(loaded, None, tmp_path / "new")
    assert not (tmp_path / "new").exists()
