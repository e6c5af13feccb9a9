"""Loads a checkpoint in Hugging Face layout or GGUF; copies weights in and out by their HF names.

The model holds q, k, v and gate, up as one matrix each. Only this file knows their HF names, which
are row ranges of the fused matrices (PARTS). Loading holds one tensor at a time, and rounds it at
once if the model is quantised. saving.py writes checkpoints.
"""

import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nanorchestra.errors import UserError, require
from nanorchestra.files import SUMS, check_sums, is_file_name, read_object, read_sums
from nanorchestra.model.awq import FourBit, decompressed
from nanorchestra.model.gguf_model import gguf_model, has
from nanorchestra.model.hf_config import read_config, stored_group
from nanorchestra.model.hub import local_model
from nanorchestra.model.native import PackedLinear
from nanorchestra.model.quantise import QuantisedLinear, linears, quantise_model
from nanorchestra.model.qwen3 import ModelConfig, Qwen3
from nanorchestra.model.sharded import fill, is_sharded, local, whole
from nanorchestra.model.tensor_files import GgufTensors, open_tensors
from nanorchestra.model.tokenizer import Tokenizer

# Module of a checkpoint -> ours, and which of its rows: part_rows counts them. Parts lie in this
# order. Other modules have the same name here and there.
PARTS = {
    "q_proj": ("qkv_proj", "q"),
    "k_proj": ("qkv_proj", "k"),
    "v_proj": ("qkv_proj", "v"),
    "mlp.gate_proj": ("gate_up_proj", "gate"),
    "mlp.up_proj": ("gate_up_proj", "up"),
    "mlp.down_proj": ("down_proj", "down"),
}
STORED = QuantisedLinear, PackedLinear  # they hold a matrix in a form of their own
BASE = ".base"  # in the name of a matrix that has an adapter
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
)
SLACK = 4  # times what the files hold is far more


@dataclass(frozen=True)
class Target:
    """Rows of a parameter, or of a module that holds its matrix in a form of its own."""

    holder: Tensor | QuantisedLinear | PackedLinear
    rows: slice

    def write(self, weight: Tensor | FourBit) -> None:
        """Overwrites the rows by a checkpoint's tensor of their shape."""
        if not isinstance(self.holder, Tensor):
            self.holder.write(self.rows, weight)
            return
        if isinstance(weight, FourBit):
            weight = weight.widened()
        fill(self.holder, weight, self.rows.start)


@dataclass
class Slot:
    """Where one tensor of a checkpoint goes. Tied embeddings go to two places in a packed model."""

    shape: list[int]
    targets: list[Target] = field(default_factory=list)


def load_model(
    path: str | Path,
    device: str = "cpu",
    dtype: str | None = "float32",
    quantise: str | None = None,
    build: Callable[[ModelConfig], Qwen3] = Qwen3,
) -> tuple[Qwen3, Tokenizer | None]:
    """Returns the model of a checkpoint and its tokenizer, None without tokenizer.json.

    `path` is a directory, a GGUF file or any other word that hub.local_model takes, such as
    "Qwen/Qwen3-0.6B". `quantise`, "int8" or "int4", rounds the matrices as they are read; "int4"
    holds those of AutoAWQ as they are stored, else they are widened. `build` makes the model
    without memory; dtype None keeps the dtypes it chooses. Raises UserError for anything wrong with
    the checkpoint.
    """
    path = local_model(path)
    if os.path.lexists(path / SUMS):
        check_saved(path)
    config = read_config(path)
    shards = _open_shards(path)
    _check_sizes(config, shards, path)
    tokenizer = None
    if has(path / "tokenizer.json"):
        tokenizer = Tokenizer.from_dir(path)
        require(
            tokenizer.vocab_size <= config.vocab_size,
            f"{path / 'tokenizer.json'}: has ids up to {tokenizer.vocab_size - 1}; the model's "
            f"vocab_size is {config.vocab_size}",
        )
    with torch.device("meta"):
        model = build(config)
    if dtype is not None:
        model.to(getattr(torch, dtype))
    if quantise:
        quantise_model(model, quantise, stored_group(path))
    _check_memory(model, torch.device(device), path)

    def empty(x):  # as to_empty does, but empty_like imports sympy: 0.3 s
        if is_sharded(x):
            return torch.empty_like(x, device=device)
        return torch.empty(x.shape, dtype=x.dtype, device=device)

    model._apply(empty)
    copy_weights(model, _stored(shards, path), str(path))
    return model, tokenizer


