"""Reads a Qwen3 configuration from config.json in Hugging Face layout, and writes one."""

from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from nanorchestra.errors import require
from nanorchestra.files import read_json, read_toml
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


def read_config(path: str | Path) -> ModelConfig:
    """Return the configuration of a checkpoint directory.

    The end-of-sequence ids are those of generation_config.json if it names any. Raises UserError.
    """
    file = Path(path) / "config.json"
    config = config_from_hf(read_json(file), str(file))
    generation = file.with_name("generation_config.json")
    ids = _eos_ids(read_json(generation)) if generation.is_file() else ()
    return replace(config, eos_token_ids=ids or config.eos_token_ids)


def stored_dtype(path: str | Path) -> str | None:
    """Return the dtype of a checkpoint's weights, if its config.json says it."""
    config = read_json(Path(path) / "config.json")
    return config.get("dtype") or config.get("torch_dtype")


def stored_group(path: str | Path) -> int | None:
    """Return how many columns share a scale in a checkpoint of AutoAWQ, 0: all; None for another.

    Raises UserError for a form that is not read.
    """
    file = Path(path) / "config.json"
    return _awq_group(read_json(file), str(file))


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

    Raises UserError for one that is not a number.
    """
    file = Path(path) / "generation_config.json"
    stated = read_json(file) if file.is_file() else {}
    stated = stated if stated.get("do_sample") else {"temperature": 0.0}
    values = {"temperature": 1.0, "top_p": 1.0, "top_k": 0}
    for name in values:
        if (number := stated.get(name)) is not None:
            known = isinstance(number, int | float)
            require(known, f"{file}: {name} = {number!r}: expected a number")
            values[name] = number
    return values


def config_from_hf(data: Mapping[str, Any], source: str = "config.json") -> ModelConfig:
    """Return the configuration that config.json holds; `source` names it in messages.

    The rotary theta stands in it, or in the newer `rope_parameters`. Raises UserError for a field
    that is missing, malformed, or asks for what the decoder does not compute, such as YaRN.
    """
    rope = data.get("rope_scaling") or data.get("rope_parameters") or {}
    values = {name: supported[0] for name, supported in _SUPPORTED.items()} | _DEFAULTS
    values["num_key_value_heads"] = data.get("num_attention_heads")
    values |= {name: value for name, value in {**data, **rope}.items() if value is not None}
    if isinstance(stored := data.get("quantization_config"), Mapping):
        method = stored.get("quant_method")
        values["quantization_config"] = method if method == "awq" else stored.get("format", method)
        _awq_group(data, source)

    def check(holds, field, expected):
        require(holds, f"{source}: {field} = {values.get(field)!r}: expected {expected}")

    for field, supported in _SUPPORTED.items():
        check(values[field] in supported, field, " or ".join(map(repr, supported)))
    for field in fields(ModelConfig):
        if field.type in (int, float):
            number = values.get(field.name)
            positive = isinstance(number, int | float) and number > 0
            check(positive, field.name, "a positive number")
    values["eos_token_ids"] = _eos_ids(data)
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


def _eos_ids(data) -> tuple[int, ...]:
    ids = data.get("eos_token_id")
    return (ids,) if isinstance(ids, int) else tuple(ids or ())


PRESETS = {  # the published sizes, and nano
    name: config_from_hf(shape)
    for name, shape in read_toml(Path(__file__).with_name("presets.toml")).items()
}
