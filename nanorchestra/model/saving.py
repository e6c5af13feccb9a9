"""Writes a checkpoint directory in Hugging Face layout, which transformers loads."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from nanorchestra.files import replace_directory
from nanorchestra.model.hf_config import config_to_hf
from nanorchestra.model.qwen3 import Qwen3
from nanorchestra.model.tokenizer import Tokenizer
from nanorchestra.model.weights import INDEX, SINGLE, named_hf_tensors


def save_checkpoint(
    model: Qwen3,
    tokenizer: Tokenizer | None,
    path: str | Path,
    *,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = 5_000_000_000,
    write: bool = True,
) -> None:
    """Write a checkpoint directory in `dtype`, the model's own by default; it replaces `path`.

    Host memory holds one shard at a time. All ranks of a sharded model call this, one of them with
    `write`. Raises UserError if `path` cannot be written or the model is quantised.
    """
    dtype = dtype or model.embed_tokens.weight.dtype
    tensors = named_hf_tensors(model, dtype)
    if not write:
        for _ in tensors:  # takes part in gathering them
            pass
        return
    eos = list(model.config.eos_token_ids)
    with replace_directory(Path(path)) as directory:
        dtype_name = str(dtype).removeprefix("torch.")
        _write_json(directory / "config.json", config_to_hf(model.config) | {"dtype": dtype_name})
        if eos:
            _write_json(directory / "generation_config.json", {"eos_token_id": eos})
        _write_shards(directory, tensors, max_shard_bytes)
        if tokenizer is not None:
            tokenizer.save(directory)


def _write_shards(
    directory: Path, tensors: Iterable[tuple[str, Tensor]], max_shard_bytes: int
) -> None:
    """Write one file, or numbered shards and their index."""
    shard: dict[str, Tensor] = {}
    weight_map: dict[str, str] = {}
    file, size, total = "", 0, 0
    for name, tensor in tensors:
        if not shard or size + tensor.nbytes > max_shard_bytes:
            if shard:
                save_file(shard, directory / file, {"format": "pt"})
            shard, size = {}, 0
            file = f"model-{1 + len(set(weight_map.values())):05d}.safetensors"
        shard[name], weight_map[name] = tensor.cpu().contiguous(), file
        size, total = size + tensor.nbytes, total + tensor.nbytes
    if len(shard) == len(weight_map):
        save_file(shard, directory / SINGLE, {"format": "pt"})
    else:
        save_file(shard, directory / file, {"format": "pt"})
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        _write_json(directory / INDEX, index)


def _write_json(file: Path, data: dict[str, Any]) -> None:
    file.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
