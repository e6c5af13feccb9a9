"""The decoder against transformers on random weights: Qwen3, Qwen2.5, Llama, "llama3" and YaRN."""

import copy
from dataclasses import replace

import pytest
import torch
import transformers

from nanorchestra.engine.engine import Engine, SamplingParams
from nanorchestra.engine.paged_attention import GatheredAttention, PagedChunk
from nanorchestra.model.attention import PackedAttention, Segment
from nanorchestra.model.checkpoint import PRESETS, load_checkpoint, save_checkpoint
from nanorchestra.model.native import STRIP, Forward, PackedLinear, library, pack, zeros
from nanorchestra.model.quantise import linears
from nanorchestra.model.qwen3 import Qwen3
from nanorchestra.model.rope import scaled_frequencies

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
def test_logits_and_greedy_continuations_are_those_of_transformers(name, shard, tmp_path):
    reference = random_transformers_model(name)
    reference.save_pretrained(tmp_path, max_shard_size=shard)
    assert (tmp_path / "model.safetensors.index.json").exists() == (shard == "100KB")
    model, tokenizer = load_checkpoint(tmp_path)
    assert tokenizer is None

    generator = torch.Generator().manual_seed(1)
    prompt = torch.randint(0, model.config.vocab_size, (90,), generator=generator)
    expected = reference(prompt[None]).logits[0]
    assert_near(logits_of(model, prompt), expected)

    expected = reference.generate(
        prompt[None, :8], max_new_tokens=40, do_sample=False, pad_token_id=0
    )[0]
    ids = prompt[:8]
    while len(ids) < len(expected):
        ids = torch.cat((ids, logits_of(model, ids)[-1:].argmax(-1)))
    assert ids.tolist() == expected.tolist()
    assert len(set(ids[8:].tolist())) > 3, "a repeated continuation shows little"


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


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "C"])
@pytest.mark.parametrize("name", ["Qwen2.5", "Llama", "Qwen3 with YaRN"])
@torch.no_grad()
def test_the_engine_continues_as_transformers_does(name, packed, tmp_path):
    """Prompts share a beginning, are prefilled in chunks, and end beyond YaRN's 64 tokens."""
    reference = random_transformers_model(name)
    reference.save_pretrained(tmp_path)
    model, _ = load_checkpoint(tmp_path)
    if packed:
        if library(torch.float32) is None:
            pytest.skip("no C compiler")
        pack(model.requires_grad_(False))
        assert linears(model, PackedLinear)
    generator = torch.Generator().manual_seed(1)
    shared = torch.randint(0, 320, (40,), generator=generator).tolist()
    prompts = []
    for count in (3, 17, 45):
        own = torch.randint(0, 320, (count,), generator=generator).tolist()
        prompts.append(shared + own)
    engine = Engine(model, num_pages=40, page_size=STRIP, max_batch_tokens=32)
    completions = engine.generate(prompts, SamplingParams(temperature=0.0, max_tokens=40))
    for prompt, completion in zip(prompts, completions, strict=True):
        expected = reference.generate(
            torch.tensor([prompt]), max_new_tokens=40, do_sample=False, pad_token_id=0
        )
        assert prompt + completion.token_ids == expected[0].tolist()
        assert len(set(completion.token_ids)) > 3, "a repeated continuation shows little"


@pytest.mark.parametrize("name", CONFIGS)
@torch.no_grad()
def test_a_saved_checkpoint_is_loaded_by_its_own_class(name, tmp_path):
    reference = random_transformers_model(name)
    reference.save_pretrained(tmp_path / "theirs")
    model, _ = load_checkpoint(tmp_path / "theirs")
    save_checkpoint(model, None, tmp_path / "ours")
    again, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours", output_loading_info=True
    )
    assert type(again) is type(reference) and not any(report.values()), report
    ids = torch.arange(70)[None]
    assert torch.equal(again(ids).logits, reference(ids).logits)
    assert load_checkpoint(tmp_path / "ours")[0].config == model.config


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


def saved_numbers(layers: int, recompute: bool, tokens: int) -> float:
    """How many numbers autograd keeps of a forward pass, each storage once, without weights."""
    model = Qwen3(replace(PRESETS["nano"], num_hidden_layers=layers))
    model.init_weights(0)
    for block in model.layers:
        block.recompute = recompute
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept = {}

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        ids = torch.arange(tokens)
        hidden = model(ids, ids, PackedAttention([Segment(0, tokens)]))
    assert hidden.requires_grad
    return sum(x.untyped_storage().nbytes() / 4 for at, x in kept.items() if at not in weights)


def test_recomputation_keeps_one_row_of_the_residual_stream_a_token_and_layer():
    tokens, hidden = 40, PRESETS["nano"].hidden_size
    with_recompute = saved_numbers(6, True, tokens) - saved_numbers(2, True, tokens)
    assert with_recompute == 4 * tokens * hidden
    assert saved_numbers(6, False, tokens) - saved_numbers(2, False, tokens) > 8 * with_recompute


@pytest.mark.parametrize("name", ["Llama 3.1", "Qwen3 with YaRN"])
def test_rotary_frequencies_do_not_depend_on_the_default_device(name, tmp_path):
    """Nothing is computed on "meta", where models are made, nor on a GPU that is the default."""
    random_transformers_model(name).save_pretrained(tmp_path)
    model, _ = load_checkpoint(tmp_path)
    expected = model.rope_frequencies(torch.device("cpu"))
    scaled_frequencies.cache_clear()
    with torch.device("meta"):
        frequencies = model.rope_frequencies(torch.device("cpu"))
    assert torch.equal(frequencies, expected)


def test_presets_have_the_published_sizes():
    sizes = {
        "qwen3-0.6b": 596_049_920,
        "qwen3-4b": 4_022_468_096,
        "qwen3-8b": 8_190_735_360,
    }
    for name, size in sizes.items():
        with torch.device("meta"):
            one, two = (Qwen3(replace(PRESETS[name], num_hidden_layers=n)) for n in (1, 2))
        rest, layer = (sum(p.numel() for p in part.parameters()) for part in (one, two.layers[1]))
        assert rest + (PRESETS[name].num_hidden_layers - 1) * layer == size
