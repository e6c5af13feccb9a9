"""GGUF files: what transformers makes of them we make of them too, once, in the user's cache."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tokenizers
import torch
import transformers
from foreign_tokenizers import TEXTS
from gguf_files import write_gguf
from smollm import smollm_file
from tokenizers import pre_tokenizers
from torch import Tensor
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from nanorchestra import formats
from nanorchestra.errors import UserError
from nanorchestra.formats.load import load_model
from nanorchestra.model.attention import PackedAttention, Segment
from nanorchestra.model.checkpoint import config_to_hf, read_config, stored_dtype
from nanorchestra.model.qwen3 import ModelConfig, Qwen3
from nanorchestra.model.rope import Llama3Scaling, YarnScaling
from nanorchestra.model.tokenizer import Tokenizer

CONFIG = ModelConfig(
    vocab_size=40, hidden_size=64, intermediate_size=96, num_hidden_layers=2, head_dim=32,
    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128,
    rms_norm_eps=2.0**-17, rope_theta=10_000.0, qk_norm=False,
)  # fmt: skip
SWITCHES = {
    "llama": {},
    "qwen2": {"attention_bias": True},
    "qwen3": {"qk_norm": True, "tie_word_embeddings": True},
}
IDS = torch.arange(3, 33)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    """The directory of the copies, empty."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "nanorchestra" / "gguf"


def a_model(architecture: str = "llama", **changes) -> Qwen3:
    model = Qwen3(replace(CONFIG, **SWITCHES[architecture] | changes))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(float("norm" in name), 0.2, generator=generator)
    return model


@torch.no_grad()
def logprobs(model: Qwen3) -> Tensor:
    """Log-probabilities after each id, [T, vocab]."""
    hidden = model(IDS, torch.arange(len(IDS)), PackedAttention([Segment(0, len(IDS))]))
    return model.logits(hidden).float().log_softmax(-1)


@torch.no_grad()
def their_logprobs(path: Path, config: ModelConfig) -> Tensor:
    """Those of what transformers makes of a GGUF file, without its package accelerate."""
    fields = config_to_hf(config)
    kind = getattr(transformers, fields["architectures"][0])
    model = kind(kind.config_class(**fields)).eval()
    loaded = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)
    report = model.load_state_dict(loaded["tensors"], strict=False)
    assert not report.unexpected_keys and set(report.missing_keys) <= {"lm_head.weight"}
    return model(IDS[None]).logits[0].float().log_softmax(-1)


@pytest.mark.parametrize(
    "kind, architecture", [("Q4_0", "llama"), ("Q5_1", "qwen2"), ("F16", "qwen3")]
)
def test_log_probabilities_are_those_of_transformers(kind, architecture, tmp_path):
    model = a_model(architecture)
    path = write_gguf(tmp_path / "model.gguf", model, kind)
    loaded, tokenizer = load_model(path)
    assert tokenizer is None and loaded.config == model.config
    assert (logprobs(loaded) - their_logprobs(path, model.config)).abs().max() < 1e-5


def test_a_file_is_converted_once_and_again_when_it_changes(cache, tmp_path, capsys):
    path = write_gguf(tmp_path / "model.gguf", a_model().bfloat16(), "BF16")
    copy = formats.directory_of(path)
    assert copy.is_relative_to(cache) and f"GB is {copy}\n" in capsys.readouterr().err
    assert stored_dtype(copy) == "bfloat16"
    assert formats.directory_of(path) == copy and not capsys.readouterr().err
    (tmp_path / "other").mkdir()
    other = formats.directory_of(write_gguf(tmp_path / "other" / path.name, a_model(), "F32"))
    write_gguf(path, a_model(), "F32")
    assert formats.directory_of(path) != copy
    assert other.exists() and not copy.exists()


