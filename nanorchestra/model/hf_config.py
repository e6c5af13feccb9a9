"""Reads a Qwen3 configuration from config.json in Hugging Face layout, and writes one.

Fields that ask for something the decoder does not compute are refused with a UserError.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from nanorchestra.errors import UserError
from nanorchestra.files import read_json
from nanorchestra.model.qwen3 import ModelConfig

# field: the values that the decoder computes; a field that is absent has the first
_SUPPORTED = {
    "hidden_act": ("silu",),
    "use_sliding_window": (False,),
    "partial_rotary_factor": (1.0,),
    "tie_word_embeddings": (False, True),
    "attention_bias": (False, True),
}
_YARN = ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")


def read_config(path: str | Path) -> ModelConfig:
    """Return the configuration of a checkpoint directory.

    The end-of-sequence ids are those of generation_config.json if it names any. Raises UserError.
    """
    config = config_from_hf(*read_config_json(path))
    generation = Path(path) / "generation_config.json"
    if not generation.is_file():
        return config
    ids = _eos_ids(_object(generation), str(generation), config.vocab_size)
    return replace(config, eos_token_ids=ids or config.eos_token_ids)


def read_config_json(path: str | Path) -> tuple[dict[str, Any], str]:
    """Return the contents of config.json in a checkpoint directory, and its path for messages."""
    file = Path(path) / "config.json"
    if not file.is_file():
        raise UserError(f"{path}: no config.json; expected a checkpoint in Hugging Face layout")
    return _object(file), str(file)


def config_from_hf(data: Mapping[str, Any], source: str = "config.json") -> ModelConfig:
    """Return the configuration that config.json holds; `source` names it in messages.

    RoPE is read from `rope_theta` and `rope_scaling`, or from the newer `rope_parameters`. Raises
    UserError for a field that is missing, malformed or not supported.
    """
    if data.get("model_type") != "qwen3":
        raise _refusal(source, "model_type", data.get("model_type"), "'qwen3', a dense decoder")
    for field, supported in _SUPPORTED.items():
        value = data.get(field, supported[0])
        if value not in supported:
            raise _refusal(source, field, value, " or ".join(map(repr, supported)))
    if set(data.get("layer_types") or ()) - {"full_attention"}:
        raise _refusal(source, "layer_types", data["layer_types"], "'full_attention' in all layers")

    def size(field: str, default: int | None = None) -> int:
        return _positive(data, field, default, source, int)

    heads, vocab_size = size("num_attention_heads"), size("vocab_size")
    kv_heads, head_dim = size("num_key_value_heads", heads), size("head_dim", 128)
    if heads % kv_heads:
        expected = f"a divisor of num_attention_heads = {heads}"
        raise _refusal(source, "num_key_value_heads", kv_heads, expected)
    if head_dim % 2:
        raise _refusal(source, "head_dim", head_dim, "an even number")
    max_position = size("max_position_embeddings", 32768)
    theta, scaling = _rope(data, max_position, source)
    return ModelConfig(
        vocab_size=vocab_size,
        hidden_size=size("hidden_size"),
        intermediate_size=size("intermediate_size"),
        num_hidden_layers=size("num_hidden_layers"),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=max_position,
        rope_theta=theta,
        rope_scaling=scaling,
        rms_norm_eps=_positive(data, "rms_norm_eps", 1e-6, source),
        tie_word_embeddings=bool(data.get("tie_word_embeddings")),
        attention_bias=bool(data.get("attention_bias")),
        eos_token_ids=_eos_ids(data, source, vocab_size),
        initializer_range=_positive(data, "initializer_range", 0.02, source),
    )


def config_to_hf(config: ModelConfig) -> dict[str, Any]:
    """Return the contents of a config.json that transformers loads as Qwen3ForCausalLM."""
    fields = asdict(config)
    eos = list(fields.pop("eos_token_ids"))
    return fields | {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_act": "silu",
        "attention_dropout": 0.0,
        "use_sliding_window": False,
        "sliding_window": None,
        "max_window_layers": config.num_hidden_layers,
        "eos_token_id": eos[0] if len(eos) == 1 else eos or None,
    }


def _rope(
    data: Mapping[str, Any], max_position: int, source: str
) -> tuple[float, dict[str, Any] | None]:
    """Return theta and the YaRN scaling, or None without scaling."""
    rope = data.get("rope_scaling") or data.get("rope_parameters") or {}
    theta = float(_positive({**data, **rope}, "rope_theta", 10_000.0, source))
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind != "yarn":
        raise _refusal(source, "rope_type", kind, "'default' or 'yarn'")
    original = _positive(rope, "original_max_position_embeddings", max_position, source)
    scaling = {
        "rope_type": "yarn",
        "factor": _positive(rope, "factor", max_position / original, source),
        "original_max_position_embeddings": original,
    }
    for field in _YARN:
        if rope.get(field) is not None:
            scaling[field] = _positive(rope, field, None, source)
    if "truncate" in rope:
        scaling["truncate"] = bool(rope["truncate"])
    return theta, scaling


def _positive(
    data: Mapping[str, Any], field: str, default: Any, source: str, kind: Any = (int, float)
) -> Any:
    value = default if data.get(field) is None else data[field]
    if isinstance(value, bool) or not isinstance(value, kind) or not 0 < value < math.inf:
        expected = "a positive integer" if kind is int else "a positive number"
        raise _refusal(source, field, value, expected)
    return value


def _eos_ids(data: Mapping[str, Any], source: str, vocab_size: int) -> tuple[int, ...]:
    value = data.get("eos_token_id")
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if any(not isinstance(i, int) or not 0 <= i < vocab_size for i in ids):
        expected = f"a token id or a list of them, below vocab_size = {vocab_size}"
        raise _refusal(source, "eos_token_id", value, expected)
    return tuple(ids)


def _refusal(source: str, field: str, value: Any, expected: str) -> UserError:
    return UserError(f"{source}: {field} = {value!r}: expected {expected}")


def _object(file: Path) -> dict[str, Any]:
    data = read_json(file)
    if not isinstance(data, dict):
        raise UserError(f"{file}: expected a JSON object")
    return data
