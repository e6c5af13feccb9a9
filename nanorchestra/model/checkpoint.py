"""Reads and writes a model as a directory in Hugging Face layout, the one form the core knows.

config.json is a ModelConfig, the weights are in safetensors, generation_config.json has how to
sample. Three values of model_type are read: qwen3, qwen2 (Qwen2 and Qwen2.5) and llama.
The model holds q, k, v and gate, up as one matrix each, so a checkpoint's tensors are row ranges of
its parameters (`hf_rows`). Loading holds one tensor at a time and rounds it at once if the model is
quantised; saving holds one shard.
"""

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from nanorchestra.errors import UserError, require
from nanorchestra.files import read_json, read_toml, replace_directory
from nanorchestra.model.native import PackedLinear
from nanorchestra.model.quantise import FourBit, QuantisedLinear, linears, quantise_model
from nanorchestra.model.qwen3 import ModelConfig, Qwen3
from nanorchestra.model.rope import (
    Llama3Scaling,
    RopeScaling,
    YarnScaling,
    yarn_attention_factor,
)
from nanorchestra.model.sharded import fill, is_sharded, local, whole
from nanorchestra.model.tokenizer import Tokenizer

NANO = Path(__file__).resolve().parents[2] / "assets" / "nano"  # the bundled checkpoint
NANO_BASE = NANO.with_name("base")  # what it was before GRPO
CONFIG, GENERATION = "config.json", "generation_config.json"
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
SHARD_BYTES = 5_000_000_000  # the most in one file
OWN_FORM = QuantisedLinear, PackedLinear  # they hold a matrix in a form of their own, in memory
BASE = ".base"  # in the name of a matrix that has an adapter


@dataclass(frozen=True)
class Kind:
    """The class of transformers that a model_type means, and its switches of ModelConfig."""

    architecture: str
    qk_norm: bool
    attention_bias: bool


KINDS = {
    "qwen3": Kind("Qwen3ForCausalLM", qk_norm=True, attention_bias=False),
    "qwen2": Kind("Qwen2ForCausalLM", qk_norm=False, attention_bias=True),
    "llama": Kind("LlamaForCausalLM", qk_norm=False, attention_bias=False),
}
# What Hugging Face calls a module of a layer, where it has another name or several modules.
HF_MODULES = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
    "down_proj": ("mlp.down_proj",),
}
DEFAULTS = {  # of transformers
    "max_position_embeddings": 32768,
    "rope_theta": 10_000.0,
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
}


def load_checkpoint(
    directory: str | Path,
    device: str = "cpu",
    dtype: str | None = "float32",
    quantise: str | None = None,
    build: Callable[[ModelConfig], Qwen3] = Qwen3,
    tensors: Iterable[tuple[str, Tensor | FourBit]] | None = None,
) -> tuple[Qwen3, Tokenizer | None]:
    """Returns the model of a directory and its tokenizer, None without tokenizer.json.

    `quantise`, "int8" or "int4", rounds the matrices as they are read; "int4" takes FourBit ones as
    they are. `build` makes the model without memory; dtype None keeps the dtypes it chooses.
    `tensors`: the weights by their names of Hugging Face, where the directory has them in another
    form. Raises UserError if a file or a tensor is missing, or has another shape.
    """
    directory = Path(directory)
    config = read_config(directory)
    tokenizer = None
    if (directory / "tokenizer.json").exists():
        tokenizer = Tokenizer.from_dir(directory)
    with torch.device("meta"):
        model = build(config)
    if dtype is not None:
        model.to(getattr(torch, dtype))
    if quantise:
        quantise_model(model, quantise, stored_group(directory))
    _check_memory(model, torch.device(device), directory)

    def empty(x):  # as to_empty does, but empty_like imports sympy: 0.3 s
        if is_sharded(x):
            return torch.empty_like(x, device=device)
        return torch.empty(x.shape, dtype=x.dtype, device=device)

    model._apply(empty)
    if tensors is None:
        tensors = stored_tensors(directory)
    copy_weights(model, tensors, str(directory))
    return model, tokenizer


