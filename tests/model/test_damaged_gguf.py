"""Whatever a GGUF file holds, loading it ends soon, in bounded memory, in one line."""

from __future__ import annotations

import os
import random
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf_files import write_gguf
from test_damaged_directories import in_a_fork, load

from nanorchestra.errors import UserError
from nanorchestra.model.qwen3 import ModelConfig, Qwen3
from nanorchestra.model.tokenizer import train_bpe
from nanorchestra.model.weights import load_model

CONFIG = ModelConfig(
    vocab_size=304, hidden_size=32, intermediate_size=32, num_hidden_layers=1, head_dim=8,
    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
    tie_word_embeddings=True,
)  # fmt: skip
HUGE = 2**60


@pytest.fixture(scope="module")
def model():
    model = Qwen3(CONFIG)
    model.init_weights(0)
    return model


@pytest.fixture(scope="module")
def tokenizer():
    return train_bpe(["The cheapest expert answers.\n" * 3], 300)


@pytest.fixture(scope="module")
def whole(model, tokenizer, tmp_path_factory):
    torch.set_num_threads(1)
    path = tmp_path_factory.mktemp("whole") / "model.gguf"
    return write_gguf(path, model, "Q4_0", tokenizer)


def ends(path: Path) -> str:
    """How loading a file ends: "loaded" or a line. Other endings are raised."""
    try:
        load_model(path)
        return "loaded"
    except UserError as error:
        text = str(error)
        assert text.startswith(str(path)) and "\n" not in text, text
        return text


def test_the_file_loads_before_it_is_damaged(whole):
    assert in_a_fork(lambda: load(whole)) == "loaded"


def test_a_file_that_is_cut_anywhere_is_refused(whole, tmp_path):
    data, cut = whole.read_bytes(), tmp_path / "cut.gguf"
    rng = random.Random(0)
    lengths = [*range(30), *(rng.randrange(len(data)) for _ in range(200)), len(data) - 1]

    def load_all():
        for length in lengths:
            cut.write_bytes(data[:length])
            assert ends(cut) != "loaded", length

    assert in_a_fork(load_all) == "loaded"


@pytest.mark.slow
def test_a_file_with_any_other_byte_loads_or_is_refused(whole, tmp_path):
    data, changed = whole.read_bytes(), tmp_path / "changed.gguf"
    header = data.index(b"blk.0.ffn_up.weight")  # where the table of tensors ends, nearly
    rng = random.Random(0)
    places = [rng.randrange(len(data)) for _ in range(250)]
    places += [rng.randrange(header + 50) for _ in range(250)]
    outcomes = []

    def load_all():
        for place in places:
            other = data[:place] + bytes([rng.randrange(256)]) + data[place + 1 :]
            changed.write_bytes(other)
            outcomes.append(ends(changed))
        assert 50 < sum(outcome == "loaded" for outcome in outcomes) < 450

    assert in_a_fork(load_all) == "loaded"


def at(place: int, kind: str, number: int):
    """The bytes at a place are another number."""

    def damage(data: bytes) -> bytes:
        packed = struct.pack("<" + kind, number)
        return data[:place] + packed + data[place + len(packed) :]

    return damage


