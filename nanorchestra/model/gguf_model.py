"""Presents a GGUF file as the Hugging Face directory that it was converted from.

`model.gguf/config.json` is a file that does not exist: its fields are made of the metadata, and so
are those of generation_config.json, tokenizer.json and tokenizer_config.json. What reads a
directory asks `has` and `read_model_object` for them.
Tensors have their Hugging Face names. llama.cpp's `convert_hf_to_gguf.py` is what is undone here.
"""

import json
import math
import os
import re
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from nanorchestra.errors import require
from nanorchestra.files import read_json, read_text
from nanorchestra.model.gguf_file import GgufFile, part_files
from nanorchestra.model.gguf_tokenizer import GgufTokenizer

ARCHITECTURES = "llama", "qwen2", "qwen3"
_MODULES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_MODULES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_FIELDS = {  # of config.json: keys of the metadata, behind the architecture
    "num_hidden_layers": "block_count",
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
}
_YARN = {
    "factor": "factor",
    "original_max_position_embeddings": "original_context_length",
    "beta_fast": "yarn_beta_fast",
    "beta_slow": "yarn_beta_slow",
}
_NOT_COMPUTED = {  # key -> the value with which the decoder is as usual
    "expert_count": 0,
    "attention.causal": True,
    "rope.scale_linear": 1.0,
    "rope.scaling.attn_factor": 1.0,
    "rope.scaling.yarn_attn_factor": 1.0,
    "rope.scaling.yarn_ext_factor": 1.0,
}
_SAMPLING = {"temperature": "temp", "top_p": "top_p", "top_k": "top_k"}  # general.sampling.*
# Of a file that does not say: what Qwen3's card asks for. Greedily, small models repeat themselves.
_UNSTATED_SAMPLING = {"temperature": 0.6, "top_p": 0.95, "top_k": 20}
_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
_ROPE_FACTORS = "rope_freqs.weight"
_LENGTH = 8192  # tokens; of llama3's scaling, where only the ratio to its two factors counts


def gguf_model(path: str | Path) -> "GgufModel | None":
    """Returns an open GGUF file; None for a directory or a path where no file is. UserError."""
    path = Path(path)
    if not path.is_file():
        return None
    states = []
    for part in part_files(path):
        state = os.stat(part) if part.exists() else None
        states.append(state and (state.st_ino, state.st_size, state.st_mtime_ns))
    return _opened(path, *states)


@lru_cache(1)
def _opened(path, *states) -> "GgufModel":
    """Opens a file once for its settings, tokenizer and weights; `states` tell a changed one."""
    return GgufModel(path)


def has(file: Path) -> bool:
    """Returns whether a model has a file, such as `x.gguf/tokenizer.json` or `x/tokenizer.json`."""
    model = gguf_model(file.parent)
    return os.path.lexists(file) if model is None else model.has(file.name)


def read_model_object(file: Path) -> dict[str, Any]:
    """Returns the JSON object of a model's file; that of a GGUF file is made of its metadata.

    UserError, which names the file.
    """
    model = gguf_model(file.parent)
    if model is None:
        _require_config(file)
        return read_json(file)
    return model.read(file.name)


def _require_config(file) -> None:
    """Raises UserError for a directory of GGUF files, which names them."""
    if file.name == "config.json" and not os.path.lexists(file):
        names = sorted(beside.name for beside in file.parent.glob("*.gguf"))
        require(not names, f"{file.parent}: holds GGUF files; give one of them: {', '.join(names)}")


def read_model_text(file: Path) -> str:
    """Returns the text of a model's file. UserError."""
    model = gguf_model(file.parent)
    if model is None:
        return read_text(file)
    return json.dumps(model.read(file.name), indent=2) + "\n"


