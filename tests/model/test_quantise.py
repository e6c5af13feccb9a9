"""Weights in 8 and 4 bits: rounded to the nearest step, packed as written, read from AWQ checkpoints as published, and small enough."""

import copy
import json
import shutil
import weakref

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from nanorchestra.errors import UserError
from nanorchestra.model import weights
from nanorchestra.model.ops import Segment, packed_attention
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
from nanorchestra.model.weights import (
    copy_weights,
    load_model,
    load_weights,
    named_hf_tensors,
    read_config,
    save_checkpoint,
)

WIDE = ModelConfig(
    61, 128, 256, 2, 4, 2, head_dim=32, max_position_embeddings=64, attention_bias=True
)  # every matrix splits into groups of 128
SMALL = ModelConfig(
    61, 64, 96, 2, 4, 2, head_dim=16, max_position_embeddings=64
)  # into groups of 32 only
IDS = torch.randint(0, 61, (48,), generator=torch.Generator().manual_seed(5))


def a_model(seed: int = 0, config: ModelConfig = WIDE, **changes) -> Qwen3:
    model = Qwen3(ModelConfig(**vars(config) | changes))
    model.init_weights(seed)
    return model


def quantised(model: Qwen3, mode: str) -> Qwen3:
    model = copy.deepcopy(model)
    quantise_model(model, mode)
    return model


def logits(model: Qwen3) -> torch.Tensor:
    with torch.no_grad():
        return model.logits(
            model(IDS, torch.arange(len(IDS)), packed_attention([Segment(0, len(IDS))]))
        )


def same(a: Qwen3, b: Qwen3) -> bool:
    pairs = zip(a.state_dict().items(), b.state_dict().items(), strict=True)
    return all(
        name == other and x.dtype == y.dtype and torch.equal(x, y)
        for (name, x), (other, y) in pairs
    )


# Rounding and packing


@pytest.mark.parametrize("magnitude", [0.0, 1e-7, 3e-6, 2e-2, 1e3], ids="{:g}".format)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("bits, group, largest", [(8, 384, 127), (4, 128, 7)], ids=["int8", "int4"])
def test_no_weight_moves_by_more_than_half_a_step(bits, group, largest, dtype, magnitude):
    """Whatever the size of the weights, down to where fp16 runs out of digits for the scale; and the rows end where blocks do not."""
    linear = nn.Linear(384, 1500, bias=False)
    weight = (magnitude * torch.randn(1500, 384, generator=torch.Generator().manual_seed(1))).to(
        dtype
    )
    module = QuantisedLinear(linear, bits, group)
    module.write(slice(0, 1500), weight)
    step = module.scales.float().repeat_interleave(group, dim=1)
    assert torch.all((module.dequantise(torch.float32) - weight.float()).abs() <= 0.5001 * step)
    coarsest = weight.float().unflatten(1, (-1, group)).abs().amax(2) / largest
    assert torch.all(module.scales <= (coarsest * 1.001 + 2.0**-24).clamp(min=2.0**-21)), (
        "and the step is no larger than it must be"
    )


def test_packing_round_trip():
    q = torch.randint(
        0, 16, (33, 3, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )
    packed = pack_nibbles(q)
    assert packed.dtype == torch.uint8 and packed.shape == (33, 48)
    assert torch.equal(unpack_nibbles(packed, 32), q)


def test_nibbles_lie_as_the_docstring_says():
    """A kernel reads these bytes: column j of a group in the low nibble of its byte j, column j + group / 2 in the high one."""
    q = torch.randint(0, 16, (2, 3, 32), dtype=torch.uint8)
    packed = pack_nibbles(q).tolist()
    for row in range(2):
        for column in range(96):
            group, j = divmod(column, 32)
            byte = packed[row][16 * group + j % 16]
            assert (byte & 15 if j < 16 else byte >> 4) == q[row, group, j]


@pytest.mark.parametrize("mode", ["int8", "int4"])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"]
)
def test_forward_is_the_product_with_the_weights_rounded_once(dtype, mode):
    linear = nn.Linear(256, 40)
    holder = nn.ModuleDict({"proj": linear})
    quantise_model(holder, mode)
    module = holder["proj"].to(dtype)
    assert module.scales.dtype == (torch.float32 if mode == "int8" else torch.float16), (
        "casting the model does not round the scales"
    )
    x = torch.randn(7, 256).to(dtype)
    expected = nn.functional.linear(
        x, module.dequantise(torch.float32).to(dtype), linear.bias.to(dtype)
    )
    assert torch.equal(module(x), expected)


