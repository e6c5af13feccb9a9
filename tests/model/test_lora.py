"""Adapters: exact gradients, the same model merged and not, only A and B trained, and files that transformers and PEFT understand."""

from __future__ import annotations

import importlib.util
import json

import pytest
import torch
from conftest import Stop, steps_of
from safetensors.torch import load_file

from nanorchestra.errors import UserError
from nanorchestra.model.lora import (
    LoRALinear,
    adapters,
    add_adapters,
    merge,
    parameters_of,
    save_adapter,
    without_adapters,
)
from nanorchestra.model.ops import Segment, packed_attention
from nanorchestra.model.qwen3 import Qwen3
from nanorchestra.model.weights import copy_weights, named_hf_tensors, save_checkpoint
from nanorchestra.training.objectives import Objective
from nanorchestra.training.packing import Group, Sample
from nanorchestra.training.trainer import Trainer

GROUPS = [
    Group(
        [5, 6, 7, 8],
        [
            Sample([9, 10, 11], [True, True, False], [-6.0] * 3, 1.0),
            Sample([9, 12], [True] * 2, [-6.5] * 2, -1.0),
        ],
    )
]


@pytest.fixture
def adapted(nano_model):
    """An adapter that says something: B is not zero."""
    add_adapters(nano_model, rank=3, alpha=6.0, seed=1)
    with torch.no_grad():
        for i, (_, module) in enumerate(adapters(nano_model)):
            module.lora_b.copy_(
                0.1 * torch.randn(module.lora_b.shape, generator=torch.Generator().manual_seed(i))
            )
    return nano_model


def hidden(model, tokens=(5, 9, 600, 3, 77, 12)):
    tokens = torch.tensor(tokens)
    return model(tokens, torch.arange(len(tokens)), packed_attention([Segment(0, len(tokens))]))


@pytest.mark.parametrize("rows", [[7], [4, 2, 1]])
def test_gradients_equal_finite_differences(rows):
    generator = torch.Generator().manual_seed(0)
    layer = LoRALinear(torch.nn.Linear(5, 7), rows, rank=2, alpha=3.0, generator=generator).double()
    x, a, b = (
        torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True)
        for shape in ((4, 5), layer.lora_a.shape, layer.lora_b.shape)
    )
    assert torch.autograd.gradcheck(
        lambda x, a, b: torch.func.functional_call(layer, {"lora_a": a, "lora_b": b}, (x,)),
        (x, a, b),
    )


def test_each_part_of_a_fused_matrix_has_its_own_adapter():
    """Row r of part p is x W_r + scale (x A_p) B_r, written out."""
    layer = LoRALinear(torch.nn.Linear(5, 7, bias=False), [4, 2, 1], rank=2, alpha=3.0)
    torch.nn.init.normal_(layer.lora_b)
    x = torch.randn(5)
    for row, part in enumerate([0, 0, 0, 0, 1, 1, 2]):
        low = layer.lora_a[2 * part : 2 * part + 2] @ x
        assert layer(x)[row].item() == pytest.approx(
            (layer.weight[row] @ x + 1.5 * layer.lora_b[row] @ low).item(), abs=1e-5
        )


def test_a_new_adapter_changes_nothing_and_its_a_is_as_published(nano_model):
    before = hidden(nano_model)
    add_adapters(nano_model, rank=64, alpha=32.0, seed=0)
    assert torch.equal(hidden(nano_model), before)
    for _, module in adapters(nano_model):
        bound = module.lora_a.shape[1] ** -0.5
        assert (
            module.lora_a.abs().max() <= bound
            and module.lora_a.std().item() == pytest.approx(bound / 3**0.5, rel=0.05)
            and not module.lora_b.any()
        )
    assert sum(p.numel() for p in nano_model.parameters() if p.requires_grad) == parameters_of(
        nano_model.config, 64
    )
    assert len(adapters(nano_model)) == 4 * nano_model.config.num_hidden_layers


def test_the_merged_model_computes_the_same(adapted):
    plain = Qwen3(adapted.config)
    copy_weights(plain, named_hf_tensors(adapted))  # as the engine takes them
    expected = hidden(adapted)
    torch.testing.assert_close(hidden(plain), expected, rtol=1e-4, atol=1e-5)
    with without_adapters(adapted):
        assert not torch.allclose(hidden(adapted), expected, atol=1e-3)
    merge(adapted, seed=2)
    torch.testing.assert_close(hidden(adapted), expected, rtol=1e-4, atol=1e-5)
    assert not any(module.lora_b.any() for _, module in adapters(adapted))


