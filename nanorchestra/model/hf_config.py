"""Reads a Qwen3 configuration from config.json in Hugging Face layout, and writes one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from nanorchestra.errors import require
from nanorchestra.files import read_json
from nanorchestra.model.qwen3 import ModelConfig

# field: the values that the decoder computes; the first is the default
_SUPPORTED = {
    "model_type": ("qwen3",),
    "hidden_act": ("silu",),
    "rope_type": ("default",),
    "use_sliding_window": (False,),
    "tie_word_embeddings": (False, True),
    "attention_bias": (False, True),
}
_DEFAULTS = {  # those of transformers
    "head_dim": 128,
    "max_position_embeddings": 32768,
    "rope_theta": 10_000.0,
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.02,
}


def read_config(path: str | Path) -> ModelConfig:
    """Return the configuration of a checkpoint directory.

    The end-of-sequence ids are those of generation_config.json if it names any. Raises UserError.
    """
    file = Path(path) / "config.json"
    config = config_from_hf(read_object(file), str(file))
    generation = file.with_name("generation_config.json")
    if not generation.is_file():
        return config
    ids = _eos_ids(read_object(generation), str(generation), config.vocab_size)
    return replace(config, eos_token_ids=ids or config.eos_token_ids)


def read_object(file: Path) -> dict[str, Any]:
    """Return the JSON object in a file. UserError if it is not one."""
    data = read_json(file)
    require(isinstance(data, dict), f"{file}: expected a JSON object")
    return data


def config_from_hf(data: Mapping[str, Any], source: str = "config.json") -> ModelConfig:
    """Return the configuration that config.json holds; `source` names it in messages.

    The rotary theta stands in it, or in the newer `rope_parameters`. Raises UserError for a field
    that is missing, malformed, or asks for what the decoder does not compute, such as YaRN.
    """
    rope = data.get("rope_scaling") or data.get("rope_parameters") or {}
    values = {name: supported[0] for name, supported in _SUPPORTED.items()} | _DEFAULTS
    values |= {"num_key_value_heads": data.get("num_attention_heads")}
    values |= {name: value for name, value in {**data, **rope}.items() if value is not None}
    for field, supported in _SUPPORTED.items():
        expected = " or ".join(map(repr, supported))
        check_field(values[field] in supported, source, values, field, expected)
    full = set(values.get("layer_types", ())) <= {"full_attention"}
    check_field(full, source, values, "layer_types", "'full_attention' in all layers")
    numbers = {"int": (int,), "float": (int, float)}
    sizes = {field.name: field.type for field in fields(ModelConfig) if field.type in numbers}
    for name, kind in sizes.items():
        value = values.get(name)
        positive = type(value) in numbers[kind] and value > 0
        check_field(positive, source, values, name, f"a positive {kind}")
    divides = values["num_attention_heads"] % values["num_key_value_heads"] == 0
    expected = f"a divisor of num_attention_heads = {values['num_attention_heads']}"
    check_field(divides, source, values, "num_key_value_heads", expected)
    check_field(values["head_dim"] % 2 == 0, source, values, "head_dim", "an even number")
    return ModelConfig(
        **{name: values[name] for name in sizes},
        tie_word_embeddings=values["tie_word_embeddings"],
        attention_bias=values["attention_bias"],
        eos_token_ids=_eos_ids(data, source, values["vocab_size"]),
    )


def config_to_hf(config: ModelConfig) -> dict[str, Any]:
    """Return the contents of a config.json that transformers loads as Qwen3ForCausalLM."""
    values = asdict(config)
    eos = list(values.pop("eos_token_ids"))
    return values | {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "eos_token_id": eos[0] if len(eos) == 1 else eos or None,
    }


def check_field(
    holds: object, source: str, values: Mapping[str, Any], field: str, expected: str
) -> None:
    """Raise UserError that names a file, its field and value unless the condition holds."""
    require(holds, f"{source}: {field} = {values.get(field)!r}: expected {expected}")


def _eos_ids(data: Mapping[str, Any], source: str, vocab_size: int) -> tuple[int, ...]:
    value = data.get("eos_token_id")
    ids = [] if value is None else value if isinstance(value, list) else [value]
    valid = all(isinstance(i, int) and 0 <= i < vocab_size for i in ids)
    expected = f"token ids below vocab_size = {vocab_size}"
    check_field(valid, source, data, "eos_token_id", expected)
    return tuple(ids)
