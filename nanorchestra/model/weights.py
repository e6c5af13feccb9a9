"""Loads a checkpoint in Hugging Face layout, and copies weights in and out by their HF names.

The model holds q, k, v and gate, up as one matrix each. Only this file knows their HF names, which
are row ranges of the fused matrices. Loading holds one tensor of one shard at a time, and rounds it
at once where the model is quantised. saving.py writes checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from nanorchestra.errors import UserError
from nanorchestra.files import read_json
from nanorchestra.model.hf_config import read_config, read_config_json
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
_FLOATS = ("F32", "BF16", "F16")  # dtypes that a checkpoint may store, as safetensors names them


@dataclass(frozen=True)
class _Stored:
    """A tensor of a checkpoint: its file and the name, shape and dtype it has there."""

    file: Path
    name: str
    shape: list[int]
    dtype: str


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
    if dtype is not None and dtype not in DTYPES:
        raise UserError(f"dtype = {dtype!r}: expected one of {', '.join(DTYPES)}")
    config, group = read_config(path), awq_group_size(*read_config_json(path))
    if group and quantise:
        raise UserError(f"{path}: quantise = {quantise!r}: the checkpoint is quantised already")
    stored = _read_headers(path)
    if "lm_head.weight" not in stored:
        config = replace(config, tie_word_embeddings=True)
    with torch.device("meta"):
        model = build(config)
    if dtype is not None:
        model.to(DTYPES[dtype])
    if group:
        _replace_awq_linears(model, group, stored)
    elif quantise:
        quantise_model(model, quantise)
    slots = hf_slots(model, stored)
    _check(slots, stored, path)  # before any memory is taken
    model.to_empty(device=device)
    _copy_stored(hf_slots(model, stored), stored)
    tokenizer = None
    if (path / "tokenizer.json").exists():
        tokenizer = Tokenizer.from_dir(path)
        if tokenizer.vocab_size > config.vocab_size:
            raise UserError(
                f"{path / 'tokenizer.json'}: has ids up to {tokenizer.vocab_size - 1}; "
                f"config.json says vocab_size = {config.vocab_size}"
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
    if is_quantised(model):
        raise UserError("the model is quantised; only full-precision weights are trained or saved")
    for name, parameter in model.named_parameters():
        owner, _, field = name.rpartition(".")
        if field in ("lora_a", "lora_b"):
            continue
        merged = getattr(model.get_submodule(owner), "merged", None)
        matrix = merged() if field == "weight" and merged else parameter
        yield from hf_parts(model.config, name, whole(matrix, dtype))


def hf_parts(config: ModelConfig, name: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
    """Return the HF names of one parameter, named as in the model, with their rows of `tensor`."""
    return [(part, tensor[rows]) for part, rows in _hf_rows(config, name, len(tensor))]


def hf_slots(model: Qwen3, stored: Collection[str] = ()) -> dict[str, Slot]:
    """Return where each HF tensor goes. AWQ's tensors have slots where `stored` names them."""
    slots: dict[str, Slot] = {}
    for name, parameter in model.named_parameters():
        if name.endswith((".lora_a", ".lora_b")):
            continue
        for part, rows in _hf_rows(model.config, name, len(parameter)):
            shape = [rows.stop - rows.start, *parameter.shape[1:]]
            slots[part] = Slot(shape, partial(fill, parameter, begin=rows.start))
    for name, module in linears(model, QuantisedLinear):
        for part, rows in _hf_rows(model.config, f"{name}.weight", module.out_features):
            prefix = part.removesuffix("weight")
            if f"{prefix}qweight" in stored:
                awq = module.awq_slots(rows)
                slots |= {prefix + kind: slot for kind, slot in awq.items()}
            else:
                shape = [rows.stop - rows.start, module.in_features]
                slots[part] = Slot(shape, partial(module.write, rows))
    return slots


def _hf_rows(config: ModelConfig, name: str, rows: int) -> list[tuple[str, slice]]:
    """Return the HF names of one parameter and the rows that each has in it."""
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
    ends = [0]
    for count in parts.values():
        ends.append(ends[-1] + count)
    return [
        (name.replace(f".{fused}.", f".{part}."), slice(*ends_of_part))
        for part, ends_of_part in zip(parts, pairwise(ends), strict=True)
    ]


def _replace_awq_linears(model: Qwen3, group: int, stored: Collection[str]) -> None:
    """Quantise the matrices that the checkpoint holds in 4 bits; it may leave some in full."""
    for name, module in linears(model):
        parts = _hf_rows(model.config, f"{name}.weight", module.out_features)
        if any(part.replace(".weight", ".qweight") in stored for part, _ in parts):
            replace_linear(model, name, 4, group)


def _read_headers(path: Path) -> dict[str, _Stored]:
    """Return {HF name: tensor} of a checkpoint directory, from one file or all shards."""
    files = [SINGLE]
    if (path / INDEX).is_file():
        files = sorted(set(read_json(path / INDEX)["weight_map"].values()))
    stored = {}
    for file in files:
        try:
            with safe_open(path / file, framework="pt") as shard:
                for name in shard.keys():  # noqa: SIM118 (a shard is no dict)
                    entry = shard.get_slice(name)
                    # A backbone saved alone has no `model.` before its names.
                    hf_name = name if name.startswith(("model.", "lm_head.")) else f"model.{name}"
                    shape, dtype = entry.get_shape(), entry.get_dtype()
                    stored[hf_name] = _Stored(path / file, name, shape, dtype)
        except (SafetensorError, OSError) as error:
            raise UserError(
                f"{path / file}: not a whole safetensors file ({error}); is the download complete?"
            ) from error
    return stored


def _check(slots: dict[str, Slot], stored: dict[str, _Stored], path: Path) -> None:
    """Raise UserError unless the checkpoint holds exactly the tensors of the model."""
    problems = {
        name: "is unexpected: config.json describes no such parameter"
        for name in stored
        if name not in slots and not _is_ignored(name)
    }
    for name, slot in slots.items():
        entry, dtypes = stored.get(name), ("I32",) if slot.integer else _FLOATS
        if entry is None:
            problems[name] = f"of shape {slot.shape} is missing"
        elif entry.shape != slot.shape:
            problems[name] = f"has shape {entry.shape}; config.json asks for {slot.shape}"
        elif entry.dtype not in dtypes:
            problems[name] = f"has dtype {entry.dtype}; expected {' or '.join(dtypes)}"
    if problems:
        name = next(iter(problems))
        file = stored[name].file if name in stored else path
        raise UserError(f"{file}: tensor {name} {problems[name]} ({len(problems)} tensors differ)")


def _is_ignored(name: str) -> bool:
    """Return True for a tensor that tied or older checkpoints hold and the model computes."""
    return name == "lm_head.weight" or name.endswith("rotary_emb.inv_freq")


def _copy_stored(slots: dict[str, Slot], stored: dict[str, _Stored]) -> None:
    for file in sorted({entry.file for entry in stored.values()}):
        with safe_open(file, framework="pt") as shard:
            for name, entry in stored.items():
                if entry.file == file and name in slots:
                    slots[name].write(shard.get_tensor(entry.name))
