"""The three attention objects: one arithmetic but for the softmax, and packs that share prompts."""

from dataclasses import replace

import pytest
import torch
from kernel_check import DEVICE

from kernels.paged_decode import split_scratch
from nanorchestra.engine.paged_attention import GatheredAttention, PagedAttention, PagedChunk
from nanorchestra.engine.step_inputs import Paging, empty_inputs
from nanorchestra.model import ops
from nanorchestra.model.attention import PackedAttention, Segment
from nanorchestra.model.checkpoint import PRESETS
from nanorchestra.model.qwen3 import Qwen3

PACKS = {
    "one sequence": [(0, 37)],
    "single tokens": [(0, 1), (1, 1, 0), (2, 1, 0), (3, 1)],
    "groups interleaved": [(0, 12), (12, 9), (21, 4, 0), (25, 6, 12), (31, 70, 12), (101, 2, 0)],
    "prompts with a common beginning": [
        (0, 9), (9, 5, 0), (14, 4, 9), (18, 30, 9), (48, 7, 0), (55, 2, 48), (57, 3, 48),
    ],
}  # fmt: skip


def segment_attention(segments, q, k, v):
    """What PackedAttention.attend computes, by its definition: each segment alone.

    q [T, H, D], k and v [T, Hkv, D] -> [T, H, D].
    """
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


KINDS = {  # switches of the decoder
    "Qwen3": {},
    "Qwen2.5": {"qk_norm": False, "attention_bias": True},
}
PAGES = [3, 0, 5, 2]


def random_model(dtype: torch.dtype, **switches) -> Qwen3:
    """A small model whose norms are not 1, and whose layers outweigh the embeddings."""
    shape = replace(
        PRESETS["nano"], vocab_size=97, hidden_size=64, intermediate_size=96, head_dim=16,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, **switches,
    )  # fmt: skip
    model = Qwen3(shape)
    model.init_weights(0)
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        parameter.data *= 6
        if parameter.dim() == 1:
            parameter.data = 1 + 0.2 * torch.randn(parameter.shape, generator=generator)
    return model.requires_grad_(False).to(dtype).to(DEVICE)


def caches(model: Qwen3) -> tuple[torch.Tensor, torch.Tensor]:
    """Six pages of sixteen."""
    config = model.config
    shape = config.num_hidden_layers, 6, config.num_key_value_heads, 16, config.head_dim
    like = model.embed_tokens.weight
    return like.new_zeros(shape), like.new_zeros(shape)


def paged(model: Qwen3, count: int) -> PagedAttention:
    """A sequence of `count` tokens, whose prompt is prefilled in one step."""
    slots = [PAGES[position // 16] * 16 + position % 16 for position in range(count)]
    step = empty_inputs(count, 1, Paging(16, len(PAGES), [0], 1, [0], 1), torch.device(DEVICE))
    step = replace(step, slots=torch.tensor(slots, dtype=torch.int32, device=DEVICE))
    scratches = split_scratch([(0, [0]), (0, [0])], 1, 1, DEVICE)  # nothing attends
    return PagedAttention(*caches(model), step, *scratches)


def hidden_states(model: Qwen3, count: int, attention) -> torch.Tensor:
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(0, 97, (count,), generator=generator).to(DEVICE)
    return model(tokens, torch.arange(count, device=DEVICE), attention)


def on_kernels(monkeypatch, answer: bool = True) -> None:
    monkeypatch.setattr(ops, "by_kernel", lambda x: answer)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kernels, kind", [(True, "Qwen3"), (True, "Qwen2.5"), (False, "Qwen3")])
def test_sampler_and_trainer_have_the_same_bits_but_for_the_softmax(
    kernels, kind, dtype, monkeypatch
):
    """The softmax is replaced by the queries. Then hidden states, keys and values are equal."""
    on_kernels(monkeypatch, kernels)
    packed_kv = []

    def packed_stub(self, q, k, v):
        packed_kv.append((k, v))
        return q.clone()

    monkeypatch.setattr(PackedAttention, "attend", packed_stub)
    for paged_class in (PagedAttention, GatheredAttention):
        monkeypatch.setattr(paged_class, "attend", lambda self, q, k_cache, v_cache: q.clone())
    model, count = random_model(dtype, **KINDS[kind]), 18
    expected = hidden_states(model, count, PackedAttention([Segment(0, count)]))
    if kernels:
        paging = paged(model, count)
    else:
        paging = GatheredAttention(*caches(model), [PagedChunk(0, count, PAGES)])
    assert torch.equal(hidden_states(model, count, paging), expected)
    for layer, (k, v) in enumerate(packed_kv):
        for cache, new in ((paging.k_cache, k), (paging.v_cache, v)):
            stored = cache[layer, PAGES].transpose(1, 2).flatten(0, 1)[:count]  # [T, Hkv, D]
            assert torch.equal(stored, new)
