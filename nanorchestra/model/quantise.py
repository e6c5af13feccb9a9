"""Weight-only quantisation: matrices in 8 or 4 bits, activations as they are. Makes Qwen3-8B fit a 24 GB card (int8) or a 12 GB one (int4).

QuantisedLinear stands where an nn.Linear stood. It is filled with full-precision weights, which it rounds itself, or with the tensors of
an AWQ checkpoint (Lin et al. 2023, arXiv 2306.00978; "gemm" layout), part by part, so that no matrix need ever be held whole in full
precision. Embeddings, norms and biases stay as they are; the lm_head takes 8 bits in either mode. Names of checkpoints are in weights.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from nanorchestra.errors import UserError
from nanorchestra.model.ops import by_kernel, linear

MODES = ("int8", "int4")
GROUP = (
    128  # input columns that share a scale in int4, as in nearly all published 4-bit checkpoints
)
_BLOCK = (
    1024  # output rows that are converted at a time; bounds the full-precision copies in flight
)
# Up to here fp16 (spaced 2^-24 at this end) keeps a scale so well that no weight, the largest included, is off by more than half a step.
# It also keeps a row of zeros from dividing by zero.
_SMALLEST_SCALE = 2.0**-21
_AWQ_NIBBLES = (
    0,
    4,
    1,
    5,
    2,
    6,
    3,
    7,
)  # column c of eight lies in this nibble of their int32, counted from the lowest


@dataclass(frozen=True)
class Slot:
    """Where one tensor of a checkpoint goes: its shape, whether it is stored as int32 rather than in floats, and what takes it in."""

    shape: list[int]
    integer: bool
    write: Callable[[Tensor], Any]


class QuantisedLinear(nn.Module):
    """x [T, in] -> x W^T + bias [T, out], where W[n, k] = (q[n, k] - zeros[n, k // group]) * scales[n, k // group].

    8 bits: values int8 [out, in] are the q; scales fp32 [out, 1], one group a row; no zeros.
    4 bits: scales fp16 and zeros uint8 (8 where rounding was symmetric), both [out, in / group]; values uint8 [out, in / 2] hold q in
    0..15, two to a byte: byte j of a group has its column j in the low nibble and column j + group / 2 in the high one, so that a run of
    bytes gives a kernel two runs of neighbouring columns under one scale.
    """

    def __init__(self, linear: nn.Linear, bits: int, group: int) -> None:
        """Shapes, device and bias of `linear`; its weights are not read. `group` must divide its columns."""
        super().__init__()
        self.in_features, self.out_features, self.bits, self.group = (
            linear.in_features,
            linear.out_features,
            bits,
            group,
        )
        out, columns, device = linear.out_features, linear.in_features, linear.weight.device
        groups = columns // group
        self.register_buffer(
            "values",
            torch.empty(
                out,
                columns * bits // 8,
                dtype=torch.int8 if bits == 8 else torch.uint8,
                device=device,
            ),
        )
        self.register_buffer(
            "scales",
            torch.empty(
                out, groups, dtype=torch.float32 if bits == 8 else torch.float16, device=device
            ),
        )
        self.register_buffer(
            "zeros",
            None if bits == 8 else torch.empty(out, groups, dtype=torch.uint8, device=device),
        )
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        """On a GPU by kernels that read W as it is stored, for few rows; else W is held in x.dtype for the length of the product."""
        if by_kernel(x):
            from kernels.quantised import quantised_linear

            return quantised_linear(x, self.values, self.scales, self.zeros, self.group, self.bias)
        return linear(x, self.dequantise(x.dtype), self.bias)

    def dequantise(self, dtype: torch.dtype) -> Tensor:
        """W [out, in] in dtype: computed in fp32 and rounded once."""
        if self.bits == 8:
            q = self.values[:, None]  # [out, 1, in]
        else:
            q = unpack_nibbles(self.values, self.group).to(torch.int8) - self.zeros[..., None].to(
                torch.int8
            )  # [out, groups, group]
        weight = torch.empty(q.shape, dtype=dtype, device=q.device)
        return torch.mul(q, self.scales[..., None].float(), out=weight).flatten(1)

    @torch.no_grad()
    def write(self, rows: slice, weight: Tensor) -> None:
        """Round weight [rows, in], of any float dtype and device, to the nearest step: absmax / 127, or absmax / 7 in 4 bits, per group."""
        largest = 127 if self.bits == 8 else 7
        for values, scales, part in zip(
            self.values[rows].split(_BLOCK), self.scales[rows].split(_BLOCK), weight.split(_BLOCK)
        ):
            part = (
                part.to(scales.device).float().unflatten(1, (-1, self.group))
            )  # [rows, groups, group]
            scales.copy_((part.abs().amax(2) / largest).clamp(min=_SMALLEST_SCALE))
            q = (
                (part / scales[..., None].float()).round().clamp(-largest, largest)
            )  # by the scale as it is stored
            values.copy_(q.flatten(1) if self.bits == 8 else pack_nibbles((q + 8).to(torch.uint8)))
        if self.bits == 4:
            self.zeros[rows] = 8

    @torch.no_grad()
    def write_awq(self, rows: slice, kind: str, tensor: Tensor) -> None:
        """One of AWQ's tensors for these rows: qweight int32 [in, rows / 8], qzeros int32 [groups, rows / 8] or scales [groups, rows]."""
        tensor = tensor.to(self.scales.device)
        if kind == "scales":
            self.scales[rows] = tensor.T.to(self.scales.dtype)
        elif kind == "qzeros":
            self.zeros[rows] = unpack_awq(tensor).T
        else:
            for values, part in zip(
                self.values[rows].split(_BLOCK), tensor.split(_BLOCK // 8, dim=1)
            ):
                values.copy_(pack_nibbles(unpack_awq(part).T.unflatten(1, (-1, self.group))))

    def slots(self, rows: slice, awq: bool) -> dict[str, Slot]:
        """What fills these rows, by the last part of its name: `weight` in full precision, or AWQ's three tensors."""
        count, groups = rows.stop - rows.start, self.in_features // self.group
        if not awq:
            return {"weight": Slot([count, self.in_features], False, partial(self.write, rows))}
        shapes = {
            "qweight": [self.in_features, count // 8],
            "qzeros": [groups, count // 8],
            "scales": [groups, count],
        }
        return {
            kind: Slot(shape, kind != "scales", partial(self.write_awq, rows, kind))
            for kind, shape in shapes.items()
        }

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "QuantisedLinear":
        """model.to(bfloat16) leaves the scales alone: rounded to bf16 they would move the largest of 127 steps by a quarter of one."""
        scales = self.scales
        super()._apply(fn, recurse)
        if self.scales.dtype != scales.dtype:
            self.scales = scales.to(self.scales.device)
        return self


def quantise_model(model: nn.Module, mode: str) -> None:
    """Replace every nn.Linear by a QuantisedLinear of its weights, in place: "int8" per output row, "int4" in groups of 128 columns.

    On the meta device only shapes are made. UserError for another mode, and for columns that do not split into groups.
    """
    if mode not in MODES:
        raise UserError(f"quantise = {mode!r}: expected one of {', '.join(MODES)}")
    for name, linear in linears(model):
        bits = 4 if mode == "int4" and name != "lm_head" else 8
        quantised = replace_linear(model, name, bits, GROUP if bits == 4 else linear.in_features)
        if not linear.weight.is_meta:
            quantised.write(slice(0, linear.out_features), linear.weight)


def replace_linear(model: nn.Module, name: str, bits: int, group: int) -> QuantisedLinear:
    """Put an empty QuantisedLinear in the place of one nn.Linear. UserError if its columns do not split into groups."""
    linear = model.get_submodule(name)
    if linear.in_features % group:
        raise UserError(
            f"{name} has {linear.in_features} input columns: expected a multiple of {group}, the group of its 4 bits; int8 takes any"
        )
    quantised = QuantisedLinear(linear, bits, group)
    model.set_submodule(name, quantised)
    return quantised


def linears(model: nn.Module, kind: type[nn.Module] = nn.Linear) -> list[tuple[str, Any]]:
    """(name, module) of the modules of one kind, as they are now."""
    return [(name, module) for name, module in model.named_modules() if isinstance(module, kind)]


def is_quantised(model: nn.Module) -> bool:
    """True if any matrix is: such a model can be run and given new weights, not trained or saved."""
    return bool(linears(model, QuantisedLinear))


def pack_nibbles(q: Tensor) -> Tensor:
    """uint8 [rows, groups, group] of 0..15 -> uint8 [rows, groups * group / 2], laid out as QuantisedLinear says."""
    low, high = q.chunk(2, dim=2)
    return (low | high << 4).flatten(1)


def unpack_nibbles(packed: Tensor, group: int) -> Tensor:
    """The inverse of pack_nibbles: uint8 [rows, groups * group / 2] -> [rows, groups, group]."""
    halves = packed.unflatten(1, (-1, group // 2))
    return torch.cat((halves & 15, halves >> 4), dim=2)


def unpack_awq(packed: Tensor) -> Tensor:
    """int32 [rows, columns / 8] of an AWQ checkpoint -> uint8 [rows, columns] of 0..15."""
    shifts = 4 * torch.tensor(_AWQ_NIBBLES, dtype=torch.int32, device=packed.device)
    return (packed[..., None] >> shifts & 15).to(torch.uint8).flatten(1)
