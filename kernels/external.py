"""flash-attn (Dao 2023; arXiv 2307.08691) in place of our attention in training and prefill.

It takes bf16 and fp16, and pages of a multiple of PAGE tokens. It knows sequences, not trees: a
prefix that several samples share is gathered once for each of them.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from kernels.common import pick, require

try:
    from flash_attn import flash_attn_varlen_func
except ImportError:
    flash_attn_varlen_func = None

PAGE = 256
# What auto takes. flash-attn 2 has no wgmma: on Hopper it reaches 330 TFLOP/s, plain Triton 370 to
# 450. Elsewhere both are on the same instructions, and its tiles were tuned.
FASTER = {80: "flash-attn", 89: "flash-attn", 90: "triton"}


def choose_attention(wanted: str, dtype: torch.dtype, page_size: int = PAGE) -> tuple[str, str]:
    """Returns "triton" or "flash-attn", and why, for `wanted`: one of these, or "auto".

    auto takes what is FASTER on this GPU, if it is installed and fits. ValueError if flash-attn is
    wanted and cannot be used.
    """
    obstacle = ""
    if flash_attn_varlen_func is None:
        obstacle = "flash-attn is not installed"
    elif dtype not in (torch.bfloat16, torch.float16):
        obstacle = f"flash-attn computes in bfloat16 or float16, not in {dtype}"
    elif page_size % PAGE:
        obstacle = f"flash-attn takes pages of a multiple of {PAGE} tokens, not {page_size}"
    require(wanted != "flash-attn" or not obstacle, obstacle)
    if wanted == "auto":
        return ("triton", obstacle) if obstacle else (pick(FASTER), "faster on this GPU")
    return wanted, "as asked"


def sizes_of(
    counts: Sequence[int], lengths: Sequence[int], device: torch.device | str
) -> dict[str, Any]:
    """Returns flash-attn's sizes of sequences with counts[i] queries and lengths[i] keys."""
    q_ends, k_ends = (
        torch.tensor([0, *accumulate(each)], dtype=torch.int32, device=device)
        for each in (counts, lengths)
    )
    longest = {"max_seqlen_q": max(counts), "max_seqlen_k": max(lengths)}
    return {"cu_seqlens_q": q_ends, "cu_seqlens_k": k_ends, **longest}


def sequences(
    spans: Sequence[tuple[int, int, int, int]], device: torch.device | str
) -> tuple[Tensor | None, dict[str, Any]]:
    """Returns the order of the keys, int64, or None for that of the pack; and their sizes.

    spans (start, end, key_start, key_end): those of the same queries one after the other, their own
    span last.
    """
    seen: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for start, end, *keys in spans:
        seen.setdefault((start, end), []).append(tuple(keys))
    counts = [end - start for start, end in seen]
    lengths = [sum(end - start for start, end in keys) for keys in seen.values()]
    order = None
    if counts != lengths:
        order = torch.cat([torch.arange(*span) for keys in seen.values() for span in keys])
        order = order.to(device)
    return order, sizes_of(counts, lengths, device)


def external_attention(
    q: Tensor, k: Tensor, v: Tensor, pack: tuple[Tensor | None, dict[str, Any]]
) -> Tensor:
    """Returns what flash_attention of flash_plan.py does, for a pack from `sequences`."""
    order, sizes = pack
    if order is not None:
        k, v = k.index_select(0, order), v.index_select(0, order)
    return flash_attn_varlen_func(q, k, v, **sizes, causal=True)


def external_prefill(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, tables: Tensor, sizes: dict[str, Any]
) -> Tensor:
    """Returns what prefill_attention does; sizes: of the new tokens and the whole contexts."""
    k, v = k_cache.transpose(1, 2), v_cache.transpose(1, 2)
    return flash_attn_varlen_func(q, k, v, **sizes, causal=True, block_table=tables)
