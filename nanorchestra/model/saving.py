"""Writes a checkpoint directory in Hugging Face layout, which transformers loads."""

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from nanorchestra.files import replace_directory
from nanorchestra.model.hf_config import GENERATION, config_to_hf
from nanorchestra.model.qwen3 import Qwen3
from nanorchestra.model.tokenizer import Tokenizer
from nanorchestra.model.weights import INDEX, SINGLE, named_hf_tensors

SHARD_BYTES = 5_000_000_000  # the most in one file


def save_checkpoint(
    model: Qwen3,
    tokenizer: Tokenizer | None,
    path: str | Path,
    *,
    dtype: torch.dtype | None = None,
    write: bool = True,
) -> None:
    """Writes a checkpoint directory in `dtype`, the model's own by default; it replaces `path`.

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
            _write_json(directory / GENERATION, {"eos_token_id": eos})
        _write_shards(directory, tensors)
        if tokenizer is not None:
            tokenizer.save(directory)


def _write_shards(directory, tensors) -> None:
    """Writes one file, or numbered shards and their index."""
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
        return
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    _write_json(directory / INDEX, index)


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


def _write_json(file, data):
    file.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