# Whole models


@pytest.mark.parametrize("mode, tolerance", [("int8", 0.06), ("int4", 0.7)])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_logits_stay_close_to_the_full_models(tied, mode, tolerance):
    """Steps of 1/127 and 1/7 of the largest of 128 or more normal weights put a relative noise of about 0.8% and 12% on each matrix.

    In two layers whose attention is sharp from the start it adds up to 2% and 40% of the logits at most. A wrong order of nibbles, rows or
    groups makes the logits independent of the full model's: a relative distance of about 1.4.
    """
    full = a_model(tie_word_embeddings=tied)
    before, after = logits(full), logits(quantised(full, mode))
    assert 0 < (after - before).norm() / before.norm() < tolerance


def test_all_but_embeddings_norms_and_biases_is_quantised():
    model = quantised(a_model(), "int4")
    assert not linears(model) and model.lm_head.bits == 8
    assert {module.bits for _, module in linears(model.layers, QuantisedLinear)} == {4}
    assert all(
        name.endswith(("norm", "bias")) or name == "embed_tokens.weight"
        for name, _ in model.named_parameters()
    )


@pytest.mark.parametrize("shard", [10**9, 20_000], ids=["single", "sharded"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("mode", ["int8", "int4"])
def test_loading_quantised_is_loading_and_quantising(mode, dtype, shard, tmp_path):
    save_checkpoint(a_model(3), None, tmp_path / "out", dtype=torch.bfloat16, max_shard_bytes=shard)
    loaded, _ = load_model(tmp_path / "out", dtype=dtype, quantise=mode)
    assert same(loaded, quantised(load_model(tmp_path / "out", dtype=dtype)[0], mode))
    assert loaded.embed_tokens.weight.dtype == getattr(torch, dtype)


def test_weights_are_read_rounded_and_dropped_one_by_one(tmp_path, monkeypatch):
    """The full-precision model is never held: of the tensors read, none is alive when the next is."""
    save_checkpoint(a_model(), None, tmp_path / "out", max_shard_bytes=100_000)
    read = []

    class Watched:
        def __init__(self, file):
            self.file, self.shard = file, open_shard(file)

        def __enter__(self):
            self.shard = self.shard.__enter__()
            return self

        def __exit__(self, *error):
            return self.shard.__exit__(*error)

        def __getattr__(self, name):
            return getattr(self.shard, name)

        def get_tensor(self, name):
            assert not [other for other, tensor in read if tensor() is not None]
            tensor = self.shard.get_tensor(name)
            read.append((name, weakref.ref(tensor)))
            return tensor

    open_shard = weights._open_shard
    monkeypatch.setattr(weights, "_open_shard", Watched)
    load_model(tmp_path / "out", quantise="int4")
    assert len(read) == len(dict(named_hf_tensors(a_model())))


@pytest.mark.parametrize("mode", ["int8", "int4"])
def test_new_weights_are_rounded_in_place(mode):
    model, other = quantised(a_model(0), mode), a_model(1)
    places = [tensor.data_ptr() for tensor in model.state_dict().values()]
    copy_weights(model, named_hf_tensors(other))
    assert same(model, quantised(other, mode))
    assert [tensor.data_ptr() for tensor in model.state_dict().values()] == places
    with pytest.raises(
        ValueError, match=r"down_proj.weight has shape \[3\]; expected \[128, 256\]"
    ):
        copy_weights(model, [("model.layers.0.mlp.down_proj.weight", torch.zeros(3))])
    with pytest.raises(ValueError, match="no new value for model.layers.1.mlp.up_proj.weight"):
        copy_weights(model, [pair for pair in named_hf_tensors(other) if "1.mlp.up" not in pair[0]])


# How small

KV_BYTES = (
    2 * 36 * 8 * 128 * 2
)  # of one token of Qwen3-8B: keys and values, layers, heads, head_dim, bf16


def qwen3_8b(mode: str | None) -> Qwen3:
    with torch.device("meta"):
        model = Qwen3(PRESETS["qwen3-8b"]).bfloat16()
    if mode == "awq":
        for name, _ in linears(model.layers):
            replace_linear(model.layers, name, 4, 128)
    elif mode:
        quantise_model(model, mode)
    return model


def model_size(model) -> tuple[int, int]:
    """(parameters, bytes); a weight in 4 bits is one parameter, scales and zeros are none."""
    parameters = sum(p.numel() for p in model.parameters()) + sum(
        m.in_features * m.out_features for _, m in linears(model, QuantisedLinear)
    )
    return parameters, sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))


