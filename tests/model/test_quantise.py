"""Weights in 8 and 4 bits: nearest step, packed as written, AWQ as published, small enough."""

import copy
import json
import shutil

import pytest
import torch
from kernel_check import DEVICE
from safetensors.torch import load_file, save_file
from torch import nn

from nanorchestra.errors import UserError
from nanorchestra.model import quantise
from nanorchestra.model.packed_attention import Segment, packed_attention
from nanorchestra.model.quantise import (
    QuantisedLinear,
    linears,
    pack_nibbles,
    quantise_model,
    replace_linear,
    unpack_awq,
    unpack_nibbles,
)
from nanorchestra.model.qwen3 import PRESETS, ModelConfig, Qwen3
from nanorchestra.model.saving import save_checkpoint
from nanorchestra.model.weights import copy_weights, load_model, named_hf_tensors

WIDE = ModelConfig(  # every matrix divides into groups of 128
    61, 128, 256, 2, 4, 2, head_dim=32, max_position_embeddings=64, attention_bias=True
)
SMALL = ModelConfig(61, 64, 96, 2, 4, 2, head_dim=16, max_position_embeddings=64)  # of 32 only
IDS = torch.randint(0, 61, (48,), generator=torch.Generator().manual_seed(5))


def a_model(seed: int = 0, config: ModelConfig = WIDE, **changes) -> Qwen3:
    model = Qwen3(ModelConfig(**vars(config) | changes))
    model.init_weights(seed)
    return model


def quantised(model: Qwen3, mode: str) -> Qwen3:
    model = copy.deepcopy(model)
    quantise_model(model, mode)
    return model


@torch.no_grad()
def logits(model: Qwen3) -> torch.Tensor:
    attend = packed_attention([Segment(0, len(IDS))])
    return model.logits(model(IDS, torch.arange(len(IDS)), attend))


def same(a: Qwen3, b: Qwen3) -> bool:
    pairs = zip(a.state_dict().items(), b.state_dict().items(), strict=True)
    return all(n == m and x.dtype == y.dtype and torch.equal(x, y) for (n, x), (m, y) in pairs)


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


def test_nibbles_lie_as_the_docstring_says():
    """Column j of a group is the low nibble of its byte j, column j + group / 2 the high one."""
    q = torch.randint(0, 16, (2, 3, 32), dtype=torch.uint8)
    packed = pack_nibbles(q)
    assert packed.dtype == torch.uint8 and torch.equal(unpack_nibbles(packed, 32), q)
    for row in range(2):
        for column in range(96):
            group, j = divmod(column, 32)
            byte = packed.tolist()[row][16 * group + j % 16]
            assert (byte & 15 if j < 16 else byte >> 4) == q[row, group, j]


