"""flash-attn (Dao 2023; arXiv 2307.08691) in place of our attention in training, before Hopper.

flash-attn takes bf16 and fp16. It knows sequences, not trees: keys of a prefix that several samples
share are copied once for each of them. The file holds the choice between the two kernels, the plan
of a pack, and the call. The package is optional, and nothing here computes attention itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.common import check, on_device
from kernels.flash import Span, pack_tokens

try:
    from flash_attn import flash_attn_varlen_func
except ImportError:
    flash_attn_varlen_func = None

HOPPER = (9, 0)  # compute capability


def choose_attention(choice: str, dtype: torch.dtype, device: torch.device | str) -> str:
    """Returns "triton" or "flash-attn", the kernel of training; `choice` is "triton" or "auto".

    auto takes flash-attn on GPUs older than Hopper if it is installed and computes in the dtype.
    Both use the same instructions there, and the tiles of flash-attn were tuned. On Hopper
    flash-attn 2 has no wgmma: 333 TFLOP/s forward at 8,192 tokens on an H100 SXM, where Triton had
    369 in 2024 (figure flash3_fp16_fwd.png of the flash-attention repository). A CPU has its own
    attention whatever the choice.
    """
    if choice != "auto" or flash_attn_varlen_func is None:
        return "triton"
    if dtype not in (torch.bfloat16, torch.float16) or torch.device(device).type != "cuda":
        return "triton"
    older = torch.cuda.get_device_capability(device) < HOPPER
    return "flash-attn" if older else "triton"


@dataclass(frozen=True)
class ExternalPlan:
    """A pack as flash-attn takes it: one sequence of queries for each segment."""

    key_order: Tensor | None  # int64: tokens of the pack, segment by segment; None: the pack itself
    cu_seqlens_q: Tensor  # int32 [segments + 1]
    cu_seqlens_k: Tensor  # int32 [segments + 1]
    max_seqlen_q: int
    max_seqlen_k: int
    tokens: int  # T of q, k and v


def external_plan(spans: Sequence[Span], device: torch.device | str) -> ExternalPlan:
    """Returns the plan of a pack.

    Spans of the same queries stand one after the other, prefixes by position and the queries' own
    span last. ValueError if there is no span.
    """
    tokens = pack_tokens(spans)
    keys_of: dict[tuple[int, int], list[Tensor]] = {}  # queries of a segment -> the keys they see
    for span in spans:
        keys = keys_of.setdefault((span.start, span.end), [])
        keys.append(torch.arange(span.key_start, span.key_end, device="cpu"))
    counts_q, counts_k, order = [], [], []
    for (start, end), keys in keys_of.items():
        counts_q.append(end - start)
        counts_k.append(sum(map(len, keys)))
        order += keys
    key_order = None
    if counts_q != counts_k:  # there are prefixes
        key_order = torch.cat(order).to(device)
    return ExternalPlan(
        key_order,
        _ends(counts_q, device),
        _ends(counts_k, device),
        max_seqlen_q=max(counts_q),
        max_seqlen_k=max(counts_k),
        tokens=tokens,
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

    The mask of causal=True is aligned with the last query and the last key (flash-attn 2.1 and
    later), so queries behind a prefix see all of it. With prefixes, k and v are copied in the order
    of the plan.

    Every run gives the same bits: deterministic=True keeps flash-attn from adding dq by atomics,
    and the gradients of copies of a key are added by the backward pass of indexing, which sorts
    them first (that of index_select adds by atomics). What is left: each of these gradients is
    rounded to 16 bits before it is added, where flash_attention rounds the sum alone, and the bits
    are not those of flash_attention. ValueError unless q, k and v have the tokens of the plan.
    """
    check((plan.tokens, None, None), q.dtype, strided=True, q=q)
    check((plan.tokens, None, q.shape[2]), q.dtype, strided=True, k=k, v=v)
    if plan.key_order is not None:
        k = k[plan.key_order]  # [sum of counts_k, Hkv, D]
        v = v[plan.key_order]
    return flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens_q=plan.cu_seqlens_q,
        cu_seqlens_k=plan.cu_seqlens_k,
        max_seqlen_q=plan.max_seqlen_q,
        max_seqlen_k=plan.max_seqlen_k,
        causal=True,
        deterministic=True,
    )
