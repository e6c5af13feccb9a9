"""Reads the configuration of a decoder from config.json in Hugging Face layout, and writes one.

A GGUF file stands for a directory here: its metadata has the fields of its files.
Three values of model_type are read: qwen3, qwen2 (Qwen2 and Qwen2.5) and llama. Fields that are
missing have transformers' defaults. What the decoder does not compute is refused.
"""

import reprlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from nanorchestra.errors import UserError, require
from nanorchestra.files import read_toml
from nanorchestra.model.gguf_model import has, read_model_object
from nanorchestra.model.qwen3 import ModelConfig
from nanorchestra.model.rope import (
    Llama3Scaling,
    RopeScaling,
    YarnScaling,
    yarn_attention_factor,
)

GENERATION = "generation_config.json"


@dataclass(frozen=True)
class _Kind:
    """What a model_type stands for: a class of transformers, its switches, its own defaults."""

    architecture: str
    qk_norm: bool
    attention_bias: bool
    max_position_embeddings: int
    head_dim: int | None = None  # None: hidden_size / num_attention_heads
    eos_token_id: int | None = None


_KINDS = {
    "qwen3": _Kind("Qwen3ForCausalLM", True, False, max_position_embeddings=32768, head_dim=128),
    "qwen2": _Kind("Qwen2ForCausalLM", False, True, max_position_embeddings=32768),
    "llama": _Kind("LlamaForCausalLM", False, False, max_position_embeddings=2048, eos_token_id=2),
}
# field: the values that the decoder computes; the first is the default
_SUPPORTED = {
    "hidden_act": ("silu",),
    "use_sliding_window": (False,),
    "tie_word_embeddings": (False, True),
    "partial_rotary_factor": (1.0,),
    "quantization_config": (None, "awq"),
}
_NEEDED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
)
MODEL_TYPES = tuple(_KINDS)  # also the names of GGUF architectures
_ROPE_TYPES = "default", "llama3", "yarn"
_DEFAULTS = {"rope_theta": 10_000.0, "rms_norm_eps": 1e-6, "initializer_range": 0.02}


def read_config(path: str | Path) -> ModelConfig:
    """Returns the configuration of a checkpoint directory or a GGUF file.

    The end-of-sequence ids are those of generation_config.json if it names any. Raises UserError.
    """
    file = Path(path) / "config.json"
    config = config_from_hf(read_model_object(file), str(file))
    ids = _eos_ids(_generation(path).get("eos_token_id"))
    return replace(config, eos_token_ids=ids or config.eos_token_ids)


def stored_dtype(path: str | Path) -> str | None:
    """Returns the dtype of a checkpoint's weights, if its config.json says it."""
    config = read_model_object(Path(path) / "config.json")
    return config.get("dtype") or config.get("torch_dtype")


def stored_group(path: str | Path) -> int | None:
    """Returns how many columns share a scale in a checkpoint of AutoAWQ, 0: all; None for another.

    Raises UserError for a form that is not read.
    """
    file = Path(path) / "config.json"
    return _awq_group(read_model_object(file), str(file))


def _awq_group(data, source) -> int | None:
    """Version "gemm" alone is read, in 4 bits."""
    stored = data.get("quantization_config")
    if not isinstance(stored, Mapping) or stored.get("quant_method") != "awq":
        return None
    version, bits = stored.get("version", stored.get("format", "gemm")), stored.get("bits")
    gemm = str(version).lower() == "gemm"
    _expect(gemm, source, "quantization_config.version", version, "'gemm'")
    _expect(bits == 4, source, "quantization_config.bits", bits, "4")
    return max(stored.get("group_size", 128), 0)  # -1: all columns


def read_sampling(path: str | Path) -> dict[str, float]:
    """Returns temperature, top_p and top_k of generation_config.json; greedy if not do_sample."""
    stated = _generation(path)
    if not stated.get("do_sample"):
        stated = {"temperature": 0.0}
    values = {"temperature": 1.0, "top_p": 1.0, "top_k": 0}
    return values | {name: stated[name] for name in values if stated.get(name) is not None}


def _generation(path) -> dict[str, Any]:
    """Returns the contents of generation_config.json, {} without one."""
    file = Path(path) / GENERATION
    return read_model_object(file) if has(file) else {}


