"""The mathematics of a Qwen3 decoder layer as plain functions: normalisation, rotary positions, SwiGLU, attention over a training pack.

Everything here is differentiable and runs on any device: by Triton kernels on a GPU, in plain PyTorch elsewhere. Shapes stand beside the
tensors. Nothing here holds weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

ONEDNN = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
ONEDNN_ROWS, ONEDNN_NUMEL = (
    8,
    1 << 18,
)  # at most so many rows, at least so many numbers in the weight
Attend = Callable[
    [int, Tensor, Tensor, Tensor], Tensor
]  # (layer, q [T, H, D], k [T, Hkv, D], v [T, Hkv, D]) -> [T, H, D]


def by_kernel(x: Tensor) -> bool:
    """Whether Triton kernels compute with x: they are imported for that alone."""
    return x.is_cuda


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias: x [T, in], weight [out, in], bias [out] -> [T, out].

    A few rows on a CPU are multiplied by oneDNN, which reads a large weight with all threads: MKL, torch's default, takes one and twice
    the time. Many rows are left to MKL: oneDNN compiles code for every new number of them.
    """
    if (
        len(x) <= ONEDNN_ROWS
        and ONEDNN
        and x.is_cpu
        and x.dtype == weight.dtype == torch.float32
        and weight.numel() >= ONEDNN_NUMEL
    ):
        if not (torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)):
            return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return F.linear(x, weight, bias)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last dimension (Zhang & Sennrich 2019, eq. 4). x [..., N]; weight broadcasts against it.

    The norm is taken in fp32 and rounded to x.dtype before the weight multiplies it, the order in which Qwen3 was trained; the kernel, which
    takes whole hidden states, rounds once.
    """
    if weight.dim() == 1 and x.dim() == 2 and by_kernel(x):
        from kernels.norm import rms_norm_train

        return rms_norm_train(x, weight, eps)
    return F.rms_norm(x, (x.shape[-1],), None, eps) * weight


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up (Shazeer 2020) for gate_up [T, 2 * F], the gate in the first half -> [T, F]."""
    if by_kernel(gate_up):
        from kernels.swiglu import swiglu_train

        return swiglu_train(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def rope_frequencies(
    head_dim: int, theta: float, scaling: Mapping[str, Any] | None = None, max_position: int = 0
) -> tuple[Tensor, float]:
    """Angles per position, fp32 [head_dim / 2] on the CPU, and the factor that multiplies cos and sin (1.0 without scaling).

    RoPE: theta_i = theta^(-2i/d) (Su et al. 2021, section 3.2.2). With `scaling` of rope_type "yarn" the frequencies are interpolated
    "by parts" and the attention is scaled (Peng et al. 2023, eqs. 17-23); the keys are those of a HF config.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim
    wavelengths = theta**exponents
    plain = 1.0 / wavelengths
    if scaling is None:
        return plain, 1.0
    original = scaling.get("original_max_position_embeddings") or max_position
    factor = scaling.get("factor") or max_position / original

    def dimension_turning(rotations: float) -> float:
        """The (fractional) pair index whose angle makes this many turns within the original context."""
        return head_dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low = dimension_turning(scaling.get("beta_fast") or 32)
    high = dimension_turning(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    # 0 for the fast pairs, which keep their angles, 1 for the slow ones, whose positions are squeezed by the factor
    squeezed = (
        (torch.arange(head_dim // 2, dtype=torch.float32, device="cpu") - low) / (high - low)
    ).clamp(0, 1)
    kept = 1 - squeezed
    frequencies = 1.0 / (factor * wavelengths) * (1 - kept) + plain * kept
    return frequencies, _yarn_attention_factor(factor, scaling)


def _yarn_attention_factor(factor: float, scaling: Mapping[str, Any]) -> float:
    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if scaling.get("attention_factor") is not None:
        return float(scaling["attention_factor"])
    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        return mscale(scaling["mscale"]) / mscale(scaling["mscale_all_dim"])
    return mscale(1.0)


def rope_tables(
    positions: Tensor, frequencies: Tensor, factor: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """cos and sin for positions [T] and frequencies fp32 [D / 2], computed in fp32 and rounded to dtype: two tensors [T, 1, D].

    The first half of sin carries the minus of the rotation, so that apply_rope needs no negation.
    """
    angles = positions[:, None, None].float() * frequencies  # [T, 1, D/2]
    cos, sin = angles.cos(), angles.sin()
    if factor != 1.0:
        cos, sin = cos * factor, sin * factor
    return torch.cat((cos, cos), -1).to(dtype), torch.cat((-sin, sin), -1).to(dtype)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair (x[i], x[i + D/2]) of x [T, heads, D] by the angle of its position; cos and sin [T, 1, D] from rope_tables."""
    return x * cos + x.roll(x.shape[-1] // 2, -1) * sin


@dataclass(frozen=True)
class Segment:
    """Tokens start .. start + length of a pack. They see a prefix, which is an earlier segment or its first tokens, whatever that one
    sees, and then themselves, causally."""

    start: int
    length: int
    prefix_start: int = 0
    prefix_length: int = 0


def packed_attention(segments: Sequence[Segment], kernel: str = "triton") -> Attend:
    """Attention for training over a pack in which prompts share their beginning, and the samples of one prompt the prompt.

    The segments cover the pack in order, without gaps. The `attend` returned takes q [T, H, D], k and v [T, Hkv, D] and gives [T, H, D]:
    position i of a segment sees all of its prefixes and positions 0..i of the segment. No mask, no padding and no copy of a prefix:
    neighbouring segments with the same prefix look at it in one dense call. On a GPU by the kernel named, triton or flash-attn
    (kernels/external.py). Raises ValueError if the segments do not fit together.
    """
    own: list[_Span] = []  # each segment on itself
    shared: dict[tuple[int, int], list[_Span]] = {}  # runs of neighbours on their common prefix
    end = 0
    for index, (segment, prefixes) in enumerate(zip(segments, _prefixes(segments))):
        if segment.start != end or segment.length < 1:
            raise ValueError(
                f"segment {index}: start {segment.start}, length {segment.length}; expected start {end} and length >= 1"
            )
        end += segment.length
        own.append(_Span(segment.start, end, segment.start, end))
        for prefix in prefixes:
            runs = shared.setdefault(prefix, [])
            if runs and runs[-1].end == segment.start:
                runs[-1] = _Span(runs[-1].start, end, *prefix)
            else:
                runs.append(_Span(segment.start, end, *prefix))
    prefixed = [span for runs in shared.values() for span in runs]

    plans: dict[Any, Any] = {}  # for the kernels: made in the first layer, used by all

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if q.shape[0] != end:
            raise ValueError(f"the segments cover {end} tokens; q has {q.shape[0]}")
        if kernel == "flash-attn":
            from kernels.external import external_attention, sequences

            if kernel not in plans:
                plans[kernel] = sequences(_spans(segments), q.device)
            return external_attention(q, k, v, plans[kernel])
        if by_kernel(q):
            from kernels.flash_plan import flash_attention, plan

            if q.dtype not in plans:
                plans[q.dtype] = plan(_spans(segments), q.device, q.dtype)
            return flash_attention(q.contiguous(), k.contiguous(), v.contiguous(), plans[q.dtype])
        if q.device.type == "cpu":
            return _PackedAttention.apply(q, k, v, own, prefixed)
        return segment_attention(segments, q, k, v)

    return attend


def _spans(segments: Sequence[Segment]) -> list[tuple[int, int, int, int]]:
    """(first query, last + 1, first key, last + 1): each segment on itself and on each of its prefixes."""
    spans = []
    for segment, prefixes in zip(segments, _prefixes(segments)):
        end = segment.start + segment.length
        spans += [(segment.start, end, *keys) for keys in [*prefixes, (segment.start, end)]]
    return spans


def _prefixes(segments: Sequence[Segment]) -> list[list[tuple[int, int]]]:
    """For each segment the spans (start, end) before it that it sees, in order of position."""
    lengths: dict[int, int] = {}
    seen: dict[int, list[tuple[int, int]]] = {}
    for index, segment in enumerate(segments):
        if segment.prefix_length > lengths.get(segment.prefix_start, 0):
            raise ValueError(
                f"segment {index}: its prefix is not the beginning of an earlier segment"
            )
        span = (segment.prefix_start, segment.prefix_start + segment.prefix_length)
        lengths[segment.start] = segment.length
        seen[segment.start] = [*seen[segment.prefix_start], span] if segment.prefix_length else []
    return [seen[segment.start] for segment in segments]


def segment_attention(segments: Sequence[Segment], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """What packed_attention computes, one segment at a time by public operators: the reference, and the path where there is neither CPU nor GPU."""
    outputs = []
    for segment, prefixes in zip(segments, _prefixes(segments)):
        spans = [slice(*prefix) for prefix in prefixes] + [
            slice(segment.start, segment.start + segment.length)
        ]
        keys, values = (torch.cat([x[span] for span in spans]) for x in (k, v))
        mask = (
            torch.ones(segment.length, len(keys), dtype=torch.bool, device=q.device).tril(
                len(keys) - segment.length
            )
            if prefixes
            else None
        )
        heads_first = (x.transpose(0, 1)[None] for x in (q[spans[-1]], keys, values))
        outputs.append(
            F.scaled_dot_product_attention(
                *heads_first, mask, is_causal=mask is None, enable_gqa=True
            )[0].transpose(0, 1)
        )
    return torch.cat(outputs)


@dataclass(frozen=True)
class _Span:
    """Queries start .. end attend to keys key_start .. key_end: causally if these are the same tokens, else to all of them."""

    start: int
    end: int
    key_start: int
    key_end: int

    @property
    def causal(self) -> bool:
        return self.start == self.key_start


class _PackedAttention(torch.autograd.Function):
    """Softmax attention in parts, merged exactly by their log-sum-exps (Dao et al. 2022, section 3.1), with the CPU's flash kernels.

    The backward pass of each part, given the merged output and log-sum-exp, yields that part's share of the gradients. Explicit,
    because autograd neither differentiates the log-sum-exp nor writes the gradient of a slice without a zero tensor of the whole.
    """

    @staticmethod
    def forward(
        ctx, q: Tensor, k: Tensor, v: Tensor, own: list[_Span], prefixed: list[_Span]
    ) -> Tensor:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)  # [T, H, D]
        lse = torch.empty(
            q.shape[:2],
            dtype=torch.float64 if q.dtype == torch.float64 else torch.float32,
            device=q.device,
        )  # [T, H]
        for span in own:
            out[span.start : span.end], lse[span.start : span.end] = _part_forward(q, k, v, span)
        for span in prefixed:
            rows = slice(span.start, span.end)
            prefix_out, prefix_lse = _part_forward(q, k, v, span)
            share = torch.sigmoid(prefix_lse - lse[rows])[
                ..., None
            ]  # of the softmax's mass that lies on the prefix
            out[rows] = torch.lerp(out[rows].to(share.dtype), prefix_out.to(share.dtype), share)
            lse[rows] = torch.logaddexp(lse[rows], prefix_lse)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.own, ctx.prefixed = own, prefixed
        return out

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
        for span in ctx.own:
            rows = slice(span.start, span.end)
            dq[rows], dk[rows], dv[rows] = _part_backward(grad, q, k, v, out, lse, span)
        for span in ctx.prefixed:
            more_q, more_k, more_v = _part_backward(grad, q, k, v, out, lse, span)
            dq[span.start : span.end] += more_q
            dk[span.key_start : span.key_end] += more_k
            dv[span.key_start : span.key_end] += more_v
        return dq, dk, dv, None, None


def _heads_first(x: Tensor, start: int, end: int) -> Tensor:
    return x[start:end].transpose(0, 1)[None]  # [T, heads, ...] -> [1, heads, end - start, ...]


def _part_forward(q: Tensor, k: Tensor, v: Tensor, span: _Span) -> tuple[Tensor, Tensor]:
    """Attention of one span: out [rows, H, D] and log-sum-exp [rows, H]."""
    q = _heads_first(q, span.start, span.end)
    k, v = (_heads_first(x, span.key_start, span.key_end) for x in (k, v))
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, span.causal)
    return out[0].transpose(0, 1), lse[0].transpose(0, 1)


def _part_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, span: _Span
) -> Iterator[Tensor]:
    """Gradients of one span: of its queries [rows, H, D], and of its keys and values [keys, Hkv, D]."""
    grad, q, out, lse = (_heads_first(x, span.start, span.end) for x in (grad, q, out, lse))
    k, v = (_heads_first(x, span.key_start, span.key_end) for x in (k, v))
    grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, q, k, v, out, lse, 0.0, span.causal
    )
    return (x[0].transpose(0, 1) for x in grads)


# The engine's KV pages. k_cache and v_cache are [pages, Hkv, page_size, D]: what a head reads of a page lies together.


def cache_rows(slots: Tensor, kv_heads: int, page_size: int) -> Tensor:
    """slots int64 [T], where slot = page * page_size + offset -> int64 [T, Hkv]: the rows of a cache, seen as [rows, D], that they are."""
    heads = torch.arange(kv_heads, device=slots.device)
    return ((slots // page_size)[:, None] * kv_heads + heads) * page_size + (slots % page_size)[
        :, None
    ]


def store_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, rows: Tensor) -> None:
    """Writes k and v [T, Hkv, D] into the caches at `rows` int64 [T, Hkv], from `cache_rows`."""
    for new, cache in ((k, k_cache), (v, v_cache)):
        cache.view(-1, cache.shape[-1]).index_copy_(0, rows.flatten(), new.flatten(0, 1))
