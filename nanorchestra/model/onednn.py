"""Matrices in oneDNN's own layout, which a CPU multiplies up to twice as fast as torch's.

They take the place of the plain ones, so memory stays as it is; only an output matrix that is tied
to the embeddings is held twice. The model can then be computed and take new weights, not trained.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanorchestra.model.quantise import linears
from nanorchestra.model.qwen3 import Qwen3

ROWS = 64  # the layout is chosen for this many, and serves any number
_OPERATORS = hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
DTYPES = [torch.float32] * _OPERATORS  # that this CPU multiplies fast
if _OPERATORS and torch.ops.mkldnn._is_mkldnn_bf16_supported():
    DTYPES.append(torch.bfloat16)


class OnednnLinear(nn.Module):
    """x [T, in] -> x W^T + bias [T, out], with W [out, in] in oneDNN's layout."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.dtype, self.bias = weight.dtype, bias
        self._parts: dict[int, Tensor] = {}
        self.write(slice(0, len(weight)), weight)

    def forward(self, x: Tensor) -> Tensor:
        """Return the product.

        Rows are padded to one of eight numbers between a power of two and the next: oneDNN compiles
        code for each number.
        """
        rows = len(x)
        padding = -rows % (1 << max(0, rows.bit_length() - 4))
        if padding:
            x = F.pad(x, (0, 0, 0, padding))
        out = torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")
        return out[:rows] if padding else out

    @torch.no_grad()
    def write(self, rows: slice, weight: Tensor) -> None:
        """Take `rows` of W, of any float dtype. They have effect once all rows have come."""
        self._parts[rows.start] = weight.detach()
        parts = [self._parts[start] for start in sorted(self._parts)]
        if sum(map(len, parts)) == self.out_features:
            self._packed = None  # gives its memory back before the new one takes as much
            whole = torch.cat(parts).to("cpu", self.dtype)
            self._packed = torch.ops.mkldnn._reorder_linear_weight(whole, ROWS)
            self._parts.clear()


def use_onednn(model: Qwen3) -> None:
    """Replace the matrices of a model on a CPU, in place, where torch has the operators.

    Quantised models stay as they are, and bfloat16 on a CPU without instructions for it.
    """
    weight, names = model.embed_tokens.weight, [name for name, _ in linears(model)]
    if not (names and weight.is_cpu and weight.dtype in DTYPES):
        return
    for name in names:
        module = model.get_submodule(name)
        model.set_submodule(name, OnednnLinear(module.weight, module.bias))
    if model.lm_head is None:
        model.lm_head = OnednnLinear(weight, None)
