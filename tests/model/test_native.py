"""A packed model computes as the plain one: any shape and number of rows, new weights too."""

import copy
import random
from dataclasses import replace

import pytest
import torch

from nanorchestra.engine.engine import Engine, SamplingParams
from nanorchestra.errors import UserError
from nanorchestra.model.checkpoint import PRESETS, copy_weights, named_hf_tensors
from nanorchestra.model.native import PackedLinear, library, pack
from nanorchestra.model.quantise import linears
from nanorchestra.model.qwen3 import Qwen3

pytestmark = pytest.mark.skipif(library(torch.float32) is None, reason="no C compiler")


@pytest.mark.parametrize("tied", [False, True])
def test_the_engine_scores_as_the_plain_model_after_new_weights_too(tied):
    """The tensors come in any order, and a copy that failed half-way leaves no trace."""
    shape = replace(PRESETS["nano"], tie_word_embeddings=tied)
    plain, rng = Qwen3(shape), random.Random(0)
    model = copy.deepcopy(plain.requires_grad_(False))
    pack(model)
    assert linears(model, PackedLinear)
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


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "dtype"),
    [(6, 2, 32, "float32"), (4, 1, 64, "float32"), (2, 2, 128, "float32"), (2, 2, 80, "bfloat16")],
)
def test_every_shape_of_heads_gives_the_plain_models_log_probabilities(heads, kv_heads, dim, dtype):
    """Prompts end before, at and after the ends of pages and of blocks of keys."""
    dtype, bound = getattr(torch, dtype), 1e-4 if dtype == "float32" else 0.1
    if library(dtype) is None:
        pytest.skip("this CPU does not multiply bfloat16")
    sizes = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": dim}
    plain, rng = Qwen3(replace(PRESETS["nano"], num_hidden_layers=2, **sizes)), random.Random(0)
    plain.init_weights(0)
    plain.requires_grad_(False).to(dtype)
    plain.layers[0].gate_up_proj.weight.mul_(400)  # gates whose exponential is beyond a float
    plain.layers[0].down_proj.weight.mul_(1e-4)
    pack(packed := copy.deepcopy(plain))
    assert linears(packed, PackedLinear)
    prompts = [[rng.randrange(800) for _ in range(n)] for n in (1, 15, 16, 17, 63, 65, 130)]
    prompts += prompts[-1:] * 2
    params = [SamplingParams(max_tokens=4, seed=i) for i in range(len(prompts))]
    engine = Engine(packed, num_pages=60, max_batch_tokens=100)
    for prompt, done in zip(prompts, engine.generate(prompts, params), strict=True):
        want = Engine(plain, num_pages=1).score([prompt + done.token_ids])[0][-4:]
        got = torch.tensor(done.logprobs)
        torch.testing.assert_close(got, torch.tensor(want), rtol=0, atol=bound)


def test_threads_share_a_step_without_changing_its_bits():
    model, rng, drawn = Qwen3(PRESETS["nano"]), random.Random(0), []
    model.init_weights(0)
    pack(model.requires_grad_(False))
    prompts = [[rng.randrange(800) for _ in range(n)] for n in (5, 64, 300)]
    for threads in (1, 3):
        torch.set_num_threads(threads)
        done = Engine(model, num_pages=60).generate(prompts, SamplingParams(max_tokens=3))
        drawn.append([(each.token_ids, each.logprobs) for each in done])
    assert drawn[0] == drawn[1]