@pytest.mark.parametrize("mode", ["int8", "int4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_forward_is_the_product_with_the_weights_rounded_once(dtype, mode):
    linear = nn.Linear(256, 40).to(dtype)
    holder = nn.ModuleDict({"proj": linear})
    quantise_model(holder, mode)
    x, weight = torch.randn(7, 256).to(dtype), holder["proj"].dequantise(torch.float32)
    expected = nn.functional.linear(x, weight.to(dtype), linear.bias)
    assert torch.equal(holder["proj"](x), expected)


@pytest.mark.parametrize("mode, tolerance", [("int8", 0.06), ("int4", 0.7)])
def test_logits_stay_close_to_the_full_models(mode, tolerance):
    """Rounding adds noise of about 2% and 40%; a wrong order of rows or nibbles adds 140%."""
    before, after = logits(a_model()), logits(quantised(a_model(), mode))
    assert 0 < (after - before).norm() / before.norm() < tolerance


def test_all_but_embeddings_norms_and_biases_is_quantised():
    model = quantised(a_model(), "int4")
    assert not linears(model) and model.lm_head.bits == 8
    assert {module.bits for _, module in linears(model.layers, QuantisedLinear)} == {4}
    for name, _ in model.named_parameters():
        assert name.endswith(("norm", "bias")) or name == "embed_tokens.weight"


@pytest.mark.parametrize("shard", [10**9, 20_000], ids=["single", "sharded"])
@pytest.mark.parametrize("mode", ["int8", "int4"])
def test_loading_quantised_is_loading_and_quantising(mode, shard, tmp_path):
    save_checkpoint(a_model(3), None, tmp_path / "out", max_shard_bytes=shard)
    loaded, _ = load_model(tmp_path / "out", dtype="bfloat16", quantise=mode)
    full, _ = load_model(tmp_path / "out")
    expected = quantised(full, mode)
    assert all(
        torch.equal(module.values, expected.get_submodule(name).values)
        for name, module in linears(loaded, QuantisedLinear)
    )
    assert loaded.embed_tokens.weight.dtype == torch.bfloat16


@pytest.mark.parametrize("mode", ["int8", "int4"])
def test_new_weights_are_rounded_in_place(mode):
    model, other = quantised(a_model(0), mode), a_model(1)
    places = [tensor.data_ptr() for tensor in model.state_dict().values()]
    copy_weights(model, named_hf_tensors(other))
    assert same(model, quantised(other, mode))
    assert [tensor.data_ptr() for tensor in model.state_dict().values()] == places


@pytest.mark.parametrize("mode, limit", [("int8", 8.9e9), ("int4", 5.6e9), ("awq", 6.2e9)])
def test_qwen3_8b_has_the_stated_size(mode, limit):
    with torch.device("meta"):
        model = Qwen3(PRESETS["qwen3-8b"]).bfloat16()
    if mode == "awq":
        for name, _ in linears(model.layers):
            replace_linear(model.layers, name, 4, 128)
    else:
        quantise_model(model, mode)
    size = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    assert 0.98 * limit < size < limit


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


def test_words_of_awq_are_unpacked_as_published():
    packed = torch.randint(-(2**31), 2**31, (5, 3)).int()
    words = packed.tolist()
    expected = [[nibble(words, row, column) for column in range(24)] for row in range(5)]
    assert unpack_awq(packed).tolist() == expected


def test_awq_checkpoint_loads_to_the_weights_it_stands_for(published):
    path, expected = published
    model, _ = load_model(path)
    assert len(linears(model, QuantisedLinear)) == 8 and linears(model)[0][0] == "lm_head"
    for name, module in linears(model, QuantisedLinear):
        weight = expected.get_submodule(name).weight
        assert torch.equal(module.dequantise(torch.float32), weight), name
    torch.testing.assert_close(logits(model), logits(expected), rtol=0, atol=1e-5)


def test_new_weights_fit_an_awq_model_in_its_groups(published):
    """Training may go on from an AWQ checkpoint's shape: full-precision weights replace its own."""
    model, other = load_model(published[0])[0], a_model(4, published[1].config)
    copy_weights(model, named_hf_tensors(other))
    for name, module in linears(model, QuantisedLinear):
        step = module.scales.float().repeat_interleave(GROUP, dim=1)
        error = module.dequantise(torch.float32) - other.get_submodule(name).weight
        assert torch.all(error.abs() <= 0.5001 * step)


@pytest.mark.parametrize(
    "damage, words",
    [
        ({"model.layers.1.mlp.down_proj.qzeros": None}, "qzeros of shape [3, 8] is missing"),
        ({"model.layers.0.self_attn.k_proj.qweight": torch.zeros(64, 4)}, "F32; expected I32"),
        ({"model.layers.0.mlp.up_proj.scales": torch.zeros(1, 96).half()}, "asks for [2, 96]"),
        ({"config": {"quantization_config": None}}, "is not described by"),
    ],
    ids=["missing", "dtype", "shape", "config"],
)
def test_bad_awq_checkpoint_is_refused_in_one_line(damage, words, published, tmp_path):
    path = tmp_path / "damaged"
    shutil.copytree(published[0], path)
    config = json.loads((path / "config.json").read_text()) | damage.get("config", {})
    (path / "config.json").write_text(json.dumps(config))
    tensors = load_file(path / "model.safetensors") | damage
    kept = {name: tensor for name, tensor in tensors.items() if isinstance(tensor, torch.Tensor)}
    save_file(kept, path / "model.safetensors")
    with pytest.raises(UserError) as refusal:
        load_model(path)
    message = str(refusal.value)
    assert str(path) in message and words in message and "\n" not in message


def test_what_cannot_be_quantised_or_saved_is_refused(published, tmp_path):
    save_checkpoint(a_model(config=SMALL), None, tmp_path / "out")
    for path, mode, words in (
        (tmp_path / "out", "int3", "quantise = 'int3': expected one of int8, int4"),
        (tmp_path / "out", "int4", "qkv_proj has 64 input columns: 4 bits need a multiple of 128"),
        (published[0], "int8", "quantise = 'int8': the checkpoint is quantised already"),
    ):
        with pytest.raises(UserError, match=words):
            load_model(path, quantise=mode)
    load_model(tmp_path / "out", quantise="int8")
    with pytest.raises(UserError, match="quantised"):
        save_checkpoint(quantised(a_model(), "int8"), None, tmp_path / "new")
    assert quantise.is_quantised(load_model(published[0])[0]) and not (tmp_path / "new").exists()


@pytest.mark.parametrize("mode", ["int8", "int4"])
def test_layers_by_kernels_equal_plain_pytorch(mode, monkeypatch):
    torch.manual_seed(0)
    linear = torch.nn.Sequential(torch.nn.Linear(256, 48).to(DEVICE))
    quantise.quantise_model(linear, mode)
    x, results = torch.randn(3, 256, device=DEVICE), []
    for by_kernel in (False, True):
        monkeypatch.setattr(quantise, "by_kernel", lambda x, answer=by_kernel: answer)
        results.append(linear(x))
    assert torch.allclose(*results, atol=1e-5)
