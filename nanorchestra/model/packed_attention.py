"""Attention over a training pack, where samples share their prompt and prompts their beginning.

A pack is a list of segments. A segment attends to its prefixes, which are earlier segments or their
first tokens, and causally to itself. Nothing is padded, masked or copied.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from kernels.external import external_attention, sequences
from kernels.flash_plan import Span, flash_attention, plan
from nanorchestra.model.ops import Attend, by_kernel


@dataclass(frozen=True)
class Segment:
    """Tokens start .. start + length of a pack, and the prefix that they see before themselves.

    The prefix is an earlier segment or its first tokens; what that segment sees is seen as well.
    """

    start: int
    length: int
    prefix_start: int = 0
    prefix_length: int = 0


def packed_attention(segments: Sequence[Segment], kernel: str = "triton") -> Attend:
    """Return `attend(layer, q, k, v)` for a pack: q [T, H, D], k and v [T, Hkv, D] -> [T, H, D].

    The segments cover the pack in order, without gaps. `kernel` names the GPU kernel, "triton" or
    "flash-attn" (kernels/external.py).
    """
    spans = _spans(segments)
    own = [slice(start, end) for start, end, key_start, _ in spans if start == key_start]
    prefixed = _joined([span for span in spans if span[0] != span[2]])

    @cache  # made by the first layer, used by all
    def planned(device, dtype):
        if kernel == "flash-attn":
            return sequences(spans, device)
        return plan(spans, device, dtype)

    def attend(layer, q, k, v):
        if kernel == "flash-attn":
            return external_attention(q, k, v, planned(q.device, q.dtype))
        if by_kernel(q):
            return flash_attention(q, k, v, planned(q.device, q.dtype))
        return _PackedAttention.apply(q, k, v, own, prefixed)

    return attend


def _spans(segments) -> list[Span]:
    """Return the spans of each segment in turn: its prefixes in order of position, then itself."""
    spans = []
    seen = {}  # start of a segment -> the keys before it
    for segment in segments:
        end = segment.start + segment.length
        prefix = (segment.prefix_start, segment.prefix_start + segment.prefix_length)
        keys = [*seen[segment.prefix_start], prefix] if segment.prefix_length else []
        seen[segment.start] = keys
        spans += [(segment.start, end, *key) for key in [*keys, (segment.start, end)]]
    return spans


def _joined(spans) -> list[tuple[slice, slice]]:
    """Return queries and keys; neighbouring queries with the same keys are one dense call."""
    joined = []
    for start, end, *keys in sorted(spans, key=lambda span: (span[2:], span[0])):
        last = joined[-1] if joined else None
        if last and last[1] == slice(*keys) and last[0].stop == start:
            joined.pop()
            start = last[0].start
        joined.append((slice(start, end), slice(*keys)))
    return joined


class _PackedAttention(torch.autograd.Function):
    """Attention on a CPU: one flash-attention call per span, merged exactly by log-sum-exps.

    The merge is that of Dao et al. 2022, section 3.1. The backward pass of a span, given the merged
    output and log-sum-exp, is that span's share of the gradients. Autograd cannot derive this: it
    does not differentiate the log-sum-exp.
    """

    @staticmethod
    def forward(ctx, q, k, v, own, prefixed):
        out = q.new_empty(q.shape)  # [T, H, D]
        lse = q.new_empty(q.shape[:2], dtype=torch.promote_types(q.dtype, torch.float32))  # [T, H]
        for rows in own:
            out[rows], lse[rows] = _span_forward(q, k, v, rows, rows)
        for rows, keys in prefixed:
            prefix_out, prefix_lse = _span_forward(q, k, v, rows, keys)
            share = torch.sigmoid(prefix_lse - lse[rows])[..., None]  # the prefix's softmax mass
            out[rows] = torch.lerp(out[rows].to(share.dtype), prefix_out.to(share.dtype), share)
            lse[rows] = torch.logaddexp(lse[rows], prefix_lse)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.own, ctx.prefixed = own, prefixed
        return out

    @staticmethod
    def backward(ctx, grad):
        saved = ctx.saved_tensors
        dq, dk, dv = (x.new_empty(x.shape) for x in saved[:3])
        for rows in ctx.own:
            dq[rows], dk[rows], dv[rows] = _span_backward(grad, *saved, rows, rows)
        for rows, keys in ctx.prefixed:
            span_dq, span_dk, span_dv = _span_backward(grad, *saved, rows, keys)
            dq[rows] += span_dq
            dk[keys] += span_dk
            dv[keys] += span_dv
        return dq, dk, dv, None, None


def _heads_first(x, places) -> Tensor:
    return x[places].transpose(0, 1)[None]  # [T, heads, ...] -> [1, heads, places, ...]


def _span_forward(q, k, v, rows, keys) -> tuple[Tensor, Tensor]:
    """Return the attention of one span: out [rows, H, D] and log-sum-exp [rows, H]."""
    q = _heads_first(q, rows)
    k, v = _heads_first(k, keys), _heads_first(v, keys)
    causal = rows == keys
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)
    return out[0].transpose(0, 1), lse[0].transpose(0, 1)


def _span_backward(grad, q, k, v, out, lse, rows, keys) -> Iterator[Tensor]:
    """Return the gradients of q [rows, H, D] and of k and v [keys, Hkv, D] from one span."""
    grad, q, out, lse = (_heads_first(x, rows) for x in (grad, q, out, lse))
    k, v = _heads_first(k, keys), _heads_first(v, keys)
    grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, q, k, v, out, lse, 0.0, rows == keys
    )
    return (x[0].transpose(0, 1) for x in grads)
