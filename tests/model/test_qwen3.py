"""The decoder against transformers on random weights: Qwen3, Qwen2.5, Llama, "llama3" and YaRN."""

import copy

import pytest
import torch
import transformers

from nanorchestra.engine.engine import Engine, SamplingParams
from nanorchestra.engine.paged_attention import GatheredAttention, PagedChunk
from nanorchestra.model.attention import PackedAttention, Segment
from nanorchestra.model.checkpoint import load_checkpoint, save_checkpoint
from nanorchestra.model.native import STRIP, Forward, library, pack, zeros
from nanorchestra.model.qwen3 import Qwen3

TINY = dict(
    vocab_size=320, hidden_size=64, intermediate_size=96, num_hidden_layers=2, head_dim=16,
    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
    rope_theta=10_000.0, tie_word_embeddings=True,
)  # fmt: skip
LLAMA3 = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
              original_max_position_embeddings=64)  # fmt: skip
YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=64)
CONFIGS = {  # the class in transformers, and its configuration
    "Qwen3": ("Qwen3", TINY),
    "untied": ("Qwen3", TINY | dict(tie_word_embeddings=False)),
    "wide heads": ("Qwen3", TINY | dict(num_hidden_layers=1, head_dim=128)),
    "as many kv heads as heads": ("Qwen3", TINY | dict(vocab_size=331, num_key_value_heads=4)),
    "one kv head": ("Qwen3", TINY | dict(num_key_value_heads=1, head_dim=32)),
    "Qwen2.5": ("Qwen2", TINY | dict(use_sliding_window=False, sliding_window=64)),
    "Llama": ("Llama", TINY | dict(rms_norm_eps=1e-5)),
    "Llama 3.1": ("Llama", TINY | dict(rope_theta=500_000.0, rope_scaling=LLAMA3)),
    "Qwen3 with YaRN": ("Qwen3", TINY | dict(rope_scaling=YARN)),
    "Qwen2.5 with YaRN": (
        "Qwen2", TINY | dict(rope_scaling=YARN | dict(attention_factor=1.3, beta_fast=20.0)),
    ),
}  # fmt: skip


def random_transformers_model(name: str) -> transformers.PreTrainedModel:
    """Norms differ from 1 and biases from 0, and layers outweigh the embeddings."""
    kind, fields = CONFIGS[name]
    config = getattr(transformers, f"{kind}Config")(**copy.deepcopy(fields), eos_token_id=None)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            spread = 2 * parameter.shape[-1] ** -0.5 if parameter.dim() == 2 else 0.1
            mean = 1.0 if parameter_name.endswith("norm.weight") else 0.0
            if parameter_name.endswith("bias"):
                spread = 0.5
            parameter.normal_(mean, spread, generator=generator)
    return model


def logits_of(model: Qwen3, ids: torch.Tensor) -> torch.Tensor:
    attention = PackedAttention([Segment(0, len(ids))])
    return model.logits(model(ids, torch.arange(len(ids)), attention))


def caches(config) -> tuple[torch.Tensor, torch.Tensor]:
    """Eight pages of sixteen."""
    shape = (
        config.num_hidden_layers, 8, config.num_key_value_heads, STRIP, config.head_dim,
    )  # fmt: skip
    return zeros(shape, torch.float32), zeros(shape, torch.float32)


def assert_near(logits, expected):
    """To 1e-5 of the largest logit."""
    scale = expected.abs().max().item()
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5 * scale)


@pytest.mark.parametrize("name, shard", [*((name, "5GB") for name in CONFIGS), ("untied", "100KB")])
@torch.no_grad()
def test_logits_and_what_the_engine_continues_are_those_of_transformers(name, shard, tmp_path):
    """Prompts share a beginning, are prefilled in chunks, and end beyond YaRN's 64 tokens.

    A checkpoint that is saved again is loaded by its own class.
    """
    reference = random_transformers_model(name)
    reference.save_pretrained(tmp_path / "theirs", max_shard_size=shard)
    model, _ = load_checkpoint(tmp_path / "theirs")
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, model.config.vocab_size, (90,), generator=generator)
    expected = reference(ids[None]).logits
    assert_near(logits_of(model, ids), expected[0])

    save_checkpoint(model, None, tmp_path / "ours")
    again, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours", output_loading_info=True
    )
    assert type(again) is type(reference) and not any(report.values()), report
    assert torch.equal(again(ids[None]).logits, expected)
    assert load_checkpoint(tmp_path / "ours")[0].config == model.config

    prompts = [ids[:count].tolist() for count in (8, 70, 75)]
    engine = Engine(model, num_pages=40, page_size=STRIP, max_batch_tokens=32)
    completions = engine.generate(prompts, SamplingParams(temperature=0.0, max_tokens=40))
    for prompt, completion in zip(prompts, completions, strict=True):
        own = torch.tensor([prompt])
        (continued,) = reference.generate(
            own,
            attention_mask=torch.ones_like(own),
            max_new_tokens=40,
            do_sample=False,
            pad_token_id=0,
        )
        assert prompt + completion.token_ids == continued.tolist()
    assert len(set(completions[0].token_ids)) > 3, "a repeated continuation shows little"


@pytest.mark.parametrize("name", CONFIGS)
@torch.no_grad()
def test_pages_and_the_c_of_a_cpu_compute_what_the_pack_does(name, tmp_path):
    """A prompt in two chunks, the second of which ends inside of a page, on shuffled pages."""
    random_transformers_model(name).save_pretrained(tmp_path)
    model, _ = load_checkpoint(tmp_path)
    ids = torch.randint(0, 320, (90,), generator=torch.Generator().manual_seed(1))
    expected = logits_of(model, ids)
    pages = [5, 0, 3, 1, 7, 2]
    attention_caches = caches(model.config)
    logits = []
    for start, end in ((0, 37), (37, 90)):
        chunks = [PagedChunk(start, end - start, pages)]
        attention = GatheredAttention(*attention_caches, chunks)
        logits.append(model.logits(model(ids[start:end], torch.arange(start, end), attention)))
    assert_near(torch.cat(logits), expected)

    if library(torch.float32) is None:
        pytest.skip("no C compiler")
    pack(model.requires_grad_(False))
    forward = Forward(model, *caches(model.config))
    logits = []
    for start, end in ((0, 37), (37, 90)):
        count = end - start
        positions = range(start, end)
        logits.append(forward(ids[start:end].tolist(), positions, [count], [pages], range(count)))
    assert_near(torch.cat(logits), expected)


@torch.no_grad()
def test_bf16_is_no_further_from_float32_than_transformers(tmp_path):
    """Cosines and norms are not rounded to bf16 on the way, as transformers rounds them."""
    random_transformers_model("Qwen3").bfloat16().save_pretrained(tmp_path)
    theirs, exact = (
        transformers.Qwen3ForCausalLM.from_pretrained(tmp_path, dtype=dtype)
        for dtype in (torch.bfloat16, torch.float32)
    )
    model, _ = load_checkpoint(tmp_path, dtype="bfloat16")
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 320, (300,), generator=generator)  # bf16 cannot count beyond 256
    expected = exact(ids[None]).logits[0]
    errors = [
        (logits.float() - expected).norm()
        for logits in (logits_of(model, ids), theirs(ids[None]).logits[0])
    ]
    assert errors[0] < 0.95 * errors[1], errors

    cast = load_checkpoint(tmp_path)[0].to(torch.bfloat16)
    assert torch.equal(logits_of(cast, ids), logits_of(model, ids)), "the frequencies stay fp32"