def save_checkpoint(
    model: Qwen3,
    tokenizer: Tokenizer | None,
    path: str | Path,
    *,
    dtype: torch.dtype | None = None,
    write: bool = True,
) -> None:
    """Writes a directory that transformers loads in `dtype`, the model's own by default.

    It replaces `path` as a whole. All ranks of a sharded model call this, one of them with `write`.
    Raises UserError if `path` cannot be written or the model is quantised.
    """
    dtype = dtype or model.embed_tokens.weight.dtype
    tensors = named_hf_tensors(model, dtype)
    if not write:
        for _ in tensors:  # takes part in gathering them
            pass
        return
    config = config_to_hf(model.config) | {"dtype": str(dtype).removeprefix("torch.")}
    eos = list(model.config.eos_token_ids)
    with replace_directory(path) as directory:
        write_json(directory / CONFIG, config)
        if eos:
            write_json(directory / GENERATION, {"eos_token_id": eos})
        write_shards(directory, tensors)
        if tokenizer is not None:
            tokenizer.save(directory)


# The configuration.


def read_config(directory: str | Path) -> ModelConfig:
    """Returns the configuration of a directory; UserError for what the decoder does not compute."""
    file = Path(directory) / CONFIG
    config = config_from_hf(read_json(file), str(file))
    return replace(config, eos_token_ids=stated_eos_ids(directory))


def stated_eos_ids(directory: str | Path) -> tuple[int, ...]:
    """Returns the end-of-sequence ids of generation_config.json, or else those of config.json."""
    for name in (GENERATION, CONFIG):
        file = Path(directory) / name
        ids = _eos_ids(read_json(file).get("eos_token_id") if file.exists() else None)
        if ids:
            return ids
    return ()


