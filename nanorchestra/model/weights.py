"""Loads a checkpoint in Hugging Face layout, and copies weights in and out by their HF names.

The model holds q, k, v and gate, up as one matrix each. Only this file knows their HF names, which
are row ranges of the fused matrices. Loading holds one tensor of one shard at a time, and rounds it
at once where the model is quantised. saving.py writes checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from nanorchestra.errors import UserError, require
from nanorchestra.files import read_json
from nanorchestra.model.hf_config import read_config, read_object
from nanorchestra.model.quantise import (
    QuantisedLinear,
    Slot,
    awq_group_size,
    is_quantised,
    linears,
    quantise_model,
    replace_linear,
)
from nanorchestra.model.qwen3 import ModelConfig, Qwen3
from nanorchestra.model.sharded import fill, whole
from nanorchestra.model.tokenizer import Tokenizer

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load_model(
    path: str | Path,
    device: str = "cpu",
    dtype: str | None = "float32",
    quantise: str | None = None,
    build: Callable[[ModelConfig], Qwen3] = Qwen3,
) -> tuple[Qwen3, Tokenizer | None]:
    """Return the model of a checkpoint directory and its tokenizer, None without tokenizer.json.

    `quantise`, "int8" or "int4", rounds the matrices as they are read; an AWQ checkpoint keeps its
    4 bits. A checkpoint without output matrix (an embedding model) is tied to its embeddings.
    `build` makes the model without memory; dtype None keeps the dtypes it chooses. Raises
    UserError for anything wrong with the directory.
    """
    path = Path(path)
    known = dtype is None or dtype in DTYPES
    require(known, f"dtype = {dtype!r}: expected one of {', '.join(DTYPES)}")
    config = read_config(path)
    group = awq_group_size(read_object(path / "config.json"), str(path))
    whole_bits = not (group and quantise)
    require(whole_bits, f"{path}: quantise = {quantise!r}: the checkpoint is quantised already")
    if not any("lm_head.weight" in stored for _, _, stored in _shards(path)):
        config = replace(config, tie_word_embeddings=True)
    with torch.device("meta"):
        model = build(config)
    if dtype is not None:
        model.to(DTYPES[dtype])
    if group:
        for name, _ in linears(model.layers):
            replace_linear(model.layers, name, 4, group)
    elif quantise:
        quantise_model(model, quantise)
    _check(hf_slots(model, bool(group)), path)  # before any memory is taken
    model.to_empty(device=device)
    slots = hf_slots(model, bool(group))
    for _, shard, stored in _shards(path):
        for name in stored.keys() & slots.keys():
            slots[name].write(shard.get_tensor(stored[name]))
    tokenizer = None
    if (path / "tokenizer.json").exists():
        tokenizer = Tokenizer.from_dir(path)
        require(
            tokenizer.vocab_size <= config.vocab_size,
            f"{path / 'tokenizer.json'}: has ids up to {tokenizer.vocab_size - 1}; "
            f"config.json says vocab_size = {config.vocab_size}",
        )
    return model, tokenizer


def copy_weights(model: Qwen3, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Overwrite all weights in place from (HF name, tensor) pairs of any float dtype and device.

    A quantised model rounds them to its own bits and groups. Raises ValueError for a name or shape
    that the model does not have, and for a parameter that is not among the pairs.
    """
    slots = hf_slots(model)
    missing = set(slots)
    for name, tensor in tensors:
        if name == "lm_head.weight" and name not in slots:
            continue  # tied: the same matrix arrives as the embeddings
        if name not in slots or list(tensor.shape) != slots[name].shape:
            expected = slots[name].shape if name in slots else "no such parameter"
            raise ValueError(f"{name} has shape {list(tensor.shape)}; expected {expected}")
        slots[name].write(tensor)
        missing.discard(name)
    if missing:
        raise ValueError(f"no new value for {min(missing)} ({len(missing)} parameters in all)")


