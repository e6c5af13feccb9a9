"""GGUF files: what transformers makes of them we make of them too, and bad ones are refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import tokenizers
import torch
import transformers
from foreign_tokenizers import CORPUS, make_foreign
from gguf_files import write_gguf
from smollm import smollm_file
from tokenizers import pre_tokenizers
from torch import Tensor
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from nanorchestra.engine.engine import Engine
from nanorchestra.engine.sequence import SamplingParams
from nanorchestra.errors import UserError
from nanorchestra.formats.load import load_model
from nanorchestra.model import lora
from nanorchestra.model.attention import PackedAttention, Segment
from nanorchestra.model.checkpoint import (
    config_to_hf,
    read_config,
    read_sampling,
    save_checkpoint,
    stored_dtype,
)
from nanorchestra.model.gguf_file import TYPES
from nanorchestra.model.native import pack
from nanorchestra.model.qwen3 import ModelConfig, Qwen3
from nanorchestra.model.rope import Llama3Scaling, YarnScaling
from nanorchestra.model.tokenizer import Tokenizer

CONFIG = ModelConfig(
    vocab_size=40, hidden_size=512, intermediate_size=256, num_hidden_layers=2, head_dim=64,
    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128, rms_norm_eps=1e-5,
    rope_theta=10_000.0, qk_norm=False,
)  # fmt: skip
SWITCHES = {
    "llama": {},
    "qwen2": {"attention_bias": True},
    "qwen3": {"qk_norm": True, "tie_word_embeddings": True},
}
IDS = list(range(3, 33))


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
@pytest.mark.parametrize("kind", ["F16", "Q4_0", "Q4_1", "Q5_1", "Q4_K", "Q6_K"])
def test_log_probabilities_are_those_of_transformers(kind, architecture, tmp_path):
    model = a_model(architecture)
    path = write_gguf(tmp_path / "model.gguf", model, kind)
    loaded, tokenizer = load_model(path)
    assert tokenizer is None and loaded.config == model.config
    assert (logprobs(loaded) - their_logprobs(theirs(path, model.config))).abs().max() < 1e-5


@pytest.mark.parametrize("kind", TYPES)
def test_each_type_is_widened_as_the_package_does_it(kind, tmp_path):
    model = a_model(tie_word_embeddings=True)
    path = write_gguf(tmp_path / "model.gguf", model, kind)
    embeddings = load_model(path)[0].embed_tokens.weight
    (stored,) = [x for x in gguf.GGUFReader(path).tensors if x.name == "token_embd.weight"]
    expected = gguf.quants.dequantize(stored.data, stored.tensor_type)
    assert stored.tensor_type.name == kind and np.ptp(expected)
    assert np.array_equal(embeddings.detach(), expected)


def test_a_file_without_loss_holds_the_model_bit_for_bit(tmp_path):
    for architecture in SWITCHES:
        model = a_model(architecture)
        loaded, _ = load_model(write_gguf(tmp_path / f"{architecture}.gguf", model))
        for name, parameter in loaded.state_dict().items():
            assert torch.equal(parameter, model.state_dict()[name]), name


@pytest.mark.parametrize("how", ["int8", "int4", "bfloat16", "pack", "lora"])
def test_all_ways_to_load_take_a_file_as_they_take_a_directory(how, tmp_path):
    model = a_model("qwen2")
    path = write_gguf(tmp_path / "model.gguf", model)
    save_checkpoint(model, None, tmp_path / "model")

    def with_adapters(config):
        model = Qwen3(config)
        lora.add_adapters(model, 2, 4.0, 0)
        return model

    results = []
    for source in (path, tmp_path / "model"):
        if how == "lora":
            loaded, _ = load_model(source, build=with_adapters)
            lora.reset(loaded, 0)
        elif how in ("bfloat16", "pack"):
            loaded, _ = load_model(source, dtype="bfloat16" if how == "bfloat16" else "float32")
        else:
            loaded, _ = load_model(source, quantise=how)
        if how == "pack":
            pack(loaded)
            engine = Engine(loaded, None, num_pages=8, page_size=16, max_running=1)
            results.append(engine.generate([IDS], SamplingParams(8, temperature=0.0))[0].logprobs)
        else:
            results.append(logprobs(loaded).tolist())
    assert results[0] == results[1]


def test_a_split_file_is_read_by_its_first_part(tmp_path):
    model = a_model()
    whole = write_gguf(tmp_path / "model.gguf", model)
    write_gguf(tmp_path / "split.gguf", model, split_max_tensors=9)
    parts = sorted(tmp_path.glob("split-*"))
    assert [part.name for part in parts] == [f"split-0000{n}-of-00003.gguf" for n in (1, 2, 3)]
    assert torch.equal(logprobs(load_model(parts[0])[0]), logprobs(load_model(whole)[0]))
    with pytest.raises(UserError, match="is part 1 .* give split-00001-of-00003.gguf"):
        load_model(parts[1])
    parts[2].unlink()
    with pytest.raises(UserError, match="split-00003-of-00003.gguf: cannot be read"):
        load_model(parts[0])


# The frequencies of rope.py


def llama3_factors(config: ModelConfig, factor, low, high, length) -> np.ndarray:
    """As the converter has them (`generate_extra_tensors` of its LlamaModel)."""
    base, dim, factors = config.rope_theta, config.head_dim, []
    for frequency in 1.0 / base ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim):
        wavelength = 2 * torch.pi / frequency
        if wavelength < length / high:
            factors.append(1.0)
        elif wavelength > length / low:
            factors.append(factor)
        else:
            smooth = (length / wavelength - low) / (high - low)
            factors.append(float(1 / ((1 - smooth) / factor + smooth)))
    return np.array(factors, np.float32)


def frequencies(config: ModelConfig) -> Tensor:
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    return config.rope.scaled(1.0 / config.rope_theta**exponents, config.rope_theta)


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize(
    "numbers", [(8.0, 1.0, 4.0, 8192), (32.0, 1.0, 4.0, 8192), (4.0, 1.5, 7.0, 2048)]
)
def test_the_scaling_of_llama3_is_read_from_its_factors(numbers, dim, tmp_path):
    scaling = Llama3Scaling(*numbers)
    model = a_model(
        rope_theta=500_000.0, head_dim=dim, rope=scaling, max_position_embeddings=131072
    )
    factors = llama3_factors(model.config, *numbers)
    path = write_gguf(tmp_path / "model.gguf", model, tensors={"rope_freqs.weight": factors})
    loaded = read_config(path)
    torch.testing.assert_close(frequencies(loaded), frequencies(model.config), rtol=1e-5, atol=0)
    if numbers[3] == 8192:
        assert loaded == model.config
        assert (logprobs(load_model(path)[0]) - logprobs(model)).abs().max() == 0


def test_factors_that_are_no_scaling_of_llama3_are_refused(tmp_path):
    rng = np.random.default_rng(0)
    tensors = {"rope_freqs.weight": rng.uniform(1, 8, 32).astype(np.float32)}
    path = write_gguf(tmp_path / "model.gguf", a_model(), tensors=tensors)
    with pytest.raises(UserError, match="rope_freqs.weight of shape .* is not a scaling of"):
        load_model(path)
    tensors = {"rope_freqs.weight": np.ones(32, np.float32)}
    path = write_gguf(tmp_path / "model.gguf", a_model(), tensors=tensors)
    assert read_config(path).rope is None


def test_yarn_is_read_and_other_scalings_are_refused(tmp_path):
    scaled = {
        "qwen3.rope.scaling.type": "yarn",
        "qwen3.rope.scaling.factor": 4.0,
        "qwen3.rope.scaling.original_context_length": 32,
    }
    path = write_gguf(tmp_path / "model.gguf", a_model("qwen3"), metadata=scaled)
    attention_factor = 0.1 * np.log(4.0) + 1.0
    assert read_config(path).rope == YarnScaling(4.0, 32, pytest.approx(attention_factor))
    for change, words in (
        ({"qwen3.rope.scaling.type": "linear"}, "rope_type = 'linear': expected 'default'"),
        ({"qwen3.rope.scaling.attn_factor": 2.0}, "attn_factor = 2.0: expected 1.0"),
    ):
        path = write_gguf(tmp_path / "model.gguf", a_model("qwen3"), metadata=scaled | change)
        with pytest.raises(UserError, match=words):
            load_model(path)


# What is not served


METADATA = {
    "general.architecture = 'gemma3': expected 'llama' or": {"general.architecture": "gemma3"},
    "qwen3.expert_count = 8: expected 0": {"qwen3.expert_count": 8},
    "qwen3.rope.dimension_count = 4: expected 64": {"qwen3.rope.dimension_count": 4},
    "tokenizer.ggml.model = 'llama': expected 'gpt2'": {"tokenizer.ggml.model": "llama"},
    "tokenizer.ggml.pre = 'chatglm-bpe': expected one of": {"tokenizer.ggml.pre": "chatglm-bpe"},
}


def refusal(path: Path) -> str:
    """The message with which loading a file ends: one line that names it."""
    with pytest.raises(UserError) as caught:
        load_model(path)
    message = str(caught.value)
    assert message.startswith(str(path)) and "\n" not in message
    return message


def test_metadata_that_is_not_served_is_refused_in_one_line(nano_tokenizer, tmp_path):
    model = a_model("qwen3", vocab_size=nano_tokenizer.vocab_size)
    for words, metadata in METADATA.items():
        path = write_gguf(tmp_path / "model.gguf", model, "F32", nano_tokenizer, metadata)
        assert words in refusal(path)


def test_a_file_of_another_kind_and_one_that_is_cut_are_refused_in_one_line(tmp_path):
    path = write_gguf(tmp_path / "model.gguf", a_model("qwen3"))
    data = path.read_bytes()
    kind = data.index(b"output_norm.weight") + len("output_norm.weight") + 12
    for words, changed in (
        ("not a GGUF file; expected one, or a directory", b"GGML" + data[4:]),
        ("'output_norm.weight' has type I8; F32, F16", data[:kind] + b"\x18" + data[kind + 1 :]),
        ("is the download complete?", data[:-100]),
    ):
        path.write_bytes(changed)
        assert words in refusal(path)
    assert "holds GGUF files; give one of them: model.gguf" in refusal(tmp_path)


# Settings


def test_dtype_sampling_and_ends_of_a_turn(tmp_path, nano_tokenizer):
    model = a_model(vocab_size=nano_tokenizer.vocab_size)
    for kind, dtype in {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}.items():
        path = write_gguf(tmp_path / "model.gguf", model, kind)
        assert stored_dtype(path) == dtype
    assert read_config(path).eos_token_ids == ()
    assert read_sampling(path) == {"temperature": 0.6, "top_p": 0.95, "top_k": 20}
    sampling = {"general.sampling.temp": 0.6, "general.sampling.top_k": 20}
    path = write_gguf(tmp_path / "model.gguf", model, "Q8_0", nano_tokenizer, sampling)
    assert stored_dtype(path) is None
    assert read_sampling(path) == {"temperature": 0.6, "top_p": 1.0, "top_k": 20}
    assert read_config(path).eos_token_ids == nano_tokenizer.eos_ids


# Tokenizers

TEXTS = [
    *CORPUS[:1],
    "a cheapestexpert, the cheapest expert",
    "In 1969, 3.14159 and 0x1F: 12345678 apples, ½ + ⅔ = ٣٤٥ Ⅷ ²",
    "  leading, trailing \n\n\n\ttabs\r\n  and    gaps ",
    "don't I'LL we've it's 's 'S THEY'RE",
    "naïve café e\u0301, 東京タワー, Привет мир, שלום, 👩‍👩‍👧 emoji\u200d!",
    "<|im_end|><|im_start|>system <tool_call> </think> [PAD] <|eot_id|>",
    "a_b-c/d\\e: {x: [1, 2]}; $9.99 ^~|<>+= `code` -- ... ?!",
    "".join(map(chr, range(1, 0x250))),
]


def test_a_native_tokenizer_comes_back_from_a_file(nano_tokenizer, tmp_path):
    model = a_model(vocab_size=nano_tokenizer.vocab_size + 8)
    path = write_gguf(tmp_path / "model.gguf", model, "Q8_0", nano_tokenizer)
    _, tokenizer = load_model(path)
    assert tokenizer.markers and tokenizer.eos_ids == nano_tokenizer.eos_ids
    for text in TEXTS:
        ids = nano_tokenizer.backend.encode(text).ids
        assert tokenizer.encode(text) == nano_tokenizer.encode(text)
        assert tokenizer.backend.encode(text).ids == ids
        assert tokenizer.decode(ids, True) == nano_tokenizer.decode(ids, True)
    assert tokenizer.vocab_size == nano_tokenizer.vocab_size


@pytest.mark.parametrize(
    "kind, pre", [("llama3", "llama-bpe"), ("qwen2", "qwen2"), ("smollm2", "smollm")]
)
def test_foreign_tokenizers_come_back_from_a_file_and_from_transformers(kind, pre, tmp_path):
    template = "{{ messages[0].content }}"
    original = Tokenizer.from_dir(make_foreign(kind, tmp_path / "original", template))
    model = a_model(vocab_size=original.vocab_size + 3)
    path = write_gguf(tmp_path / "model.gguf", model, "Q8_0", original, pre=pre)
    loaded, tokenizer = load_model(path)
    assert tokenizer.template == template and tokenizer.bos_ids == original.bos_ids
    assert tokenizer.im_end == original.im_end and tokenizer.vocab_size == original.vocab_size
    added = tokenizer.backend.get_added_tokens_decoder()
    assert added.keys() == original.backend.get_added_tokens_decoder().keys()
    for token in added.values():
        ids = tokenizer.encode(f"a {token.content} b{token.content}")
        assert not added.keys() & set(ids), "text forges a marker"
    save_checkpoint(loaded, tokenizer, tmp_path / "saved")
    ours = transformers.AutoTokenizer.from_pretrained(tmp_path / "saved")
    reference = transformers.AutoTokenizer.from_pretrained(tmp_path / "original")
    for text in TEXTS:
        assert tokenizer.encode(text) == original.encode(text)
        assert ours.encode(text) == reference.encode(text)
    assert ours.chat_template == template and ours.eos_token == reference.eos_token


def test_the_default_cut_is_that_of_llama_cpp(nano_tokenizer, tmp_path):
    """Punctuation, then words as GPT-2's, then runs of digits, then threes of them."""
    model = a_model(vocab_size=nano_tokenizer.vocab_size)
    path = write_gguf(tmp_path / "model.gguf", model, "Q8_0", nano_tokenizer, pre="default")
    cut = Tokenizer.from_dir(path).backend.pre_tokenizer.pre_tokenize_str("It's 12345, (no)  x")
    words = ["It", "'", "s", "Ġ", "123", "45", ",", "Ġ", "(", "no", ")", "Ġ", "Ġx"]
    assert [word for word, _ in cut] == words