def config_from_hf(data: Mapping[str, Any], source: str = CONFIG) -> ModelConfig:
    """Returns the configuration that config.json holds; `source` names it in messages.

    The rotation stands in `rope_theta` and `rope_scaling`, or in the newer `rope_parameters`. With
    YaRN, max_position_embeddings is the extended length. UserError.
    """
    stated = {name: value for name, value in data.items() if value is not None}
    model_type = stated.get("model_type")
    kinds = " or ".join(map(repr, KINDS))
    require(model_type in KINDS, f"{source}: model_type = {model_type!r}: expected {kinds}")
    activation = stated.get("hidden_act", "silu")
    require(activation == "silu", f"{source}: hidden_act = {activation!r}: expected 'silu'")
    window = stated.get("use_sliding_window", False)
    require(not window, f"{source}: use_sliding_window = {window!r}: expected false")

    kind, values = KINDS[model_type], DEFAULTS | stated
    try:
        heads = values["num_attention_heads"]
        values.setdefault("num_key_value_heads", heads)
        values.setdefault("head_dim", values["hidden_size"] // heads)
        stated_rope = stated.get("rope_scaling") or stated.get("rope_parameters") or {}
        rope = {name: value for name, value in stated_rope.items() if value is not None}
        values["rope_theta"] = rope.get("rope_theta", values["rope_theta"])
        values["rope"] = _rope_scaling(rope, values["max_position_embeddings"], source)
        if isinstance(values["rope"], YarnScaling):
            extended = int(values["rope"].factor * values["rope"].original_max_position_embeddings)
            values["max_position_embeddings"] = max(values["max_position_embeddings"], extended)
        values["qk_norm"], values["attention_bias"] = kind.qk_norm, kind.attention_bias
        values["eos_token_ids"] = _eos_ids(stated.get("eos_token_id"))
        return ModelConfig(**{field.name: values[field.name] for field in fields(ModelConfig)})
    except KeyError as error:
        raise UserError(f"{source}: has no {error.args[0]}") from None


def _rope_scaling(rope, length, source) -> RopeScaling | None:
    """Returns the scaling of the rotary frequencies; `length` is the original one if none is said.

    Before rope_type, the field was called type.
    """
    rope_type = rope.get("rope_type") or rope.get("type") or "default"
    length = rope.get("original_max_position_embeddings", length)
    if rope_type == "default":
        return None
    if rope_type == "llama3":
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        return Llama3Scaling(rope["factor"], low, high, length)
    expected = "'default' or 'llama3' or 'yarn'"
    require(rope_type == "yarn", f"{source}: rope_type = {rope_type!r}: expected {expected}")
    return YarnScaling(
        rope["factor"],
        length,
        rope.get("attention_factor", yarn_attention_factor(rope["factor"])),
        rope.get("beta_fast", 32.0),
        rope.get("beta_slow", 1.0),
        rope.get("truncate", True),
    )


def _eos_ids(stated) -> tuple[int, ...]:
    if stated is None:
        return ()
    return tuple(stated) if isinstance(stated, list) else (stated,)


def config_to_hf(config: ModelConfig) -> dict[str, Any]:
    """Returns the contents of a config.json that transformers loads as the class that fits."""
    values = asdict(config)
    switches = values.pop("qk_norm"), values.pop("attention_bias")
    eos = list(values.pop("eos_token_ids"))
    del values["rope"]
    if config.rope is not None:
        values["rope_scaling"] = {"rope_type": config.rope.rope_type} | asdict(config.rope)
    for model_type, kind in KINDS.items():
        if (kind.qk_norm, kind.attention_bias) == switches:
            values |= {"architectures": [kind.architecture], "model_type": model_type}
    return values | {"eos_token_id": eos[0] if len(eos) == 1 else eos or None}


def stored_dtype(directory: str | Path) -> str | None:
    """Returns the dtype of the stored weights, if config.json says it."""
    config = read_json(Path(directory) / CONFIG)
    return config.get("dtype") or config.get("torch_dtype")


def stored_group(directory: str | Path) -> int | None:
    """Returns how many columns share a scale in weights that are stored in few bits, else None."""
    stored = read_json(Path(directory) / CONFIG).get("quantization_config") or {}
    return stored.get("group_size")


def read_sampling(directory: str | Path) -> dict[str, float]:
    """Returns temperature, top_p and top_k of generation_config.json; greedy if not do_sample."""
    stated = _generation(directory)
    if not stated.get("do_sample"):
        stated = {"temperature": 0.0}
    values = {"temperature": 1.0, "top_p": 1.0, "top_k": 0}
    return values | {name: stated[name] for name in values if stated.get(name) is not None}


def _generation(directory) -> dict[str, Any]:
    """Returns the contents of generation_config.json, {} without one."""
    file = Path(directory) / GENERATION
    return read_json(file) if file.exists() else {}


# The weights.


def stored_tensors(directory: Path) -> Iterator[tuple[str, Tensor]]:
    """Yields (name, tensor) of a directory, one at a time.

    A bare backbone, such as Qwen3-Embedding, has names without their first "model". The rotary
    frequencies that old Llama checkpoints hold are left out. UserError for a file that is missing.
    """
    files = {SINGLE}
    if (directory / INDEX).exists():
        files = set(read_json(directory / INDEX)["weight_map"].values())
    for file in sorted(files):
        with open_tensors(directory / file) as shard:
            for name in shard.keys():  # noqa: SIM118
                if name.endswith("rotary_emb.inv_freq"):
                    continue
                bare = not name.startswith(("model.", "lm_head."))
                yield f"model.{name}" if bare else name, shard.get_tensor(name)


def open_tensors(file: Path) -> Any:
    """Returns an open safetensors file. UserError if it is missing or not whole."""
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(
            f"{file}: not a whole safetensors file ({reason}); is the download complete?"
        ) from error


@dataclass
class Target:
    """Where a tensor goes: these rows of each holder, a parameter or a module that is no nn.Linear.

    Tied embeddings go to two holders in a packed model.
    """

    shape: list[int]
    rows: slice
    holders: list[Any]


def copy_weights(
    model: Qwen3, tensors: Iterable[tuple[str, Tensor | FourBit]], source: str = "new weights"
) -> None:
    """Overwrites all weights in place from (HF name, tensor) pairs of any float dtype and device.

    A quantised model rounds them to its own bits and groups. Raises UserError, which begins with
    `source`, for a name or shape that the model does not have, and for a parameter that is not
    among the pairs.
    """
    targets = {}
    for name, holder, (count, *columns) in _holders(model):
        for part, rows in hf_rows(model.config, name, count):
            shape = [rows.stop - rows.start, *columns]
            targets.setdefault(part, Target(shape, rows, [])).holders.append(holder)
    missing = set(targets)
    for name, tensor in tensors:
        if name == "lm_head.weight" and name not in targets:
            continue  # tied: the same matrix comes as the embeddings
        target, shape = targets.get(name), list(tensor.shape)
        require(target, f"{source}: {name}: the model has no such tensor")
        require(
            shape == target.shape, f"{source}: {name} has shape {shape}; expected {target.shape}"
        )
        for holder in target.holders:
            if isinstance(holder, Tensor):
                values = tensor.widened() if isinstance(tensor, FourBit) else tensor
                fill(holder, values, target.rows.start)
            else:
                holder.write(target.rows, tensor)
        missing.discard(name)
    if missing:
        name = min(missing)
        raise UserError(f"{source}: {name} of shape {targets[name].shape} is missing")


def named_hf_tensors(
    model: Qwen3, dtype: torch.dtype | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yields (HF name, tensor) of every parameter, without gradient, cast to dtype if given.

    The tensors are views: writing to them writes to the model. Two exceptions are copies: a matrix
    with an adapter (lora.py) is merged, and a sharded one is gathered, so all ranks must iterate
    together. Raises UserError for a quantised model without adapters and a packed one.
    """
    adapted = all(name.endswith(BASE) for name, _ in linears(model, OWN_FORM))
    require(adapted, "a quantised or packed model can be neither trained nor saved")
    for name, holder, shape in _holders(model):
        parts = hf_rows(model.config, name, shape[0])
        if name.endswith(f"{BASE}.weight"):
            holder = model.get_submodule(name.removesuffix(f"{BASE}.weight")).merged()
        if parts:
            tensor = whole(holder, dtype)
            for part, rows in parts:
                yield part, tensor[rows]


def _holders(model) -> Iterator[tuple[str, Any, list[int]]]:
    """Yields (name, holder, shape) of what holds weights: parameters, and matrices as OWN_FORM."""
    for name, parameter in model.named_parameters():
        yield name, parameter, list(parameter.shape)
    for name, module in linears(model, OWN_FORM):
        if name == "lm_head" and model.config.tie_word_embeddings:
            name = "embed_tokens"
        yield f"{name}.weight", module, [module.out_features, module.in_features]


def hf_rows(config: ModelConfig, name: str, rows: int) -> list[tuple[str, slice]]:
    """Returns the HF names of one parameter and the rows that each has; none for an adapter.

    "layers.0.gate_up_proj.weight" holds rows of model.layers.0.mlp.gate_proj.weight, then of
    up_proj.
    """
    if name.endswith("norm"):
        name += ".weight"
    *owner, module, tensor = name.replace(f"{BASE}.", ".").split(".")  # tensor: "weight" or "bias"
    if tensor in ("lora_a", "lora_b"):
        return []
    root = [] if module == "lm_head" else ["model"]
    parts = HF_MODULES.get(module, (module,))
    counts = [rows // len(parts)] * len(parts)
    if module == "qkv_proj":
        kv_rows = config.num_key_value_heads * config.head_dim
        counts = [config.num_attention_heads * config.head_dim, kv_rows, kv_rows]
    ranges = []
    begin = 0
    for part, count in zip(parts, counts, strict=True):
        ranges.append((".".join([*root, *owner, part, tensor]), slice(begin, begin + count)))
        begin += count
    return ranges


def _check_memory(model, device, directory) -> None:
    """Raises UserError if the model, not allocated yet, is larger than the device's memory."""
    tensors = [*model.parameters(), *model.buffers()]
    needed = sum(local(x).numel() * x.element_size() for x in tensors)  # on this rank
    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory
    else:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    gigabytes = f"{needed / 1e9:.1f} GB here; {device} has {memory / 1e9:.1f} GB"
    require(needed <= memory, f"{directory}: its weights take {gigabytes}")


def write_shards(directory: Path, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Writes (name, tensor) pairs to one file, or to numbered shards and their index."""
    weight_map = {}
    total = 0
    for number, shard in enumerate(_shards(tensors), 1):
        file = f"model-{number:05d}.safetensors"
        try:
            save_file(shard, directory / file, {"format": "pt"})
        except SafetensorError as error:  # a full disk, for replace_directory to tell
            raise OSError(str(error)) from error
        (directory / file).chmod(0o644)  # save_file lets its owner alone read it
        weight_map |= dict.fromkeys(shard, file)
        total += sum(tensor.nbytes for tensor in shard.values())
    if number == 1:
        (directory / file).rename(directory / SINGLE)
    else:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        write_json(directory / INDEX, index)


def _shards(tensors) -> Iterator[dict[str, Tensor]]:
    """Yields the contents of each shard, which are dropped when the next one is asked for."""
    shard = {}
    size = 0
    for name, tensor in tensors:
        if shard and size + tensor.nbytes > SHARD_BYTES:
            yield shard
            shard.clear()
            size = 0
        shard[name] = tensor.cpu().contiguous()
        size += tensor.nbytes
    yield shard


def write_json(file: Path, data: Any) -> None:
    """Writes a JSON file as Hugging Face does."""
    file.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")


PRESETS = {  # the published sizes, and nano
    name: config_from_hf(shape)
    for name, shape in read_toml(Path(__file__).with_name("presets.toml")).items()
}
