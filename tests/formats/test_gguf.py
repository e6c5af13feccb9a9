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
from nanorchestra.formats import adopt, gguf
from nanorchestra.formats.load import load_model
from nanorchestra.model.attention import PackedAttention, Segment
from nanorchestra.model.checkpoint import config_to_hf, read_config, read_sampling, stored_dtype
from nanorchestra.model.qwen3 import ModelConfig, Qwen3
from nanorchestra.model.rope import Llama3Scaling, YarnScaling
from nanorchestra.model.tokenizer import Tokenizer

CONFIG = ModelConfig(
    vocab_size=40, hidden_size=512, intermediate_size=256, num_hidden_layers=2, head_dim=64,
    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128,
    rms_norm_eps=2.0**-17, rope_theta=10_000.0, qk_norm=False,
)  # fmt: skip
SWITCHES = {
    "llama": {},
    "qwen2": {"attention_bias": True},
    "qwen3": {"qk_norm": True, "tie_word_embeddings": True},
}
IDS = list(range(3, 33))


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
            spread = 0.2 if parameter.dim() == 1 else 0.05
            parameter.normal_(float("norm" in name), spread, generator=generator)
    return model


@torch.no_grad()
def logprobs(model: Qwen3, ids=IDS) -> Tensor:
    """Log-probabilities after each id, [T, vocab]."""
    tokens = torch.tensor(ids)
    hidden = model(tokens, torch.arange(len(ids)), PackedAttention([Segment(0, len(ids))]))
    return model.logits(hidden).float().log_softmax(-1)


@torch.no_grad()
def their_logprobs(model, ids=IDS) -> Tensor:
    return model.eval()(torch.tensor([ids])).logits[0].float().log_softmax(-1)


def theirs(path: Path, config: ModelConfig):
    """What transformers makes of the weights in a GGUF file, without its package accelerate."""
    fields = config_to_hf(config)
    kind = getattr(transformers, fields["architectures"][0])
    model = kind(kind.config_class(**fields))
    loaded = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)
    report = model.load_state_dict(loaded["tensors"], strict=False)
    assert not report.unexpected_keys and set(report.missing_keys) <= {"lm_head.weight"}
    return model


@pytest.mark.parametrize("architecture", SWITCHES)
@pytest.mark.parametrize("kind", ["F16", "Q4_0", "Q5_1", "Q4_K", "Q6_K"])
def test_log_probabilities_are_those_of_transformers(kind, architecture, tmp_path):
    model = a_model(architecture)
    path = write_gguf(tmp_path / "model.gguf", model, kind)
    loaded, tokenizer = load_model(path)
    assert tokenizer is None and loaded.config == model.config
    assert (logprobs(loaded) - their_logprobs(theirs(path, model.config))).abs().max() < 1e-5


def test_a_file_is_converted_once_and_again_when_it_changes(cache, tmp_path, monkeypatch, capsys):
    path = write_gguf(tmp_path / "model.gguf", a_model(), "Q8_0")
    copy = formats.directory_of(path)
    err = capsys.readouterr().err
    assert copy.parent == cache and f"{path}: the copy of 0.01 GB is {copy}\n" in err
    monkeypatch.setattr(gguf, "GGUFReader", None)
    assert formats.directory_of(path) == copy and not capsys.readouterr().err
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def fail(directory, tensors):
        next(tensors)
        raise KeyboardInterrupt

    write_gguf(path, a_model(), "F32")
    monkeypatch.setattr(gguf, "write_shards", fail)
    with pytest.raises(KeyboardInterrupt):
        formats.directory_of(path)
    assert [path for path in cache.iterdir() if path.is_dir()] == [copy]
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert formats.directory_of(path) != copy


@pytest.mark.parametrize(
    "architecture, kind", [("llama", "BF16"), ("qwen2", "F16"), ("qwen3", "F32")]
)
def test_a_file_without_loss_holds_the_model_bit_for_bit(architecture, kind, tmp_path):
    dtype = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}[kind]
    model = a_model(architecture).to(getattr(torch, dtype))
    path = write_gguf(tmp_path / "model.gguf", model, kind)
    assert stored_dtype(formats.directory_of(path)) == dtype
    loaded, _ = load_model(path, dtype=dtype)
    for name, parameter in loaded.state_dict().items():
        assert torch.equal(parameter, model.state_dict()[name]), name


def test_a_split_file_is_read_by_its_first_part(tmp_path):
    model = a_model()
    write_gguf(tmp_path / "split.gguf", model, split_max_tensors=9)
    parts = sorted(tmp_path.glob("split-*"))
    assert [part.name for part in parts] == [f"split-0000{n}-of-00003.gguf" for n in (1, 2, 3)]
    assert torch.equal(logprobs(load_model(parts[0])[0]), logprobs(model))
    with pytest.raises(UserError, match="one of 3 parts; give x-00001-of-00003.gguf"):
        load_model(parts[1])


def frequencies(config: ModelConfig) -> Tensor:
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    frequencies = 1.0 / config.rope_theta**exponents
    return config.rope.scaled(frequencies, config.rope_theta) / frequencies


