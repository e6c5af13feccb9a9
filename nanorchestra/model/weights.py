"""Checkpoints in Hugging Face layout, in and out: config.json, generation_config.json and single or sharded safetensors.

The model keeps q, k, v and gate, up as one matrix each; here, and only here, they have their HF names, as row ranges of the fused
parameters, so that loading and updating copy in place. Loading touches one shard at a time, saving one tensor at a time. A quantised
model (quantise.py) is filled the same way, each tensor rounded as it comes. A save is written aside and renamed: a reader, or a run
killed half-way, finds the old checkpoint or the new one.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from nanorchestra.errors import UserError
from nanorchestra.files import read_json, sync
from nanorchestra.model.quantise import (
    MODES,
    QuantisedLinear,
    Slot,
    is_quantised,
    linears,
    quantise_model,
    replace_linear,
)
from nanorchestra.model.qwen3 import ModelConfig, Qwen3, eos_ids
from nanorchestra.model.sharded import first_row, is_sharded, whole

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

    from nanorchestra.model.tokenizer import Tokenizer

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_STORED = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


def load_model(
    path: str | Path,
    device: str = "cpu",
    dtype: str | None = "float32",
    quantise: str | None = None,
    build: Callable[[ModelConfig], Qwen3] = Qwen3,
) -> tuple[Qwen3, Tokenizer | None]:
    """The model of a checkpoint directory on `device` in `dtype`, and its tokenizer, or None if the directory has no tokenizer.json.

    The end-of-sequence ids in model.config are those of generation_config.json if it names any. A backbone saved without its output
    matrix (an embedding model) comes with the output tied to the embeddings. `quantise`, "int8" or "int4", rounds the matrices as they are
    read; those of an AWQ checkpoint keep its 4 bits without being asked. `build` makes the model, a sharded one for training say;
    a `dtype` of None leaves it the dtypes that it has by then. Raises UserError for anything wrong with the directory.
    """
    if dtype is not None and dtype not in DTYPES:
        raise UserError(f"dtype = {dtype!r}: expected one of {', '.join(DTYPES)}")
    if quantise is not None and quantise not in MODES:
        raise UserError(f"quantise = {quantise!r}: expected one of {', '.join(MODES)}")
    path = Path(path)
    config = read_config(path)
    names = _locate(path)
    if "lm_head.weight" not in names and "embed_tokens.weight" in names:
        config = replace(config, tie_word_embeddings=True)
    if config.num_hidden_layers > len(names):
        raise UserError(
            f"{path / 'config.json'}: num_hidden_layers = {config.num_hidden_layers}: the checkpoint has only {len(names)} tensors"
        )
    model = _empty_model(config, build)
    if dtype is not None:
        model.to(DTYPES[dtype])
    if config.awq_group_size is not None:
        if quantise:
            raise UserError(
                f"{path}: quantise = {quantise!r}: the checkpoint is quantised already (AWQ, 4 bits); expected no quantise"
            )
        _make_room_for_awq(model, path, {_hf_name(stored) for stored in names})
    elif quantise:
        quantise_model(model, quantise)
    _check_weights(model, path)  # before there is memory for them
    try:
        model.to_empty(device=device)
    except (
        RuntimeError,
        AssertionError,
    ) as error:  # torch's ways to say that there is no such device
        raise UserError(
            f"device = {device!r}: {str(error).splitlines()[0]}; expected cpu, or cuda where there is one"
        ) from error
    load_weights(model, path)
    if not (path / "tokenizer.json").exists():
        return model, None
    from nanorchestra.model.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_dir(path)
    if tokenizer.vocab_size > config.vocab_size:
        raise UserError(
            f"{path / 'tokenizer.json'}: ids up to {tokenizer.vocab_size - 1}, but config.json says vocab_size = {config.vocab_size}"
        )
    return model, tokenizer


def _empty_model(config: ModelConfig, build: Callable[[ModelConfig], Qwen3] = Qwen3) -> Qwen3:
    """Shapes without memory."""
    with torch.device("meta"):
        return build(config)


def _make_room_for_awq(model: Qwen3, path: Path, names: Collection[str]) -> None:
    """Quantise, still without memory, the matrices that the checkpoint holds in 4 bits: publishers leave the lm_head or others whole."""
    for name, linear in linears(model):
        parts = [part for part, _ in hf_parts(model.config, f"{name}.weight", linear.weight)]
        packed = [part for part in parts if part.replace(".weight", ".qweight") in names]
        if packed and packed != parts:
            whole = next(part for part in parts if part not in packed)
            raise UserError(
                f"{path}: {packed[0]} is in 4 bits and {whole} is not: expected both or neither, for they are one matrix here"
            )
        if packed:
            replace_linear(model, name, 4, model.config.awq_group_size)


def read_config(path: str | Path) -> ModelConfig:
    """The ModelConfig of a checkpoint directory, end-of-sequence ids as generation uses them. Raises UserError."""
    path = Path(path)
    if not (path / "config.json").is_file():
        raise UserError(
            f"{path}: no config.json; expected a checkpoint directory in Hugging Face layout"
        )
    config = ModelConfig.from_hf(_read_json(path / "config.json"), str(path / "config.json"))
    generation = path / "generation_config.json"
    if generation.is_file():
        ids = eos_ids(
            _read_json(generation).get("eos_token_id"), str(generation), config.vocab_size
        )
        config = replace(config, eos_token_ids=ids or config.eos_token_ids)
    return config


def load_weights(model: Qwen3, path: str | Path) -> None:
    """Copy a checkpoint's tensors into the model, casting to the model's dtype and device, or rounding to its bits where it is quantised.

    Every name, shape and dtype is checked before the first tensor is copied. Raises UserError for a tensor that is missing, unexpected
    or of the wrong shape, and for a missing or unreadable shard.
    """
    slots, shards = _check_weights(model, Path(path))
    with torch.no_grad():
        for file, names in shards.items():
            with _open_shard(file) as shard:
                for stored, name in names:
                    slots[name].write(shard.get_tensor(stored))


def _check_weights(
    model: Qwen3, path: Path
) -> tuple[dict[str, Slot], dict[Path, list[tuple[str, str]]]]:
    """The model's slots, and for each file the (stored name, HF name) of its tensors that go there."""
    located = {stored: (_hf_name(stored), file) for stored, file in _locate(path).items()}
    slots = hf_slots(model, {name for name, _ in located.values()})
    shards: dict[Path, list[tuple[str, str]]] = {}  # file -> [(stored name, HF name)]
    found = set()
    for stored, (name, file) in located.items():
        if name.endswith("rotary_emb.inv_freq") or (name == "lm_head.weight" and name not in slots):
            continue  # computed here; a copy of the embeddings
        if name not in slots:
            raise UserError(
                f"{file}: unexpected tensor {stored}: a Qwen3 of this config.json has no such parameter"
            )
        shards.setdefault(file, []).append((stored, name))
        found.add(name)
    missing = [name for name in slots if name not in found]
    if missing:
        raise UserError(
            f"{path}: missing tensor {missing[0]} of shape {slots[missing[0]].shape} ({len(missing)} missing in all)"
        )

    for file, names in shards.items():
        with _open_shard(file) as shard:
            for stored, name in names:
                _check_stored(file, stored, shard, slots[name])
    return slots, shards


