"""Loads a checkpoint in Hugging Face layout, and copies weights in and out by their HF names.

The model holds q, k, v and gate, up as one matrix each. Only this file knows their HF names, which
are row ranges of the fused matrices. Loading holds one tensor at a time, and rounds it at once if
the model is quantised. saving.py writes checkpoints.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from nanorchestra.errors import UserError, require
from nanorchestra.files import read_json
from nanorchestra.model.compressed import FourBit, awq_decompressed, decompressed
from nanorchestra.model.hf_config import read_config, stored_group
from nanorchestra.model.native import PackedLinear
from nanorchestra.model.quantise import QuantisedLinear, linears, quantise_model
from nanorchestra.model.qwen3 import ModelConfig, Qwen3
from nanorchestra.model.sharded import fill, is_sharded, whole
from nanorchestra.model.tokenizer import Tokenizer

STORED = QuantisedLinear, PackedLinear  # they hold a matrix in a form of their own
BASE = ".base"  # in the name of a matrix that has an adapter
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


@dataclass(frozen=True)
class Slot:
    """The place of one checkpoint tensor: its shape, and what writes it."""

    shape: list[int]
    writes: list[Callable[[Tensor | FourBit], None]]


def load_model(
    path: str | Path,
    device: str = "cpu",
    dtype: str | None = "float32",
    quantise: str | None = None,
    build: Callable[[ModelConfig], Qwen3] = Qwen3,
) -> tuple[Qwen3, Tokenizer | None]:
    """Return the model of a checkpoint directory and its tokenizer, None without tokenizer.json.

    `quantise`, "int8", "int4" or "fp8", rounds the matrices as they are read; those that are stored
    in 4 or 8 bits are widened before, but for AutoAWQ's, which "int4" holds as they are. `build`
    makes the model without memory; dtype None keeps the dtypes it chooses. Raises UserError for
    anything wrong with the directory.
    """
    path = Path(path)
    config = read_config(path)
    with torch.device("meta"):
        model = build(config)
    if dtype is not None:
        model.to(getattr(torch, dtype))
    if quantise:
        quantise_model(model, quantise, stored_group(path))

    def empty(x):  # as to_empty does, but empty_like imports sympy: 0.3 s
        if is_sharded(x):
            return torch.empty_like(x, device=device)
        return torch.empty(x.shape, dtype=x.dtype, device=device)

    model._apply(empty)
    copy_weights(model, _stored(path), str(path))
    has_tokenizer = (path / "tokenizer.json").exists()
    return model, Tokenizer.from_dir(path) if has_tokenizer else None


def copy_weights(
    model: Qwen3, tensors: Iterable[tuple[str, Tensor | FourBit]], source: str = "new weights"
) -> None:
    """Overwrite all weights in place from (HF name, tensor) pairs of any float dtype and device.

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
        for write in slots[name].writes:
            write(tensor)
        missing.discard(name)
    if missing:
        name = min(missing)
        raise UserError(f"{source}: {name} of shape {slots[name].shape} is missing")


def named_hf_tensors(
    model: Qwen3, dtype: torch.dtype | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yield (HF name, tensor) of every parameter, without gradient, cast to dtype if given.

    The tensors are views: writing to them writes to the model. Two exceptions are copies: a matrix
    with an adapter (lora.py) is merged, and a sharded one is gathered, so all ranks must iterate
    together. Raises UserError for a quantised model without adapters and a packed one.
    """
    held = linears(model, STORED)
    adapted = all(name.endswith(BASE) for name, _ in held)
    require(adapted, "a quantised or packed model can be neither trained nor saved")
    for name, parameter in model.named_parameters():
        parts = hf_rows(model.config, name, len(parameter))
        if parts:
            owner, _, field = name.rpartition(".")
            merged = getattr(model.get_submodule(owner.removesuffix(BASE)), "merged", None)
            matrix = whole(merged() if merged and field == "weight" else parameter, dtype)
            yield from ((part, matrix[rows]) for part, rows in parts)
    for name, module in held:
        matrix = whole(model.get_submodule(name.removesuffix(BASE)).merged(), dtype)
        parts = hf_rows(model.config, f"{name}.weight", module.out_features)
        yield from ((part, matrix[rows]) for part, rows in parts)


def hf_slots(model: Qwen3) -> dict[str, Slot]:
    """Return where each HF tensor goes."""
    slots = {}
    for name, parameter in model.named_parameters():
        for part, rows in hf_rows(model.config, name, len(parameter)):
            shape = [rows.stop - rows.start, *parameter.shape[1:]]
            slots[part] = Slot(shape, [partial(_fill, parameter, rows.start)])
    for name, module in linears(model, STORED):
        if name == "lm_head" and model.config.tie_word_embeddings:
            name = "embed_tokens"
        for part, rows in hf_rows(model.config, f"{name}.weight", module.out_features):
            shape = [rows.stop - rows.start, module.in_features]
            slots.setdefault(part, Slot(shape, [])).writes.append(partial(module.write, rows))
    return slots


def _fill(parameter, begin, weight):
    """Write rows begin.. of a parameter, which holds its numbers one by one."""
    fill(parameter, weight.widened() if isinstance(weight, FourBit) else weight, begin)


def hf_rows(config: ModelConfig, name: str, rows: int) -> list[tuple[str, slice]]:
    """Return the HF names of one parameter and the rows that each has; none for an adapter."""
    if name.endswith("norm"):
        name += ".weight"
    name = name.replace(f"{BASE}.", ".")
    *owner, module, field = name.split(".")
    if field in ("lora_a", "lora_b"):
        return []
    kv = config.num_key_value_heads * config.head_dim
    fused = {
        "qkv_proj": {"q_proj": rows - 2 * kv, "k_proj": kv, "v_proj": kv},
        "gate_up_proj": {"mlp.gate_proj": rows // 2, "mlp.up_proj": rows // 2},
        "down_proj": {"mlp.down_proj": rows},
    }
    parts = fused.get(module, {module: rows})
    path = owner if module == "lm_head" else ["model", *owner]
    return [
        (".".join([*path, part, field]), slice(end - count, end))
        for (part, count), end in zip(parts.items(), accumulate(parts.values()), strict=True)
    ]


def _stored(path) -> Iterator[tuple[str, Tensor | FourBit]]:
    """Yield (name, tensor) of a checkpoint directory, shard by shard.

    A bare backbone, such as Qwen3-Embedding, has names without their first "model".
    """
    files, shards = {SINGLE}, {}
    if (path / INDEX).is_file():
        files = set(read_json(path / INDEX)["weight_map"].values())
    for file in sorted(files):
        try:
            shard = safe_open(path / file, framework="pt")
        except (SafetensorError, OSError) as error:
            raise UserError(
                f"{path / file}: not a whole safetensors file ({error}); is the download complete?"
            ) from error
        shards |= dict.fromkeys(shard.keys(), shard)

    def read(name):
        return shards[name].get_tensor(name)

    group = stored_group(path)
    if group is None:
        tensors = decompressed(shards, read, str(path))
    else:
        tensors = awq_decompressed(shards, read, group, str(path))
    for name, tensor in tensors:
        bare = not name.startswith(("model.", "lm_head."))
        yield f"model.{name}" if bare else name, tensor