def test_weights_loaded_into_a_model_with_adapters_reach_its_base(adapted):
    fresh = Qwen3(adapted.config)
    fresh.init_weights(5)
    copy_weights(adapted, named_hf_tensors(fresh))
    with without_adapters(adapted):
        torch.testing.assert_close(hidden(adapted), hidden(fresh))


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_steps_change_only_a_and_b(adapted, kind):
    trainer = Trainer(adapted, vocab_limit=690, optimizer=kind)
    before = {name: p.clone() for name, p in adapted.named_parameters()}
    trainer.supervised_step(GROUPS, 1e-3)
    trainer.policy_step(GROUPS, 1e-3, Objective())
    for name, parameter in adapted.named_parameters():
        assert torch.equal(parameter, before[name]) != name.endswith(("lora_a", "lora_b")), name


def test_the_base_is_the_reference_and_takes_no_memory(adapted):
    trainer = Trainer(adapted, vocab_limit=690)
    trainer.freeze_reference()
    assert trainer.policy_step(GROUPS, 0.0, Objective(kl_coef=1.0)).metrics["kl"] > 1e-4
    merge(adapted, seed=0)
    assert trainer.policy_step(GROUPS, 0.0, Objective(kl_coef=1.0)).metrics["kl"] == pytest.approx(
        0.0, abs=1e-7
    )
    assert not any(name.startswith("reference.") for name in trainer.tensors())
    assert all(module.enabled for _, module in adapters(adapted))


def test_a_checkpoint_goes_on_exactly(adapted):
    trainer = Trainer(adapted, vocab_limit=690)
    trainer.freeze_reference()
    trainer.policy_step(GROUPS, 1e-3, Objective(kl_coef=0.1))
    saved = {name: tensor.clone() for name, tensor in trainer.tensors().items()}
    straight = [trainer.policy_step(GROUPS, 1e-3, Objective(kl_coef=0.1)) for _ in range(2)]
    for name, tensor in trainer.prepare("adamw", reference=True).items():
        tensor.copy_(saved.pop(name))
    assert not saved
    assert [trainer.policy_step(GROUPS, 1e-3, Objective(kl_coef=0.1)) for _ in range(2)] == straight


def test_in_bf16_the_adapter_stays_fp32_and_learns_at_a_small_rate(nano_model):
    nano_model.to(torch.bfloat16)
    add_adapters(nano_model, rank=2, alpha=4.0, seed=0)
    trainer = Trainer(nano_model, vocab_limit=690)
    trainer.policy_step(GROUPS, 1e-6, Objective())
    for _, module in adapters(nano_model):
        assert (
            module.weight.dtype == torch.bfloat16
            and module.lora_a.dtype == torch.float32
            and module.lora_b.any()
        )


def test_a_run_holds_its_base_in_the_dtype_of_computing_and_goes_on_exactly(make_training):
    """Also after a merge, in a checkpoint and in what it exports."""
    options = [
        "--lora.rank",
        "2",
        "--run.dtype",
        "bfloat16",
        "--grpo.steps",
        "3",
        "--grpo.learning_rate",
        "1e-2",
        "--rollout.overlap",
        "false",
    ]

    def held(training):
        return {
            (name.endswith(("lora_a", "lora_b")), tensor.dtype)
            for name, tensor in training.trainer.tensors().items()
            if name.startswith("model.")
        }

    straight = make_training("straight", *options)
    assert held(straight) == {(False, torch.bfloat16), (True, torch.float32)}
    assert straight.grpo(Stop()) and all(row["grad_norm"] > 0 for row in steps_of(straight))
    cut = make_training("cut", *options)
    assert not cut.grpo(Stop(2))
    cut.checkpoints.wait()
    again = make_training("cut", resume=True)
    assert again.grpo(Stop()) and steps_of(again) == steps_of(straight)
    for (name, ours), (_, theirs) in zip(
        again.trainer.tensors().items(), straight.trainer.tensors().items(), strict=True
    ):
        assert torch.equal(ours, theirs), name
    merge(again.trainer.model, seed=2)
    assert held(again) == held(straight)
    again.export(again.run.path / "model")
    exported = load_file(again.run.path / "model" / "model.safetensors")
    for name, merged in named_hf_tensors(straight.trainer.model):
        assert exported[name].dtype == torch.bfloat16 and torch.equal(exported[name], merged), name


def test_an_export_loads_in_transformers_and_computes_the_same(adapted, tmp_path):
    transformers = pytest.importorskip("transformers")
    save_checkpoint(adapted, None, tmp_path / "model")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", dtype=torch.float32
    )
    tokens = torch.tensor([[5, 9, 600, 3, 77, 12]])
    torch.testing.assert_close(
        theirs(tokens).logits[0], adapted.logits(hidden(adapted)), rtol=1e-4, atol=1e-4
    )


