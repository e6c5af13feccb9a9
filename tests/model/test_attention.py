"""A pack with shared prompts gives what each sequence gives alone, values and gradients."""

import pytest
import torch
from packed_reference import segment_attention

from nanorchestra.model.attention import PackedAttention, Segment

PACKS = {
    "one sequence": [(0, 37)],
    "single tokens": [(0, 1), (1, 1, 0, 1), (2, 1, 0, 1), (3, 1)],
    "two groups": [
        (0, 33), (33, 5, 0, 33), (38, 41, 0, 33), (79, 20), (99, 3, 79, 20), (102, 1, 79, 20),
    ],
    "groups interleaved, part of a prefix": [
        (0, 12), (12, 9), (21, 4, 0, 12), (25, 6, 12, 8), (31, 70, 12, 9), (101, 2, 0, 12),
    ],
    "prompts with a common beginning": [
        (0, 9), (9, 5, 0, 9), (14, 4, 9, 5), (18, 30, 9, 5), (48, 7, 0, 6), (55, 2, 48, 7),
        (57, 3, 48, 1),
    ],
}  # fmt: skip


def packed(segments, q, k, v):
    return PackedAttention(segments).attend(q, k, v)


@pytest.mark.parametrize(
    "dtype, tolerance", [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 0.1)]
)
@pytest.mark.parametrize("name", PACKS)
def test_pack_equals_each_sequence_alone(dtype, tolerance, name):
    segments = [Segment(*fields) for fields in PACKS[name]]
    generator = torch.Generator().manual_seed(0)
    total = segments[-1].start + segments[-1].length
    q, k, v, grad = (
        torch.randn(total, heads, 16, generator=generator, dtype=torch.float64).to(dtype)
        for heads in (6, 2, 2, 6)
    )
    results = []
    for function, computed in ((packed, dtype), (segment_attention, torch.float64)):
        inputs = [x.to(computed, copy=True).requires_grad_() for x in (q, k, v)]
        out = function(segments, *inputs)
        out.backward(grad.to(computed))
        results.append([out.detach(), *(x.grad for x in inputs)])
    for ours, expected in zip(*results, strict=True):
        assert ours.dtype == dtype
        torch.testing.assert_close(ours.double(), expected, rtol=tolerance, atol=tolerance)
