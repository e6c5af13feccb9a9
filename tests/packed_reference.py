"""Attention over a training pack by its definition: each segment alone, behind its prefixes."""

from __future__ import annotations

import torch


def segment_attention(segments, q, k, v):
    """What PackedAttention.attend computes: q [T, H, D], k and v [T, Hkv, D] -> [T, H, D]."""
    outputs, seen = [], {}
    for segment in segments:
        own = list(range(segment.start, segment.start + segment.length))
        ids = own if segment.prefix is None else seen[segment.prefix] + own
        seen[segment.start] = ids
        keys, values = (x[ids].repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        scores = torch.einsum("ihd,jhd->hij", q[own], keys) * q.shape[-1] ** -0.5
        future = torch.ones_like(scores).triu(len(ids) - len(own) + 1).bool()
        weights = scores.masked_fill(future, -torch.inf).softmax(-1)
        outputs.append(torch.einsum("hij,jhd->ihd", weights, values))
    return torch.cat(outputs)
