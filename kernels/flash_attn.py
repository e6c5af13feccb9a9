"""flash-attn (Dao 2023; arXiv 2307.08691) in place of our attention in training.

flash-attn takes bf16 and fp16. It knows sequences, not trees: keys of a prefix that several samples
share are copied once for each of them. The file holds the choice between the two kernels, the plan
of a pack, and the call. The package is optional, and nothing here computes attention itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from kernels.common import on_device
from kernels.flash import Span

try:
    from flash_attn import flash_attn_varlen_func
except ImportError:
    flash_attn_varlen_func = None

HOPPER = 90  # sm_90: flash-attn 2 has no wgmma and reaches 330 TFLOP/s there, Triton 370 to 450


def choose_attention(choice: str, dtype: torch.dtype) -> str:
    """Returns "triton" or "flash-attn"; `choice` is "triton" or "auto".

    auto takes flash-attn before sm_90 if it is installed and computes in the dtype. Both use the
    same instructions there, and the tiles of flash-attn were tuned.
    """
    if choice != "auto" or flash_attn_varlen_func is None:
        return "triton"
    if dtype not in (torch.bfloat16, torch.float16):
        return "triton"
    arch = triton.runtime.driver.active.get_current_target().arch
    return "flash-attn" if arch < HOPPER else "triton"


@dataclass(frozen=True)
class ExternalPlan:
    """A pack as flash-attn takes it: one sequence of queries for each segment."""

    key_order: Tensor | None  # int64: tokens of the pack, segment by segment; None: the pack itself
    cu_seqlens_q: Tensor  # int32 [segments + 1]
    cu_seqlens_k: Tensor  # int32 [segments + 1]
    max_seqlen_q: int
    max_seqlen_k: int


def external_plan(spans: Sequence[Span], device: torch.device | str) -> ExternalPlan:
    """Returns the plan of a pack.

    Spans of the same queries stand one after the other, prefixes by position and the queries' own
    span last.
    """
    keys_of: dict[tuple[int, int], list[int]] = {}  # queries of a segment -> the keys they see
    for span in spans:
        keys = keys_of.setdefault((span.start, span.end), [])
        keys += range(span.key_start, span.key_end)
    counts_q = [end - start for start, end in keys_of]
    counts_k = [len(keys) for keys in keys_of.values()]
    key_order = None
    if counts_q != counts_k:  # there are prefixes
        order = []
        for keys in keys_of.values():
            order += keys
        key_order = torch.tensor(order).to(device)
    return ExternalPlan(
        key_order,
        _ends(counts_q, device),
        _ends(counts_k, device),
        max_seqlen_q=max(counts_q),
        max_seqlen_k=max(counts_k),
    )


def _ends(counts: Sequence[int], device: torch.device | str) -> Tensor:
    """Returns int32 [len(counts) + 1]: 0, then the sum of the counts up to each."""
    ends = [0]
    for count in counts:
        ends.append(ends[-1] + count)
    return torch.tensor(ends, dtype=torch.int32).to(device)


@on_device
def external_attention(q: Tensor, k: Tensor, v: Tensor, plan: ExternalPlan) -> Tensor:
    """Returns what flash_attention of flash.py does: q [T, H, D], k and v [T, Hkv, D] -> [T, H, D].

    With prefixes, k and v are copied in the order of the plan.
    """
    if plan.key_order is not None:
        k = k.index_select(0, plan.key_order)  # [sum of counts_k, Hkv, D]
        v = v.index_select(0, plan.key_order)
    return flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens_q=plan.cu_seqlens_q,
        cu_seqlens_k=plan.cu_seqlens_k,
        max_seqlen_q=plan.max_seqlen_q,
        max_seqlen_k=plan.max_seqlen_k,
        causal=True,
    )