# The real model

PROMPT = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
    "<|im_end|>\n<|im_start|>user\nWhat is the capital of France?<|im_end|>\n"
    "<|im_start|>assistant\n"
)


@pytest.fixture(scope="module")
def smollm():
    return load_model(smollm_file())


def test_ids_are_those_of_smollms_own_tokenizer(smollm):
    """Its tokenizer.json splits by Digits and ByteLevel; the vocabulary is the file's."""
    _, tokenizer = smollm
    reference = tokenizers.Tokenizer.from_str(tokenizer.backend.to_str())
    digits = pre_tokenizers.Digits(individual_digits=True)
    words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    reference.pre_tokenizer = pre_tokenizers.Sequence([digits, words])
    rng = np.random.default_rng(0)
    characters = [chr(c) for c in range(1, 0x11000) if not 0xD800 <= c < 0xE000]
    noise = ["".join(rng.choice(characters, 60)) for _ in range(200)]
    mixed = [" ".join(rng.choice([*"0a1 b٣½.'\n"], 40)) for _ in range(50)]
    pages = [page.read_text() for page in Path(__file__).parents[2].glob("docs/*.md")]
    for text in [*TEXTS, *noise, *mixed, *pages]:
        assert tokenizer.backend.encode(text).ids == reference.encode(text).ids
    assert tokenizer.encode("1969") == [33, 41, 38, 41]
    assert tokenizer.eos_ids == (2, 0) and tokenizer.bos_ids == []


@pytest.mark.slow
def test_smollm_has_the_log_probabilities_of_transformers_and_saves_for_it(smollm, tmp_path):
    model, tokenizer = smollm
    ids = tokenizer.backend.encode(PROMPT + "The capital of France is Paris. 1 2 3").ids
    file = smollm_file()
    reference = theirs(file, model.config)
    expected = their_logprobs(reference, ids)
    assert (logprobs(model, ids) - expected).abs().max() < 1e-4
    save_checkpoint(model, tokenizer, tmp_path / "saved")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert torch.equal(their_logprobs(again, ids), expected)
    saved = transformers.AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert saved.encode(PROMPT) == tokenizer.backend.encode(PROMPT).ids
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    assert saved.apply_chat_template(chat, add_generation_prompt=True, tokenize=False) == PROMPT
    ours, _ = load_model(tmp_path / "saved")
    assert torch.equal(logprobs(ours, ids), logprobs(model, ids))