def entry(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


def behind(text: str, skipped: int, kind: str, number: int):
    """A number that stands some bytes behind a key or a tensor's name is another."""

    def damage(data: bytes) -> bytes:
        name = entry(text)
        return at(data.index(name) + len(name) + skipped, kind, number)(data)

    return damage


TENSOR = "output_norm.weight"  # it has one dimension: 4 bytes, its length, its type, its offset
BYTES = {
    "not a GGUF file": at(0, "I", 0x12345678),
    "it has version 1; expected 2 or 3": at(4, "I", 1),
    "it has version 4; expected 2 or 3": at(4, "I", 4),
    "its numbers are big-endian": lambda data: data[:4] + data[7:3:-1] + data[8:],
    f"it states {HUGE:,} tensors": at(8, "Q", HUGE),
    f"it states {HUGE:,} keys": at(16, "Q", HUGE),
    "is longer than the file": at(24, "Q", HUGE),
    f"it states {HUGE:,} elements of an array": behind("tokenizer.ggml.tokens", 8, "Q", HUGE),
    "elements of type 9; expected 0 to 12": behind("tokenizer.ggml.tokens", 4, "I", 9),
    "has type 13; expected 0 to 12": behind("qwen3.block_count", 0, "I", 13),
    "is not UTF-8": lambda data: data.replace(b"general.arch", b"general.\xffrch"),
    "the key 'general.architecture' is there twice": lambda data: data.replace(
        entry("qwen3.rope.freq_base"), entry("general.architecture")
    ),
    f"{TENSOR!r} has type I8; F32, F16": behind(TENSOR, 12, "I", 24),
    f"{TENSOR!r} has type 999; F32, F16": behind(TENSOR, 12, "I", 999),
    f"{TENSOR!r} has 9 dimensions; expected 1 to 4": behind(TENSOR, 0, "I", 9),
    f"{TENSOR!r} has 0 dimensions; expected 1 to 4": behind(TENSOR, 0, "I", 0),
    f"{TENSOR!r} has shape [0]": behind(TENSOR, 4, "Q", 0),
    f"{TENSOR!r} has rows of 31 numbers in blocks of 32 (Q4_0)": lambda data: behind(
        TENSOR, 12, "I", 2
    )(behind(TENSOR, 4, "Q", 31)(data)),
    f"{TENSOR!r} ends at byte {4 * HUGE:,}"[:30]: behind(TENSOR, 4, "Q", HUGE),
    f"{TENSOR!r} ends at byte 1,152,921": behind(TENSOR, 16, "Q", HUGE),
    "model.norm.weight has shape [16]; expected [32]": behind(TENSOR, 4, "Q", 16),
    "the tensor 'blk.0.ffn_gatf.weight' is none that": lambda data: data.replace(
        b"blk.0.ffn_gate.", b"blk.0.ffn_gatf."
    ),
    "num_hidden_layers = 2: the weights have 1 layers": behind("qwen3.block_count", 4, "I", 2),
    "has a number that is NaN or infinite": lambda data: data[:-300] + b"\xff" * 300,
}  # fmt: skip


@pytest.mark.parametrize("words", BYTES)
def test_a_damaged_file_is_refused_in_one_line_that_names_it(words, whole, tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(BYTES[words](whole.read_bytes()))
    assert path.read_bytes() != whole.read_bytes()
    outcome = in_a_fork(lambda: load(path))
    assert outcome.startswith(f"UserError {path}") and "\n" not in outcome, outcome
    assert words in outcome, outcome


METADATA = {
    "general.architecture = 'gemma3': expected 'llama' or": {"general.architecture": "gemma3"},
    "qwen3.context_length = None: expected a number": {"qwen3.context_length": None},
    "hidden_size = '32': expected a whole number": {"qwen3.embedding_length": "32"},
    "num_attention_heads = 0": {"qwen3.attention.head_count": 0},
    "num_key_value_heads = [2, 2]: expected a whole": {"qwen3.attention.head_count_kv": [2, 2]},
    "qwen3.attention.value_length = 16: expected 8": {"qwen3.attention.value_length": 16},
    "qwen3.rope.dimension_count = 4: expected 8": {"qwen3.rope.dimension_count": 4},
    "qwen3.expert_count = 8: expected 0": {"qwen3.expert_count": 8},
    "qwen3.attention.causal = False: expected True": {"qwen3.attention.causal": False},
    "general.alignment is 48; expected a power of two": {"general.alignment": 48},
    "tokenizer.ggml.model = 'llama': expected 'gpt2'": {"tokenizer.ggml.model": "llama"},
    "tokenizer.ggml.pre = 'chatglm-bpe': expected one of": {"tokenizer.ggml.pre": "chatglm-bpe"},
    "tokenizer.ggml.tokens = None: expected an array": {"tokenizer.ggml.tokens": None},
    "tokenizer.ggml.tokens = [1, 2]: expected an array": {"tokenizer.ggml.tokens": [1, 2]},
    "tokenizer.ggml.token_type = [1, 1]: expected": {"tokenizer.ggml.token_type": [1, 1]},
    "tokenizer.ggml.merges has ['a']: expected two tokens": {"tokenizer.ggml.merges": ["a"]},
    "model.gguf/tokenizer.json: not a readable": {"tokenizer.ggml.merges": ["q 字"]},
    "tokenizer.ggml.padding_token_id = 999: expected": {"tokenizer.ggml.padding_token_id": 999},
    "eos_token_id = 9999: expected an id below 304": {"tokenizer.ggml.eos_token_id": 9999},
    "tokenizer.chat_template = 3: expected text": {"tokenizer.chat_template": 3},
}


@pytest.mark.parametrize("words", METADATA)
def test_metadata_that_is_not_served_is_refused_in_one_line(words, model, tokenizer, tmp_path):
    path = write_gguf(tmp_path / "model.gguf", model, "Q4_0", tokenizer, metadata=METADATA[words])
    outcome = in_a_fork(lambda: load(path))
    assert outcome.startswith(f"UserError {path}") and "\n" not in outcome, outcome
    assert words in outcome, outcome


def test_a_tensor_that_is_missing_and_one_that_is_too_many(model, tmp_path):
    path = write_gguf(tmp_path / "model.gguf", model, "Q4_0")
    assert load_model(path)[1] is None
    data = path.read_bytes().replace(b"output_norm.weight", b"attnot_norm.weight")
    path.write_bytes(data)
    with pytest.raises(UserError, match="the tensor 'attnot_norm.weight' is none that"):
        load_model(path)
    extra = {"blk.0.attn_q.bias": np.zeros(32, np.float32)}
    path = write_gguf(path, model, "Q4_0", tensors=extra)
    with pytest.raises(UserError, match="q_proj.bias has shape .32.; expected no tensor"):
        load_model(path)
    path = write_gguf(path, model, "Q4_0", missing="model.embed_tokens.weight")
    with pytest.raises(UserError, match="the tensor 'token_embd.weight' is missing"):
        load_model(path)
    path = write_gguf(path, model, "Q4_0", missing="model.norm.weight")
    with pytest.raises(UserError, match="model.norm.weight of shape .32. is missing"):
        load_model(path)


def test_a_directory_of_files_a_pipe_and_a_file_that_changed(model, tmp_path):
    path = write_gguf(tmp_path / "model.gguf", model)
    assert torch.equal(load_model(path)[0].embed_tokens.weight, model.embed_tokens.weight)
    with pytest.raises(UserError, match="holds GGUF files; give one of them: model.gguf"):
        load_model(tmp_path)
    other = Qwen3(CONFIG)
    other.init_weights(1)
    write_gguf(path, other, "F16")
    other.half().float()
    assert torch.equal(load_model(path)[0].embed_tokens.weight, other.embed_tokens.weight)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(UserError, match="model.gguf"):
        load_model(path)
    with pytest.raises(UserError, match="nowhere.gguf"):
        load_model(tmp_path / "nowhere.gguf")
