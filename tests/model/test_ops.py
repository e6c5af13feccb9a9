"""The decoder's arithmetic: a pack with shared prompts gives what every sequence gives alone, values and gradients."""

import pytest
import torch
import torch.nn.functional as F

from nanorchestra.model.ops import Segment, linear, packed_attention, rms_norm, segment_attention
from nanorchestra.model.qwen3 import ModelConfig, Qwen3

PACKS = {
    "one sequence": [Segment(0, 37)],
    "single tokens": [Segment(0, 1), Segment(1, 1, 0, 1), Segment(2, 1, 0, 1), Segment(3, 1)],
    "two groups": [
        Segment(0, 33),
        Segment(33, 5, 0, 33),
        Segment(38, 41, 0, 33),
        Segment(79, 20),
        Segment(99, 3, 79, 20),
        Segment(102, 1, 79, 20),
    ],
    "groups interleaved, part of a prefix": [
        Segment(0, 12),
        Segment(12, 9),
        Segment(21, 4, 0, 12),
        Segment(25, 6, 12, 8),
        Segment(31, 70, 12, 9),
        Segment(101, 2, 0, 12),
    ],
    "prompts with a common beginning": [
        Segment(0, 9),
        Segment(9, 5, 0, 9),
        Segment(14, 4, 9, 5),
        Segment(18, 30, 9, 5),
        Segment(48, 7, 0, 6),
        Segment(55, 2, 48, 7),
        Segment(57, 3, 48, 1),
    ],
}


def attention_alone(
    segments: list[Segment], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> torch.Tensor:
    """Each segment with its prefix in front, as a sequence of its own, by the definition of attention."""
    outputs = []
    seen = {}
    for segment in segments:
        own = list(range(segment.start, segment.start + segment.length))
        prefix = list(range(segment.prefix_start, segment.prefix_start + segment.prefix_length))
        seen[segment.start] = seen[segment.prefix_start] + prefix if prefix else []
        ids = seen[segment.start] + own
        repeat = q.shape[1] // k.shape[1]
        queries, keys, values = (
            q[own],
            k[ids].repeat_interleave(repeat, 1),
            v[ids].repeat_interleave(repeat, 1),
        )
        scores = torch.einsum("ihd,jhd->hij", queries, keys) * q.shape[-1] ** -0.5
        scores = scores.masked_fill(
            torch.ones_like(scores).triu(len(ids) - len(own) + 1).bool(), -torch.inf
        )
        outputs.append(torch.einsum("hij,jhd->ihd", scores.softmax(-1), values))
    return torch.cat(outputs)


def packed(
    segments: list[Segment], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> torch.Tensor:
    return packed_attention(segments)(0, q, k, v)


@pytest.mark.parametrize("attention", [packed, segment_attention])
@pytest.mark.parametrize(
    "dtype, tolerance", [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 0.1)]
)
@pytest.mark.parametrize("name", PACKS)
def test_pack_equals_each_sequence_alone(attention, dtype, tolerance, name):
    segments = PACKS[name]
    generator = torch.Generator().manual_seed(0)
    total = segments[-1].start + segments[-1].length
    shapes = [(total, heads, 16) for heads in (6, 2, 2, 6)]
    q, k, v, grad = (
        torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes
    )
    results = []
    for function, exact in ((attention, False), (attention_alone, True)):
        inputs = [(x.double() if exact else x.clone()).requires_grad_() for x in (q, k, v)]
        out = function(segments, *inputs)
        out.backward(grad.to(out.dtype))
        results.append([out.detach(), *(x.grad for x in inputs)])
    for ours, expected in zip(*results):
        assert ours.dtype == dtype
        torch.testing.assert_close(ours.double(), expected, rtol=tolerance, atol=tolerance)


def test_scores_far_apart_do_not_overflow():
    """The merge of prefix and own part holds when either has all of the softmax's mass."""
    segments = [Segment(0, 3), Segment(3, 4, 0, 3)]
    q, k, v = torch.randn(7, 2, 8), torch.randn(7, 1, 8), torch.randn(7, 1, 8)
    for scale in (torch.tensor([300.0] * 3 + [1.0] * 4), torch.tensor([1.0] * 3 + [300.0] * 4)):
        keys = k * scale[:, None, None]
        torch.testing.assert_close(
            packed(segments, q, keys, v),
            attention_alone(segments, q, keys, v),
            rtol=1e-4,
            atol=1e-4,
        )


def test_model_on_a_pack_equals_each_sequence_alone():
    """The property the trainer relies on: hidden states and parameter gradients of a group are those of its full sequences."""
    config = ModelConfig(50, 24, 32, 2, 4, 2, head_dim=8, attention_bias=True)
    model = Qwen3(config).double()
    model.init_weights(0)
    generator = torch.Generator().manual_seed(1)
    prompt, *samples = (torch.randint(0, 50, (n,), generator=generator) for n in (11, 5, 1, 9))
    segments, positions, start = [Segment(0, 11)], [torch.arange(11)], 11
    for sample in samples:
        segments.append(Segment(start, len(sample), 0, 11))
        positions.append(torch.arange(11, 11 + len(sample)))
        start += len(sample)
    hidden = model(torch.cat((prompt, *samples)), torch.cat(positions), packed_attention(segments))
    model.logits(hidden[11:]).log_softmax(-1)[:, 7].sum().backward()
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}

    model.zero_grad()
    alone = []
    for sample in samples:
        tokens = torch.cat((prompt, sample))
        alone.append(
            model(tokens, torch.arange(len(tokens)), packed_attention([Segment(0, len(tokens))]))[
                11:
            ]
        )
    torch.testing.assert_close(hidden[11:], torch.cat(alone), rtol=1e-10, atol=1e-10)
    model.logits(torch.cat(alone)).log_softmax(-1)[:, 7].sum().backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(
            gradients[name],
            parameter.grad,
            rtol=1e-9,
            atol=1e-9,
            msg=lambda text: f"{name}: {text}",
        )