def named_hf_tensors(
    model: Qwen3, dtype: torch.dtype | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yield (HF name, tensor) of every parameter, without gradient, cast to dtype if given.

    The tensors are views: writing to them writes to the model. Two exceptions are copies: a matrix
    with an adapter (lora.py) is merged, and a sharded one is gathered, so all ranks must iterate
    together. Raises UserError for a quantised model.
    """
    require(not is_quantised(model), "a quantised model can be neither trained nor saved")
    for name, parameter in model.named_parameters():
        owner, _, field = name.rpartition(".")
        if field in ("lora_a", "lora_b"):
            continue
        merged = getattr(model.get_submodule(owner), "merged", None)
        matrix = merged() if merged and field == "weight" else parameter
        yield from hf_parts(model.config, name, whole(matrix, dtype))


def hf_parts(config: ModelConfig, name: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
    """Return the HF names of one parameter, named as in the model, with their rows of `tensor`."""
    return [(part, tensor[rows]) for part, rows in _hf_rows(config, name, len(tensor))]


def hf_slots(model: Qwen3, awq: bool = False) -> dict[str, Slot]:
    """Return where each HF tensor goes; `awq`: 4-bit matrices come as the tensors of AWQ."""
    slots: dict[str, Slot] = {}
    for name, parameter in model.named_parameters():
        for part, rows in _hf_rows(model.config, name, len(parameter)):
            shape = [rows.stop - rows.start, *parameter.shape[1:]]
            slots[part] = Slot(shape, partial(fill, parameter, begin=rows.start))
    for name, module in linears(model, QuantisedLinear):
        for part, rows in _hf_rows(model.config, f"{name}.weight", module.out_features):
            if awq and module.bits == 4:
                slots |= module.awq_slots(part.removesuffix("weight"), rows)
            else:
                shape = [rows.stop - rows.start, module.in_features]
                slots[part] = Slot(shape, partial(module.write, rows))
    return slots


def _hf_rows(config: ModelConfig, name: str, rows: int) -> list[tuple[str, slice]]:
    """Return the HF names of one parameter and the rows that each has; none for an adapter."""
    if name.endswith((".lora_a", ".lora_b")):
        return []
    if name == "lm_head.weight":
        return [(name, slice(0, rows))]
    name = f"model.{name}.weight" if name.endswith("norm") else f"model.{name}"
    fused, parts = "down_proj", {"mlp.down_proj": rows}
    if ".qkv_proj." in name:
        q = config.num_attention_heads * config.head_dim
        kv = config.num_key_value_heads * config.head_dim
        fused, parts = "qkv_proj", {"q_proj": q, "k_proj": kv, "v_proj": kv}
    elif ".gate_up_proj." in name:
        fused, parts = "gate_up_proj", {"mlp.gate_proj": rows // 2, "mlp.up_proj": rows // 2}
    ends = accumulate(parts.values())
    return [
        (name.replace(f".{fused}.", f".{part}."), slice(end - count, end))
        for (part, count), end in zip(parts.items(), ends, strict=True)
    ]


def _shards(path: Path) -> Iterator[tuple[Path, Any, dict[str, str]]]:
    """Open each shard in turn; yield its file, its handle and {HF name: stored name}."""
    files = [SINGLE]
    if (path / INDEX).is_file():
        files = sorted(set(read_json(path / INDEX)["weight_map"].values()))
    for file in files:
        try:
            with safe_open(path / file, framework="pt") as shard:
                names, prefixes = shard.keys(), ("model.", "lm_head.")
                # A backbone saved alone has no `model.` before its names.
                stored = {n if n.startswith(prefixes) else f"model.{n}": n for n in names}
                yield path / file, shard, stored
        except (SafetensorError, OSError) as error:
            raise UserError(
                f"{path / file}: not a whole safetensors file ({error}); is the download complete?"
            ) from error


def _check(slots: dict[str, Slot], path: Path) -> None:
    """Raise UserError unless the checkpoint holds exactly the tensors of the slots."""
    missing = set(slots)
    for file, shard, stored in _shards(path):
        for name in stored:
            slot, entry = slots.get(name), shard.get_slice(stored[name])
            problem = ""
            if slot is None:
                problem = "is not described by config.json" if name != "lm_head.weight" else ""
            elif entry.get_shape() != slot.shape:
                problem = f"has shape {entry.get_shape()}; config.json asks for {slot.shape}"
            elif entry.get_dtype() not in slot.dtypes:
                problem = f"has dtype {entry.get_dtype()}; expected {' or '.join(slot.dtypes)}"
            require(not problem, f"{file}: tensor {name} {problem}")
            missing.discard(name)
    if missing:
        name = min(missing)
        raise UserError(f"{path}: tensor {name} of shape {slots[name].shape} is missing")
