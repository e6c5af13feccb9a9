"""The decoder against transformers' Qwen3ForCausalLM on random weights, and the reading of config.json."""

import copy

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from nanorchestra.errors import UserError
from nanorchestra.model.ops import Segment, packed_attention, rope_frequencies
from nanorchestra.model.qwen3 import PRESETS, ModelConfig, Qwen3
from nanorchestra.model.weights import load_model

TINY = dict(
    vocab_size=320, hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    head_dim=16, max_position_embeddings=256, rope_theta=10_000.0, tie_word_embeddings=True,
)  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
CONFIGS = {
    "tied": TINY,
    "untied": TINY | dict(tie_word_embeddings=False),
    "head_dim 128, hidden 1024": TINY
    | dict(hidden_size=1024, intermediate_size=256, num_hidden_layers=1, head_dim=128),
    "odd vocabulary, as many kv heads as heads": TINY | dict(vocab_size=331, num_key_value_heads=4),
    "attention bias, one kv head": TINY
    | dict(attention_bias=True, num_key_value_heads=1, tie_word_embeddings=False),
    "yarn": TINY | dict(rope_scaling=YARN),
    "yarn, every key": TINY
    | dict(
        rope_scaling=YARN
        | dict(
            beta_fast=16.0,
            beta_slow=2.0,
            mscale=1.5,
            mscale_all_dim=0.5,
            truncate=False,
            factor=3.0,
        )
    ),
    "yarn, attention factor": TINY | dict(rope_scaling=YARN | dict(attention_factor=1.3)),
}


def random_transformers_model(fields: dict, seed: int = 0) -> Qwen3ForCausalLM:
    """No weight keeps a value that would hide its absence: norms differ from 1, biases from 0, layers outweigh the embeddings."""
    model = Qwen3ForCausalLM(
        Qwen3Config(**copy.deepcopy(fields), use_cache=True, bos_token_id=None, eos_token_id=None)
    ).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            spread = 2 * parameter.shape[-1] ** -0.5 if parameter.dim() == 2 else 0.1
            parameter.normal_(
                1.0 if name.endswith("norm.weight") else 0.0, spread, generator=generator
            )
    return model


def ours(model: Qwen3, ids: torch.Tensor) -> torch.Tensor:
    return model.logits(
        model(ids, torch.arange(len(ids)), packed_attention([Segment(0, len(ids))]))
    )


@pytest.mark.parametrize(
    "name, sharded", [*((name, False) for name in CONFIGS), ("tied", True), ("untied", True)]
)
@torch.no_grad()
def test_logits_and_greedy_continuations_are_those_of_transformers(name, sharded, tmp_path):
    reference = random_transformers_model(CONFIGS[name])
    reference.save_pretrained(tmp_path, max_shard_size="100KB" if sharded else "5GB")
    assert (tmp_path / "model.safetensors.index.json").exists() == sharded
    model, tokenizer = load_model(tmp_path)
    assert tokenizer is None

    prompt = torch.randint(
        0, model.config.vocab_size, (70,), generator=torch.Generator().manual_seed(1)
    )
    torch.testing.assert_close(
        ours(model, prompt), reference(prompt[None]).logits[0], rtol=0, atol=1e-4
    )

    expected = reference.generate(
        prompt[None, :8], max_new_tokens=64, do_sample=False, pad_token_id=0
    )[0]
    ids = prompt[:8]
    while len(ids) < len(expected):
        ids = torch.cat((ids, ours(model, ids)[-1:].argmax(-1)))
    assert ids.tolist() == expected.tolist()
    assert len(set(ids[8:].tolist())) > 5, "a continuation that repeats itself shows little"


