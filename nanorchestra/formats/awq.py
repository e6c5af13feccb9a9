"""Reads matrices that AutoAWQ stored in 4 bits (Lin et al. 2023, arXiv 2306.00978).

AutoAWQ in its version "gemm": W[n, k] = (q[n, k] - zero[n, g]) * scale[n, g], where a group g of
columns shares a scale and a zero point, and q and zero are in 0 .. 15. They lie transposed in int32
words, qweight [in, out / 8] and qzeros [groups, out / 8], in the order AWQ_ORDER; scales are fp16
[groups, out]. They stay in 4 bits: an int4 model holds them exactly.
"""

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from nanorchestra.errors import require
from nanorchestra.files import read_json
from nanorchestra.model.checkpoint import CONFIG, stored_tensors
from nanorchestra.model.quantise import FourBit

# The place in a word, counted from its lowest 4 bits, of each of eight neighbouring outputs
AWQ_ORDER = 0, 4, 1, 5, 2, 6, 3, 7
PARTS = "qweight", "qzeros", "scales"  # of a matrix


def is_awq(directory: Path) -> bool:
    """Returns whether AutoAWQ wrote a directory. UserError for a form of it that is not read."""
    file = directory / CONFIG
    stored = read_json(file).get("quantization_config") or {}
    if stored.get("quant_method") != "awq":
        return False
    version, bits = stored.get("version", "gemm"), stored.get("bits")
    require(
        (version.lower(), bits) == ("gemm", 4),
        f"{file}: quantization_config is AWQ {version} in {bits} bits: expected gemm in 4",
    )
    return True


def awq_tensors(directory: Path) -> Iterator[tuple[str, Tensor | FourBit]]:
    """Yields (name, tensor) of a directory of AutoAWQ; what it did not convert comes as it is."""
    matrices = {}  # module -> those of PARTS that were read
    for name, tensor in stored_tensors(directory):
        module, _, part = name.rpartition(".")
        if part not in PARTS:
            yield name, tensor
            continue
        matrices.setdefault(module, {})[part] = tensor
        if len(matrices[module]) == len(PARTS):
            parts = matrices.pop(module)
            q, zeros = _unpacked(parts["qweight"]), _unpacked(parts["qzeros"])
            yield f"{module}.weight", FourBit(q, zeros, parts["scales"].T)


def _unpacked(words: Tensor) -> Tensor:
    """Returns the values 0 .. 15 of int32 words [N, W] as uint8 [8 W, N]."""
    places = [(words >> 4 * place & 15).to(torch.uint8) for place in AWQ_ORDER]
    return torch.stack(places, dim=2).flatten(1).T
