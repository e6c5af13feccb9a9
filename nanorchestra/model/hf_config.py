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

GENERATION = "generation_config.json"
LARGEST = 2**31  # a size is below it
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
    defaults = {"version": stored.get("format", "gemm"), "zero_point": True, "group_size": 128}
    stored = defaults | stored
    group = stored["group_size"]

    def check(holds, field, expected):
        expected = f"{expected}, as AutoAWQ's version 'gemm' has it"
        _expect(holds, source, f"quantization_config.{field}", stored.get(field), expected)

    check(stored.get("backend") != "llm-awq", "backend", "autoawq")
    check(str(stored["version"]).lower() == "gemm", "version", "'gemm'")
    check(stored.get("bits") == 4, "bits", "4")
    check(stored["zero_point"] is True, "zero_point", "true")
    counted = _is_whole(group) and (group > 0 or group == -1)
    check(counted, "group_size", "a number of columns, or -1")
    return max(group, 0)


def read_sampling(path: str | Path) -> dict[str, float]:
    """Return temperature, top_p and top_k of generation_config.json; greedy if it does not sample.

    Raises UserError for one that is not a number, or out of its range.
    """
    stated = _generation(path)
    if not stated.get("do_sample"):
        stated = {"temperature": 0.0}
    values = {"temperature": 1.0, "top_p": 1.0, "top_k": 0}
    values |= {name: stated[name] for name in values if stated.get(name) is not None}

    def check(holds, name, expected):
        _expect(holds, Path(path) / GENERATION, name, values[name], f"a number, {expected}")

    temperature, top_p, top_k = values.values()
    check(_is_number(temperature) and temperature >= 0, "temperature", "0 or more")
    check(_is_number(top_p) and 0 < top_p <= 1, "top_p", "above 0, at most 1")
    check(_is_whole(top_k) and top_k >= 0, "top_k", "whole, 0 or more")
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
    _expect(isinstance(rope, Mapping), source, "rope_scaling", rope, "an object")
    values = {name: supported[0] for name, supported in _SUPPORTED.items()} | _DEFAULTS
    values["num_key_value_heads"] = data.get("num_attention_heads")
    values |= {name: value for name, value in {**data, **rope}.items() if value is not None}
    if isinstance(stored := data.get("quantization_config"), Mapping):
        method = stored.get("quant_method")
        values["quantization_config"] = method if method == "awq" else stored.get("format", method)
        _awq_group(data, source)

    def check(holds, field, expected):
        _expect(holds, source, field, values.get(field), expected)

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
    if stated is None:
        return ()
    ids = tuple(stated) if isinstance(stated, list | tuple) else (stated,)
    known = all(_is_whole(i) and 0 <= i < vocab_size for i in ids)
    expected = f"an id below {vocab_size}, the vocab_size, or a list of them"
    _expect(known, source, "eos_token_id", stated, expected)
    return ids


def _expect(holds, source, field, value, expected) -> None:
    """UserError, which names the file, the field, its value and what would be right."""
    require(holds, f"{source}: {field} = {reprlib.repr(value)}: expected {expected}")


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
