"""Checkpoints: what we write transformers reads bit for bit and the other way round; bad ones are refused in one line; saves are whole."""

import json
import shutil
import struct

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3Config, Qwen3ForCausalLM

from nanorchestra.errors import UserError
from nanorchestra.model import weights
from nanorchestra.model.qwen3 import ModelConfig, Qwen3
from nanorchestra.model.tokenizer import train_bpe
from nanorchestra.model.weights import (
    copy_weights,
    load_model,
    load_weights,
    named_hf_tensors,
    read_config,
    save_checkpoint,
)

CONFIG = ModelConfig(
    41,
    24,
    32,
    2,
    4,
    2,
    head_dim=8,
    max_position_embeddings=64,
    rope_theta=10_000.0,
    attention_bias=True,
    eos_token_ids=(7, 5),
)


def a_model(seed: int = 0, **changes) -> Qwen3:
    model = Qwen3(ModelConfig(**vars(CONFIG) | changes))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.5, 1.0, generator=generator)
    return model


def same(a: Qwen3, b: Qwen3) -> bool:
    pairs = zip(a.state_dict().items(), b.state_dict().items(), strict=True)
    return all(name == other and torch.equal(x, y) for (name, x), (other, y) in pairs)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"]
)
@pytest.mark.parametrize("shard", [10**9, 3000, 1], ids=["single", "sharded", "a shard per tensor"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_transformers_loads_what_we_save_bit_for_bit(tied, shard, dtype, tmp_path):
    model = a_model(tie_word_embeddings=tied).to(dtype)
    save_checkpoint(model, None, tmp_path / "out", max_shard_bytes=shard)
    theirs, report = Qwen3ForCausalLM.from_pretrained(
        tmp_path / "out", output_loading_info=True, dtype="auto"
    )
    assert not any(report.values()), report
    assert theirs.dtype == dtype and theirs.generation_config.eos_token_id == [7, 5]
    loaded = theirs.state_dict()
    if tied:
        assert (
            loaded.pop("lm_head.weight").data_ptr()
            == loaded["model.embed_tokens.weight"].data_ptr()
        )
    for name, tensor in named_hf_tensors(model):
        assert torch.equal(loaded.pop(name), tensor), name
    assert not loaded

    again, tokenizer = load_model(tmp_path / "out", dtype=str(dtype).removeprefix("torch."))
    assert same(again, model) and again.config == model.config and tokenizer is None


@pytest.mark.parametrize("shard", ["5GB", "2KB"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_we_load_what_transformers_saves_bit_for_bit(tied, shard, tmp_path):
    theirs = Qwen3ForCausalLM(
        Qwen3Config(**CONFIG.to_hf() | {"tie_word_embeddings": tied})
    ).bfloat16()
    theirs.save_pretrained(tmp_path, max_shard_size=shard)
    assert (tmp_path / "model.safetensors.index.json").exists() == (shard == "2KB")
    model, _ = load_model(tmp_path, dtype="bfloat16")
    ours = dict(named_hf_tensors(model))
    for name, tensor in theirs.state_dict().items():
        if name in ours:
            assert torch.equal(ours.pop(name), tensor), name
    assert not ours
    full, _ = load_model(tmp_path)  # bf16 on disk, fp32 in memory
    assert same(full.bfloat16(), model)


def test_weights_are_cast_on_the_way_out(tmp_path):
    model = a_model()
    save_checkpoint(model, None, tmp_path / "out", dtype=torch.bfloat16)
    assert json.loads((tmp_path / "out/config.json").read_text())["dtype"] == "bfloat16"
    assert same(load_model(tmp_path / "out", dtype="bfloat16")[0], model.bfloat16())


def test_a_copy_of_the_embeddings_as_output_is_ignored_when_tied(tmp_path):
    """Some published tied checkpoints hold lm_head.weight as well."""
    model = a_model(tie_word_embeddings=True)
    save_checkpoint(model, None, tmp_path / "out")
    tensors = load_file(tmp_path / "out/model.safetensors")
    save_file(
        tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()},
        tmp_path / "out/model.safetensors",
    )
    assert same(load_model(tmp_path / "out")[0], model)


def test_backbone_without_output_matrix_loads(tmp_path):
    """Embedding models are saved without the `model.` prefix and without lm_head, whatever their config says about tying."""
    model = a_model(tie_word_embeddings=False)
    save_checkpoint(model, None, tmp_path / "out")
    tensors = load_file(tmp_path / "out/model.safetensors")
    del tensors["lm_head.weight"]
    save_file(
        {name.removeprefix("model."): tensor for name, tensor in tensors.items()},
        tmp_path / "out/model.safetensors",
    )
    loaded, _ = load_model(tmp_path / "out")
    assert loaded.config.tie_word_embeddings and torch.equal(
        loaded.layers[1].self_attn.qkv_proj.bias, model.layers[1].self_attn.qkv_proj.bias
    )


def test_end_of_sequence_ids_are_those_of_generation(tmp_path):
    save_checkpoint(a_model(eos_token_ids=(3,)), None, tmp_path / "out")
    assert read_config(tmp_path / "out").eos_token_ids == (3,)
    (tmp_path / "out/generation_config.json").write_text('{"eos_token_id": [9, 3]}')
    assert load_model(tmp_path / "out")[0].config.eos_token_ids == (9, 3)
    (tmp_path / "out/generation_config.json").write_text('{"temperature": 0.6}')
    assert read_config(tmp_path / "out").eos_token_ids == (3,)


def test_tokenizer_travels_with_the_weights(tmp_path):
    tokenizer = train_bpe(["one two three"], 300)
    save_checkpoint(a_model(vocab_size=tokenizer.vocab_size + 5), tokenizer, tmp_path / "out")
    loaded = load_model(tmp_path / "out")[1]
    assert loaded.vocab_size == tokenizer.vocab_size and loaded.encode(
        "one five"
    ) == tokenizer.encode("one five")
    save_checkpoint(a_model(vocab_size=tokenizer.vocab_size - 1), tokenizer, tmp_path / "out")
    with pytest.raises(
        UserError,
        match=f"tokenizer.json: .* {tokenizer.vocab_size - 1}.* vocab_size = {tokenizer.vocab_size - 1}",
    ):
        load_model(tmp_path / "out")


# Bad checkpoints. Each of these damages a directory with a sharded checkpoint; the words must be in the message.


def edit_json(file, **changes):
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def edit_tensors(path, change):
    """Rewrite the last shard, which holds the final norm and the output matrix, with `change` applied to its tensors."""
    file = sorted(path.glob("model-*.safetensors"))[-1]
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


def no_config(path):
    (path / "config.json").unlink()


def broken_config(path):
    (path / "config.json").write_text('{"model_type": ')


def config_is_a_list(path):
    (path / "config.json").write_text("[]")


def other_shape(path):
    edit_json(path / "config.json", hidden_size=32)


def more_layers(path):
    edit_json(path / "config.json", num_hidden_layers=3)


def fewer_layers(path):
    edit_json(path / "config.json", num_hidden_layers=1)


def bad_eos(path):
    edit_json(path / "generation_config.json", eos_token_id="stop")


def end_beyond_the_vocabulary(path):
    edit_json(path / "config.json", eos_token_id=[7, 41])


def generation_ends_beyond_the_vocabulary(path):
    edit_json(path / "generation_config.json", eos_token_id=10**6)


def no_end_of_layers(path):
    edit_json(path / "config.json", num_hidden_layers=10**7)


def enormous(path):
    edit_json(path / "config.json", hidden_size=10**12)


def too_large_for_memory(path):
    edit_json(path / "config.json", hidden_size=2**24, intermediate_size=2**24, vocab_size=2**24)


def enormous_heads(path):
    edit_json(path / "config.json", head_dim=2**24)


def another_model(path):
    edit_json(path / "config.json", architectures=["LlamaForCausalLM"])


def deep_config(path):
    (path / "config.json").write_text('{"a": ' * 100_000)


def no_weights(path):
    for file in path.glob("model*"):
        file.unlink()


def missing_shard(path):
    sorted(path.glob("model-*.safetensors"))[-1].unlink()


def truncated_shard(path):
    file = sorted(path.glob("model-*.safetensors"))[-1]
    file.write_bytes(file.read_bytes()[:-9])


def not_safetensors(path):
    sorted(path.glob("model-*.safetensors"))[0].write_bytes(struct.pack("<Q", 1 << 60) + b"x" * 50)


def bad_index(path):
    (path / "model.safetensors.index.json").write_text('{"weight_map": ["a"]}')


def index_and_shard_disagree(path):
    edit_tensors(path, lambda tensors: tensors.pop("lm_head.weight"))


def integer_weights(path):
    edit_tensors(
        path,
        lambda tensors: tensors.update(
            {"lm_head.weight": tensors["lm_head.weight"].to(torch.int8)}
        ),
    )


def transposed(path):
    edit_tensors(
        path,
        lambda tensors: tensors.update(
            {"lm_head.weight": tensors["lm_head.weight"].T.contiguous()}
        ),
    )


DAMAGES = {
    no_config: ["no config.json", "Hugging Face"],
    broken_config: ["config.json", "JSON"],
    config_is_a_list: ["config.json", "JSON object"],
    other_shape: ["safetensors", "model.norm.weight", "[24]", "[32]"],
    more_layers: ["missing tensor model.layers.2.", "missing in all"],
    fewer_layers: ["safetensors", "unexpected tensor model.layers.1."],
    bad_eos: ["generation_config.json", "eos_token_id", "'stop'"],
    end_beyond_the_vocabulary: ["config.json", "eos_token_id = [7, 41]", "below vocab_size = 41"],
    generation_ends_beyond_the_vocabulary: [
        "generation_config.json",
        "eos_token_id = 1000000",
        "below vocab_size = 41",
    ],
    no_end_of_layers: ["config.json", "num_hidden_layers = 10000000", "33 tensors"],
    enormous: ["config.json", "hidden_size = 1000000000000", "at most"],
    too_large_for_memory: ["[24]", "[16777216]", "config.json asks"],
    enormous_heads: ["config.json", "head_dim = 16777216", "num_attention_heads = 4"],
    another_model: ["config.json", "architectures = ['LlamaForCausalLM']", "Qwen3ForCausalLM"],
    deep_config: ["config.json", "not JSON"],
    no_weights: ["no weights", "model.safetensors"],
    missing_shard: ["index.json", "model-0000", "not in the directory"],
    truncated_shard: ["safetensors", "incomplete"],
    not_safetensors: ["safetensors", "incomplete"],
    bad_index: ["index.json", "weight_map"],
    index_and_shard_disagree: ["safetensors", "lm_head.weight"],
    integer_weights: ["lm_head.weight", "I8", "F32"],
    transposed: ["lm_head.weight", "[24, 41]", "[41, 24]"],
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    path = tmp_path_factory.mktemp("whole") / "checkpoint"
    save_checkpoint(a_model(), None, path, max_shard_bytes=8000)
    return path


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_bad_checkpoint_is_refused_in_one_line_that_names_it(damage, whole, tmp_path):
    path = tmp_path / "damaged"
    shutil.copytree(whole, path)
    damage(path)
    with pytest.raises(UserError) as refusal:
        load_model(path)
    message = str(refusal.value)
    assert str(path) in message and "\n" not in message
    for word in DAMAGES[damage]:
        assert word in message


@pytest.mark.parametrize(
    "damage",
    [missing_shard, truncated_shard, transposed, integer_weights, index_and_shard_disagree],
)
def test_model_is_untouched_by_a_refused_checkpoint(damage, whole, tmp_path):
    path = tmp_path / "damaged"
    shutil.copytree(whole, path)
    damage(path)
    model, before = a_model(3), a_model(3)
    with pytest.raises(UserError):
        load_weights(model, path)
    assert same(model, before)


def test_unknown_dtype_and_device_are_refused(whole):
    with pytest.raises(UserError, match="dtype = 'int8': expected one of float32"):
        load_model(whole, dtype="int8")
    with pytest.raises(UserError, match="device = 'abacus'"):
        load_model(whole, device="abacus")


# Updates in place


def test_copy_weights_overwrites_in_place():
    model, other = a_model(0), a_model(1)
    places = [parameter.data_ptr() for parameter in model.parameters()]
    copy_weights(model, named_hf_tensors(other))
    assert (
        same(model, other) and [parameter.data_ptr() for parameter in model.parameters()] == places
    )


def test_copy_weights_refuses_what_does_not_fit():
    model = a_model()
    tensors = dict(named_hf_tensors(a_model(1)))
    with pytest.raises(ValueError, match=r"model.norm.weight has shape \[3\]; expected \[24\]"):
        copy_weights(model, [("model.norm.weight", torch.zeros(3))])
    with pytest.raises(ValueError, match="no parameter model.nonsense"):
        copy_weights(model, [("model.nonsense", torch.zeros(3))])
    tensors.pop("model.layers.1.mlp.up_proj.weight")
    with pytest.raises(ValueError, match="model.layers.1.mlp.up_proj.weight"):
        copy_weights(model, tensors.items())


# Saves are whole


class Interrupted(Exception):
    pass


def test_interrupted_save_leaves_the_old_checkpoint(tmp_path):
    path, old = tmp_path / "model", a_model(0)
    save_checkpoint(old, None, path)

    def stops_half_way():
        for number, pair in enumerate(named_hf_tensors(a_model(1))):
            if number == 7:
                raise Interrupted
            yield pair

    with pytest.raises(Interrupted):
        save_checkpoint(a_model(1), None, path, tensors=stops_half_way())
    assert same(load_model(path)[0], old)
    assert [entry.name for entry in tmp_path.iterdir()] == ["model"], "nothing is left beside it"


def test_save_that_cannot_take_its_place_leaves_the_old_checkpoint(tmp_path, monkeypatch):
    path, old = tmp_path / "model", a_model(0)
    save_checkpoint(old, None, path)
    rename = weights.Path.rename

    def fails(self, target):
        if self.name.endswith(".partial"):
            raise OSError(28, "No space left on device")
        return rename(self, target)

    monkeypatch.setattr(weights.Path, "rename", fails)
    with pytest.raises(UserError, match="cannot be written: No space left on device"):
        save_checkpoint(a_model(1), None, path)
    assert same(load_model(path)[0], old)


def test_new_checkpoint_replaces_the_old_one_as_a_whole(tmp_path):
    path = tmp_path / "model"
    save_checkpoint(a_model(0), None, path, max_shard_bytes=3000)
    (tmp_path / ".model.partial").mkdir()  # of a save that was killed
    save_checkpoint(a_model(1), None, path)
    assert same(load_model(path)[0], a_model(1))
    assert sorted(entry.name for entry in path.iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
    ]
    assert [entry.name for entry in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize("foreign", ["thesis.tex", "folder/config.json", ".git/HEAD"])
def test_directory_with_other_things_is_not_replaced(foreign, tmp_path):
    path = tmp_path / "home"
    (path / foreign).parent.mkdir(parents=True)
    (path / foreign).write_text("precious")
    with pytest.raises(UserError, match="no part of a checkpoint"):
        save_checkpoint(a_model(), None, path)
    assert (path / foreign).read_text() == "precious"


def test_unwritable_place_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="is a file"):
        save_checkpoint(a_model(), None, tmp_path / "file")
    with pytest.raises(UserError, match="cannot be written"):
        save_checkpoint(a_model(), None, tmp_path / "file" / "below")


def test_tensors_in_another_order_are_refused(tmp_path):
    pairs = list(named_hf_tensors(a_model()))
    with pytest.raises(
        ValueError, match="expected model.norm.weight of shape .* got lm_head.weight"
    ):
        save_checkpoint(a_model(), None, tmp_path / "out", tensors=reversed(pairs))
    with pytest.raises(ValueError, match="got nothing"):
        save_checkpoint(a_model(), None, tmp_path / "out", tensors=pairs[:-1])
    assert not (tmp_path / "out").exists()
