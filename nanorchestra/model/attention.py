"""What the decoder asks of attention, and attention of a pack: sequences that share prefixes.

An attention object receives a layer's raw queries, keys and values. It owns all that follows: the
norm of queries and keys, their rotation, the store of keys and values, and attention itself. One
object serves all layers of a step. The rest is qwen3.py, the one PyTorch decoder of trainer and
engine; native/native.c repeats decoder and attention in C for CPUs.

`PackedAttention`, of training and scores, is differentiable: kernels/flash.py computes it on a GPU,
native/packed_attention.c on a CPU. The engine's two, over KV pages, are in
engine/paged_attention.py.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernels.flash import FlashWork, Span, flash_attention, flash_work
from nanorchestra.model import ops
from nanorchestra.model.compiler import LARGEST_DIM, compiled
from nanorchestra.model.ops import qk_norm_rope
from nanorchestra.model.rope import Rotation

if TYPE_CHECKING:
    from nanorchestra.model.qwen3 import SelfAttention

SOURCE = "packed_attention.c"  # in native/


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
    prefixes and causally to itself. No token is padding.
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
        wide = torch.promote_types(q.dtype, torch.float32)
        native = isinstance(self._work, _NativeWork)
        compute = _NativeAttention.apply if native else attend_by_segment
        return compute(q.to(wide), k.to(wide), v.to(wide), self._work).to(q.dtype)

    def _make_work(self, q) -> Work:
        spans = segment_spans(self.segments)
        if ops.by_kernel(q):
            return flash_work(spans, q.device, q.dtype)
        dim = q.shape[-1]
        fits = q.dtype != torch.float64 and dim % 16 == 0 and dim <= LARGEST_DIM
        return _native_work(spans) if fits and compiled(SOURCE) else spans


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


def attend_by_segment(q: Tensor, k: Tensor, v: Tensor, spans: Sequence[Span]) -> Tensor:
    """Returns the attention [T, H, D] of spans, those of a segment in turn: in plain PyTorch.

    Where native/packed_attention.c cannot compute it: in fp64, for other heads, without a compiler.
    A segment has a mask [its tokens, its keys].
    """
    outputs = []
    keys, values = [], []  # of the segment at hand
    for span in spans:
        keys.append(k[span.key_start : span.key_end])
        values.append(v[span.key_start : span.key_end])
        if span.causal:  # the last of its segment
            queries = q[span.start : span.end]
            outputs.append(attend_at_the_end(queries, torch.cat(keys), torch.cat(values)))
            keys, values = [], []
    return torch.cat(outputs)


def attend_at_the_end(q, k, v) -> Tensor:
    """Returns the causal attention of the last len(q) tokens of a sequence with keys k."""
    mask = q.new_ones(len(q), len(k), dtype=torch.bool).tril(len(k) - len(q))
    heads_first = (x.transpose(0, 1)[None] for x in (q, k, v))
    out = F.scaled_dot_product_attention(*heads_first, attn_mask=mask, enable_gqa=True)
    return out[0].transpose(0, 1)


class _NativeWork(NamedTuple):
    """Blocks of queries [n, 4] and pieces of keys [m, 3], as native/packed_attention.c has them."""

    blocks: Tensor
    pieces: Tensor


Work = FlashWork | _NativeWork | list[Span]  # of a GPU, of a CPU, of plain PyTorch


def _native_work(spans) -> _NativeWork:
    """Returns the work of spans, those of a segment in turn."""
    library = compiled(SOURCE)
    block_size, piece_size = library.queries_of_block(), library.keys_of_piece()
    blocks, pieces = [], []
    prefixes = []  # of the segment at hand: their first keys, and where they end
    for span in spans:
        if not span.causal:
            prefixes.append((span.key_start, span.key_end))
            continue
        for start in range(span.start, span.end, block_size):
            end, first = min(start + block_size, span.end), len(pieces)
            for key_start, key_end in (*prefixes, (span.start, end)):
                for key in range(key_start, key_end, piece_size):
                    count = min(piece_size, key_end - key)
                    pieces.append((key, count, key_start == span.start))
            blocks.append((start, end - start, first, len(pieces)))
        prefixes = []
    return _NativeWork(torch.tensor(blocks), torch.tensor(pieces, dtype=torch.int64))


class _Packed(ctypes.Structure):
    """`packed` of native/packed_attention.c."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("q", "k", "v", "out", "lse", "grad")),
        *((name, ctypes.c_void_p) for name in ("grad_q", "grad_k", "grad_v", "blocks", "pieces")),
        *((name, ctypes.c_int64) for name in ("tokens", "block_count", "heads", "kv_heads", "dim")),
    ]


class _NativeAttention(torch.autograd.Function):
    """Attention in native/packed_attention.c; all in fp32."""

    @staticmethod
    def forward(ctx, q, k, v, work):
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        out = torch.empty_like(q)  # [T, H, D]
        lse = q.new_empty(q.shape[:2])  # [T, H]
        ctx.work = work
        _call("attention_forward", work, q=q, k=k, v=v, out=out, lse=lse)
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        q, k, v, out, lse = ctx.saved_tensors
        tokens, heads, dim = q.shape
        grad_q = torch.empty_like(q)
        grad_k, grad_v = q.new_empty(2, heads, tokens, dim)
        given = {"q": q, "k": k, "v": v, "out": out, "lse": lse, "grad": grad.contiguous()}
        results = {"grad_q": grad_q, "grad_k": grad_k, "grad_v": grad_v}
        _call("attention_backward", ctx.work, **given, **results)
        by_kv_head = (x.unflatten(0, (k.shape[1], -1)).sum(1) for x in (grad_k, grad_v))
        return grad_q, *(x.transpose(0, 1) for x in by_kv_head), None


def _call(function, work, **tensors) -> None:
    tokens, heads, dim = tensors["q"].shape
    packed = _Packed(
        **{name: tensor.data_ptr() for name, tensor in tensors.items()},
        blocks=work.blocks.data_ptr(),
        pieces=work.pieces.data_ptr(),
        tokens=tokens,
        block_count=len(work.blocks),
        heads=heads,
        kv_heads=tensors["k"].shape[1],
        dim=dim,
    )
    call = getattr(compiled(SOURCE), function)
    call(ctypes.byref(packed), torch.get_num_threads())
