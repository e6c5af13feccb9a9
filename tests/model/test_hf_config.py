"""config.json: what is read, what is written, what is refused."""

from dataclasses import replace

import pytest
import transformers

from nanorchestra.errors import UserError
from nanorchestra.model.hf_config import PRESETS, config_from_hf, config_to_hf, read_sampling
from nanorchestra.model.qwen3 import ModelConfig
from nanorchestra.model.rope import Llama3Scaling, YarnScaling

TINY = dict(
    vocab_size=320, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2,
)  # fmt: skip
CLASSES = {"qwen3": "Qwen3Config", "qwen2": "Qwen2Config", "llama": "LlamaConfig"}
QWEN3 = config_from_hf(TINY | {"rope_theta": 9.5, "eos_token_id": [7, 5]})
QWEN2 = replace(QWEN3, qk_norm=False, attention_bias=True)
LLAMA = replace(QWEN3, qk_norm=False, eos_token_ids=())
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
YARN_QWEN3 = config_from_hf(TINY | {"rope_scaling": YARN})


def theirs(data) -> dict:
    """What transformers makes of a config.json, and writes."""
    model_type = data.get("model_type", "qwen3")
    return getattr(transformers, CLASSES[model_type])(**data).to_dict()


@pytest.mark.parametrize(
    "config",
    [
        *PRESETS.values(),
        QWEN3,
        QWEN2,
        LLAMA,
        replace(LLAMA, rope=Llama3Scaling(8.0, 1.0, 4.0, 8192)),
        YARN_QWEN3,
        replace(YARN_QWEN3, rope=YarnScaling(4.0, 32768, 1.2, 20.0, 2.0, False)),
    ],
)
def test_a_config_comes_back_from_its_file_and_from_transformers(config: ModelConfig):
    assert config_from_hf(config_to_hf(config)) == config
    assert config_from_hf(theirs(config_to_hf(config))) == config  # writes rope_parameters


@pytest.mark.parametrize("model_type", CLASSES)
def test_missing_fields_have_transformers_defaults(model_type):
    stated = TINY | {"model_type": model_type}
    assert config_from_hf(stated) == config_from_hf(theirs(stated))
    config = config_from_hf(stated)
    assert config.head_dim == (128 if model_type == "qwen3" else 16)
    assert (config.qk_norm, config.attention_bias) == (model_type == "qwen3", model_type == "qwen2")


def test_both_forms_of_a_scaled_rotation_are_read():
    for rope in (LLAMA3, YARN):
        older = {("type" if name == "rope_type" else name): value for name, value in rope.items()}
        forms = [
            {"rope_theta": 5e5, "rope_scaling": rope},
            {"rope_theta": 5e5, "rope_scaling": older},
            {"rope_parameters": rope | {"rope_theta": 5e5}},
        ]
        first, *others = [config_from_hf(TINY | form) for form in forms]
        assert first.rope_theta == 5e5 and first.rope.rope_type == rope["rope_type"]
        assert all(other == first for other in others)
    assert first.max_position_embeddings == 131072, "YaRN's is the extended length"


@pytest.mark.parametrize(
    "change, words",
    [
        (
            {"model_type": "mistral"},
            "model_type = 'mistral': expected 'qwen3' or 'qwen2' or 'llama'",
        ),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type = 'dynamic'"),
        ({"use_sliding_window": True}, "use_sliding_window = True: expected False"),
        (
            {"attention_bias": True},
            "attention_bias = True: expected false; the decoder has no bias",
        ),
        ({"model_type": "llama", "mlp_bias": True}, "no bias on gate_proj, up_proj and down_proj"),
    ],
    ids=str,
)
def test_a_config_that_is_not_supported_is_refused_in_one_line(change, words):
    with pytest.raises(UserError) as refusal:
        config_from_hf(TINY | change, "here/config.json")
    message = str(refusal.value)
    assert message.startswith("here/config.json: ") and words in message and "\n" not in message


def test_sampling_is_as_the_checkpoint_says_and_greedy_without_a_word(tmp_path):
    file = tmp_path / "generation_config.json"
    greedy = (0.0, 1.0, 0)
    assert tuple(read_sampling(tmp_path).values()) == greedy
    for stated, sampling in (
        ('{"temperature": 0.7}', greedy),
        ('{"do_sample": true, "top_k": 20}', (1.0, 1.0, 20)),
        ('{"do_sample": true, "temperature": 0.6, "top_p": 0.95}', (0.6, 0.95, 0)),
    ):
        file.write_text(stated)
        assert tuple(read_sampling(tmp_path).values()) == sampling
