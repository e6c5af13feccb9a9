"""Directories in Hugging Face layout: transformers reads what we write, and the other way round."""

import json
from dataclasses import replace

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from nanorchestra.errors import UserError
from nanorchestra.model import checkpoint
from nanorchestra.model.checkpoint import (
    PRESETS,
    config_from_hf,
    config_to_hf,
    copy_weights,
    load_checkpoint,
    named_hf_tensors,
    read_sampling,
    save_checkpoint,
)
from nanorchestra.model.qwen3 import ModelConfig, Qwen3
from nanorchestra.model.rope import Llama3Scaling, YarnScaling

TINY = dict(
    vocab_size=41, hidden_size=24, intermediate_size=32, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=64,
    rope_theta=9.5, eos_token_ids=(7, 5),
)  # fmt: skip
QWEN3 = ModelConfig(**TINY)
LLAMA = replace(QWEN3, qk_norm=False, eos_token_ids=())
CLASSES = {"qwen3": "Qwen3Config", "qwen2": "Qwen2Config", "llama": "LlamaConfig"}
SINGLE = "model.safetensors"


def a_model(seed: int = 0, **changes) -> Qwen3:
    model = Qwen3(replace(QWEN3, **changes))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.5, 1.0, generator=generator)
    return model


def same(a: Qwen3, b: Qwen3) -> bool:
    pairs = zip(a.state_dict().items(), b.state_dict().items(), strict=True)
    return all(name == other and torch.equal(x, y) for (name, x), (other, y) in pairs)


def theirs(data) -> dict:
    """What transformers makes of a config.json, and writes."""
    return getattr(transformers, CLASSES[data["model_type"]])(**data).to_dict()


@pytest.mark.parametrize(
    "config",
    [
        *PRESETS.values(),
        QWEN3,
        replace(QWEN3, qk_norm=False, attention_bias=True),
        LLAMA,
        replace(LLAMA, rope=Llama3Scaling(8.0, 1.0, 4.0, 8192)),
        replace(
            QWEN3, max_position_embeddings=256, rope=YarnScaling(4.0, 64, 1.2, 20.0, 2.0, False)
        ),
    ],
)
def test_a_config_comes_back_from_its_file_and_from_transformers(config: ModelConfig):
    assert config_from_hf(config_to_hf(config)) == config
    assert config_from_hf(theirs(config_to_hf(config))) == config  # writes rope_parameters


def test_sampling_is_as_the_directory_says_and_greedy_without_a_word(tmp_path):
    file = tmp_path / "generation_config.json"
    greedy = (0.0, 1.0, 0)
    assert tuple(read_sampling(tmp_path).values()) == greedy
    for stated, sampling in (
        ('{"temperature": 0.7}', greedy),
        ('{"do_sample": true, "temperature": 0.6, "top_p": 0.95}', (0.6, 0.95, 0)),
    ):
        file.write_text(stated)
        assert tuple(read_sampling(tmp_path).values()) == sampling


@pytest.mark.parametrize(
    "dtype, tied, shard", [("float32", True, 10**9), ("bfloat16", False, 3000)]
)
def test_transformers_loads_what_we_save_bit_for_bit(dtype, tied, shard, tmp_path, monkeypatch):
    model = a_model(tie_word_embeddings=tied)
    monkeypatch.setattr(checkpoint, "SHARD_BYTES", shard)
    save_checkpoint(model, None, tmp_path, dtype=getattr(torch, dtype))
    model.to(getattr(torch, dtype))
    reread, report = transformers.Qwen3ForCausalLM.from_pretrained(
        tmp_path, output_loading_info=True, dtype="auto"
    )
    assert not any(report.values()), report
    assert reread.dtype == getattr(torch, dtype)
    assert reread.generation_config.eos_token_id == [7, 5]
    loaded = reread.state_dict()
    if tied:
        loaded.pop("lm_head.weight")
    for name, tensor in named_hf_tensors(model):
        assert torch.equal(loaded.pop(name), tensor), name
    assert not loaded
    again, tokenizer = load_checkpoint(tmp_path, dtype=dtype)
    assert same(again, model) and again.config == model.config and tokenizer is None


def test_a_tied_checkpoint_with_a_copy_of_the_embeddings_and_a_bare_backbone_load(tmp_path):
    model = a_model(tie_word_embeddings=True)
    save_checkpoint(model, None, tmp_path)
    tensors = load_file(tmp_path / SINGLE)
    copied = tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}
    save_file(copied, tmp_path / SINGLE)
    assert same(load_checkpoint(tmp_path)[0], model)
    bare = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    save_file(bare, tmp_path / SINGLE)  # as Qwen3-Embedding's
    assert same(load_checkpoint(tmp_path)[0], model)


@pytest.mark.parametrize(
    "change, words",
    [
        ({"model_type": "mistral"}, "config.json: model_type = 'mistral': expected 'qwen3' or"),
        ({"rope_scaling": {"rope_type": "dynamic"}}, "config.json: rope_type = 'dynamic'"),
        ({"hidden_size": None}, "config.json: has no hidden_size"),
        ({"hidden_size": 32}, "embed_tokens.weight has shape [41, 24]; expected [41, 32]"),
        ({"num_hidden_layers": 3}, "model.layers.2.input_layernorm.weight of shape [24] is missi"),
        ({"vocab_size": 10**12}, "its weights take"),
        ("model-00002.safetensors", "model-00002.safetensors: not a whole safetensors file"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_one_line_that_names_it(change, words, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "SHARD_BYTES", 8000)
    save_checkpoint(a_model(), None, tmp_path)
    if isinstance(change, str):
        (tmp_path / change).unlink()
    else:
        file = tmp_path / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(UserError) as refusal:
        load_checkpoint(tmp_path)
    message = str(refusal.value)
    assert message.startswith(str(tmp_path)) and words in message and "\n" not in message, message


def test_copy_weights_overwrites_in_place():
    model, other = a_model(0), a_model(1)
    places = [parameter.data_ptr() for parameter in model.parameters()]
    copy_weights(model, named_hf_tensors(other))
    assert same(model, other)
    assert [parameter.data_ptr() for parameter in model.parameters()] == places
