"""Weight-only quantisation: matrices in 8 or 4 bits, activations in full precision.

A QuantisedLinear takes the place of an nn.Linear and rounds its full-precision weights. Embeddings,
and norms stay as they are; the lm_head takes 8 bits in either mode.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernels.common import wide_product
from kernels.quantised import ROWS, quantised_linear
from nanorchestra.errors import require
from nanorchestra.model.ops import by_kernel

MODES = {"int8": torch.int8, "int4": torch.uint8, "fp8": torch.float8_e4m3fn}  # uint8: two each
LARGEST = {torch.int8: 127, torch.uint8: 7, torch.float8_e4m3fn: 448}  # magnitudes
GROUP = 128  # input columns that share a scale in int4, as in most published 4-bit checkpoints
_BLOCK = 1024  # output rows converted at a time; bounds the full-precision copies in memory
# fp16, spaced 2^-24 here, still keeps a scale so well that no weight moves by over half a step.
_SMALLEST_SCALE = 2.0**-21


class QuantisedLinear(nn.Module):
    """x [T, in] -> x W^T [T, out], W[n, k] = q[n, k] * scales[n, k // group].

    With 8 bits, values int8 or float8_e4m3fn [out, in] hold q, scales are fp32 [out, 1]. With 4
    bits, values uint8 [out, in / 2] hold q + 8, scales are fp16 [out, in / group]. Byte j of a
    group holds column j in its low nibble and column j + group / 2 in its high one, so that
    consecutive bytes give a kernel consecutive columns.
    """

    def __init__(self, linear: nn.Linear, kind: torch.dtype, group: int):
        """Take shapes and device of `linear`, not its weights. kind: one of MODES."""
        super().__init__()
        rows, columns = self.out_features, self.in_features = linear.weight.shape
        self.group, self.packed = group, kind == torch.uint8
        dtype, device = torch.float16 if self.packed else torch.float32, linear.weight.device
        values = torch.empty(rows, columns // (1 + self.packed), dtype=kind, device=device)
        scales = torch.empty(rows, columns // group, dtype=dtype, device=device)
        self.values, self.scales = nn.Buffer(values), nn.Buffer(scales)

    def forward(self, x: Tensor) -> Tensor:
        """Return the product; a GPU kernel reads the stored bits for up to ROWS rows of x."""
        return self.product(x, x.dtype)

    def product(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the product in dtype, x.dtype or fp32."""
        if by_kernel(x) and len(x) <= ROWS:
            return quantised_linear(x, self.values, self.scales, dtype)
        weight = self.dequantise(x.dtype)
        return F.linear(x, weight) if dtype == x.dtype else wide_product(x, weight.T)

    def dequantise(self, dtype: torch.dtype) -> Tensor:
        """Return W [out, in] in dtype, computed in fp32 and rounded once."""
        q = self.values[:, None]  # [out, groups, group]
        if q.is_floating_point():
            q = q.float()
        if self.packed:
            halves = self.values.unflatten(1, (-1, self.group // 2))
            q = torch.cat((halves & 15, halves >> 4), dim=2).to(torch.int8) - 8
        weight = torch.empty(q.shape, dtype=dtype, device=q.device)
        return torch.mul(q, self.scales[..., None].float(), out=weight).flatten(1)

    @torch.no_grad()
    def write(self, rows: slice, weight: Tensor) -> None:
        """Round weight [rows, in], of any float dtype and device, to the nearest step.

        A step is the largest magnitude of a group divided by 127, or by 7 with 4 bits. In fp8 it is
        the distance to the next number of three binary digits after the point, 448 the largest.
        """
        largest = LARGEST[self.values.dtype]
        blocks = (self.values[rows], self.scales[rows], weight)
        for values, scales, block in zip(*(x.split(_BLOCK) for x in blocks), strict=True):
            block = block.to(scales.device).float().unflatten(1, (-1, self.group))
            scales.copy_((block.abs().amax(2) / largest).clamp(min=_SMALLEST_SCALE))
            # Divides by the scale as it is stored.
            q = (block / scales[..., None].float()).clamp(-largest, largest)
            if not values.is_floating_point():
                q = q.round()
            if self.packed:
                low, high = (q + 8).to(values.dtype).chunk(2, dim=2)
                q = low | high << 4
            values.copy_(q.flatten(1))


def quantise_model(model: nn.Module, mode: str) -> None:
    """Replace every nn.Linear by an empty QuantisedLinear, in place.

    "int8" and "fp8" (e4m3) scale each output row, "int4" groups of 128 input columns. Raises
    UserError for another mode.
    """
    require(mode in MODES, f"quantise = {mode!r}: expected one of {', '.join(MODES)}")
    for name, module in linears(model):
        kind = MODES["int8" if (mode, name) == ("int4", "lm_head") else mode]
        group = GROUP if kind == torch.uint8 else module.in_features
        model.set_submodule(name, QuantisedLinear(module, kind, group))


def linears(model: nn.Module, kind: type | tuple[type, ...] = nn.Linear) -> list[tuple[str, Any]]:
    """Return (name, module) of the modules of a kind, or of several."""
    return [(name, module) for name, module in model.named_modules() if isinstance(module, kind)]
