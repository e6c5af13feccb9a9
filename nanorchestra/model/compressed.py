"""Reads matrices that the package compressed-tensors stored in 4 or 8 bits, in full precision.

A matrix is W[n, k] = (q[n, k] - zero[n, k]) * scale[n, k], where rectangles of W share a scale and
a zero point: a row, a group of columns, a block, or all of it. q is int8 or float8_e4m3fn, or lies
densely in int32 words, lowest bits first, each value with half of its range added.
"""

from collections.abc import Callable, Collection, Iterator

import torch
from torch import Tensor

from nanorchestra.errors import UserError, require

# Values of `format` in quantization_config
FORMATS = "pack-quantized", "int-quantized", "float-quantized", "naive-quantized"
PARTS = "", "_packed", "_shape", "_scale", "_zero_point"  # of a matrix, behind its name


def decompressed(
    names: Collection[str], read: Callable[[str], Tensor], source: str
) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) of a checkpoint; what was compressed comes as [out, in] in fp32.

    names: of all tensors, which `read` gives. Scales of activations are left out, since activations
    are not rounded. UserError, which names the `source`, for parts that do not fit and for columns
    whose groups are not contiguous.
    """
    for name in names:
        module, _, field = name.rpartition(".")
        weight = f"{module}.weight"
        if f"{weight}_scale" not in names:
            yield name, read(name)
        elif field == "weight_scale":
            order = f"{weight}_g_idx"
            require(order not in names, f"{source}: {order}: groups must be contiguous")
            parts = {x: read(weight + x) for x in PARTS if weight + x in names}
            try:
                matrix = _matrix(parts)
            except (KeyError, RuntimeError):
                shapes = {weight + part: list(x.shape) for part, x in parts.items()}
                raise UserError(f"{source}: the parts do not fit: {shapes}") from None
            yield weight, matrix


def _matrix(parts: dict[str, Tensor]) -> Tensor:
    """Return W [out, in] in fp32 from its parts, by the names in PARTS."""
    q, zero = parts.get(""), parts.get("_zero_point")
    if q is None:
        packed, (rows, columns) = parts["_packed"], parts["_shape"].tolist()
        bits = 32 * packed.shape[1] // columns
        q = _unpacked(packed, bits)
        zero = None if zero is None else _unpacked(zero.T, bits).T[:rows]

    def spread(x):  # to each place of the rectangles
        x = x.float().view(len(x), -1)
        for dim in (0, 1):
            x = x.repeat_interleave(q.shape[dim] // x.shape[dim], dim)
        return x

    q = q.float()
    if zero is not None:
        q -= spread(zero)
    return q * spread(parts["_scale"])


def _unpacked(words: Tensor, bits: int) -> Tensor:
    """Return the values of int32 words [N, W] -> [N, W * 32 / bits]."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    return (words[..., None] >> shifts & (1 << bits) - 1).flatten(1) - (1 << bits - 1)