@pytest.mark.parametrize(
    "mode, card, tokens", [("int8", 24e9, 65536), ("int4", 12e9, 32768), ("awq", 12e9, 24576)]
)
def test_qwen3_8b_fits_the_card(mode, card, tokens):
    parameters, size = model_size(qwen3_8b(mode))
    matrices, vocabulary = 36 * (4096 * 6144 + 4096 * 4096 + 3 * 4096 * 12288), 151936 * 4096
    norms = 36 * (2 * 4096 + 2 * 128) + 4096
    assert parameters == matrices + 2 * vocabulary + norms == model_size(qwen3_8b(None))[0]
    rows = 36 * (6144 + 4096 + 24576 + 4096)
    blocks = (
        matrices + 4 * rows if mode == "int8" else matrices // 2 + 3 * matrices // 128
    )  # fp32 a row; fp16 and a byte a group
    output = 2 * vocabulary if mode == "awq" else vocabulary + 4 * 151936
    assert size == blocks + output + 2 * vocabulary + 2 * norms
    assert size < 0.9 * card - tokens * KV_BYTES


# AWQ checkpoints. The layout: qweight int32 [in, out / 8], qzeros int32 [groups, out / 8], scales fp16 [groups, out]; nibble n of a word,
# counted from the lowest, holds column ORDER[n] of its eight.

ORDER = [0, 2, 4, 6, 1, 3, 5, 7]
GROUP = 32
PUBLISHED = {  # as in the config.json of the Qwen3-*-AWQ on the hub
    "backend": "autoawq",
    "bits": 4,
    "do_fuse": False,
    "exllama_config": None,
    "fuse_max_seq_len": None,
    "group_size": GROUP,
    "modules_to_not_convert": None,
    "modules_to_fuse": None,
    "quant_method": "awq",
    "version": "gemm",
    "zero_point": True,
}