@pytest.mark.parametrize(
    "segments",
    [
        [Segment(1, 4)],
        [Segment(0, 4), Segment(5, 2)],
        [Segment(0, 0)],
        [Segment(0, 4), Segment(4, 2, 0, 5)],
        [Segment(0, 4), Segment(4, 2, 1, 3)],
        [Segment(0, 4, 4, 2), Segment(4, 2)],
    ],
    ids=[
        "late start",
        "gap",
        "empty",
        "prefix too long",
        "prefix inside",
        "prefix that comes later",
    ],
)
def test_segments_that_do_not_fit_are_refused(segments):
    with pytest.raises(ValueError, match="segment"):
        packed_attention(segments)


def test_pack_of_another_length_is_refused():
    with pytest.raises(ValueError, match="cover 4 tokens"):
        packed(PACKS["single tokens"], *(torch.zeros(5, 2, 8) for _ in range(3)))


def test_norm_rounds_before_the_weight():
    """In bf16 the order of rounding is visible; it is the one of the published models."""
    x, weight = torch.randn(64, 32).bfloat16(), torch.randn(32).bfloat16()
    exact = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)
    assert torch.equal(rms_norm(x, weight, 1e-6), exact.bfloat16() * weight)
    assert not torch.equal(rms_norm(x, weight, 1e-6), F.rms_norm(x, (32,), weight, 1e-6))


@pytest.mark.parametrize("rows", [0, 1, 8, 9])
@pytest.mark.parametrize("biased", [False, True])
def test_linear_equals_float64(rows, biased):
    """Of a weight large enough for oneDNN; and a result that wants gradients has them."""
    generator = torch.Generator().manual_seed(rows)
    x, weight, bias = (
        torch.randn(*shape, generator=generator) for shape in ((rows, 512), (600, 512), (600,))
    )
    bias = bias if biased else None
    exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    torch.testing.assert_close(linear(x, weight, bias).double(), exact, rtol=0, atol=2e-4)
    assert linear(x.requires_grad_(), weight, bias).requires_grad
