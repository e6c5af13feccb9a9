"""config.json: what is read, what is written, what is refused."""

import pytest
from transformers import Qwen3Config

from nanorchestra.errors import UserError
from nanorchestra.model.hf_config import PRESETS, config_from_hf, config_to_hf, read_sampling
from nanorchestra.model.qwen3 import ModelConfig

TINY = dict(
    model_type="qwen3", vocab_size=320, hidden_size=48, intermediate_size=96, head_dim=16,
    num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
)  # fmt: skip


@pytest.mark.parametrize(
    "config",
    [*PRESETS.values(), config_from_hf(TINY | {"rope_theta": 9.5, "eos_token_id": [7, 5]})],
)
def test_a_config_comes_back_from_its_file_and_from_transformers(config: ModelConfig):
    assert config_from_hf(config_to_hf(config)) == config
    theirs = Qwen3Config(**config_to_hf(config)).to_dict()  # writes rope_parameters
    assert config_from_hf(theirs) == config


@pytest.mark.parametrize(
    "change, words",
    [
        ({"model_type": "llama"}, "model_type = 'llama': expected 'qwen3'"),
        ({"hidden_size": None}, "hidden_size = None: expected a whole number from 1"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "rope_type = 'yarn'"),
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
    file.write_text('{"do_sample": true, "top_p": "high"}')
    with pytest.raises(UserError, match="json: top_p = 'high': expected a number"):
        read_sampling(tmp_path)
