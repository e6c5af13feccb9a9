"""A pack with shared prompts gives what each sequence gives alone, values and gradients."""

import pytest
import torch
from packed_reference import segment_attention

from nanorchestra.model.packed_attention import Segment, packed_attention
from nanorchestra.model.qwen3 import ModelConfig, Qwen3

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
    return packed_attention(segments)(0, q, k, v)


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


def test_scores_far_apart_do_not_overflow():
    """The merge holds if the prefix, or the segment itself, has all of the softmax's mass."""
    segments = [Segment(0, 3), Segment(3, 4, 0, 3)]
    q, k, v = torch.randn(7, 2, 8), torch.randn(7, 1, 8), torch.randn(7, 1, 8)
    for scale in ([300.0] * 3 + [1.0] * 4, [1.0] * 3 + [300.0] * 4):
        keys = k * torch.tensor(scale)[:, None, None]
        expected = segment_attention(segments, q, keys, v)
        torch.testing.assert_close(packed(segments, q, keys, v), expected, rtol=1e-4, atol=1e-4)


def test_model_on_a_pack_equals_each_sequence_alone():
    """Hidden states and parameter gradients of a group are those of its full sequences."""
    model = Qwen3(ModelConfig(50, 24, 32, 2, 4, 2, head_dim=8, attention_bias=True)).double()
    model.init_weights(0)
    generator = torch.Generator().manual_seed(1)
    prompt, *samples = (torch.randint(0, 50, (n,), generator=generator) for n in (11, 5, 1, 9))
    segments, positions, start = [Segment(0, 11)], [torch.arange(11)], 11
    for sample in samples:
        segments.append(Segment(start, len(sample), 0, 11))
        positions.append(torch.arange(11, 11 + len(sample)))
        start += len(sample)
    packed_hidden = model(
        torch.cat((prompt, *samples)), torch.cat(positions), packed_attention(segments)
    )[11:]
    alone = []
    for sample in samples:
        tokens = torch.cat((prompt, sample))
        attend = packed_attention([Segment(0, len(tokens))])
        alone.append(model(tokens, torch.arange(len(tokens)), attend)[11:])
    gradients = []
    for hidden in (packed_hidden, torch.cat(alone)):
        model.zero_grad()
        model.logits(hidden).log_softmax(-1)[:, 7].sum().backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    torch.testing.assert_close(packed_hidden, torch.cat(alone), rtol=1e-10, atol=1e-10)
    for ours, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    "fields",
    [
        [(1, 4)],
        [(0, 4), (5, 2)],
        [(0, 0)],
        [(0, 4), (4, 2, 0, 5)],
        [(0, 4), (4, 2, 1, 3)],
        [(0, 4, 4, 2), (4, 2)],
    ],
    ids=["late", "gap", "empty", "long prefix", "prefix inside", "later prefix"],
)
def test_segments_that_do_not_fit_are_refused(fields):
    with pytest.raises(ValueError, match="segment"):
        packed_attention([Segment(*each) for each in fields])


def test_pack_of_another_length_is_refused():
    with pytest.raises(ValueError, match="cover 4 tokens"):
        packed([Segment(0, 4)], *(torch.zeros(5, 2, 8) for _ in range(3)))
