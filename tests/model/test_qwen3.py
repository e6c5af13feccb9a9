"""The decoder against transformers' Qwen3ForCausalLM on random weights."""

import copy
from dataclasses import replace

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from nanorchestra.model.hf_config import PRESETS
from nanorchestra.model.packed_attention import Segment, packed_attention
from nanorchestra.model.qwen3 import Qwen3
from nanorchestra.model.weights import load_model

TINY = dict(
    vocab_size=320, hidden_size=48, intermediate_size=96, num_hidden_layers=2, head_dim=16,
    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
    rope_theta=10_000.0, tie_word_embeddings=True,
)  # fmt: skip
CONFIGS = {
    "tied": TINY,
    "untied": TINY | dict(tie_word_embeddings=False),
    "wide heads": TINY | dict(hidden_size=64, num_hidden_layers=1, head_dim=128),
    "odd vocabulary, as many kv heads as heads": TINY | dict(vocab_size=331, num_key_value_heads=4),
    "one kv head": TINY | dict(num_key_value_heads=1),
}


def random_transformers_model(fields: dict) -> Qwen3ForCausalLM:
    """Norms differ from 1, and layers outweigh the embeddings."""
    model = Qwen3ForCausalLM(Qwen3Config(**copy.deepcopy(fields), eos_token_id=None)).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            spread = 2 * parameter.shape[-1] ** -0.5 if parameter.dim() == 2 else 0.1
            mean = 1.0 if name.endswith("norm.weight") else 0.0
            parameter.normal_(mean, spread, generator=generator)
    return model


def logits_of(model: Qwen3, ids: torch.Tensor) -> torch.Tensor:
    attend = packed_attention([Segment(0, len(ids))])
    return model.logits(model(ids, torch.arange(len(ids)), attend))


@pytest.mark.parametrize("name, shard", [*((name, "5GB") for name in CONFIGS), ("untied", "100KB")])
@torch.no_grad()
def test_logits_and_greedy_continuations_are_those_of_transformers(name, shard, tmp_path):
    reference = random_transformers_model(CONFIGS[name])
    reference.save_pretrained(tmp_path, max_shard_size=shard)
    assert (tmp_path / "model.safetensors.index.json").exists() == (shard == "100KB")
    model, tokenizer = load_model(tmp_path)
    assert tokenizer is None

    generator = torch.Generator().manual_seed(1)
    prompt = torch.randint(0, model.config.vocab_size, (70,), generator=generator)
    expected = reference(prompt[None]).logits[0]
    torch.testing.assert_close(logits_of(model, prompt), expected, rtol=0, atol=1e-4)

    expected = reference.generate(
        prompt[None, :8], max_new_tokens=40, do_sample=False, pad_token_id=0
    )[0]
    ids = prompt[:8]
    while len(ids) < len(expected):
        ids = torch.cat((ids, logits_of(model, ids)[-1:].argmax(-1)))
    assert ids.tolist() == expected.tolist()
    assert len(set(ids[8:].tolist())) > 3, "a repeated continuation shows little"


@torch.no_grad()
def test_bf16_rounds_where_transformers_rounds(tmp_path):
    """With the same attention arithmetic, nearly every bf16 logit is equal bit for bit."""
    random_transformers_model(TINY).bfloat16().save_pretrained(tmp_path)
    reference = Qwen3ForCausalLM.from_pretrained(
        tmp_path, dtype=torch.bfloat16, attn_implementation="eager"
    )
    model, _ = load_model(tmp_path, dtype="bfloat16")
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 320, (300,), generator=generator)  # bf16 cannot count beyond 256
    mask = torch.full((300, 300), torch.finfo(torch.bfloat16).min, dtype=torch.bfloat16).triu(1)

    def eager(layer, q, k, v):
        q = q.transpose(0, 1)
        k, v = (x.repeat_interleave(2, 1).transpose(0, 1) for x in (k, v))
        scores = q @ k.transpose(1, 2) * 0.25 + mask
        return (scores.float().softmax(-1).to(q.dtype) @ v).transpose(0, 1)

    logits = model.logits(model(ids, torch.arange(300), eager))
    assert (logits == reference(ids[None]).logits[0]).float().mean() > 0.95

    cast = load_model(tmp_path)[0].to(torch.bfloat16)
    assert torch.equal(logits_of(cast, ids), logits_of(model, ids)), "the frequencies stay fp32"


def test_presets_have_the_published_sizes():
    sizes = {
        "qwen3-0.6b": 596_049_920, "qwen3-1.7b": 1_720_574_976, "qwen3-4b": 4_022_468_096,
        "qwen3-8b": 8_190_735_360, "qwen3-14b": 14_768_307_200, "qwen3-32b": 32_762_123_264,
    }  # fmt: skip
    for name, size in sizes.items():
        with torch.device("meta"):
            one, two = (Qwen3(replace(PRESETS[name], num_hidden_layers=n)) for n in (1, 2))
        rest, layer = (sum(p.numel() for p in part.parameters()) for part in (one, two.layers[1]))
        assert rest + (PRESETS[name].num_hidden_layers - 1) * layer == size
