"""Writes small GGUF files as llama.cpp's convert_hf_to_gguf.py does, by the package `gguf`."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFValueType, GGUFWriter, quants

from nanorchestra.model.checkpoint import named_hf_tensors
from nanorchestra.model.qwen3 import Qwen3
from nanorchestra.model.tokenizer import Tokenizer

NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "model.layers.": "blk.", "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}  # fmt: skip


def write_gguf(
    path: Path,
    model: Qwen3,
    kind: str = "F32",
    tokenizer: Tokenizer | None = None,
    metadata: dict | None = None,
    tensors: dict[str, np.ndarray] | None = None,
    pre: str = "qwen2",
    **writer,
) -> Path:
    """Writes a model with its matrices in the type `kind`, and returns `path`.

    metadata: more keys, or other values. tensors: more of them, in fp32. writer: of GGUFWriter.
    """
    config = model.config
    architecture = "qwen3" if config.qk_norm else "qwen2" if config.attention_bias else "llama"
    out = GGUFWriter(path, architecture, **writer)
    keys = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.dimension_count": config.head_dim,
        "rope.freq_base": config.rope_theta,
    }
    keys = {f"{architecture}.{key}": value for key, value in keys.items()}
    keys |= {} if tokenizer is None else tokenizer_metadata(tokenizer, pre, config.vocab_size)
    for key, value in (keys | (metadata or {})).items():
        if value is not None:
            out.add_key_value(key, value, GGUFValueType.get_type(value))
    dtype = GGMLQuantizationType[kind]
    for name, tensor in named_hf_tensors(model):
        numbers = tensor.detach().float().numpy()
        if architecture == "llama" and (".q_proj." in name or ".k_proj." in name):
            halves = numbers.reshape(-1, 2, config.head_dim // 2, *numbers.shape[1:])
            numbers = halves.swapaxes(1, 2).reshape(numbers.shape)
        for ours, theirs in NAMES.items():
            name = name.replace(ours, theirs)
        if numbers.ndim == 1:
            out.add_tensor(name, numbers)
        else:
            blocks = quants.quantize(np.ascontiguousarray(numbers), dtype)
            out.add_tensor(name, blocks, raw_dtype=dtype)
    for name, numbers in (tensors or {}).items():
        out.add_tensor(name, numbers)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    return path


def tokenizer_metadata(tokenizer: Tokenizer, pre: str, vocab_size: int) -> dict:
    """Returns what the converter makes of a tokenizer.json: a token for each row of a matrix."""
    backend = json.loads(tokenizer.backend.to_str())
    added = tokenizer.backend.get_added_tokens_decoder()
    texts = {i: token for token, i in tokenizer.backend.get_vocab(True).items()}
    types = {i: 3 if token.special else 4 for i, token in added.items()}
    ids, own = range(vocab_size), None if tokenizer.markers else tokenizer.chat
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [texts.get(i, f"[PAD{i}]") for i in ids],
        "tokenizer.ggml.token_type": [types.get(i, 1 if i in texts else 5) for i in ids],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in backend["model"]["merges"]],
        "tokenizer.ggml.eos_token_id": tokenizer.end_of_turn,
        "tokenizer.chat_template": own and own.template,
        "tokenizer.ggml.bos_token_id": tokenizer.token_id(own.bos) if own and own.bos else None,
    }
