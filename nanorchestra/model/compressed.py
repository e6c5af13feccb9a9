"""Reads matrices that compressed-tensors or AutoAWQ stored in 4 or 8 bits.

compressed-tensors: W[n, k] = (q[n, k] - zero[n, k]) * scale[n, k], where rectangles of W share a
scale and a zero point: a row, a group of columns, a block, or all of it. q is int8 or
float8_e4m3fn, or lies densely in int32 words, lowest bits first, each value with half of its range
added. These matrices are widened as they are read.

AutoAWQ (Lin et al. 2023, arXiv 2306.00978) in its version "gemm": the same formula for groups of
columns, q and zero in 0 .. 15. They lie transposed in int32 words, qweight [in, out / 8] and qzeros
[groups, out / 8], in the order AWQ_ORDER; scales are fp16 [groups, out]. These matrices stay in 4
bits until their place in the model is known: an int4 model holds them exactly.
"""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from nanorchestra.errors import UserError, require

# Values of `format` in quantization_config
FORMATS = "pack-quantized", "int-quantized", "float-quantized", "naive-quantized"
PARTS = "", "_packed", "_shape", "_scale", "_zero_point"  # of a matrix, behind its name
# The place in a word, counted from its lowest 4 bits, of each of eight neighbouring outputs
AWQ_ORDER = 0, 4, 1, 5, 2, 6, 3, 7


@dataclass(frozen=True)
class FourBit:
    """A matrix as it is stored in 4 bits: W[n, k] = (q[n, k] - zeros[n, g]) * scales[n, g].

    Group g holds the columns k of g * group .. (g + 1) * group - 1. q uint8 [out, in] and zeros
    uint8 [out, groups] are in 0 .. 15, scales are fp16 [out, groups].
    """

    q: Tensor
    zeros: Tensor
    scales: Tensor

    @property
    def shape(self) -> torch.Size:
        """Returns [out, in]."""
        return self.q.shape

    @property
    def group(self) -> int:
        """Returns how many columns share a scale."""
        return self.q.shape[1] // self.scales.shape[1]

    def widened(self) -> Tensor:
        """Returns W [out, in] in fp32, which holds it exactly."""
        q = self.q.float().unflatten(1, (-1, self.group))
        return ((q - self.zeros[..., None]) * self.scales[..., None].float()).flatten(1)


def decompressed(
    names: Collection[str], read: Callable[[str], Tensor], source: str
) -> Iterator[tuple[str, Tensor]]:
    """Yields (name, tensor) of a checkpoint; what was compressed comes as [out, in] in fp32.

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


def awq_decompressed(
    names: Collection[str], read: Callable[[str], Tensor], group: int, source: str
) -> Iterator[tuple[str, Tensor | FourBit]]:
    """Yields (name, tensor) of a checkpoint of AutoAWQ; what it did not convert comes as it is.

    names: of all tensors, which `read` gives. group: columns that share a scale, 0: a whole row.
    UserError, which names the `source`, for parts that are missing or do not fit.
    """
    for name in names:
        module, _, field = name.rpartition(".")
        converted = f"{module}.qweight" in names
        if field not in ("qweight", "qzeros", "scales") or not converted:
            yield name, read(name)
        elif field == "qweight":
            parts = {}
            for field in ("qweight", "qzeros", "scales"):
                part = f"{module}.{field}"
                require(part in names, f"{source}: {part} is missing beside {name}")
                parts[part] = read(part)
            matrix = _awq_matrix(*parts.values(), group)
            stored = {part: f"{x.dtype} {list(x.shape)}" for part, x in parts.items()}
            groups = f"groups of {group} rows" if group else "one group of rows"
            require(
                matrix, f"{source}: the parts do not fit ({groups}, 8 columns a word): {stored}"
            )
            yield f"{module}.weight", matrix


def _awq_matrix(qweight, qzeros, scales, group) -> FourBit | None:
    """Returns the matrix, or None if the parts do not fit."""
    if any(part.dim() != 2 for part in (qweight, qzeros, scales)):
        return None
    columns, words = qweight.shape
    if columns == 0:
        return None
    groups, rest = divmod(columns, group or columns)
    fits = (
        rest == 0
        and qweight.dtype == qzeros.dtype == torch.int32
        and scales.dtype == torch.float16
        and qzeros.shape == (groups, words)
        and scales.shape == (groups, 8 * words)
    )
    return FourBit(_awq_values(qweight), _awq_values(qzeros), scales.T) if fits else None


def _awq_values(words: Tensor) -> Tensor:
    """Returns the values 0 .. 15 of int32 words [N, W] as uint8 [8 W, N]."""
    places = [(words >> 4 * place & 15).to(torch.uint8) for place in AWQ_ORDER]
    return torch.stack(places, dim=2).flatten(1).T


def _matrix(parts: dict[str, Tensor]) -> Tensor:
    """Returns W [out, in] in fp32 from its parts, by the names in PARTS."""
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
    """Returns the values of int32 words [N, W] -> [N, W * 32 / bits]."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    return (words[..., None] >> shifts & (1 << bits) - 1).flatten(1) - (1 << bits - 1)
