"""Ways to damage a model directory, each of which a loader must refuse in one line.

`DAMAGES[name](directory)` damages a whole directory of two or more shards with a tokenizer. It has
no checksums, as one that others have made.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from nanorchestra.model.weights import INDEX

Damage = Callable[[Path], object]
CONFIG, GENERATION = "config.json", "generation_config.json"
TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
SHARD = "model-00002.safetensors"
NORM = "model.norm.weight"


def edited(file: str, **changes) -> Damage:
    """Fields of a JSON object have other values; None removes one."""

    def damage(directory):
        value = json.loads((directory / file).read_text()) | changes
        kept = {key: field for key, field in value.items() if field is not None}
        (directory / file).write_text(json.dumps(kept))

    return damage


def text(file: str, content: str | bytes) -> Damage:
    content = content.encode() if isinstance(content, str) else content
    return lambda directory: (directory / file).write_bytes(content)


def cut(file: str) -> Damage:
    return lambda directory: os.truncate(directory / file, (directory / file).stat().st_size // 2)


def gone(file: str) -> Damage:
    return lambda directory: (directory / file).unlink()


def replaced(file: str, make: Callable[[Path], object]) -> Damage:
    """The file is something else: a directory, a pipe, a link."""

    def damage(directory):
        (directory / file).unlink(missing_ok=True)
        make(directory / file)

    return damage


def unreadable(path: Path) -> None:
    """Without permission; root may read it all the same, so for root it is a directory."""
    path.mkdir() if os.geteuid() == 0 else (path.touch(), path.chmod(0))


def zeros(path: Path) -> None:
    path.symlink_to("/dev/zero")


def dangling(path: Path) -> None:
    path.symlink_to("nowhere")


def itself(path: Path) -> None:
    path.symlink_to(path)


def index(change: Callable[[dict], object]) -> Damage:
    def damage(directory):
        value = json.loads((directory / INDEX).read_text())
        change(value)
        (directory / INDEX).write_text(json.dumps(value))

    return damage


def mapped(file: object) -> Damage:
    """weight_map has another value for one tensor."""
    return index(lambda value: value["weight_map"].update({NORM: file}))


def outside(directory: Path, *, absolute: bool) -> None:
    """weight_map leads to a whole shard that lies beside the directory."""
    elsewhere = directory.with_name("elsewhere.safetensors")
    shutil.copy(directory / SHARD, elsewhere)
    name = str(elsewhere) if absolute else f"../{elsewhere.name}"
    value = json.loads((directory / INDEX).read_text())
    files = {
        tensor: name if file == SHARD else file for tensor, file in value["weight_map"].items()
    }
    (directory / INDEX).write_text(json.dumps(value | {"weight_map": files}))


def tensors(change: Callable[[dict], object]) -> Damage:
    """The tensors of one shard are others."""

    def damage(directory):
        held = load_file(directory / SHARD)
        change(held)
        save_file(held, directory / SHARD)

    return damage


def first(held: dict) -> str:
    return min(held)


def header(change: Callable[[dict], object]) -> Damage:
    """The JSON header of a shard is another; the bytes behind it stay."""

    def damage(directory):
        data = (directory / SHARD).read_bytes()
        (length,) = struct.unpack("<Q", data[:8])
        value = json.loads(data[8 : 8 + length])
        change(value)
        changed = json.dumps(value).encode()
        packed = struct.pack("<Q", len(changed)) + changed + data[8 + length :]
        (directory / SHARD).write_bytes(packed)

    return damage


def entry(**changes) -> Damage:
    """The header says something else of one tensor."""
    return header(lambda value: value[min(value.keys() - {"__metadata__"})].update(changes))


def header_length(length: int) -> Damage:
    def damage(directory):
        data = (directory / SHARD).read_bytes()
        (directory / SHARD).write_bytes(struct.pack("<Q", length) + data[8:])

    return damage


def vocabulary(change: Callable[[dict], object]) -> Damage:
    """The tokenizer's BPE model is another."""

    def damage(directory):
        value = json.loads((directory / TOKENIZER).read_text())
        change(value["model"])
        (directory / TOKENIZER).write_text(json.dumps(value))

    return damage


def renamed(held: dict) -> None:
    held["model.layers.77.mlp.up_proj.weight"] = held.pop(first(held))


def duplicated(directory: Path) -> None:
    """A second shard holds a tensor of the first, with other values."""
    others = load_file(directory / "model-00001.safetensors")
    name = first(others)
    held = load_file(directory / SHARD)
    save_file(held | {name: others[name] + 1}, directory / SHARD)


def spoiled(value: float) -> Damage:
    return tensors(lambda held: held[first(held)].view(-1)[:1].fill_(value))


