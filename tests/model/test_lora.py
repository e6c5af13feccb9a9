"""Adapters: exact gradients, the same model merged or not, only A and B trained, PEFT's files.

Over a base in 4 bits the gradients are those over its widened weights.
"""

import copy
import json

import pytest
import torch
from groups import grouped
from safetensors.torch import load_file

from nanorchestra.config import GrpoSection, ParallelSection
from nanorchestra.model.attention import PackedAttention, Segment
from nanorchestra.model.checkpoint import copy_weights, named_hf_tensors
from nanorchestra.model.lora import adapters, add_adapters, disabled, reset, save_adapter
from nanorchestra.model.quantise import QuantisedLinear, linears, quantise_model
from nanorchestra.model.qwen3 import Qwen3
from nanorchestra.training.packing import Sample
from nanorchestra.training.trainer import Trainer
from train import policy_update, supervised_update

SAMPLES = [
    Sample([9, 10, 11], [True, True, False], [-6.0] * 3, 1.0),
    Sample([9, 12], [True] * 2, [-6.5] * 2, -1.0),
]
GROUPS = [grouped([5, 6, 7, 8], SAMPLES)]
TOKENS = (5, 9, 600, 3, 77, 12)


def fill_adapters(model):
    """B is not zero, so that the adapters change the model."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for _, module in adapters(model):
            module.lora_b.copy_(0.1 * torch.randn(module.lora_b.shape, generator=generator))


@pytest.fixture
def adapted(nano_model):
    add_adapters(nano_model, rank=3, alpha=6.0, seed=1)
    fill_adapters(nano_model)
    return nano_model


def hidden(model):
    tokens = torch.tensor(TOKENS)
    return model(tokens, torch.arange(len(tokens)), PackedAttention([Segment(0, len(tokens))]))


def test_the_merged_model_computes_the_same(adapted):
    plain = Qwen3(adapted.config)
    copy_weights(plain, named_hf_tensors(adapted))  # as the engine takes them
    expected = hidden(adapted)
    torch.testing.assert_close(hidden(plain), expected, rtol=1e-4, atol=1e-5)
    with disabled(adapted):
        assert not torch.allclose(hidden(adapted), expected, atol=1e-3)
    reset(adapted, seed=2)
    assert not any(module.lora_b.any() for _, module in adapters(adapted))
    plain.init_weights(5)
    copy_weights(adapted, named_hf_tensors(plain))  # loads into the base
    torch.testing.assert_close(hidden(adapted), hidden(plain))


def test_the_base_is_the_reference_and_takes_no_memory(adapted):
    trainer = Trainer(adapted, vocab_limit=690)
    grpo = GrpoSection(kl_coef=1.0)
    trainer.begin_grpo(grpo)
    assert policy_update(trainer, GROUPS, grpo, 0.0, 1.0)["kl"] > 1e-4
    reset(adapted, seed=0)
    update = policy_update(trainer, GROUPS, grpo, 0.0, 1.0)
    assert update["kl"] == pytest.approx(0.0, abs=1e-7)
    assert not any(name.startswith("reference.") for name in trainer.tensors())
    assert all(module.enabled for _, module in adapters(adapted))


def applied(base, path):
    """{HF name: weight} of `base` with the adapter files in `path` added, by PEFT's formula."""
    config = json.loads((path / "adapter_config.json").read_text())
    tensors = load_file(path / "adapter_model.safetensors")
    weights = {name: tensor.clone() for name, tensor in base.items()}
    for name in [name for name in tensors if name.endswith("lora_A.weight")]:
        assert len(tensors[name]) == config["r"]
        module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        assert module.rpartition(".")[2] in config["target_modules"]
        scale = config["lora_alpha"] / config["r"]
        delta = tensors[name.replace("lora_A", "lora_B")] @ tensors[name]
        weights[f"{module}.weight"] += scale * delta
    return weights


def test_peft_files_hold_the_adapters(nano_model, tmp_path):
    base = {name: tensor.clone() for name, tensor in named_hf_tensors(nano_model)}
    add_adapters(nano_model, rank=3, alpha=6.0, seed=1)
    trainer = Trainer(nano_model, vocab_limit=690)
    supervised_update(trainer, GROUPS, 1e-2)
    policy_update(trainer, GROUPS, GrpoSection(), 1e-2, 1.0)
    save_adapter(nano_model, tmp_path, "base")
    expected = dict(named_hf_tensors(nano_model))
    for name, weight in applied(base, tmp_path).items():
        torch.testing.assert_close(weight, expected[name], rtol=1e-5, atol=1e-6)
    matrix = "model.layers.0.mlp.down_proj.weight"
    assert not torch.allclose(base[matrix], expected[matrix], atol=1e-4)


def gradients(model, recompute):
    """The gradients of a policy step by name, and the largest |trainer - sampler|."""
    parallel = ParallelSection(activation_checkpointing=recompute)
    trainer, taken = Trainer(model, vocab_limit=690, parallel=parallel), {}

    def take():
        parameters = model.named_parameters()
        taken.update({name: p.grad.clone() for name, p in parameters if p.grad is not None})
        return float("nan")  # no update

    trainer.clip_gradients = take
    update = policy_update(trainer, GROUPS, GrpoSection(), 0.0, 1.0)
    return taken, update["logprob_gap_max"]


@pytest.mark.parametrize("recompute, zeros", [(False, None), (True, 32)])
def test_gradients_over_a_base_in_4_bits_are_those_over_its_widened_weights(
    nano_model, recompute, zeros
):
    """Of adapters alone: the base has none. Nothing of the widened base is kept for backward."""
    base, wide = copy.deepcopy(nano_model), nano_model
    quantise_model(base.layers, "int4", zeros)
    copy_weights(base, named_hf_tensors(wide))
    for name, module in linears(base.layers, QuantisedLinear):
        if zeros:
            generator = torch.Generator().manual_seed(len(name))
            module.zeros.random_(6, 11, generator=generator)
        wide.layers.get_submodule(name).weight.data = module.dequantise(torch.float32)
    results = []
    for each in (base, wide):
        add_adapters(each, rank=3, alpha=6.0, seed=1)
        fill_adapters(each)
        results.append(gradients(each, recompute))
    (ours, gap), (theirs, their_gap) = results
    assert ours.keys() == theirs.keys() and all(".lora_" in name for name in ours)
    assert gap == pytest.approx(their_gap, abs=1e-5) and len(ours) == 2 * 16
    for name, gradient in ours.items():
        size = theirs[name].norm()
        assert size > 0 and (gradient - theirs[name]).norm() < 1e-5 * size, name

    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        hidden(base)
    smallest = min(
        module.base.in_features * module.base.out_features for _, module in adapters(base)
    )
    assert kept and max(x.numel() for x in kept) < smallest