def config_from_hf(data: Mapping[str, Any], source: str = "config.json") -> ModelConfig:
    """Returns the configuration that config.json holds; `source` names it in messages.

    The rotation stands in `rope_theta` and `rope_scaling`, or in the newer `rope_parameters`. With
    YaRN, max_position_embeddings is the extended length. Raises UserError for a field that is
    missing, or asks for what the decoder does not compute.
    """
    stated = {name: value for name, value in data.items() if value is not None}
    rope = stated.get("rope_scaling") or stated.get("rope_parameters") or {}
    model_type = stated.get("model_type", "qwen3")
    _expect(model_type in _KINDS, source, "model_type", model_type, " or ".join(map(repr, _KINDS)))
    kind = _KINDS[model_type]

    values = {name: supported[0] for name, supported in _SUPPORTED.items()} | _DEFAULTS
    values["max_position_embeddings"] = kind.max_position_embeddings
    values["num_key_value_heads"] = stated.get("num_attention_heads")
    values |= stated
    for name in ("rope_theta", "partial_rotary_factor"):
        if rope.get(name) is not None:
            values[name] = rope[name]
    stored = stated.get("quantization_config")
    if isinstance(stored, Mapping):
        values["quantization_config"] = stored.get("quant_method")
        _awq_group(data, source)

    for field, supported in _SUPPORTED.items():
        holds = values[field] in supported
        _expect(holds, source, field, values[field], " or ".join(map(repr, supported)))
    for field in _NEEDED:
        _expect(values.get(field) is not None, source, field, None, "a number")
    _check_biases(model_type, values, source)
    values["qk_norm"], values["attention_bias"] = kind.qk_norm, kind.attention_bias
    if values.get("head_dim") is None:
        head_dim = kind.head_dim or values["hidden_size"] // values["num_attention_heads"]
        values["head_dim"] = head_dim
    values["rope"] = _rope_scaling(rope, values, source)
    if isinstance(values["rope"], YarnScaling):
        extended = values["rope"].factor * values["rope"].original_max_position_embeddings
        values["max_position_embeddings"] = max(values["max_position_embeddings"], int(extended))
    values["eos_token_ids"] = _eos_ids(data.get("eos_token_id", kind.eos_token_id))
    return ModelConfig(**{field.name: values[field.name] for field in fields(ModelConfig)})


def _check_biases(model_type, values, source) -> None:
    """Raises UserError for biases that the decoder does not compute.

    attention_bias of Qwen3 and Llama is one on o_proj too. Qwen2 has none there, whatever its
    configuration says.
    """
    refused = {"qwen3": ["attention_bias"], "qwen2": [], "llama": ["attention_bias", "mlp_bias"]}
    for field in refused[model_type]:
        value = values.get(field, False)
        matrices = "o_proj" if field == "attention_bias" else "gate_proj, up_proj and down_proj"
        expected = f"false; the decoder has no bias on {matrices}"
        _expect(value is False, source, field, value, expected)


def _rope_scaling(rope, values, source) -> RopeScaling | None:
    """Returns the scaling of the rotary frequencies that `rope` states.

    The original length is max_position_embeddings if it is not stated. Before rope_type, the field
    was called type.
    """
    rope_type = rope.get("rope_type") or rope.get("type") or "default"
    is_computed = rope_type in _ROPE_TYPES
    _expect(is_computed, source, "rope_type", rope_type, " or ".join(map(repr, _ROPE_TYPES)))
    if rope_type == "default":
        return None
    length = values.get("original_max_position_embeddings")  # beside the scaling, as Phi has it
    if length is None:
        length = rope.get("original_max_position_embeddings")
    if length is None:
        length = values["max_position_embeddings"]

    def number(field, default=None) -> float:
        value = default if rope.get(field) is None else rope[field]
        _expect(value is not None, source, f"rope_scaling.{field}", value, "a number")
        return float(value)

    if rope_type == "llama3":
        low, high = number("low_freq_factor"), number("high_freq_factor")
        return Llama3Scaling(number("factor"), low, high, length)
    factor = number("factor", values["max_position_embeddings"] / length)
    return YarnScaling(
        factor,
        length,
        number("attention_factor", yarn_attention_factor(factor)),
        number("beta_fast", 32.0),
        number("beta_slow", 1.0),
        rope.get("truncate", True),
    )


def config_to_hf(config: ModelConfig) -> dict[str, Any]:
    """Returns the contents of a config.json that transformers loads as the class that fits.

    Raises UserError for a combination of switches that no class has.
    """
    values = asdict(config)
    switches = values.pop("qk_norm"), values.pop("attention_bias")
    eos = list(values.pop("eos_token_ids"))
    del values["rope"]
    if config.rope is not None:
        values["rope_scaling"] = {"rope_type": config.rope.rope_type} | asdict(config.rope)
    for model_type, kind in _KINDS.items():
        if (kind.qk_norm, kind.attention_bias) == switches:
            return values | {
                "architectures": [kind.architecture],
                "model_type": model_type,
                "eos_token_id": eos[0] if len(eos) == 1 else eos or None,
            }
    raise UserError(
        f"qk_norm = {config.qk_norm}, attention_bias = {config.attention_bias}: config.json has no "
        "model_type for both; expected at most one of them"
    )


def _eos_ids(stated) -> tuple[int, ...]:
    if stated is None:
        return ()
    return tuple(stated) if isinstance(stated, list) else (stated,)


def _expect(holds, source, field, value, expected) -> None:
    """UserError, which names the file, the field, its value and what would be right."""
    require(holds, f"{source}: {field} = {reprlib.repr(value)}: expected {expected}")


PRESETS = {  # the published sizes, and nano
    name: config_from_hf(shape)
    for name, shape in read_toml(Path(__file__).with_name("presets.toml")).items()
}
