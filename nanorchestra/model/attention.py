"""What the decoder asks of attention, and attention of a pack: sequences that share prefixes.

An attention object receives a layer's raw queries, keys and values. It owns all that follows: the
norm of queries and keys, their rotation, the store of keys and values, and attention itself. One
object serves all layers of a step. The rest is qwen3.py, the one PyTorch decoder of trainer and
engine; native/native.c repeats decoder and attention in C for CPUs.

`PackedAttention`, of training and scores, is differentiable. The engine's two, over KV pages, are
in engine/paged_attention.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from kernels.flash import FlashWork, Span, flash_attention, flash_work
from nanorchestra.model import ops
from nanorchestra.model.ops import qk_norm_rope
from nanorchestra.model.rope import Rotation

if TYPE_CHECKING:
    from nanorchestra.model.qwen3 import SelfAttention


class Attention(Protocol):
    """What the decoder asks for in each layer."""

    def __call__(self, layer: SelfAttention, qkv: Tensor, rotation: Rotation) -> Tensor:
        """Returns attention's output [T, H, D].

        qkv [T, (H + 2 Hkv) D] is the product with the layer's fused matrix, queries first. `layer`
        has `kv_heads`, the norms (q_norm, k_norm, eps) and the `index` of the layer.
        """
        ...


@dataclass(frozen=True)
class Segment:
    """Tokens start .. start + length of a pack, and the prefix that they see before themselves.

    prefix is the start of an earlier segment, None without one. What that segment sees is seen as
    well.
    """

    start: int
    length: int
    prefix: int | None = None


class PackedAttention:
    """Attention over a pack of sequences: samples share prompts, and prompts their beginning.

    A pack is a list of segments that cover it in order, without gaps. A segment attends to its
    prefixes and causally to itself. No token is padding, and no [T, T] mask is made.
    """

    def __init__(self, segments: Sequence[Segment]):
        self.segments = segments
        self._work: Work | None = None  # made by the first layer, used by all

    def __call__(self, layer: SelfAttention, qkv: Tensor, rotation: Rotation) -> Tensor:
        """Returns attention's output [T, H, D], differentiable in qkv and the norms."""
        q, k, v = qk_norm_rope(qkv, layer.q_norm, layer.k_norm, rotation, layer.kv_heads, layer.eps)
        return self.attend(q, k, v)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Returns attention of q [T, H, D] over k and v [T, Hkv, D] -> [T, H, D]."""
        if self._work is None:
            self._work = self._make_work(q)
        if isinstance(self._work, FlashWork):
            return flash_attention(q, k, v, self._work)
        # In fp32: PyTorch's backward takes three times as long for short spans in 16 bits.
        wide = torch.promote_types(q.dtype, torch.float32)
        return _SpanAttention.apply(q.to(wide), k.to(wide), v.to(wide), self._work).to(q.dtype)

    def _make_work(self, q) -> Work:
        spans = segment_spans(self.segments)
        if not ops.by_kernel(q):
            return _cpu_spans(spans)
        return flash_work(spans, q.device, q.dtype)


def segment_spans(segments: Sequence[Segment]) -> list[Span]:
    """Returns the spans of each segment in turn: one for each of its prefixes, then its own."""
    spans = []
    ranges_of = {}  # start of a segment -> the ranges of keys that it sees, its own last
    for segment in segments:
        start, end = segment.start, segment.start + segment.length
        ranges = []
        if segment.prefix is not None:
            ranges += ranges_of[segment.prefix]
        ranges.append((start, end))
        ranges_of[start] = ranges
        for key_start, key_end in ranges:
            spans.append(Span(start, end, key_start, key_end))
    return spans


# Attention over a pack on a CPU.


def _cpu_spans(spans: Sequence[Span]) -> list[Span]:
    """Returns the spans as the CPU computes them: each segment's own keys first, then prefixes.

    Neighbouring queries that see the same prefix are one span, and one call of PyTorch's attention.
    """
    merged = []
    prefixes = []
    for span in spans:
        if span.causal:
            merged.append(span)
        else:
            prefixes.append(span)
    prefixes.sort(key=lambda span: (span.key_start, span.key_end, span.start))
    for span in prefixes:
        last = merged[-1]
        same_keys = (last.key_start, last.key_end) == (span.key_start, span.key_end)
        if same_keys and not last.causal and last.end == span.start:
            merged[-1] = last._replace(end=span.end)
        else:
            merged.append(span)
    return merged


Work = FlashWork | list[Span]  # what attention over a pack needs, on a GPU and on a CPU


class _SpanAttention(torch.autograd.Function):
    """Attention on a CPU: one flash-attention call per span, merged by their log-sum-exps.

    The merge is that of Dao et al. 2022, section 3.1. The backward pass of a span, given the merged
    output and log-sum-exp, is that span's share of the gradients. Autograd cannot derive this: it
    does not differentiate the log-sum-exp. q, k and v are fp32 or fp64.
    """

    @staticmethod
    def forward(ctx, q, k, v, spans):
        out = q.new_empty(q.shape)  # [T, H, D]
        lse = q.new_empty(q.shape[:2])  # [T, H]
        for span in spans:
            rows = slice(span.start, span.end)
            span_out, span_lse = _span_forward(q, k, v, span)
            if span.causal:  # a segment's first
                out[rows], lse[rows] = span_out, span_lse
                continue
            share = torch.sigmoid(span_lse - lse[rows])[..., None]  # the span's softmax mass
            out[rows] = torch.lerp(out[rows], span_out, share)
            lse[rows] = torch.logaddexp(lse[rows], span_lse)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.spans = spans
        return out

    @staticmethod
    def backward(ctx, grad):
        q, k, v, out, lse = ctx.saved_tensors
        dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
        for span in ctx.spans:
            rows = slice(span.start, span.end)
            keys = slice(span.key_start, span.key_end)
            span_dq, span_dk, span_dv = _span_backward(grad, q, k, v, out, lse, span)
            if span.causal:
                dq[rows], dk[keys], dv[keys] = span_dq, span_dk, span_dv
                continue
            dq[rows] += span_dq
            dk[keys] += span_dk
            dv[keys] += span_dv
        return dq, dk, dv, None


def _heads_first(x, start, end) -> Tensor:
    return x[start:end].transpose(0, 1)[None]  # [T, heads, ...] -> [1, heads, end - start, ...]


def _span_forward(q, k, v, span) -> tuple[Tensor, Tensor]:
    """Returns the attention of one span: out [rows, H, D] and log-sum-exp [rows, H]."""
    q = _heads_first(q, span.start, span.end)
    k = _heads_first(k, span.key_start, span.key_end)
    v = _heads_first(v, span.key_start, span.key_end)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, span.causal)
    return out[0].transpose(0, 1), lse[0].transpose(0, 1)


def _span_backward(grad, q, k, v, out, lse, span) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of q [rows, H, D] and of k and v [keys, Hkv, D] from one span."""
    grad, q, out, lse = (_heads_first(x, span.start, span.end) for x in (grad, q, out, lse))
    k, v = (_heads_first(x, span.key_start, span.key_end) for x in (k, v))
    dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, q, k, v, out, lse, 0.0, span.causal
    )
    return dq[0].transpose(0, 1), dk[0].transpose(0, 1), dv[0].transpose(0, 1)
