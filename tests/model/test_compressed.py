"""Checkpoints of compressed-tensors load with the weights that the package itself gives back."""

import json

import pytest
import torch
from compressed_tensors.compressors.base import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import load_file, save_file

from nanorchestra.errors import UserError
from nanorchestra.files import SUMS
from nanorchestra.model.compressed import decompressed
from nanorchestra.model.qwen3 import ModelConfig, Qwen3
from nanorchestra.model.saving import save_checkpoint
from nanorchestra.model.weights import load_model, named_hf_tensors

CONFIG = ModelConfig(vocab_size=41, hidden_size=64, intermediate_size=96, num_hidden_layers=1,
    head_dim=16, num_attention_heads=4, num_key_value_heads=2)  # fmt: skip
CASES = {
    "4 bits in groups": ("pack-quantized", 4, {"strategy": "group", "group_size": 32}),
    "4 bits, zero points": (
        "pack-quantized", 4, {"strategy": "group", "group_size": 32, "symmetric": False},
    ),
    "8 bits packed": ("pack-quantized", 8, {"strategy": "group", "group_size": 32}),
    "int8 rows": ("int-quantized", 8, {"strategy": "channel"}),
    "int8, zero points": ("int-quantized", 8, {"strategy": "channel", "symmetric": False}),
    "fp8 rows": ("float-quantized", 8, {"type": "float", "strategy": "channel"}),
    "fp8 matrix": ("float-quantized", 8, {"type": "float", "strategy": "tensor"}),
}  # fmt: skip


def compressed(weight, style, args):
    """Tensors of a module, by their names behind the module's, and the matrix they stand for."""
    width = args.group_size if args.strategy == "group" else weight.shape[1]
    blocks = weight.unflatten(1, (-1, width))
    dims = (0, 1, 2) if args.strategy == "tensor" else 2
    scale, zero = calculate_qparams(blocks.amin(dims), blocks.amax(dims), args)
    if args.strategy == "tensor":
        scale, zero = scale.view(1), zero.view(1)
    compressor = BaseCompressor.get_value_from_registry(style)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    state = {"weight": weight, "weight_scale": scale.bfloat16()}
    if not args.symmetric:
        state["weight_zero_point"] = zero
    state = compressor.compress(state, scheme)
    return state, compressor.decompress(state, scheme)["weight"]


@pytest.fixture
def directory(tmp_path):
    model = Qwen3(CONFIG)
    model.init_weights(0)
    save_checkpoint(model, None, tmp_path / "model")
    (tmp_path / "model" / SUMS).unlink()  # another program writes the files anew
    return tmp_path / "model"


@pytest.mark.parametrize("case", CASES)
def test_matrices_are_those_the_package_gives_back(directory, case):
    """In two shards, the parts of a matrix on either side; the output matrix is not compressed."""
    style, bits, options = CASES[case]
    stored, exact = {}, {}
    for name, tensor in load_file(directory / "model.safetensors").items():
        stored[name] = exact[name] = tensor
        if name.endswith("_proj.weight"):
            args = QuantizationArgs(num_bits=bits, **options)
            del stored[name]
            parts, exact[name] = compressed(tensor, style, args)
            module = name.removesuffix("weight")
            stored |= {module + part: x.contiguous() for part, x in parts.items()}
            stored[f"{module}input_scale"] = torch.ones(1)
    names = sorted(stored)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, members in shards.items():
        save_file({name: stored[name] for name in members}, directory / file)
    where = {name: file for file, members in shards.items() for name in members}
    index = {"weight_map": where}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "compressed-tensors", "format": style}
    (directory / "config.json").write_text(json.dumps(config))
    loaded = dict(named_hf_tensors(load_model(directory, dtype="bfloat16")[0]))
    assert loaded.keys() == exact.keys()
    for name, tensor in exact.items():
        assert torch.equal(loaded[name], tensor.bfloat16()), name


@pytest.mark.parametrize(
    "change, words",
    [
        (
            {"_packed": torch.zeros(64, 1, dtype=torch.int32)},
            r"do not fit: \{'model.*_packed': \[64, 1",
        ),
        ({"_scale": torch.ones(64, 3)}, "do not fit"),
        ({"_shape": None}, "do not fit"),
        ({"_g_idx": torch.zeros(64)}, "q_proj.weight_g_idx: groups must be contiguous"),
    ],
)
def test_parts_that_do_not_fit_are_refused_in_one_line(change, words, tmp_path):
    name = "model.layers.0.self_attn.q_proj.weight"
    args = QuantizationArgs(num_bits=4, strategy="group", group_size=32)
    parts, _ = compressed(torch.randn(64, 64), "pack-quantized", args)
    stored = {f"{name.removesuffix('weight')}{part}": x for part, x in parts.items()}
    stored |= {name + part: x for part, x in change.items()}
    stored = {name: x for name, x in stored.items() if x is not None}
    with pytest.raises(UserError, match=words):
        dict(decompressed(stored, stored.__getitem__, "somewhere"))


@pytest.mark.parametrize(
    "stored", [{"quant_method": "awq"}, {"format": "nvfp4-pack-quantized"}, "mine"]
)
def test_other_formats_are_refused(directory, stored):
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"quantization_config": stored}))
    with pytest.raises(UserError, match="quantization_config = '.*': expected None or 'pack-quant"):
        load_model(directory)