def test_a_split_file_is_read_by_its_first_part(tmp_path):
    model = a_model()
    write_gguf(tmp_path / "split.gguf", model, split_max_tensors=9)
    parts = sorted(tmp_path.glob("split-*"))
    assert [part.name for part in parts] == [f"split-0000{n}-of-00003.gguf" for n in (1, 2, 3)]
    assert torch.equal(logprobs(load_model(parts[0])[0]), logprobs(model))
    with pytest.raises(UserError, match="one of 3 parts; give x-00001-of-00003.gguf"):
        load_model(parts[1])


def test_the_scaling_of_the_rotation_is_read(tmp_path):
    """Llama's from the factors in the file, YaRN's from the metadata."""
    changes = {"rope_theta": 500_000.0, "head_dim": 64, "max_position_embeddings": 131072}
    model = a_model(rope=Llama3Scaling(8.0, 1.0, 4.0, 8192), **changes)
    frequencies = 500_000.0 ** -(torch.arange(0, 64, 2, dtype=torch.float32) / 64)
    factors = (frequencies / model.config.rope.scaled(frequencies, 500_000.0)).numpy()
    path = write_gguf(tmp_path / "llama.gguf", model, tensors={"rope_freqs.weight": factors})
    assert load_model(path)[0].config == model.config

    scaled = {"type": "yarn", "factor": 4.0, "original_context_length": 32}
    scaled = {f"qwen3.rope.scaling.{key}": value for key, value in scaled.items()}
    path = write_gguf(tmp_path / "qwen.gguf", a_model("qwen3"), metadata=scaled)
    expected = YarnScaling(4.0, 32, pytest.approx(0.1 * np.log(4.0) + 1.0))
    assert read_config(formats.directory_of(path)).rope == expected


def test_what_is_not_served_is_refused_in_one_line(tmp_path):
    path = write_gguf(tmp_path / "x.gguf", a_model(), metadata={"general.architecture": "gemma3"})
    with pytest.raises(UserError, match=f"^{path}: model_type = 'gemma3': expected 'qwen3' or"):
        load_model(path)


def test_the_default_cut_is_that_of_llama_cpp(tmp_path, nano_tokenizer):
    """Punctuation, then words as GPT-2's, then threes of digits."""
    model = a_model(vocab_size=nano_tokenizer.vocab_size)
    path = write_gguf(tmp_path / "model.gguf", model, "Q8_0", nano_tokenizer, pre="default")
    directory = formats.directory_of(path)
    assert read_config(directory).eos_token_ids == nano_tokenizer.eos_ids
    backend = Tokenizer.from_dir(directory).backend
    cut = backend.pre_tokenizer.pre_tokenize_str("It's 12345, (no)  x")
    words = ["It", "'", "s", "Ġ", "123", "45", ",", "Ġ", "(", "no", ")", "Ġ", "Ġx"]
    assert [word for word, _ in cut] == words


@pytest.mark.slow
def test_the_tokenizer_of_a_real_model_is_the_published_one(monkeypatch):
    """Its tokenizer.json splits by Digits and ByteLevel; the vocabulary is the file's."""
    file = smollm_file()
    monkeypatch.undo()  # test_real_model.py reads the same copy
    tokenizer = Tokenizer.from_dir(formats.directory_of(file))
    reference = tokenizers.Tokenizer.from_str(tokenizer.backend.to_str())
    digits = pre_tokenizers.Digits(individual_digits=True)
    words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    reference.pre_tokenizer = pre_tokenizers.Sequence([digits, words])
    rng = np.random.default_rng(0)
    characters = [chr(c) for c in range(1, 0x11000) if not 0xD800 <= c < 0xE000]
    noise = ["".join(rng.choice(characters, 60)) for _ in range(100)]
    mixed = [" ".join(rng.choice([*"0a1 b٣½.'\n"], 40)) for _ in range(50)]
    for text in [*TEXTS, *noise, *mixed]:
        assert tokenizer.backend.encode(text).ids == reference.encode(text).ids
