"""A model that oneDNN holds is the plain model: any number of rows, new weights too."""

import copy
import random
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from nanorchestra.agent.load import NANO, load_rollout
from nanorchestra.agent.loop import Limits
from nanorchestra.engine.engine import Engine
from nanorchestra.errors import UserError
from nanorchestra.model.hf_config import PRESETS
from nanorchestra.model.onednn import DTYPES, OnednnLinear, use_onednn
from nanorchestra.model.quantise import linears
from nanorchestra.model.qwen3 import Qwen3
from nanorchestra.model.saving import save_checkpoint
from nanorchestra.model.weights import copy_weights, load_model, named_hf_tensors


@pytest.mark.parametrize("tied", [False, True])
def test_the_engine_scores_as_the_plain_model_after_new_weights_too(tied):
    """The tensors come in any order, and a copy that failed half-way leaves no trace."""
    shape = replace(PRESETS["nano"], tie_word_embeddings=tied, attention_bias=not tied)
    plain, rng = Qwen3(shape), random.Random(0)
    model = copy.deepcopy(plain.requires_grad_(False))
    use_onednn(model)
    if not linears(model, OnednnLinear):
        pytest.skip("this torch has no oneDNN")
    engine = Engine(model, num_pages=1)
    texts = [[rng.randrange(shape.vocab_size) for _ in range(n)] for n in (2, 7, 20, 133)]
    for seed in range(2):
        plain.init_weights(seed)
        tensors = list(named_hf_tensors(plain))
        rng.shuffle(tensors)
        with pytest.raises(UserError, match="missing"):
            copy_weights(model, [(name, 2 * tensor) for name, tensor in tensors[:-1]])
        engine.update_weights(tensors)
        for text, got in zip(texts, engine.score(texts), strict=True):
            want = Engine(plain, num_pages=1).score([text])[0]
            torch.testing.assert_close(torch.tensor(got), torch.tensor(want), rtol=0, atol=1e-4)
    with pytest.raises(UserError, match="neither trained nor saved"):
        next(named_hf_tensors(model))


def test_a_cpu_keeps_a_checkpoint_in_bfloat16_if_it_multiplies_that(tmp_path):
    """The answers are those of float32 but for bfloat16's rounding."""
    path = tmp_path / "model"
    model, tokenizer = load_model(NANO)
    save_checkpoint(model, tokenizer, path, dtype=torch.bfloat16)
    engines = [load_rollout(place, Limits(), 0.0, 1).engine for place in (path, NANO)]
    dtypes = [engine.model.embed_tokens.weight.dtype for engine in engines]
    assert dtypes == [DTYPES[-1], torch.float32]
    text = tokenizer.encode("law case 372 is hard: what is its code?")
    (got,), (want,) = (engine.score([text]) for engine in engines)
    torch.testing.assert_close(torch.tensor(got), torch.tensor(want), rtol=0.05, atol=0.1)


def test_a_row_is_the_same_in_every_number_of_rows():
    weight, bias, x = torch.randn(600, 512), torch.randn(600), torch.randn(133, 512)
    layer = OnednnLinear(weight, bias)
    with torch.inference_mode():
        out = F.linear(x.double(), weight.double(), bias.double()).float()
        for rows in (0, 1, 2, 8, 9, 17, 65, 100):
            torch.testing.assert_close(layer(x[:rows]), out[:rows], rtol=0, atol=2e-4)
