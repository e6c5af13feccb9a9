"""Reads a Qwen3 configuration from config.json in Hugging Face layout, and writes one."""

import math
import os
import reprlib
from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from nanorchestra.errors import require
from nanorchestra.files import read_object, read_toml
from nanorchestra.model.compressed import FORMATS
from nanorchestra.model.qwen3 import ModelConfig

# field: the values that the decoder computes; the first is the default
_SUPPORTED = {
    "model_type": ("qwen3",),
    "hidden_act": ("silu",),
    "rope_type": ("default",),
    "use_sliding_window": (False,),
    "tie_word_embeddings": (False, True),
    "attention_bias": (False,),
    "quantization_config": (None, *FORMATS, "awq"),
}
_DEFAULTS = {  # those of transformers
    "head_dim": 128,
    "max_position_embeddings": 32768,
    "rope_theta": 10_000.0,
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.02,
}


GENERATION = "generation_config.json"
LARGEST = 2**31  # a size is below it


def read_config(path: str | Path) -> ModelConfig:
    """Return the configuration of a checkpoint directory.

    The end-of-sequence ids are those of generation_config.json if it names any. Raises UserError.
    """
    file = Path(path) / "config.json"
    config = config_from_hf(read_object(file), str(file))
    generation = file.with_name(GENERATION)
    ids = _eos_ids(_generation(path), str(generation), config.vocab_size)
    return replace(config, eos_token_ids=ids or config.eos_token_ids)


def stored_dtype(path: str | Path) -> str | None:
    """Return the dtype of a checkpoint's weights, if its config.json says it."""
    config = read_object(Path(path) / "config.json")
    return config.get("dtype") or config.get("torch_dtype")


def stored_group(path: str | Path) -> int | None:
    """Return how many columns share a scale in a checkpoint of AutoAWQ, 0: all; None for another.

    Raises UserError for a form that is not read.
    """
    file = Path(path) / "config.json"
    return _awq_group(read_object(file), str(file))


def _awq_group(data, source) -> int | None:
    """Version "gemm" alone is read, in 4 bits, with zero points."""
    stored = data.get("quantization_config")
    if not isinstance(stored, Mapping) or stored.get("quant_method") != "awq":
        return None
    version = stored.get("version", stored.get("format", "gemm"))
    bits, zeros = stored.get("bits"), stored.get("zero_point", True)
    group = stored.get("group_size", 128)
    counted = type(group) is int and (group > 0 or group == -1)
    for field, value, holds, expected in (
        ("backend", stored.get("backend"), stored.get("backend") != "llm-awq", "autoawq"),
        ("version", version, str(version).lower() == "gemm", "'gemm'"),
        ("bits", bits, bits == 4, "4"),
        ("zero_point", zeros, zeros is True, "true"),
        ("group_size", group, counted, "a number of columns, or -1"),
    ):
        where = f"{source}: quantization_config.{field} = {value!r}"
        require(holds, f"{where}: expected {expected}, as AutoAWQ's version 'gemm' has it")
    return max(group, 0)


def read_sampling(path: str | Path) -> dict[str, float]:
    """Return temperature, top_p and top_k of generation_config.json; greedy if it does not sample.

    Raises UserError for one that is not a number, or out of its range.
    """
    stated = _generation(path)
    stated = stated if stated.get("do_sample") else {"temperature": 0.0}
    values = {"temperature": 1.0, "top_p": 1.0, "top_k": 0}
    for name in values:
        if (number := stated.get(name)) is not None:
            values[name] = number
    for name, holds, expected in (
        (
            "temperature",
            _is_number(values["temperature"]) and values["temperature"] >= 0,
            "0 or more",
        ),
        ("top_p", _is_number(values["top_p"]) and 0 < values["top_p"] <= 1, "above 0, at most 1"),
        ("top_k", _is_whole(values["top_k"]) and values["top_k"] >= 0, "whole, 0 or more"),
    ):
        where = f"{Path(path) / GENERATION}: {name} = {reprlib.repr(values[name])}"
        require(holds, f"{where}: expected a number, {expected}")
    return values


def _generation(path) -> dict[str, Any]:
    """Return the contents of generation_config.json, {} without one."""
    file = Path(path) / GENERATION
    return read_object(file) if os.path.lexists(file) else {}


def config_from_hf(data: Mapping[str, Any], source: str = "config.json") -> ModelConfig:
    """Return the configuration that config.json holds; `source` names it in messages.

    The rotary theta stands in it, or in the newer `rope_parameters`. Raises UserError for a field
    that is missing, malformed, or asks for what the decoder does not compute, such as YaRN.
    """
    rope = data.get("rope_scaling") or data.get("rope_parameters") or {}
    require(
        isinstance(rope, Mapping),
        f"{source}: rope_scaling = {reprlib.repr(rope)}: expected an object",
    )
    values = {name: supported[0] for name, supported in _SUPPORTED.items()} | _DEFAULTS
    values["num_key_value_heads"] = data.get("num_attention_heads")
    values |= {name: value for name, value in {**data, **rope}.items() if value is not None}
    if isinstance(stored := data.get("quantization_config"), Mapping):
        method = stored.get("quant_method")
        values["quantization_config"] = method if method == "awq" else stored.get("format", method)
        _awq_group(data, source)

    def check(holds, field, expected):
        stated = reprlib.repr(values.get(field))
        require(holds, f"{source}: {field} = {stated}: expected {expected}")

    for field, supported in _SUPPORTED.items():
        check(values[field] in supported, field, " or ".join(map(repr, supported)))
    for field in fields(ModelConfig):
        number = values.get(field.name)
        if field.type is int:
            whole = _is_whole(number) and 0 < number < LARGEST
            check(whole, field.name, f"a whole number from 1 to {LARGEST - 1}")
        elif field.type is float:
            check(_is_number(number) and number > 0, field.name, "a positive number")
    groups = values["num_attention_heads"] % values["num_key_value_heads"] == 0
    check(groups, "num_key_value_heads", f"a divisor of {values['num_attention_heads']} heads")
    check(values["head_dim"] % 2 == 0, "head_dim", "an even number")
    values["eos_token_ids"] = _eos_ids(data, source, values["vocab_size"])
    return ModelConfig(**{field.name: values[field.name] for field in fields(ModelConfig)})


def config_to_hf(config: ModelConfig) -> dict[str, Any]:
    """Return the contents of a config.json that transformers loads as Qwen3ForCausalLM."""
    values = asdict(config)
    eos = list(values.pop("eos_token_ids"))
    return values | {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "eos_token_id": eos[0] if len(eos) == 1 else eos or None,
    }


def _eos_ids(data, source, vocab_size) -> tuple[int, ...]:
    stated = data.get("eos_token_id")
    ids = stated if isinstance(stated, list | tuple) else () if stated is None else (stated,)
    known = all(_is_whole(i) and 0 <= i < vocab_size for i in ids)
    said = f"{source}: eos_token_id = {reprlib.repr(stated)}"
    require(known, f"{said}: expected an id below {vocab_size}, the vocab_size, or a list of them")
    return tuple(ids)


def _is_whole(value) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value) -> bool:
    """Return whether a value is a number that a float holds."""
    if _is_whole(value):
        return abs(value) < 2**63
    return isinstance(value, float) and math.isfinite(value)


PRESETS = {  # the published sizes, and nano
    name: config_from_hf(shape)
    for name, shape in read_toml(Path(__file__).with_name("presets.toml")).items()
}