class GgufModel:
    """A GGUF file with the names of a Hugging Face directory.

    `tensors` has what the file holds by its name in Hugging Face layout. UserError for an
    architecture or a tensor that the decoder does not have.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = GgufFile(path)
        self._metadata = self._file.metadata
        self._tokenizer = GgufTokenizer(self._file)
        self.architecture = self._metadata.get("general.architecture")
        served = " or ".join(map(repr, ARCHITECTURES))
        self._file.check(self.architecture in ARCHITECTURES, "general.architecture", served)
        self.tensors = {}
        for name, tensor in self._file.tensors.items():
            if name != _ROPE_FACTORS:
                self.tensors[self._hf_name(name)] = tensor
        self._files = {
            "config.json": self._config,
            "generation_config.json": self._generation_config,
        }
        if self._tokenizer.exists:
            self._files["tokenizer.json"] = self._tokenizer.tokenizer
            self._files["tokenizer_config.json"] = self._tokenizer.tokenizer_config

    def has(self, name: str) -> bool:
        """Returns whether the directory would have a file."""
        return name in self._files

    def read(self, name: str) -> dict[str, Any]:
        """Returns the JSON object of a file of the directory. UserError."""
        require(name in self._files, f"{self.path}: its metadata has nothing for a {name}")
        return self._files[name]()

    def array(self, name: str) -> np.ndarray:
        """Returns a tensor by its Hugging Face name, float32.

        The rows of a head's query and key lie in Llama's files as pairs that are turned together.
        Here the first halves of all pairs come before the second ones.
        """
        numbers = self.tensors[name].widened()
        if self.architecture != "llama" or ".self_attn." not in name:
            return numbers
        heads = self._key("attention.head_count")
        if ".k_proj." in name:
            heads = self._key("attention.head_count_kv", heads)
        elif ".q_proj." not in name:
            return numbers
        pairs = numbers.reshape(heads, -1, 2, *numbers.shape[1:])
        return pairs.swapaxes(1, 2).reshape(numbers.shape)

    def _hf_name(self, name) -> str:
        match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
        layer, module, kind = match.groups() if match else (None, None, None)
        names = _MODULES if layer is None else _LAYER_MODULES
        require(
            module in names,
            f"{self.path}: the tensor {name!r} is none that a decoder of the kind "
            f"{self.architecture} has here",
        )
        owner = "" if layer is None else f"model.layers.{layer}."
        return f"{owner}{names[module]}.{kind}"

    def _key(self, name, default=None) -> Any:
        """Returns the value of a key of the architecture, such as llama.block_count."""
        return self._metadata.get(f"{self.architecture}.{name}", default)

    def _check(self, holds, name, expected) -> None:
        self._file.check(holds, f"{self.architecture}.{name}", expected)

    def _config(self) -> dict[str, Any]:
        fields = {"model_type": self.architecture}
        for field, key in _FIELDS.items():
            fields[field] = self._key(key)
            self._check(fields[field] is not None, key, "a number")
        for key, usual in _NOT_COMPUTED.items():
            usual_here = self._key(key, usual) == usual
            self._check(usual_here, key, repr(usual))
        heads, width = fields["num_attention_heads"], fields["hidden_size"]
        fields["num_key_value_heads"] = self._key("attention.head_count_kv", heads)
        head_dim = self._key("attention.key_length", width // heads)
        values = self._key("attention.value_length", head_dim)
        self._check(values == head_dim, "attention.value_length", head_dim)
        turned = self._key("rope.dimension_count", head_dim)
        self._check(turned == head_dim, "rope.dimension_count", head_dim)
        embeddings = self.tensors.get("model.embed_tokens.weight")
        require(embeddings, f"{self.path}: the tensor 'token_embd.weight' is missing")
        fields |= {
            "head_dim": head_dim,
            "vocab_size": embeddings.shape[0],
            "tie_word_embeddings": "lm_head.weight" not in self.tensors,
            "rope_theta": self._key("rope.freq_base", 10_000.0),
            "eos_token_id": self._metadata.get("tokenizer.ggml.eos_token_id"),
            "bos_token_id": self._metadata.get("tokenizer.ggml.bos_token_id"),
        }
        types = {tensor.type.name for tensor in self.tensors.values() if len(tensor.shape) > 1}
        fields["dtype"] = _DTYPES.get(min(types)) if len(types) == 1 else None
        fields["rope_scaling"] = self._rope_scaling(fields)
        return fields

    def _rope_scaling(self, fields) -> dict[str, Any] | None:
        """Returns the field of config.json; another type than yarn is left to its reader."""
        scaling = self._key("rope.scaling.type", "none")
        factors = self._file.tensors.get(_ROPE_FACTORS)
        if factors is not None:
            self._check(scaling == "none", "rope.scaling.type", f"none beside {_ROPE_FACTORS}")
            return self._llama3_scaling(factors, fields["rope_theta"], fields["head_dim"])
        if scaling == "none":
            return None
        yarn = {field: self._key(f"rope.scaling.{key}") for field, key in _YARN.items()}
        return {"rope_type": scaling} | yarn

    def _llama3_scaling(self, stored, theta, head_dim) -> dict[str, Any] | None:
        """Returns the scaling of which `stored` has the divisor of each frequency."""
        scaling = None
        if stored.shape == (head_dim // 2,):
            factors = stored.widened().astype(np.float64)
            if (factors == 1).all():
                return None
            scaling = llama3_scaling(factors, theta)
        require(
            scaling,
            f"{self.path}: {_ROPE_FACTORS} of shape {list(stored.shape)} is not a scaling of "
            f"{head_dim} / 2 frequencies as Llama 3.1's",
        )
        return scaling

    def _generation_config(self) -> dict[str, Any]:
        ids = self._tokenizer.ending_ids() if self._tokenizer.exists else []
        stated = {}
        for field, key in _SAMPLING.items():
            value = self._metadata.get(f"general.sampling.{key}")
            if value is not None:
                stated[field] = value
        return {"eos_token_id": ids, "do_sample": True} | (stated or _UNSTATED_SAMPLING)


def llama3_scaling(factors: np.ndarray, theta: float) -> dict[str, Any] | None:
    """Returns the field rope_scaling that divides frequencies of `theta` by `factors` [D / 2].

    None if llama3's formula (`rope.py`) does not give them. It keeps a share of each frequency,
    which grows with its turns in _LENGTH tokens: two pairs on that slope give the line. With fewer
    of them the published one is tried, from 1 to 4 turns.
    """
    if factors.min() < 0.999 or factors.max() <= 1:
        return None
    factor = float(str(np.float32(factors.max())))
    turns = _LENGTH * theta ** (-np.arange(len(factors)) / len(factors)) / (2 * math.pi)
    kept = (1 / factors - 1 / factor) / (1 - 1 / factor)
    slope = (kept > 0.001) & (kept < 0.999)
    lines = [(1.0, 4.0)]
    if slope.sum() > 1:
        rise, begin = np.polyfit(turns[slope], kept[slope], 1)
        low = -begin / rise
        lines.append((round(float(low), 3), round(float(low + 1 / rise), 3)))
    for low, high in lines:
        share = ((turns - low) / (high - low)).clip(0, 1)
        if 0 < low < high and np.allclose(1 / factors, (1 - share) / factor + share, rtol=1e-4):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": low,
                "high_freq_factor": high,
                "original_max_position_embeddings": _LENGTH,
            }
    return None