def copy_weights(
    model: Qwen3, tensors: Iterable[tuple[str, Tensor | FourBit]], source: str = "new weights"
) -> None:
    """Overwrites all weights in place from (HF name, tensor) pairs of any float dtype and device.

    A quantised model rounds them to its own bits and groups. Raises UserError, which begins with
    `source`, for a name or shape that the model does not have, and for a parameter that is not
    among the pairs.
    """
    slots = hf_slots(model)
    missing = set(slots)
    for name, tensor in tensors:
        if name == "lm_head.weight" and name not in slots:
            continue  # tied: the same matrix comes as the embeddings
        shape, expected = list(tensor.shape), slots[name].shape if name in slots else "no tensor"
        require(shape == expected, f"{source}: {name} has shape {shape}; expected {expected}")
        for target in slots[name].targets:
            target.write(tensor)
        missing.discard(name)
    if missing:
        name = min(missing)
        raise UserError(f"{source}: {name} of shape {slots[name].shape} is missing")


def named_hf_tensors(
    model: Qwen3, dtype: torch.dtype | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yields (HF name, tensor) of every parameter, without gradient, cast to dtype if given.

    The tensors are views: writing to them writes to the model. Two exceptions are copies: a matrix
    with an adapter (lora.py) is merged, and a sharded one is gathered, so all ranks must iterate
    together. Raises UserError for a quantised model without adapters and a packed one.
    """
    held = linears(model, STORED)
    adapted = all(name.endswith(BASE) for name, _ in held)
    require(adapted, "a quantised or packed model can be neither trained nor saved")
    for name, parameter in model.named_parameters():
        parts = hf_rows(model.config, name, len(parameter))
        if not parts:
            continue
        if name.endswith(f"{BASE}.weight"):
            adapter = model.get_submodule(name.removesuffix(f"{BASE}.weight"))
            parameter = adapter.merged()
        tensor = whole(parameter, dtype)
        for part, rows in parts:
            yield part, tensor[rows]
    for name, module in held:
        matrix = whole(model.get_submodule(name.removesuffix(BASE)).merged(), dtype)
        for part, rows in hf_rows(model.config, f"{name}.weight", module.out_features):
            yield part, matrix[rows]


def hf_slots(model: Qwen3) -> dict[str, Slot]:
    """Returns where each HF tensor goes."""
    slots = {}
    for name, parameter in model.named_parameters():
        for part, rows in hf_rows(model.config, name, len(parameter)):
            shape = [rows.stop - rows.start, *parameter.shape[1:]]
            slots[part] = Slot(shape, [Target(parameter, rows)])
    for name, module in linears(model, STORED):
        if name == "lm_head" and model.config.tie_word_embeddings:
            name = "embed_tokens"
        for part, rows in hf_rows(model.config, f"{name}.weight", module.out_features):
            shape = [rows.stop - rows.start, module.in_features]
            slots.setdefault(part, Slot(shape)).targets.append(Target(module, rows))
    return slots


def part_rows(config: ModelConfig) -> dict[str, int]:
    """Returns how many output rows each of PARTS has."""
    return {
        "q": config.num_attention_heads * config.head_dim,
        "k": config.num_key_value_heads * config.head_dim,
        "v": config.num_key_value_heads * config.head_dim,
        "gate": config.intermediate_size,
        "up": config.intermediate_size,
        "down": config.hidden_size,
    }


def hf_rows(config: ModelConfig, name: str, rows: int) -> list[tuple[str, slice]]:
    """Returns the HF names of one parameter and the rows that each has; none for an adapter."""
    if name.endswith("norm"):
        name += ".weight"
    name = name.replace(f"{BASE}.", ".")
    *owner, module, kind = name.split(".")  # kind: "weight" or "bias"
    if kind in ("lora_a", "lora_b"):
        return []
    if module == "lm_head":
        return [(name, slice(0, rows))]
    counts = part_rows(config)
    parts = []
    begin = 0
    for hf_module, (fused, part) in PARTS.items():
        if fused == module:
            end = begin + counts[part]
            parts.append((".".join(["model", *owner, hf_module, kind]), slice(begin, end)))
            begin = end
    return parts or [(f"model.{name}", slice(0, rows))]


def check_saved(path: Path) -> None:
    """Raises UserError, which names the file, unless all files in SHA256SUMS are as it says."""
    digests = read_sums(path)
    try:
        check_sums(path, digests, digests)
    except UserError as error:
        raise UserError(
            f"{error}; get the file again, or remove {SUMS} if you have changed it yourself"
        ) from None


def _open_shards(path) -> dict[str, Any]:
    """Returns the open file of each tensor in a checkpoint, by the tensor's name."""
    gguf = gguf_model(path)
    if gguf is not None:
        return dict.fromkeys(gguf.tensors, GgufTensors(gguf))
    index = path / INDEX
    files, weight_map = {SINGLE}, {}
    if os.path.lexists(index):
        weight_map = read_object(index).get("weight_map")
        require(
            isinstance(weight_map, dict) and weight_map,
            f"{index}: weight_map: expected an object of files by tensor",
        )
        for name, file in weight_map.items():
            beside = is_file_name(file)
            require(beside, f"{index}: {name}: {file!r}: expected a file name in its directory")
        files = set(weight_map.values())
    shards, places = {}, {}
    for file in sorted(files):
        shard = open_tensors(path / file)
        names = shard.keys()
        for name in names:
            twice = f"{path / file}: {name} is in {places.get(name)} too; expected it once"
            require(name not in places, twice)
            places[name], shards[name] = file, shard
    for name, file in weight_map.items():
        place = places.get(name)
        require(place == file, f"{index}: {name} is in {place or 'no file'}, not in {file}")
    return shards


def _check_sizes(config, shards, path) -> None:
    """Raises UserError if the configuration asks for far more than the files hold.

    Nothing of its size has been made yet, not even modules. A difference below a factor of SLACK
    is left to `copy_weights`, which names the tensor. A word of int32 holds eight weights at most.
    """
    matches = [re.match(r"(?:model\.)?layers\.(\d+)\.", name) for name in shards]
    layers = len({match[1] for match in matches if match})
    require(
        config.num_hidden_layers <= layers,
        f"{path / 'config.json'}: num_hidden_layers = {config.num_hidden_layers}: "
        f"the weights have {layers} layers",
    )
    heads = 2 * config.num_attention_heads + 2 * config.num_key_value_heads
    layer = config.hidden_size * (heads * config.head_dim + 3 * config.intermediate_size)
    weights = config.vocab_size * config.hidden_size + config.num_hidden_layers * layer
    stored_weights = 0
    for name, file in shards.items():
        stored = file.get_slice(name)
        weights_per_number = 8 if stored.get_dtype() == "I32" else 1
        stored_weights += math.prod(stored.get_shape()) * weights_per_number
    stated = ", ".join(f"{name} = {getattr(config, name)}" for name in SIZES)
    require(
        weights <= SLACK * stored_weights,
        f"{path / 'config.json'}: {stated} make {weights:,} weights; its files hold "
        f"{stored_weights:,}",
    )


def _check_memory(model, device, path) -> None:
    """Raises UserError if the model, not allocated yet, is larger than the device's memory."""
    needed, memory = model_bytes(model), memory_bytes(device)
    require(
        needed <= memory,
        f"{path}: its weights take {needed / 1e9:.1f} GB here; {device} has {memory / 1e9:.1f} GB",
    )


def model_bytes(model: Qwen3) -> int:
    """Returns the bytes of a model's tensors on this rank, allocated or not."""
    tensors = [*model.parameters(), *model.buffers()]
    return sum(local(x).numel() * x.element_size() for x in tensors)


def memory_bytes(device: torch.device) -> int:
    """Returns the bytes of all memory of a GPU, or of this machine."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _stored(shards: Mapping[str, Any], path) -> Iterator[tuple[str, Tensor | FourBit]]:
    """Yields (name, tensor) of a checkpoint directory, shard by shard.

    A bare backbone, such as Qwen3-Embedding, has names without their first "model". The rotary
    frequencies that old Llama checkpoints hold are left out.
    """

    def read(name):
        tensor = shards[name].get_tensor(name)
        if tensor.is_floating_point():
            _check_finite(tensor, f"{path}: {name}")
            return tensor
        weight = name.endswith(".weight")
        require(not weight, f"{path}: {name} has dtype {tensor.dtype}; expected a float")
        return tensor

    group = stored_group(path)
    if group is None:
        tensors = ((name, read(name)) for name in shards)
    else:
        tensors = decompressed(shards, read, group, str(path))
    for name, tensor in tensors:
        if name.endswith("rotary_emb.inv_freq"):
            continue
        bare = not name.startswith(("model.", "lm_head."))
        yield f"model.{name}" if bare else name, tensor


def _check_finite(tensor, source) -> None:
    """Raises UserError for a number that is NaN or infinite."""
    if tensor.numel():
        compared = tensor.float() if tensor.itemsize == 1 else tensor
        low, high = compared.aminmax()  # NaN if any is
        finite = bool(low.isfinite() and high.isfinite())
        require(finite, f"{source} has a number that is NaN or infinite; get the file again")
