"""A run over a base in 4 bits: one copy of it, which learns, resumes and is saved merged."""

from __future__ import annotations

import torch
from run_rows import steps_of

from nanorchestra.model.checkpoint import load_checkpoint, named_hf_tensors
from nanorchestra.model.lora import adapters
from nanorchestra.model.quantise import QuantisedLinear, linears

QLORA = {
    "lora.base": "int4",
    "lora.rank": 4,
    "grpo.learning_rate": 1e-2,
    "grpo.warmup_steps": 1,
    "grpo.steps": 4,
    "grpo.optimizer": "adamw",
    "grpo.importance_cap": 2.0,
    "grpo.kl_coef": 0.1,
}


def frozen(model) -> dict[str, torch.Tensor]:
    """Every tensor of the model but those of adapters, by name."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: x for name, x in tensors.items() if ".lora_" not in name}


def test_a_run_over_four_bits_learns_resumes_to_the_bit_and_is_saved_merged(make_training):
    run = make_training("whole", QLORA)
    assert run.train()
    model = run.trainer.model
    ours, theirs = frozen(model), frozen(run.engine.model)
    assert ours.keys() == theirs.keys() and len(linears(model, QuantisedLinear)) == 16
    assert all(x.data_ptr() == theirs[name].data_ptr() for name, x in ours.items())
    for row in run.folder.rows("metrics"):  # the engine has what the trainer has learnt
        assert row["grad_norm"] > 0 and row["logprob_gap_max"] < 1e-4
    assert min(module.lora_b.abs().max().item() for _, module in adapters(model)) > 1e-3

    assert not make_training("stopped", QLORA, steps=2).train()
    again = make_training("stopped", resume=True)
    assert again.train()
    assert steps_of(again) == steps_of(run) and len(steps_of(run)) == 4

    loaded, _ = load_checkpoint(run.folder.path / "model")
    trained = dict(named_hf_tensors(model))
    for name, tensor in named_hf_tensors(loaded):
        assert torch.equal(tensor, trained.pop(name)), name
    assert not trained
    _, module = adapters(model)[-1]
    expected = module.base.dequantise(torch.float32) + module.scale * module.lora_b @ module.lora_a
    torch.testing.assert_close(loaded.layers[-1].down_proj.weight, expected)
    assert (run.folder.path / "adapter" / "adapter_model.safetensors").is_file()