@torch.no_grad()
def test_bf16_rounds_where_transformers_rounds(tmp_path):
    """With the same attention arithmetic, nearly every bf16 logit is the same bit for bit; a cast in another place moves most of them."""
    random_transformers_model(TINY).bfloat16().save_pretrained(tmp_path)
    reference = Qwen3ForCausalLM.from_pretrained(
        tmp_path, dtype=torch.bfloat16, attn_implementation="eager"
    )
    model, _ = load_model(tmp_path, dtype="bfloat16")
    ids = torch.randint(
        0, 320, (300,), generator=torch.Generator().manual_seed(1)
    )  # bf16 cannot count beyond 256

    def eager(layer, q, k, v):
        q, k, v = (
            q.transpose(0, 1),
            k.repeat_interleave(2, 1).transpose(0, 1),
            v.repeat_interleave(2, 1).transpose(0, 1),
        )
        scores = q @ k.transpose(1, 2) * 0.25 + torch.full(
            (300, 300), torch.finfo(q.dtype).min, dtype=q.dtype
        ).triu(1)
        return (scores.float().softmax(-1).to(q.dtype) @ v).transpose(0, 1)

    logits = model.logits(model(ids, torch.arange(300), eager))
    assert (logits == reference(ids[None]).logits[0]).float().mean() > 0.95

    cast = load_model(tmp_path)[0].to(
        torch.bfloat16
    )  # casting afterwards leaves the rotary frequencies in fp32
    assert torch.equal(ours(cast, ids), ours(model, ids))


@torch.no_grad()
def test_positions_are_the_callers():
    """A sequence cut in two and fed with its own positions and keys is the same sequence."""
    model = Qwen3(ModelConfig.from_hf(TINY | {"model_type": "qwen3"}))
    model.init_weights(0)
    ids, cache = torch.arange(30), {}

    def attend(layer, q, k, v):
        past_k, past_v = cache.get(layer, (k[:0], v[:0]))
        cache[layer] = torch.cat((past_k, k)), torch.cat((past_v, v))
        total = len(cache[layer][0])
        segments = [Segment(0, total)]
        padded_q = torch.cat((q.new_zeros(total - len(q), *q.shape[1:]), q))
        return packed_attention(segments)(layer, padded_q, *cache[layer])[total - len(q) :]

    parts = [model(ids[a:b], torch.arange(a, b), attend) for a, b in ((0, 17), (17, 18), (18, 30))]
    torch.testing.assert_close(model.logits(torch.cat(parts)), ours(model, ids), rtol=0, atol=1e-5)


LONG = YARN | {"factor": 40.0, "original_max_position_embeddings": 32768}


@pytest.mark.parametrize(
    "scaling, theta",
    [
        (None, 1e6),
        (YARN, 1e6),
        (CONFIGS["yarn, every key"]["rope_scaling"], 1e4),
        (LONG, 1e6),
        (LONG, 100.0),
        (LONG, 20.0),
    ],
)
def test_rotary_frequencies_are_those_of_transformers(scaling, theta):
    fields = TINY | dict(rope_scaling=scaling, head_dim=128, rope_theta=theta)
    embedding = Qwen3ForCausalLM(Qwen3Config(**copy.deepcopy(fields))).model.rotary_emb
    frequencies, factor = rope_frequencies(128, theta, scaling, TINY["max_position_embeddings"])
    assert torch.equal(frequencies, embedding.inv_freq)
    assert factor == embedding.attention_scaling


def test_initial_weights_depend_on_the_seed_only():
    config = PRESETS["nano"]
    first, same, other = Qwen3(config), Qwen3(config).to(torch.float64), Qwen3(config)
    for model, seed in ((first, 1), (same, 1), (other, 2)):
        torch.manual_seed(seed + 100)
        model.init_weights(seed)
    for a, b in zip(first.parameters(), same.parameters()):
        assert torch.equal(a, b.float())
    assert not torch.equal(first.embed_tokens.weight, other.embed_tokens.weight)


