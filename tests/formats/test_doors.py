"""Every word for a model gives the same directory: weights, tokens, ends of a turn, chat template.

The reference is the directory that the model was saved in, and transformers, which reads all of it.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import chat_templates
import pytest
import torch
import transformers
from foreign_tokenizers import TEXTS, make_foreign
from gguf_files import write_gguf

from nanorchestra import formats
from nanorchestra.formats.load import load_model, with_chat
from nanorchestra.model.checkpoint import save_checkpoint
from nanorchestra.model.qwen3 import ModelConfig, Qwen3
from nanorchestra.model.tokenizer import Tokenizer

CONFIG = ModelConfig(
    vocab_size=40, hidden_size=64, intermediate_size=96, num_hidden_layers=2, head_dim=16,
    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128,
    rms_norm_eps=2.0**-17, rope_theta=10_000.0, qk_norm=False,
)  # fmt: skip
MODELS = {  # name: (switches of the architecture, tokenizer, its cut in a GGUF file, chat template)
    "Llama 3": ({}, "llama3", "llama-bpe", chat_templates.LLAMA31),
    "SmolLM2": ({"tie_word_embeddings": True}, "smollm2", "smollm", chat_templates.SMOLLM2),
    "Qwen2.5": ({"attention_bias": True}, "qwen2", "qwen2", chat_templates.QWEN25),
    "Qwen3": ({"qk_norm": True, "tie_word_embeddings": True}, None, "qwen2", None),
}
DOORS = [
    *(("GGUF file", name) for name in ("Llama 3", "SmolLM2", "Qwen2.5")),
    ("GGUF file of the hub", "Qwen3"),
    ("hub id", "Llama 3"),
]


def saved(name: str, folder: Path, nano_tokenizer) -> tuple[Path, Qwen3, Tokenizer]:
    """Writes a model in Hugging Face layout; returns its directory, the model and its tokenizer."""
    switches, kind, _, template = MODELS[name]
    tokenizer = nano_tokenizer
    if kind:
        made = make_foreign(kind, folder / "tokenizer", template)
        tokenizer = with_chat(Tokenizer.from_dir(made), made)
    vocab = {"vocab_size": tokenizer.vocab_size + 3, "eos_token_ids": tuple(tokenizer.eos_ids)}
    model = Qwen3(replace(CONFIG, **switches, **vocab))
    model.init_weights(0)
    save_checkpoint(model, tokenizer, folder / "model", dtype=torch.float32)
    return folder / "model", model, tokenizer


def word_of(door: str, name: str, directory: Path, model, tokenizer, hub) -> str:
    """Returns the word with which a model comes in by a door."""
    if "GGUF" in door:
        pre = MODELS[name][2]
        file = write_gguf(directory.parent / "x.gguf", model, "F32", tokenizer, pre=pre)
        if door == "GGUF file":
            return str(file)
        commit = hub.add("a/b.c-D_1", {"q/x.gguf": file.read_bytes()})
        return f"a/b.c-D_1@{commit}/q/x.gguf"
    files = {path.name: path.read_bytes() for path in directory.iterdir() if path.is_file()}
    hub.add("a/b", files)
    return "a/b"


@pytest.mark.parametrize("door, name", DOORS)
def test_a_word_for_a_model_gives_the_directory_that_it_was_saved_in(
    door, name, hub, tmp_path, nano_tokenizer, monkeypatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    source, model, tokenizer = saved(name, tmp_path, nano_tokenizer)
    word = word_of(door, name, source, model, tokenizer, hub)
    directory = formats.directory_of(word)

    loaded, tokens = load_model(formats.pinned(word))
    assert replace(loaded.config, eos_token_ids=()) == replace(model.config, eos_token_ids=())
    for key, weights in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[key], weights), key
    assert tokens.vocab_size == tokenizer.vocab_size
    assert (tokens.end_of_turn, tokens.bos_ids) == (tokenizer.end_of_turn, tokenizer.bos_ids)
    assert getattr(tokens.chat, "template", None) == MODELS[name][3]
    added = tokens.backend.get_added_tokens_decoder()
    assert added == tokenizer.backend.get_added_tokens_decoder()
    for text in TEXTS:
        assert tokens.encode(text) == tokenizer.encode(text)
        assert not added.keys() & set(tokens.encode(text)), "text forges a marker"

    theirs = transformers.AutoTokenizer.from_pretrained(directory)
    reference = transformers.AutoTokenizer.from_pretrained(source)
    for text in TEXTS:
        assert theirs.encode(text) == reference.encode(text)
    assert theirs.eos_token == reference.eos_token
    ids = torch.arange(3, 33)
    with torch.no_grad():
        again = transformers.AutoModelForCausalLM.from_pretrained(directory).eval()
        expected = transformers.AutoModelForCausalLM.from_pretrained(source).eval()
        assert torch.equal(again(ids[None]).logits, expected(ids[None]).logits)