def nibble(words: list[list[int]], row: int, column: int) -> int:
    return (words[row][column // 8] >> 4 * ORDER.index(column % 8)) & 15


def slow_awq(qweight: torch.Tensor, qzeros: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """[out, in], element by element; exact in fp32, for a scale has 11 digits and a difference of nibbles 4."""
    words, zeros, steps = qweight.tolist(), qzeros.tolist(), scales.tolist()
    return torch.tensor(
        [
            [
                (nibble(words, k, n) - nibble(zeros, k // GROUP, n)) * steps[k // GROUP][n]
                for k in range(qweight.shape[0])
            ]
            for n in range(scales.shape[1])
        ]
    )


@pytest.fixture(scope="module", params=["tied", "untied"])
def published(request, tmp_path_factory):
    """(directory, the model that it means): an AWQ checkpoint of random words in two shards, one with all the scales."""
    path = tmp_path_factory.mktemp("awq") / request.param
    model = a_model(2, SMALL, tie_word_embeddings=request.param == "tied").half().float()
    save_checkpoint(model, None, path, dtype=torch.float16)
    tensors = load_file(path / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    meant = {}
    for name in [name for name in tensors if name.endswith("proj.weight")]:
        out, columns = tensors.pop(name).shape
        part = {
            "qweight": torch.randint(
                -(2**31), 2**31, (columns, out // 8), generator=generator
            ).int(),
            "qzeros": torch.randint(
                -(2**31), 2**31, (columns // GROUP, out // 8), generator=generator
            ).int(),
            "scales": (0.004 * torch.rand(columns // GROUP, out, generator=generator)).half(),
        }
        meant[name] = slow_awq(**part)
        tensors |= {name.replace("weight", kind): tensor for kind, tensor in part.items()}
    copy_weights(
        model, [(name, meant.get(name, tensor)) for name, tensor in named_hf_tensors(model)]
    )
    (path / "model.safetensors").unlink()
    shards = [
        {name: tensor for name, tensor in tensors.items() if name.endswith("scales") == late}
        for late in (False, True)
    ]
    files = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    for file, shard in zip(files, shards):
        save_file(shard, path / file)
    index = {
        "metadata": {},
        "weight_map": {name: file for file, shard in zip(files, shards) for name in shard},
    }
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": PUBLISHED}))
    return path, model


def test_words_of_awq_are_taken_apart_as_published():
    packed = torch.randint(-(2**31), 2**31, (5, 3)).int()
    assert unpack_awq(packed).tolist() == [
        [nibble(packed.tolist(), row, column) for column in range(24)] for row in range(5)
    ]


def test_awq_checkpoint_loads_to_the_weights_it_means(published):
    path, meant = published
    model, _ = load_model(path)
    assert (
        len(linears(model, QuantisedLinear)) == 8 and len(linears(model)) == len(linears(meant)) - 8
    ), "the lm_head is not in 4 bits"
    for name, module in linears(model, QuantisedLinear):
        assert torch.equal(module.dequantise(torch.float32), meant.get_submodule(name).weight), name
    torch.testing.assert_close(logits(model), logits(meant), rtol=0, atol=1e-5)
    assert torch.equal(
        load_model(path, dtype="bfloat16")[0].layers[1].down_proj.dequantise(torch.float32),
        meant.layers[1].down_proj.weight,
    )


def test_new_weights_fit_an_awq_model_in_its_groups(published):
    """RL goes on from an AWQ checkpoint's shape: full-precision weights replace its own, zero points included."""
    model, other = load_model(published[0])[0], a_model(4, published[1].config)
    copy_weights(model, named_hf_tensors(other))
    for name, module in linears(model, QuantisedLinear):
        step = module.scales.float().repeat_interleave(GROUP, dim=1)
        assert torch.all(
            (module.dequantise(torch.float32) - other.get_submodule(name).weight).abs()
            <= 0.5001 * step
        )


def edit_shard(path, number, change):
    file = path / f"model-0000{number}-of-00002.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)
    index = path / "model.safetensors.index.json"
    located = {
        name: other
        for name, other in json.loads(index.read_text())["weight_map"].items()
        if other != file.name
    }
    index.write_text(json.dumps({"weight_map": located | {name: file.name for name in tensors}}))


def no_zero_points(path):
    edit_shard(path, 1, lambda tensors: tensors.pop("model.layers.1.mlp.down_proj.qzeros"))


def floats_for_words(path):
    edit_shard(
        path,
        1,
        lambda tensors: tensors.update(
            {"model.layers.0.self_attn.k_proj.qweight": torch.zeros(64, 4)}
        ),
    )


def words_for_scales(path):
    edit_shard(
        path,
        2,
        lambda tensors: tensors.update(
            {"model.layers.0.self_attn.k_proj.scales": torch.zeros(2, 32, dtype=torch.int32)}
        ),
    )


def other_groups(path):
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(
        json.dumps(
            config
            | {"quantization_config": PUBLISHED | {"group_size": 64}, "intermediate_size": 128}
        )
    )


def one_part_whole(path):
    def change(tensors):
        del (
            tensors["model.layers.0.self_attn.k_proj.qweight"],
            tensors["model.layers.0.self_attn.k_proj.qzeros"],
        )
        tensors["model.layers.0.self_attn.k_proj.weight"] = torch.zeros(32, 64)

    edit_shard(path, 1, change)


def says_nothing(path):
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": None}))


DAMAGES = {
    no_zero_points: ["missing tensor model.layers.1.mlp.down_proj.qzeros", "[3, 8]"],
    floats_for_words: ["k_proj.qweight", "F32", "I32"],
    words_for_scales: ["k_proj.scales", "I32", "F16"],
    other_groups: ["qzeros has shape [2, 8]", "[1, 8]"],
    one_part_whole: ["q_proj.weight is in 4 bits", "k_proj.weight is not"],
    says_nothing: ["unexpected tensor", "qweight"],
}


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_bad_awq_checkpoint_is_refused_in_one_line(damage, published, tmp_path):
    path = tmp_path / "damaged"
    shutil.copytree(published[0], path)
    damage(path)
    with pytest.raises(UserError) as refusal:
        load_model(path)
    message = str(refusal.value)
    assert str(path) in message and "\n" not in message
    for word in DAMAGES[damage]:
        assert word in message


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"version": "GEMM"},
        {"group_size": 128},
        {"zero_point": False},
        {"modules_to_not_convert": ["lm_head"]},
    ],
    ids=str,
)
def test_published_quantisation_configs_are_accepted(change):
    for data in (
        PUBLISHED | change,
        {name: value for name, value in (PUBLISHED | change).items() if name != "version"},
    ):
        assert (
            ModelConfig.from_hf(SMALL.to_hf() | {"quantization_config": data}).awq_group_size
            == data["group_size"]
        )


@pytest.mark.parametrize(
    "change, words",
    [
        ({"quant_method": "gptq"}, ["quant_method", "'gptq'", "'awq'"]),
        ({"bits": 8}, ["bits", "8", "4"]),
        ({"version": "gemv"}, ["version", "'gemv'", "'gemm'"]),
        ({"group_size": -1}, ["group_size", "-1", "multiple of 32"]),
        ({"group_size": 0}, ["group_size", "0", "multiple of 32"]),
        ({"group_size": 48}, ["group_size", "48", "multiple of 32"]),
        ({"group_size": "128"}, ["group_size", "'128'", "multiple of 32"]),
        ({"zero_point": "yes"}, ["zero_point", "'yes'", "true or false"]),
    ],
)
def test_other_quantisation_is_refused_in_one_line(change, words):
    for data, expected in ((PUBLISHED | change, words), (["awq"], ["object or null"])):
        with pytest.raises(UserError) as refusal:
            ModelConfig.from_hf(
                SMALL.to_hf() | {"quantization_config": data}, source="somewhere/config.json"
            )
        message = str(refusal.value)
        assert (
            message.startswith("somewhere/config.json: quantization_config") and "\n" not in message
        )
        assert all(word in message for word in expected)


def test_what_cannot_be_quantised_is_refused(published, tmp_path):
    save_checkpoint(a_model(config=SMALL), None, tmp_path / "out")
    with pytest.raises(UserError, match="quantise = 'int3': expected one of int8, int4"):
        load_model(tmp_path / "out", quantise="int3")
    with pytest.raises(
        UserError,
        match="layers.0.self_attn.qkv_proj has 64 input columns: expected a multiple of 128",
    ):
        load_model(tmp_path / "out", quantise="int4")
    load_model(tmp_path / "out", quantise="int8")
    with pytest.raises(UserError, match="quantise = 'int8': the checkpoint is quantised already"):
        load_model(published[0], quantise="int8")


def test_quantised_model_is_not_saved(tmp_path):
    with pytest.raises(UserError, match="quantised"):
        save_checkpoint(quantised(a_model(), "int8"), None, tmp_path / "below" / "out")
    assert not list(tmp_path.iterdir())


def test_saving_says_nothing_of_awq(published, tmp_path):
    """A full-precision model of an AWQ checkpoint's config is saved as what it is."""
    path, meant = published
    model = Qwen3(read_config(path))
    copy_weights(model, named_hf_tensors(meant))
    save_checkpoint(model, None, tmp_path / "out")
    again, _ = load_model(tmp_path / "out")
    assert again.config.awq_group_size is None and same(again, model)
    with pytest.raises(UserError, match="unexpected tensor"):
        load_weights(model, path)
