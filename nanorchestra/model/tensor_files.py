"""Writes safetensors files with their SHA-256, and opens them once they are known to be sound.

A GGUF file's tensors are read by the same methods.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from nanorchestra.errors import UserError
from nanorchestra.model.gguf_model import GgufModel

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
}


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> str:
    """Writes contiguous tensors on the CPU, in a dtype of DTYPES, and brings the file to disk.

    Returns the SHA-256 of the bytes as they were written, in hex. Raises OSError.
    """
    # In falling size of a number, so that each tensor begins at a multiple of it.
    names = sorted(tensors, key=lambda name: (-tensors[name].itemsize, name))
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in names:
        tensor = tensors[name]
        begin, end = end, end + tensor.nbytes
        entries[name] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    digest = hashlib.sha256()
    with open(path, "wb") as file:

        def write(data):
            digest.update(data)
            file.write(data)

        write(len(header).to_bytes(8, "little"))
        write(header)
        for name in names:
            write(tensors[name].detach().reshape(-1).view(torch.uint8).numpy())
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest()


def open_tensors(path: Path) -> Any:
    """Returns an open safetensors file, which reads tensors or rows of them as they are asked for.

    Its header and its size agree. Raises UserError, which names the file.
    """
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(
            f"{path}: not a whole safetensors file ({reason}); is the download complete?"
        ) from error


class GgufTensors:
    """The tensors of a GGUF file by Hugging Face name, with the methods of a safetensors file."""

    def __init__(self, model: GgufModel) -> None:
        self._model = model

    def get_tensor(self, name: str) -> Tensor:
        """Returns a tensor, widened to fp32."""
        return torch.from_numpy(self._model.array(name))