@pytest.mark.parametrize(
    "name, parameters",
    {
        "qwen3-0.6b": 596_049_920, "qwen3-1.7b": 1_720_574_976, "qwen3-4b": 4_022_468_096, "qwen3-8b": 8_190_735_360,
        "qwen3-14b": 14_768_307_200, "qwen3-32b": 32_762_123_264,
    }.items(),
)  # fmt: skip
def test_presets_have_the_published_sizes(name, parameters):
    with torch.device("meta"):
        assert sum(p.numel() for p in Qwen3(PRESETS[name]).parameters()) == parameters


@pytest.mark.parametrize(
    "config",
    [*PRESETS.values(), ModelConfig.from_hf(CONFIGS["yarn, every key"] | {"model_type": "qwen3"})],
)
def test_config_survives_the_way_through_transformers(config, tmp_path):
    assert ModelConfig.from_hf(config.to_hf()) == config
    Qwen3Config.from_dict(config.to_hf()).save_pretrained(tmp_path)
    data = Qwen3Config.from_pretrained(tmp_path).to_dict()
    assert "rope_theta" not in data, "transformers 5 writes the rope_parameters form"
    assert ModelConfig.from_hf(data) == config


@pytest.mark.parametrize(
    "change, words",
    [
        ({"model_type": "llama"}, ["model_type", "'llama'", "'qwen3'"]),
        ({"model_type": "qwen3_moe"}, ["model_type", "'qwen3_moe'"]),
        ({"hidden_act": "gelu"}, ["hidden_act", "'gelu'", "'silu'"]),
        ({"vocab_size": None}, ["vocab_size", "None", "positive integer"]),
        ({"hidden_size": "48"}, ["hidden_size", "'48'", "positive integer"]),
        ({"num_hidden_layers": True}, ["num_hidden_layers"]),
        ({"num_key_value_heads": 3}, ["num_key_value_heads", "3", "divisor", "4"]),
        ({"head_dim": 15}, ["head_dim", "15", "even"]),
        ({"rms_norm_eps": -1}, ["rms_norm_eps", "-1", "positive number"]),
        ({"tie_word_embeddings": "yes"}, ["tie_word_embeddings", "'yes'", "true or false"]),
        (
            {"use_sliding_window": True, "sliding_window": 128, "max_window_layers": 1},
            ["use_sliding_window", "false"],
        ),
        (
            {"layer_types": ["full_attention", "sliding_attention"]},
            ["layer_types", "'sliding_attention'", "'full_attention'"],
        ),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
            ["rope_scaling.rope_type", "'linear'", "'yarn'"],
        ),
        ({"rope_parameters": {"rope_type": "llama3"}}, ["rope_parameters.rope_type", "'llama3'"]),
        ({"rope_scaling": YARN | {"factor": "big"}}, ["rope_scaling.factor", "'big'"]),
        ({"rope_scaling": 2}, ["rope_scaling", "2", "object"]),
        ({"rope_theta": 0}, ["rope_theta", "0", "positive number"]),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor", "0.5", "1.0"]),
        ({"eos_token_id": "end"}, ["eos_token_id", "'end'"]),
        ({"quantization_config": {"bits": 4}}, ["quantization_config"]),
    ],
)
def test_config_that_is_not_ours_is_refused_in_one_line(change, words):
    with pytest.raises(UserError) as refusal:
        ModelConfig.from_hf(TINY | {"model_type": "qwen3"} | change, source="somewhere/config.json")
    message = str(refusal.value)
    assert message.startswith("somewhere/config.json: ") and "\n" not in message
    for word in words:
        assert word in message


def test_sliding_window_that_is_switched_off_is_fine():
    published = {
        "model_type": "qwen3",
        "use_sliding_window": False,
        "sliding_window": None,
        "max_window_layers": 2,
        "eos_token_id": [5, 3],
    }
    assert ModelConfig.from_hf(TINY | published).eos_token_ids == (5, 3)
    ModelConfig.from_hf(
        TINY
        | {
            "model_type": "qwen3",
            "use_sliding_window": True,
            "sliding_window": 9,
            "max_window_layers": 2,
        }
    )