def copy_weights(model: Qwen3, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Overwrite all of the model's weights in place from (HF name, tensor) pairs of any float dtype and device; a quantised model rounds
    them again to its own bits and groups.

    Raises ValueError for a name or shape that is not the model's, and if some parameter was not among the pairs.
    """
    slots = hf_slots(model)
    missing = set(slots)
    with torch.no_grad():
        for name, tensor in tensors:
            if name == "lm_head.weight" and name not in slots:
                continue  # tied: the same matrix arrives as the embeddings
            if name not in slots:
                raise ValueError(f"the model has no parameter {name}")
            if list(tensor.shape) != slots[name].shape:
                raise ValueError(
                    f"{name} has shape {list(tensor.shape)}; expected {slots[name].shape}"
                )
            slots[name].write(tensor)
            missing.discard(name)
    if missing:
        raise ValueError(
            f"no new value for {sorted(missing)[0]} ({len(missing)} parameters in all)"
        )


def hf_slots(model: Qwen3, stored: Collection[str] = ()) -> dict[str, Slot]:
    """Where each HF tensor goes. Parts of a quantised matrix come as AWQ's tensors where `stored` names them, else in full precision."""
    slots: dict[str, Slot] = {}
    for ours, parameter in model.named_parameters():
        if ours.endswith((".lora_a", ".lora_b")):
            continue  # no checkpoint's
        if is_sharded(parameter):
            slots |= _shard_slots(model.config, ours, parameter)
        else:
            slots |= {
                name: Slot(list(view.shape), False, view.copy_)
                for name, view in hf_parts(model.config, ours, parameter.detach())
            }
    for name, module in linears(model, QuantisedLinear):
        for part, rows in hf_parts(
            model.config, f"{name}.weight", torch.arange(module.out_features)
        ):
            part = part.removesuffix("weight")
            for kind, slot in module.slots(
                slice(int(rows[0]), int(rows[-1]) + 1), f"{part}qweight" in stored
            ).items():
                slots[part + kind] = slot
    return slots


def _shard_slots(config: ModelConfig, name: str, parameter: DTensor) -> dict[str, Slot]:
    """Slots of a parameter of which this rank holds some rows: they take a whole tensor and keep those."""
    held, first = parameter.detach().to_local(), first_row(parameter)

    def slot(begin: int, end: int) -> Slot:
        low, high = max(begin, first), min(end, first + len(held))

        def write(tensor: Tensor) -> None:
            if low < high:
                held[low - first : high - first].copy_(tensor[low - begin : high - begin])

        return Slot([end - begin, *parameter.shape[1:]], False, write)

    return {
        part: slot(int(rows[0]), int(rows[-1]) + 1)
        for part, rows in hf_parts(config, name, torch.arange(len(parameter)))
    }


def named_hf_tensors(
    model: Qwen3, dtype: torch.dtype | None = None
) -> Iterator[tuple[str, Tensor]]:
    """(HF name, tensor) of every parameter, without gradient; the tensors are views: writing to them writes to the model. Matrices with an
    adapter (lora.py) come merged, as copies.

    Of a sharded model the whole tensors, gathered one parameter at a time in `dtype`: all ranks iterate alike, and writing to them writes nowhere.
    Raises UserError for a quantised model, whose matrices are no such tensors.
    """
    if is_quantised(model):
        raise UserError(
            "the model is quantised, which cannot be saved or trained: expected full-precision weights, loaded without quantise"
        )
    return _views(model, dtype, merged=True)


def _views(
    model: Qwen3, dtype: torch.dtype | None = None, merged: bool = False
) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in model.named_parameters():
        module, _, own = name.rpartition(".")
        if own in ("lora_a", "lora_b"):
            continue
        if merged and own == "weight" and hasattr(adapted := model.get_submodule(module), "merged"):
            matrix = adapted.merged()
            yield from hf_parts(model.config, name, matrix if dtype is None else matrix.to(dtype))
        else:
            yield from hf_parts(model.config, name, whole(parameter, dtype))


def hf_parts(config: ModelConfig, name: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
    """The HF names and rows of one parameter of ours, given whole under its name in Qwen3.named_parameters()."""
    if name == "lm_head.weight":
        return [(name, tensor)]
    name = f"model.{name}"
    if ".qkv_proj." in name:
        q, kv = (
            config.num_attention_heads * config.head_dim,
            config.num_key_value_heads * config.head_dim,
        )
        return [
            (name.replace("qkv_proj", part), rows)
            for part, rows in zip(("q_proj", "k_proj", "v_proj"), tensor.split((q, kv, kv)))
        ]
    if ".gate_up_proj." in name:
        return [
            (name.replace("gate_up_proj", f"mlp.{part}"), rows)
            for part, rows in zip(("gate_proj", "up_proj"), tensor.chunk(2))
        ]
    if name.endswith("norm"):
        return [(f"{name}.weight", tensor)]
    return [(name.replace(".down_proj.", ".mlp.down_proj."), tensor)]


def save_checkpoint(
    model: Qwen3,
    tokenizer: Tokenizer | None,
    path: str | Path,
    *,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = 5_000_000_000,
    tensors: Iterable[tuple[str, Tensor]] | None = None,
) -> None:
    """Write a checkpoint directory that transformers loads, in `dtype` (the model's own by default).

    `tensors` replaces the model's own (HF name, tensor) pairs, in the order of named_hf_tensors: a trainer whose parameters are sharded
    passes a generator that gathers one at a time. An existing checkpoint at `path` is replaced as a whole, after the new one is on disk;
    UserError if `path` holds anything that is not a checkpoint's, or cannot be written.
    """
    tensors = named_hf_tensors(model) if tensors is None else tensors
    path = Path(path).resolve()
    dtype = dtype or model.embed_tokens.weight.dtype
    if dtype not in _STORED:
        raise ValueError(f"a checkpoint is {', '.join(DTYPES)}; not {dtype}")
    aside, previous = (
        path.with_name(f".{path.name}.partial"),
        path.with_name(f".{path.name}.previous"),
    )
    _check_replaceable(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        for leftover in (aside, previous):  # of a save that was killed
            shutil.rmtree(leftover, ignore_errors=True)
        aside.mkdir()
        _write_json(
            aside / "config.json",
            model.config.to_hf() | {"dtype": str(dtype).removeprefix("torch.")},
        )
        if model.config.eos_token_ids:
            _write_json(
                aside / "generation_config.json", {"eos_token_id": list(model.config.eos_token_ids)}
            )
        _write_shards(aside, model.config, tensors, dtype, max_shard_bytes)
        if tokenizer is not None:
            tokenizer.save(aside)
        for file in (*aside.iterdir(), aside):
            sync(file)
        _swap(aside, path, previous)
        sync(path.parent)
        shutil.rmtree(previous, ignore_errors=True)
    except OSError as error:
        raise UserError(
            f"{path}: the checkpoint cannot be written: {error.strerror or error}"
        ) from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _write_shards(
    directory: Path,
    config: ModelConfig,
    tensors: Iterable[tuple[str, Tensor]],
    dtype: torch.dtype,
    max_shard_bytes: int,
) -> None:
    shards: list[dict[str, list[int]]] = [
        {}
    ]  # {HF name: shape}, in the order in which the tensors come
    room = max_shard_bytes
    for name, tensor in named_hf_tensors(_empty_model(config)):
        size = tensor.numel() * dtype.itemsize
        if size > room and shards[-1]:
            shards.append({})
            room = max_shard_bytes
        shards[-1][name] = list(tensor.shape)
        room -= size
    files = (
        [SINGLE]
        if len(shards) == 1
        else [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
    )
    source = iter(tensors)
    total = sum(
        _write_safetensors(directory / file, shapes, source, dtype)
        for file, shapes in zip(files, shards)
    )
    if len(files) > 1:
        weight_map = {name: file for file, shapes in zip(files, shards) for name in shapes}
        _write_json(
            directory / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map}
        )


def _write_safetensors(
    file: Path,
    shapes: dict[str, list[int]],
    source: Iterator[tuple[str, Tensor]],
    dtype: torch.dtype,
) -> int:
    """One safetensors file: header length (8 bytes, little endian), JSON header, then the tensors' bytes. Returns the bytes of tensors."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + torch.Size(shape).numel() * dtype.itemsize
        header[name] = {"dtype": _STORED[dtype], "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for expected, shape in shapes.items():
            name, tensor = next(source, ("nothing", torch.empty(0)))
            if name != expected or list(tensor.shape) != shape:
                raise ValueError(
                    f"expected {expected} of shape {shape} next; got {name} of shape {list(tensor.shape)}"
                )
            out.write(
                tensor.detach().to("cpu", dtype).contiguous().flatten().view(torch.uint8).numpy()
            )
    return end


def _swap(new: Path, path: Path, previous: Path) -> None:
    if path.exists():
        path.rename(previous)
    try:
        new.rename(path)
    except OSError:
        if previous.exists():
            previous.rename(path)
        raise


def _check_replaceable(path: Path) -> None:
    """A directory that holds more than a checkpoint must not be swept away with one."""
    if not path.exists():
        return
    if not path.is_dir():
        raise UserError(f"{path}: is a file; expected a new directory or an existing checkpoint")
    for entry in path.iterdir():
        if entry.is_dir() or entry.suffix not in (".json", ".safetensors", ".txt", ".jinja", ".md"):
            raise UserError(
                f"{path}: holds {entry.name}, which is no part of a checkpoint; expected a new directory or an existing checkpoint"
            )


def _locate(path: Path) -> dict[str, Path]:
    """{stored tensor name: file} of a checkpoint directory, from the index or the single file."""
    if (path / INDEX).is_file():
        weight_map = _read_json(path / INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not all(
            isinstance(file, str) for file in weight_map.values()
        ):
            raise UserError(
                f"{path / INDEX}: weight_map: expected an object of tensor names and file names"
            )
        for file in sorted(set(weight_map.values())):
            if not (path / file).is_file():
                raise UserError(
                    f"{path / INDEX}: weight_map names the shard {file}, which is not in the directory"
                )
        return {name: path / file for name, file in weight_map.items()}
    if not (path / SINGLE).is_file():
        raise UserError(f"{path}: no weights; expected {SINGLE}, or {INDEX} and its shards")
    with _open_shard(path / SINGLE) as shard:
        return {name: path / SINGLE for name in shard.keys()}


def _hf_name(stored: str) -> str:
    """A backbone saved alone has no `model.` before its names."""
    return stored if stored.startswith(("model.", "lm_head.")) else f"model.{stored}"


def _open_shard(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise UserError(
            f"{file}: not a readable safetensors file ({error}); the download may be incomplete"
        ) from error


def _check_stored(file: Path, stored: str, shard: Any, slot: Slot) -> None:
    try:
        entry = shard.get_slice(stored)
    except SafetensorError as error:
        raise UserError(
            f"{file}: missing tensor {stored}, which the index places in this shard"
        ) from error
    if entry.get_shape() != slot.shape:
        raise UserError(
            f"{file}: {stored} has shape {entry.get_shape()}; config.json asks for {slot.shape}"
        )
    dtypes = ("I32",) if slot.integer else _STORED.values()
    if entry.get_dtype() not in dtypes:
        raise UserError(
            f"{file}: {stored} has dtype {entry.get_dtype()}; expected one of {', '.join(dtypes)}"
        )


def _read_json(file: Path) -> dict[str, Any]:
    data = read_json(file)
    if not isinstance(data, dict):
        raise UserError(f"{file}: expected a JSON object")
    return data


def _write_json(file: Path, data: dict[str, Any]) -> None:
    file.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
