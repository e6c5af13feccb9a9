"""Loads a checkpoint in Hugging Face layout or GGUF; copies weights in and out by their HF names.

The model holds q, k, v and gate, up as one matrix each. Only this file knows their HF names, which
are row ranges of the fused matrices (PARTS). Loading holds one tensor at a time, and rounds it at
once if the model is quantised. saving.py writes checkpoints.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from nanorchestra.errors import UserError, require
from nanorchestra.files import read_json
from nanorchestra.model.awq import FourBit, decompressed
from nanorchestra.model.gguf_model import GgufModel, gguf_model, has
from nanorchestra.model.hf_config import read_config, stored_group
from nanorchestra.model.hub import local_model
from nanorchestra.model.native import PackedLinear
from nanorchestra.model.quantise import QuantisedLinear, linears, quantise_model
from nanorchestra.model.qwen3 import ModelConfig, Qwen3
from nanorchestra.model.sharded import fill, is_sharded, local, whole
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
    config = read_config(path)
    shards = _open_shards(path)
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


def _open_shards(path) -> dict[str, Any]:
    """Returns the open file of each tensor in a checkpoint, by the tensor's name."""
    gguf = gguf_model(path)
    if gguf is not None:
        return dict.fromkeys(gguf.tensors, GgufTensors(gguf))
    files = {SINGLE}
    if (path / INDEX).exists():
        files = set(read_json(path / INDEX)["weight_map"].values())
    shards = {}
    for file in sorted(files):
        shard = open_tensors(path / file)
        shards |= dict.fromkeys(shard.keys(), shard)
    return shards


class GgufTensors:
    """The tensors of a GGUF file by Hugging Face name, with the method of a safetensors file."""

    def __init__(self, model: GgufModel) -> None:
        self._model = model

    def get_tensor(self, name: str) -> Tensor:
        """Returns a tensor, widened to fp32."""
        return torch.from_numpy(self._model.array(name))


def open_tensors(path: Path) -> Any:
    """Returns an open safetensors file, which reads tensors or rows of them as they are asked for.

    Raises UserError, which names the file.
    """
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(
            f"{path}: not a whole safetensors file ({reason}); is the download complete?"
        ) from error


def _check_memory(model, device, path) -> None:
    """Raises UserError if the model, not allocated yet, is larger than the device's memory."""
    tensors = [*model.parameters(), *model.buffers()]
    needed = sum(local(x).numel() * x.element_size() for x in tensors)  # on this rank
    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory
    else:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    require(
        needed <= memory,
        f"{path}: its weights take {needed / 1e9:.1f} GB here; {device} has {memory / 1e9:.1f} GB",
    )


def _stored(shards: Mapping[str, Any], path) -> Iterator[tuple[str, Tensor | FourBit]]:
    """Yields (name, tensor) of a checkpoint directory, shard by shard.

    A bare backbone, such as Qwen3-Embedding, has names without their first "model". The rotary
    frequencies that old Llama checkpoints hold are left out.
    """

    def read(name):
        return shards[name].get_tensor(name)

    if stored_group(path) is None:
        tensors = ((name, read(name)) for name in shards)
    else:
        tensors = decompressed(shards, read)
    for name, tensor in tensors:
        if name.endswith("rotary_emb.inv_freq"):
            continue
        bare = not name.startswith(("model.", "lm_head."))
        yield f"model.{name}" if bare else name, tensor