def stored_as(dtype: torch.dtype) -> Damage:
    return tensors(lambda held: held.update({first(held): held[first(held)].to(dtype)}))


def shaped(change: Callable[[torch.Tensor], torch.Tensor]) -> Damage:
    return tensors(lambda held: held.update({first(held): change(held[first(held)]).contiguous()}))


SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "head_dim")
SIZES += ("num_attention_heads", "num_key_value_heads")
DEEP = "[" * 100_000 + "]" * 100_000

DAMAGES: dict[str, Damage] = {
    "no config": gone(CONFIG),
    "config empty": text(CONFIG, ""),
    "config cut": cut(CONFIG),
    "config no JSON": text(CONFIG, "hidden_size = 3"),
    "config no text": text(CONFIG, b"\xff\xfe\x00{}"),
    "config deep": text(CONFIG, DEEP),
    "config a list": text(CONFIG, "[1, 2]"),
    "config a number": text(CONFIG, "3"),
    "config null": text(CONFIG, "null"),
    "config a directory": replaced(CONFIG, Path.mkdir),
    "config a pipe": replaced(CONFIG, os.mkfifo),
    "config endless": replaced(CONFIG, zeros),
    "config a link to itself": replaced(CONFIG, itself),
    "config unreadable": replaced(CONFIG, unreadable),
    **{f"{name} 10^9": edited(CONFIG, **{name: 10**9}) for name in SIZES},
    **{f"{name} missing": edited(CONFIG, **{name: None}) for name in SIZES if "h" in name[:1]},
    "vocab_size that fits the memory": edited(CONFIG, vocab_size=30_000_000),
    "hidden_size 2^70": edited(CONFIG, hidden_size=2**70),
    "hidden_size text": edited(CONFIG, hidden_size="24"),
    "hidden_size a list": edited(CONFIG, hidden_size=[24]),
    "hidden_size an object": edited(CONFIG, hidden_size={"size": 24}),
    "hidden_size half": edited(CONFIG, hidden_size=24.5),
    "hidden_size 0": edited(CONFIG, hidden_size=0),
    "hidden_size negative": edited(CONFIG, hidden_size=-24),
    "hidden_size NaN": edited(CONFIG, hidden_size=float("nan")),
    "hidden_size true": edited(CONFIG, hidden_size=True),
    "num_hidden_layers half": edited(CONFIG, num_hidden_layers=1.5),
    "head_dim odd": edited(CONFIG, head_dim=7),
    "heads that no group divides": edited(CONFIG, num_key_value_heads=3),
    "positions 10^9": edited(CONFIG, max_position_embeddings=10**9),
    "positions infinite": edited(CONFIG, max_position_embeddings=float("inf")),
    "theta 10^400": edited(CONFIG, rope_theta=10**400),
    "theta a list": edited(CONFIG, rope_theta=[1]),
    "eps infinite": edited(CONFIG, rms_norm_eps=float("inf")),
    "rope_scaling a list": edited(CONFIG, rope_scaling=[1]),
    "rope_scaling text": edited(CONFIG, rope_scaling="yarn"),
    "model_type a list": edited(CONFIG, model_type=["qwen3"]),
    "eos text": edited(CONFIG, eos_token_id="</s>"),
    "eos of lists": edited(CONFIG, eos_token_id=[[7]]),
    "eos an object": edited(CONFIG, eos_token_id={"id": 7}),
    "eos 10^9": edited(CONFIG, eos_token_id=10**9),
    "quantization a list": edited(CONFIG, quantization_config=[4]),
    "quantization a format of lists": edited(CONFIG, quantization_config={"format": [["x"]]}),
    "generation cut": cut(GENERATION),
    "generation a list": text(GENERATION, "[]"),
    "generation a directory": replaced(GENERATION, Path.mkdir),
    "generation a pipe": replaced(GENERATION, os.mkfifo),
    "generation a dangling link": replaced(GENERATION, dangling),
    "generation's eos of text": edited(GENERATION, eos_token_id=["a"]),
    "temperature NaN": edited(GENERATION, do_sample=True, temperature=float("nan")),
    "temperature a list": edited(GENERATION, do_sample=True, temperature=[0.6]),
    "top_k half": edited(GENERATION, do_sample=True, top_k=2.5),
    "top_p negative": edited(GENERATION, do_sample=True, top_p=-1),
    "index empty": text(INDEX, ""),
    "index a list": text(INDEX, "[]"),
    "index without weight_map": text(INDEX, "{}"),
    "index a pipe": replaced(INDEX, os.mkfifo),
    "index a directory": replaced(INDEX, Path.mkdir),
    "weight_map a list": text(INDEX, json.dumps({"weight_map": [SHARD]})),
    "weight_map empty": text(INDEX, json.dumps({"weight_map": {}})),
    "weight_map of numbers": mapped(2),
    "weight_map of lists": mapped([SHARD]),
    "weight_map to no file": mapped("model-00099.safetensors"),
    "weight_map to another shard": mapped(SHARD),
    "weight_map to the directory": mapped("."),
    "weight_map to a device": mapped("/dev/zero"),
    "weight_map to a name with a zero byte": mapped("a\0b"),
    "weight_map to a long name": mapped("a" * 5000),
    "weight_map leaves its directory": partial(outside, absolute=False),
    "weight_map has an absolute path": partial(outside, absolute=True),
    "no shard": gone(SHARD),
    "shard empty": text(SHARD, ""),
    "shard cut": cut(SHARD),
    "shard a directory": replaced(SHARD, Path.mkdir),
    "shard a pipe": replaced(SHARD, os.mkfifo),
    "shard endless": replaced(SHARD, zeros),
    "shard unreadable": replaced(SHARD, unreadable),
    "shard of zeros": text(SHARD, bytes(4096)),
    "shard a pickle": lambda directory: torch.save({NORM: torch.ones(3)}, directory / SHARD),
    "shard longer": lambda directory: os.truncate(directory / SHARD, 10**6),
    "header length 2^63": header_length(2**63),
    "header length of 1 GB": header_length(10**9),
    "header length 0": header_length(0),
    "header no JSON": lambda directory: (directory / SHARD).write_bytes(
        struct.pack("<Q", 8) + b"not json" + bytes(80)
    ),
    "header deep": lambda directory: (directory / SHARD).write_bytes(
        struct.pack("<Q", len(DEEP)) + DEEP.encode()
    ),
    "offsets outside": entry(data_offsets=[0, 10**12]),
    "offsets backwards": entry(data_offsets=[96, 0]),
    "offsets negative": entry(data_offsets=[-96, 0]),
    "shape 10^18": entry(shape=[10**9, 10**9]),
    "shape negative": entry(shape=[-24]),
    "unknown dtype": entry(dtype="F99"),
    "tensor of whole numbers": stored_as(torch.int64),
    "tensor of truths": stored_as(torch.bool),
    "tensor complex": stored_as(torch.complex64),
    "tensor transposed": shaped(lambda tensor: tensor[None]),
    "tensor empty": shaped(lambda tensor: tensor[:0]),
    "tensor missing": tensors(lambda held: held.pop(first(held))),
    "tensor renamed": tensors(renamed),
    "tensor twice": duplicated,
    "weight NaN": spoiled(float("nan")),
    "weight infinite": spoiled(float("inf")),
    "tokenizer empty": text(TOKENIZER, ""),
    "tokenizer cut": cut(TOKENIZER),
    "tokenizer a list": text(TOKENIZER, "[]"),
    "tokenizer deep": text(TOKENIZER, DEEP),
    "tokenizer a pipe": replaced(TOKENIZER, os.mkfifo),
    "tokenizer endless": replaced(TOKENIZER, zeros),
    "tokenizer a directory": replaced(TOKENIZER, Path.mkdir),
    "tokenizer a dangling link": replaced(TOKENIZER, dangling),
    "tokenizer without vocabulary": vocabulary(lambda model: model.update(vocab={}, merges=[])),
    "tokenizer of another kind": vocabulary(
        lambda model: [
            model.clear(),
            model.update(type="WordLevel", vocab={"a": 0, "b": 1}, unk_token="a"),
        ]
    ),
    "tokenizer with a prefix": vocabulary(
        lambda model: model.update(continuing_subword_prefix="x")
    ),
    "tokenizer with merges of nothing": vocabulary(
        lambda model: model.update(merges=[["q", "\u5b57"]])
    ),
    "tokenizer's bytes foreign": vocabulary(lambda model: model["vocab"].update({"\u5b57": 270})),
    "token id 10^9": vocabulary(lambda model: model["vocab"].update({"zq": 10**9})),
    "token id 2^40": vocabulary(lambda model: model["vocab"].update({"zq": 2**40})),
    "more tokens than the model has": vocabulary(
        lambda model: model["vocab"].update({"a" * n: 2000 + n for n in range(40, 3000)})
    ),
    "tokenizer_config cut": cut(TOKENIZER_CONFIG),
    "tokenizer_config a list": text(TOKENIZER_CONFIG, "[]"),
    "tokenizer_config no text": text(TOKENIZER_CONFIG, b"\xff\xfe"),
    "tokenizer_config a pipe": replaced(TOKENIZER_CONFIG, os.mkfifo),
    "chat_template a directory": replaced("chat_template.jinja", Path.mkdir),
    "chat_template endless": replaced("chat_template.jinja", zeros),
}
