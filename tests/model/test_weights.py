"""Checkpoints: transformers reads what we write and the other way round; bad ones are refused."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3ForCausalLM

from nanorchestra.errors import UserError
from nanorchestra.model import saving
from nanorchestra.model.qwen3 import ModelConfig, Qwen3
from nanorchestra.model.saving import save_checkpoint
from nanorchestra.model.weights import copy_weights, load_model, named_hf_tensors

CONFIG = ModelConfig(
    vocab_size=41, hidden_size=24, intermediate_size=32, num_hidden_layers=2, head_dim=8,
    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
    rope_theta=10_000.0, eos_token_ids=(7, 5),
)  # fmt: skip
SINGLE = "model.safetensors"


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


@pytest.mark.parametrize("shard", [10**9, 3000, 1], ids=["single", "sharded", "one tensor each"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_transformers_loads_what_we_save_bit_for_bit(dtype, tied, shard, tmp_path, monkeypatch):
    model = a_model(tie_word_embeddings=tied)
    monkeypatch.setattr(saving, "SHARD_BYTES", shard)
    save_checkpoint(model, None, tmp_path / "out", dtype=dtype)
    model = model.to(dtype)
    theirs, report = Qwen3ForCausalLM.from_pretrained(
        tmp_path / "out", output_loading_info=True, dtype="auto"
    )
    assert not any(report.values()), report
    assert theirs.dtype == dtype and theirs.generation_config.eos_token_id == [7, 5]
    loaded = theirs.state_dict()
    if tied:
        loaded.pop("lm_head.weight")
    for name, tensor in named_hf_tensors(model):
        assert torch.equal(loaded.pop(name), tensor), name
    assert not loaded
    again, tokenizer = load_model(tmp_path / "out", dtype=str(dtype).removeprefix("torch."))
    assert same(again, model) and again.config == model.config and tokenizer is None


def test_a_tied_checkpoint_with_a_copy_of_the_embeddings_and_a_bare_backbone_load(tmp_path):
    model = a_model(tie_word_embeddings=True)
    save_checkpoint(model, None, tmp_path)
    tensors = load_file(tmp_path / SINGLE)
    copied = tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}
    save_file(copied, tmp_path / SINGLE)
    assert same(load_model(tmp_path)[0], model)
    bare = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    save_file(bare, tmp_path / SINGLE)  # as Qwen3-Embedding's
    assert same(load_model(tmp_path)[0], model)


def edit_json(file, **changes):
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


DAMAGES = {
    "config.json: cannot be read": lambda path: (path / "config.json").unlink(),
    "model.embed_tokens.weight has shape [41, 24]; expected [41, 32]": lambda path: edit_json(
        path / "config.json", hidden_size=32
    ),
    "model.layers.1.input_layernorm.weight has shape [24]; expected no tensor": lambda path: (
        edit_json(path / "config.json", num_hidden_layers=1)
    ),
    "model.safetensors: not a whole safetensors file": lambda path: [
        file.unlink() for file in path.glob("model*")
    ],
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    path = tmp_path_factory.mktemp("whole") / "checkpoint"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saving, "SHARD_BYTES", 8000)
        save_checkpoint(a_model(), None, path)
    return path


@pytest.mark.parametrize("words", DAMAGES)
def test_a_bad_checkpoint_is_refused_in_one_line_that_names_it(words, whole, tmp_path):
    path = tmp_path / "damaged"
    shutil.copytree(whole, path)
    DAMAGES[words](path)
    with pytest.raises(UserError) as refusal:
        load_model(path)
    message = str(refusal.value)
    assert str(path) in message and "\n" not in message and words in message, message


def test_copy_weights_overwrites_in_place():
    model, other = a_model(0), a_model(1)
    places = [parameter.data_ptr() for parameter in model.parameters()]
    copy_weights(model, named_hf_tensors(other))
    assert same(model, other)
    assert [parameter.data_ptr() for parameter in model.parameters()] == places


def test_copy_weights_refuses_what_does_not_fit():
    tensors = dict(named_hf_tensors(a_model(1)))
    with pytest.raises(UserError, match=r"model.norm.weight has shape \[3\]; expected \[24\]"):
        copy_weights(a_model(), [("model.norm.weight", torch.zeros(3))])
    tensors.pop("model.layers.1.mlp.up_proj.weight")
    with pytest.raises(UserError, match="model.layers.1.mlp.up_proj.weight of shape .* is missing"):
        copy_weights(a_model(), tensors.items())


def test_a_save_replaces_the_old_checkpoint_as_a_whole(tmp_path, monkeypatch):
    path = tmp_path / "model"
    with monkeypatch.context() as patch:
        patch.setattr(saving, "SHARD_BYTES", 3000)
        save_checkpoint(a_model(0), None, path)
    save_checkpoint(a_model(1), None, path)
    assert same(load_model(path)[0], a_model(1))
    names = sorted(entry.name for entry in path.iterdir())
    assert names == ["config.json", "generation_config.json", SINGLE]
    assert [entry.name for entry in tmp_path.iterdir()] == ["model"]
