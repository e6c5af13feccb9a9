"""Weight-only quantisation: matrices in 8 or 4 bits, activations in full precision.

A QuantisedLinear takes the place of an nn.Linear. It rounds full-precision weights, and takes those
of a 4-bit checkpoint as they are. Embeddings and norms stay as they are; the lm_head takes 8 bits
in either mode.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from kernels.common import wide_product
from kernels.quantised import GROUPS, ROWS, quantised_linear
from nanorchestra.errors import require
from nanorchestra.model import ops

MODES = {"int8": torch.int8, "int4": torch.uint8}  # uint8: two each
LARGEST = {torch.int8: 127, torch.uint8: 7}  # magnitudes
GROUP = 128  # input columns that share a scale in int4: those of most published 4-bit checkpoints
_BLOCK = 1024  # output rows converted at a time; bounds the full-precision copies in memory
# fp16, spaced 2^-24 here, still keeps a scale so well that no weight moves by over half a step.
_SMALLEST_SCALE = 2.0**-21


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


class QuantisedLinear(nn.Module):
    """x [T, in] -> x W^T + bias, W[n, k] = (q[n, k] - zeros[n, k // group]) * scales[n, same].

    With 8 bits, values int8 [out, in] hold q, scales are fp32 [out, 1], and there are no zeros.
    With 4 bits, values uint8 [out, in / 2] hold q in 0 .. 15, scales are fp16 and zeros uint8 [out,
    in / group]; zeros None stands for 8. Byte j of a group holds column j in its low nibble and
    column j + group / 2 in its high one, so that consecutive bytes give a kernel consecutive
    columns. The bias, of `linear` if it has one, is not rounded.
    """

    def __init__(self, linear: nn.Linear, kind: torch.dtype, group: int, zeros: bool = False):
        """Takes shapes and device of `linear`, not its weights. kind: one of MODES.

        zeros: whether to hold zeros, which a checkpoint in 4 bits may have; rounding uses 8.
        ValueError if the group does not divide the columns of the weights.
        """
        super().__init__()
        rows, columns = self.out_features, self.in_features = linear.weight.shape
        if columns % group:
            raise ValueError(f"{columns} columns; expected a multiple of the group, {group}")
        self.bias = linear.bias
        self.group, self.packed = group, kind == torch.uint8
        dtype, device = torch.float16 if self.packed else torch.float32, linear.weight.device
        values_per_byte = 2 if self.packed else 1
        values = torch.empty(rows, columns // values_per_byte, dtype=kind, device=device)
        scales = torch.empty(rows, columns // group, dtype=dtype, device=device)
        self.values, self.scales = nn.Buffer(values), nn.Buffer(scales)
        places = torch.empty(scales.shape, dtype=torch.uint8, device=device) if zeros else None
        self.register_buffer("zeros", places)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the product; a GPU kernel reads the stored bits for up to ROWS rows of x.

        Gradients flow into x. The values are frozen: they have none.
        """
        if x.requires_grad and torch.is_grad_enabled():
            out = _FrozenProduct.apply(x, self)
        else:
            out = self.product(x, x.dtype)
        return out if self.bias is None else out + self.bias

    def product(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Returns the product without bias in dtype, x.dtype or fp32."""
        if ops.by_kernel(x) and len(x) <= ROWS:
            return quantised_linear(x, self.values, self.scales, dtype, self.zeros)
        weight = self.dequantise(x.dtype)
        return F.linear(x, weight) if dtype == x.dtype else wide_product(x, weight.T)

    def dequantise(self, dtype: torch.dtype) -> Tensor:
        """Returns W [out, in] in dtype, computed in fp32 and rounded once."""
        q = self.values[:, None]  # [out, groups, group]
        if self.packed:
            halves = self.values.unflatten(1, (-1, self.group // 2))
            zeros = 8 if self.zeros is None else self.zeros[..., None].to(torch.int8)
            q = torch.cat((halves & 15, halves >> 4), dim=2).to(torch.int8) - zeros
        weight = torch.empty(q.shape, dtype=dtype, device=q.device)
        return torch.mul(q, self.scales[..., None].float(), out=weight).flatten(1)

    @torch.no_grad()
    def write(self, rows: slice, weight: Tensor | FourBit) -> None:
        """Rounds weight [rows, in], of any float dtype and device, to the nearest step.

        A step is the largest magnitude of a group divided by 127, or by 7 with 4 bits. A matrix
        that is stored in 4 bits in the groups of this one is taken as it is.
        """
        if isinstance(weight, FourBit):
            if self.zeros is not None and weight.group == self.group:
                self._take(rows, weight)
                return
            weight = weight.widened()
        if self.zeros is not None:
            self.zeros[rows] = 8
        largest = LARGEST[self.values.dtype]
        blocks = (self.values[rows], self.scales[rows], weight)
        for values, scales, block in zip(*(x.split(_BLOCK) for x in blocks), strict=True):
            block = block.to(scales.device).float().unflatten(1, (-1, self.group))
            scales.copy_((block.abs().amax(2) / largest).clamp(min=_SMALLEST_SCALE))
            # Divides by the scale as it is stored.
            q = (block / scales[..., None].float()).clamp(-largest, largest).round()
            values.copy_(_packed((q + 8).to(values.dtype)) if self.packed else q.flatten(1))

    def _take(self, rows, weight) -> None:
        self.values[rows] = _packed(weight.q.unflatten(1, (-1, self.group)))
        self.scales[rows] = weight.scales
        self.zeros[rows] = weight.zeros


class _FrozenProduct(torch.autograd.Function):
    """x W^T with a gradient in x: grad W. Both passes dequantise W, and neither keeps it."""

    @staticmethod
    def forward(ctx, x, linear):
        ctx.linear = linear
        return F.linear(x, linear.dequantise(x.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return grad @ ctx.linear.dequantise(grad.dtype), None


def _packed(q: Tensor) -> Tensor:
    """Returns q uint8 [rows, groups, group] in 0 .. 15, two to a byte: [rows, columns / 2]."""
    low, high = q.chunk(2, dim=2)
    return (low | high << 4).flatten(1)


def quantise_model(model: nn.Module, mode: str, stored_group: int | None = None) -> None:
    """Replaces every nn.Linear by an empty QuantisedLinear, in place.

    "int8" scales each output row, "int4" groups of 128 input columns, or of 64 or 32 where 128 do
    not divide a row. stored_group: that of a checkpoint in 4 bits with zero points, which "int4"
    then holds exactly, if the group is one of GROUPS. Raises UserError for another mode, and for
    rows that no group divides.
    """
    require(mode in MODES, f"quantise = {mode!r}: expected one of {', '.join(MODES)}")
    zeros = stored_group in GROUPS
    largest = stored_group if zeros else GROUP
    for name, module in linears(model):
        kind = MODES["int8" if (mode, name) == ("int4", "lm_head") else mode]
        columns = group = module.in_features
        if kind == torch.uint8:
            fitting = [size for size in GROUPS if size <= largest and columns % size == 0]
            require(
                fitting,
                f"quantise = 'int4': {name} has {columns} columns; expected a multiple of 32",
            )
            group = fitting[0]
        quantised = QuantisedLinear(module, kind, group, zeros and kind == torch.uint8)
        model.set_submodule(name, quantised)


def linears(model: nn.Module, kind: type | tuple[type, ...] = nn.Linear) -> list[tuple[str, Any]]:
    """Returns (name, module) of the modules of a kind, or of several."""
    return [(name, module) for name, module in model.named_modules() if isinstance(module, kind)]
