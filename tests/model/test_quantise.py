"""Weights in 8 and 4 bits: nearest step, packed as written, AWQ as published, small enough."""

import copy
import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from nanorchestra.errors import UserError
from nanorchestra.model.quantise import QuantisedLinear, is_quantised, linears, quantise_model
from nanorchestra.model.qwen3 import ModelConfig, Qwen3
from nanorchestra.model.saving import save_checkpoint
from nanorchestra.model.weights import copy_weights, load_model, named_hf_tensors

WIDE = ModelConfig(  # every matrix divides into groups of 128
    61, 128, 256, 2, 4, 2, head_dim=32, max_position_embeddings=64, attention_bias=True
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
@pytest.mark.parametrize("bits, group, largest", [(8, 384, 127), (4, 128, 7)], ids=["int8", "int4"])
def test_no_weight_moves_by_more_than_half_a_step(bits, group, largest, magnitude):
    """For all magnitudes down to where fp16 cannot hold the scale, and rows beyond one block."""
    weight = magnitude * torch.randn(1500, 384, generator=torch.Generator().manual_seed(1))
    module = QuantisedLinear(nn.Linear(384, 1500, bias=False), bits, group)
    module.write(slice(0, 1500), weight)
    step = module.scales.float().repeat_interleave(group, dim=1)
    assert torch.all((module.dequantise(torch.float32) - weight).abs() <= 0.5001 * step)
    coarsest = weight.unflatten(1, (-1, group)).abs().amax(2) / largest
    assert torch.all(module.scales <= (coarsest * 1.001 + 2.0**-24).clamp(min=2.0**-21))


@pytest.mark.parametrize("mode", ["int8", "int4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_forward_is_the_product_with_the_weights_rounded_once(dtype, mode):
    linear = nn.Linear(256, 40).to(dtype)
    holder = nn.ModuleDict({"proj": linear})
    quantise_model(holder, mode)
    holder["proj"].write(slice(0, 40), linear.weight)
    x, weight = torch.randn(7, 256).to(dtype), holder["proj"].dequantise(torch.float32)
    expected = nn.functional.linear(x, weight.to(dtype), linear.bias)
    assert torch.equal(holder["proj"](x), expected)


@pytest.mark.parametrize("mode", ["int8", "int4"])
def test_loading_quantised_is_loading_and_quantising(mode, tmp_path):
    save_checkpoint(a_model(3), None, tmp_path / "out")
    loaded, _ = load_model(tmp_path / "out", dtype="bfloat16", quantise=mode)
    full, _ = load_model(tmp_path / "out")
    expected = quantised(full, mode)
    assert all(
        torch.equal(module.values, expected.get_submodule(name).values)
        for name, module in linears(loaded, QuantisedLinear)
    )
    assert loaded.embed_tokens.weight.dtype == torch.bfloat16


# AWQ checkpoints: qweight int32 [in, out / 8], qzeros int32 [groups, out / 8], scales fp16
# [groups, out]. Nibble n of a word, counted from the lowest, holds column ORDER[n] of its eight.
ORDER = [0, 2, 4, 6, 1, 3, 5, 7]
GROUP = 32
AWQ = {"quant_method": "awq", "bits": 4, "version": "gemm", "group_size": GROUP}


def nibble(words: list[list[int]], row: int, column: int) -> int:
    return (words[row][column // 8] >> 4 * ORDER.index(column % 8)) & 15


def slow_awq(qweight: torch.Tensor, qzeros: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The weight [out, in], element by element."""
    words, zeros, steps = qweight.tolist(), qzeros.tolist(), scales.tolist()

    def weight(n: int, k: int) -> float:
        return (nibble(words, k, n) - nibble(zeros, k // GROUP, n)) * steps[k // GROUP][n]

    rows, columns = scales.shape[1], qweight.shape[0]
    return torch.tensor([[weight(n, k) for k in range(columns)] for n in range(rows)])


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """(directory, model): an AWQ checkpoint of random words, and the weights it stands for."""
    path = tmp_path_factory.mktemp("awq") / "checkpoint"
    model = a_model(2, SMALL).half().float()
    save_checkpoint(model, None, path, dtype=torch.float16)
    tensors = load_file(path / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    weights = {}

    def words(rows: int, columns: int) -> torch.Tensor:
        return torch.randint(-(2**31), 2**31, (rows, columns), generator=generator).int()

    for name in [name for name in tensors if name.endswith("proj.weight")]:
        out, columns = tensors.pop(name).shape
        scales = (0.004 * torch.rand(columns // GROUP, out, generator=generator)).half()
        part = {
            "qweight": words(columns, out // 8),
            "qzeros": words(columns // GROUP, out // 8),
            "scales": scales,
        }
        weights[name] = slow_awq(**part)
        tensors |= {name.replace("weight", kind): tensor for kind, tensor in part.items()}
    full = [(name, weights.get(name, tensor)) for name, tensor in named_hf_tensors(model)]
    copy_weights(model, full)
    save_file(tensors, path / "model.safetensors")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": AWQ}))
    return path, model


def test_awq_checkpoint_loads_to_the_weights_it_stands_for(published):
    path, expected = published
    model, _ = load_model(path)
    assert len(linears(model, QuantisedLinear)) == 8 and linears(model)[0][0] == "lm_head"
    for name, module in linears(model, QuantisedLinear):
        weight = expected.get_submodule(name).weight
        assert torch.equal(module.dequantise(torch.float32), weight), name


def test_what_cannot_be_quantised_or_saved_is_refused(published, tmp_path):
    save_checkpoint(a_model(config=SMALL), None, tmp_path / "out")
    for path, mode, words in (
        (tmp_path / "out", "int3", "quantise = 'int3': expected one of int8, int4"),
        (published[0], "int8", "quantise = 'int8': is quantised already"),
    ):
        with pytest.raises(UserError, match=words):
            load_model(path, quantise=mode)
    load_model(tmp_path / "out", quantise="int8")
    with pytest.raises(UserError, match="quantised"):
        save_checkpoint(quantised(a_model(), "int8"), None, tmp_path / "new")
    assert is_quantised(load_model(published[0])[0]) and not (tmp_path / "new").exists()
