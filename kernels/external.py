"""flash-attn (Dao 2023; arXiv 2307.08691) in place of our attention in training.

It takes bf16 and fp16. It knows sequences, not trees: a prefix that several samples share is
gathered once for each of them.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from kernels.common import pick

try:
    from flash_attn import flash_attn_varlen_func
except ImportError:
    flash_attn_varlen_func = None


def choose_attention(wanted: str, dtype: torch.dtype) -> str:
    """Returns "triton" or "flash-attn"; `wanted` is "triton" or "auto".

    auto takes what tiles.toml names for this GPU, if it is installed and computes in the dtype.
    """
    usable = flash_attn_varlen_func and dtype in (torch.bfloat16, torch.float16)
    return pick("attention")["auto"] if wanted == "auto" and usable else "triton"


def sequences(
    spans: Sequence[tuple[int, int, int, int]], device: torch.device | str
) -> tuple[Tensor | None, dict[str, Any]]:
    """Returns the order of the keys, int64, or None for that of the pack; and their sizes.

    spans (start, end, key_start, key_end): those of the same queries one after the other, their own
    span last.
    """
    seen = {}
    for start, end, *keys in spans:
        seen.setdefault((start, end), []).append(tuple(keys))
    counts = [end - start for start, end in seen]
    lengths = [sum(end - start for start, end in keys) for keys in seen.values()]
    order = None
    if counts != lengths:
        order = torch.cat([torch.arange(*span) for keys in seen.values() for span in keys])
        order = order.to(device)
    q_ends, k_ends = (
        torch.tensor([0, *accumulate(each)], dtype=torch.int32, device=device)
        for each in (counts, lengths)
    )
    longest = {"max_seqlen_q": max(counts), "max_seqlen_k": max(lengths)}
    return order, {"cu_seqlens_q": q_ends, "cu_seqlens_k": k_ends, **longest}


def external_attention(
    q: Tensor, k: Tensor, v: Tensor, pack: tuple[Tensor | None, dict[str, Any]]
) -> Tensor:
    """Returns what flash_attention of flash_plan.py does, for a pack from `sequences`."""
    order, sizes = pack
    if order is not None:
        k, v = k.index_select(0, order), v.index_select(0, order)
    return flash_attn_varlen_func(q, k, v, **sizes, causal=True)
