"""Reads matrices that AutoAWQ stored in 4 bits (Lin et al. 2023, arXiv 2306.00978).

AutoAWQ in its version "gemm": W[n, k] = (q[n, k] - zero[n, g]) * scale[n, g], where a group g of
columns shares a scale and a zero point, and q and zero are in 0 .. 15. They lie transposed in int32
words, qweight [in, out / 8] and qzeros [groups, out / 8], in the order AWQ_ORDER; scales are fp16
[groups, out]. These matrices stay in 4 bits until their place in the model is known: an int4 model
holds them exactly.
"""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

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
    names: Collection[str], read: Callable[[str], Tensor]
) -> Iterator[tuple[str, Tensor | FourBit]]:
    """Yields (name, tensor) of a checkpoint of AutoAWQ; what it did not convert comes as it is.

    names: of all tensors, which `read` gives.
    """
    for name in names:
        module, _, field = name.rpartition(".")
        converted = f"{module}.qweight" in names
        if field not in ("qweight", "qzeros", "scales") or not converted:
            yield name, read(name)
        elif field == "qweight":
            q, zeros = _awq_values(read(name)), _awq_values(read(f"{module}.qzeros"))
            yield f"{module}.weight", FourBit(q, zeros, read(f"{module}.scales").T)


def _awq_values(words: Tensor) -> Tensor:
    """Returns the values 0 .. 15 of int32 words [N, W] as uint8 [8 W, N]."""
    places = [(words >> 4 * place & 15).to(torch.uint8) for place in AWQ_ORDER]
    return torch.stack(places, dim=2).flatten(1).T