def plain_base(model, path):
    """The base of a model with adapters, saved."""
    base = Qwen3(model.config)
    own = base.state_dict()
    base.load_state_dict({name: value for name, value in model.state_dict().items() if name in own})
    save_checkpoint(base, None, path)


def test_an_adapter_file_holds_what_peft_reads(adapted, tmp_path):
    """Applied by hand, with PEFT's names and formula, to transformers' base model it gives our model."""
    transformers = pytest.importorskip("transformers")
    plain_base(adapted, tmp_path / "base")
    save_adapter(adapted, tmp_path / "adapter", "base")
    config, tensors = (
        json.loads((tmp_path / "adapter" / "adapter_config.json").read_text()),
        load_file(tmp_path / "adapter" / "adapter_model.safetensors"),
    )
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "base", dtype=torch.float32
    )
    with torch.no_grad():
        for name in [n for n in tensors if n.endswith("lora_A.weight")]:
            module = theirs.get_submodule(
                name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            )
            module.weight += (
                config["lora_alpha"]
                / config["r"]
                * tensors[name.replace("lora_A", "lora_B")]
                @ tensors[name]
            )
    assert (
        set(config["target_modules"])
        == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
        and len(tensors) == 2 * 7 * 2
    )
    tokens = torch.tensor([[5, 9, 600, 3, 77, 12]])
    torch.testing.assert_close(
        theirs(tokens).logits[0], adapted.logits(hidden(adapted)), rtol=1e-4, atol=1e-4
    )


def applied(base, path):
    """HF name -> base weight with the adapter in the directory added, by PEFT's formula."""
    config, tensors = (
        json.loads((path / "adapter_config.json").read_text()),
        load_file(path / "adapter_model.safetensors"),
    )
    weights = {name: tensor.clone() for name, tensor in base.items()}
    for name in [n for n in tensors if n.endswith("lora_A.weight")]:
        assert len(tensors[name]) == config["r"]
        module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        weights[f"{module}.weight"] += (
            config["lora_alpha"]
            / config["r"]
            * tensors[name.replace("lora_A", "lora_B")]
            @ tensors[name]
        )
    return weights


def test_the_adapters_of_two_phases_are_one_adapter_of_the_first_base(nano_model, tmp_path):
    base = {name: tensor.clone() for name, tensor in named_hf_tensors(nano_model)}
    add_adapters(nano_model, rank=3, alpha=6.0, seed=1)
    trainer = Trainer(nano_model, vocab_limit=690)
    for _ in range(3):
        trainer.supervised_step(GROUPS, 1e-2)
    save_adapter(nano_model, tmp_path / "before", "base")
    warm = {name: tensor.clone() for name, tensor in named_hf_tensors(nano_model)}
    merge(nano_model, seed=2)
    for _ in range(3):
        trainer.policy_step(GROUPS, 1e-2, Objective())
    save_adapter(nano_model, tmp_path, "base", before=tmp_path / "before")
    for expected, path in (
        (warm, tmp_path / "before"),
        (dict(named_hf_tensors(nano_model)), tmp_path),
    ):
        for name, weight in applied(base, path).items():
            torch.testing.assert_close(weight, expected[name], rtol=1e-5, atol=1e-6)
        assert not torch.allclose(
            base["model.layers.0.mlp.down_proj.weight"],
            expected["model.layers.0.mlp.down_proj.weight"],
            atol=1e-4,
        )
    with pytest.raises(UserError, match="nowhere: .*the run's adapters cannot be read"):
        save_adapter(nano_model, tmp_path / "new", before=tmp_path / "nowhere")
    assert not (tmp_path / "new").exists()
    save_adapter(nano_model, tmp_path / "new", write=False)
    assert not (tmp_path / "new").exists()


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="peft is not installed")
def test_peft_loads_the_adapter(adapted, tmp_path):
    import peft
    import transformers

    plain_base(adapted, tmp_path / "base")
    save_adapter(adapted, tmp_path / "adapter", str(tmp_path / "base"))
    theirs = peft.PeftModel.from_pretrained(
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32),
        tmp_path / "adapter",
    )
    tokens = torch.tensor([[5, 9, 600, 3, 77, 12]])
    torch.testing.assert_close(
        theirs(tokens).logits[0], adapted.logits(hidden(adapted)), rtol=1e-4, atol=1e-4
    )