@pytest.mark.parametrize("factor", [8.0, 32.0])
@pytest.mark.parametrize("dim", [64, 128])
def test_the_scaling_of_llama3_is_read_from_its_factors(factor, dim, tmp_path):
    changes = {"rope_theta": 500_000.0, "head_dim": dim, "max_position_embeddings": 131072}
    model = a_model(rope=Llama3Scaling(factor, 1.0, 4.0, 8192), **changes)
    factors = (1 / frequencies(model.config)).numpy()
    path = write_gguf(tmp_path / "model.gguf", model, tensors={"rope_freqs.weight": factors})
    assert load_model(path)[0].config == model.config


def test_yarn_is_read(tmp_path):
    scaled = {
        "qwen3.rope.scaling.type": "yarn",
        "qwen3.rope.scaling.factor": 4.0,
        "qwen3.rope.scaling.original_context_length": 32,
    }
    path = write_gguf(tmp_path / "model.gguf", a_model("qwen3"), metadata=scaled)
    attention_factor = 0.1 * np.log(4.0) + 1.0
    expected = YarnScaling(4.0, 32, pytest.approx(attention_factor))
    assert read_config(formats.directory_of(path)).rope == expected


@pytest.mark.parametrize(
    ("metadata", "tensors", "words"),
    [
        ({"general.architecture": "gemma3"}, [], "model_type = 'gemma3': expected 'qwen3' or"),
        ({"qwen3.rope.scaling.type": "linear"}, [], "rope_type = 'linear': expected 'default'"),
        ({"tokenizer.ggml.model": "llama"}, [], "tokenizer.ggml.model = 'llama': expected 'gpt2'"),
        ({"tokenizer.ggml.pre": "x"}, [], "tokenizer.ggml.pre = 'x': expected smollm, "),
        ({}, ["rope_freqs.weight"], "rope_freqs.weight is not the scaling of Llama 3.1"),
        ({}, ["blk.0.ffn_gate_exps.weight"], "the tensor 'blk.0.ffn_gate_exps.weight' of a model"),
    ],
)
def test_what_is_not_served_is_refused_in_one_line(
    metadata, tensors, words, nano_tokenizer, tmp_path
):
    model = a_model("qwen3", vocab_size=nano_tokenizer.vocab_size)
    more = {name: np.arange(1.0, 33, dtype=np.float32) for name in tensors}
    path = write_gguf(tmp_path / "model.gguf", model, "F32", nano_tokenizer, metadata, more)
    with pytest.raises(UserError, match=f"^{path}: .*{words}") as caught:
        load_model(path)
    assert "\n" not in str(caught.value)


def test_a_file_of_another_kind_and_one_that_is_cut_are_refused_in_one_line(tmp_path):
    path = write_gguf(tmp_path / "model.gguf", a_model("qwen3"))
    data = path.read_bytes()
    for changed in (b"GGML" + data[4:], data[:-100], data[:100]):
        path.write_bytes(changed)
        with pytest.raises(UserError, match=f"^{path}: not a whole GGUF file") as caught:
            load_model(path)
        assert "\n" not in str(caught.value)


def test_sampling_and_the_ends_of_a_turn(tmp_path, nano_tokenizer):
    model = a_model(vocab_size=nano_tokenizer.vocab_size)
    sampling = {"general.sampling.temp": 0.5, "general.sampling.top_k": 30}
    directory = formats.directory_of(
        write_gguf(tmp_path / "model.gguf", model, "Q8_0", nano_tokenizer, sampling)
    )
    assert read_sampling(directory) == {"temperature": 0.5, "top_p": 0.95, "top_k": 30}
    assert read_config(directory).eos_token_ids == nano_tokenizer.eos_ids


def test_the_default_cut_is_that_of_llama_cpp(nano_tokenizer, tmp_path):
    """Punctuation, then words as GPT-2's, then runs of digits, then threes of them."""
    model = a_model(vocab_size=nano_tokenizer.vocab_size)
    path = write_gguf(tmp_path / "model.gguf", model, "Q8_0", nano_tokenizer, pre="default")
    backend = Tokenizer.from_dir(formats.directory_of(path)).backend
    cut = backend.pre_tokenizer.pre_tokenize_str("It's 12345, (no)  x")
    words = ["It", "'", "s", "Ġ", "123", "45", ",", "Ġ", "(", "no", ")", "Ġ", "Ġx"]
    assert [word for word, _ in cut] == words


@pytest.mark.slow
def test_the_real_model_is_that_of_transformers_also_with_qwens_markers(tmp_path, capsys):
    """Its published tokenizer.json splits by Digits and ByteLevel; the vocabulary is the file's."""
    file, out = smollm_file(), tmp_path / "adopted"
    directory = formats.directory_of(file)
    model, tokenizer = load_model(directory)
    prompt = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    ids = tokenizer.backend.encode(prompt + "The capital of France is Paris. 1 2 3").ids
    expected = their_logprobs(theirs(file, model.config), ids)
    assert (logprobs(model, ids) - expected).abs().max() < 2e-5

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
    assert tokenizer.eos_ids == (2, 0) and tokenizer.bos_ids == []

    assert adopt.main([str(directory), "--out", str(out)]) == 0
    assert "-> <tool_call>" in capsys.readouterr().out
    adopted = transformers.AutoModelForCausalLM.from_pretrained(out)
    words = transformers.AutoTokenizer.from_pretrained(out)
    ids = words(prompt, return_tensors="pt").input_ids
    answer = adopted.generate(ids, max_new_tokens=7, do_sample=False)[0, ids.shape[1] :]
    assert words.decode(answer) == "The capital of France is Paris."
