"""Runs with rounded weights: a base in 4 bits, one copy of it, and rollouts in 8."""

from __future__ import annotations

from statistics import fmean

import pytest
import torch
from run_rows import steps_of

import train
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


def tensors_of(model) -> list[torch.Tensor]:
    """Every tensor that the model holds."""
    return [*model.parameters(), *model.buffers()]


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


def share_of_small_ids(attempts, *task):
    """A reward that a few steps teach: the share of sampled ids below 300 of 700."""
    shares = []
    for attempt in attempts:
        pairs = zip(attempt.ids, attempt.sampled, strict=True)
        shares.append(fmean(token < 300 for token, sampled in pairs if sampled))
    return shares


LEARNS = {
    "grpo.steps": 8,
    "grpo.prompts": 3,
    "grpo.group_size": 8,
    "grpo.learning_rate": 5e-2,
    "grpo.warmup_steps": 1,
    "grpo.hold": 1.0,
    "grpo.importance_cap": 2.0,
    "rollout.turns": 1,
}


@pytest.mark.slow
def test_rollouts_in_int8_learn_as_well_from_weights_rounded_in_place(make_training, monkeypatch):
    """The gap of the log-probabilities is that of the rounding, far above that of float32."""
    addresses, publish = set(), train.publish

    def published(config, trained, engine, dtype):
        seconds = publish(config, trained, engine, dtype)
        addresses.add(tuple(x.data_ptr() for x in tensors_of(engine.model)))
        return seconds

    monkeypatch.setattr(train, "group_rewards", share_of_small_ids)
    monkeypatch.setattr(train, "publish", published)
    gaps = {}
    for weights in ("full", "int8"):
        addresses.clear()
        run = make_training(weights, LEARNS | {"rollout.weights": weights})
        assert run.train()
        rows = list(run.folder.rows("metrics"))
        assert rows[0]["reward"] < 0.5 and rows[-1]["reward"] > 0.9
        gaps[weights] = [row["logprob_gap"] for row in rows if "logprob_gap" in row]
        assert len(addresses) == 1, "of 9 times; a captured graph reads where it was captured"
    assert max(gaps["full"]) < 1e-5 and 1e-4 < min(gaps["int8"]) < max(gaps["int8"]) < 1e-2

    rounded, _ = load_checkpoint(run.folder.path / "model", quantise="int8")
    assert len(linears(rounded, QuantisedLinear)) == 16
    for ours, afresh in zip(tensors_of(run.engine.model), tensors_of(rounded), strict=True):
        assert torch.equal(ours, afresh)
