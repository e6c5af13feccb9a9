"""A run over a base in 4 bits: one copy of it, which learns, resumes and is saved merged."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from run_rows import steps_of

from nanorchestra.config import Config
from nanorchestra.engine.sequence import SamplingParams
from nanorchestra.errors import UserError
from nanorchestra.model.checkpoint import load_checkpoint, named_hf_tensors
from nanorchestra.model.lora import adapters
from nanorchestra.model.quantise import QuantisedLinear, linears
from nanorchestra.training import build
from nanorchestra.training.distributed import Ranks
from nanorchestra.training.packing import Group, Sample, samples_in
from train import publish, supervised_update

QLORA = {
    "lora.base": "int4",
    "lora.rank": 4,
    "grpo.learning_rate": 1e-2,
    "grpo.warmup_steps": 1,
    "grpo.steps": 4,
    "grpo.optimizer": "adamw",
}


def frozen(model) -> dict[str, torch.Tensor]:
    """Every tensor of the model but those of adapters, by name."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: x for name, x in tensors.items() if ".lora_" not in name}


def gap(engine, trainer) -> float:
    """The largest difference of a log-probability between engine and trainer, on new samples."""
    prompts = [[5, 6, 7, 8], [9, 10, 11]]
    params = [SamplingParams(12, seed=seed, ignore_eos=True) for seed in range(len(prompts))]
    groups, drawn = [], []
    for prompt, done in zip(prompts, engine.generate(prompts, params), strict=True):
        given, count = len(prompt), len(done.token_ids)
        in_loss = [False] * given + [True] * count
        logprobs = [0.0] * given + done.logprobs
        sample = Sample(prompt + done.token_ids, in_loss, logprobs, 1.0)
        groups.append(Group([sample], given))
        drawn.append(done.logprobs)
    trainer.compute_first_logprobs(groups, 1.0)
    computed = sum([sample.first_logprobs for sample in samples_in(groups)], [])
    differences = torch.tensor(computed) - torch.tensor(sum(drawn, []))
    return differences.abs().max().item()


def parts(run):
    """The trainer and the engine of a run, as train.py builds them, and a function to publish."""
    model, tokenizer = build.load_policy(
        run.config, run.ranks, torch.float32, run.config.model.path
    )
    trainer = build.build_trainer(run.config, model, tokenizer, run.ranks, torch.float32)
    engine = build.build_engine(run.config, model, tokenizer, run.ranks, torch.float32)

    def publish_weights():
        publish(run.config, model, engine, torch.float32)

    publish_weights()
    return trainer, engine, publish_weights


def test_trainer_and_engine_share_the_base_and_agree_after_every_update(make_training):
    trainer, engine, _ = parts(make_training("built", QLORA))
    ours, theirs = frozen(trainer.model), frozen(engine.model)
    assert ours.keys() == theirs.keys() and len(linears(trainer.model, QuantisedLinear)) == 16
    assert all(x.data_ptr() == theirs[name].data_ptr() for name, x in ours.items())
    assert gap(engine, trainer) < 1e-4

    run = make_training("shared", QLORA)
    assert run.train()
    for row in run.folder.rows("metrics"):
        assert row["grad_norm"] > 0 and row["logprob_gap_max"] < 1e-4
    moved = [module.lora_b.abs().max().item() for _, module in adapters(run.trainer.model)]
    assert min(moved) > 1e-3
    assert gap(run.engine, run.trainer) < 1e-4
    assert all(torch.equal(x, ours[name]) for name, x in frozen(run.engine.model).items())


def test_demonstrations_lower_the_loss_and_the_engine_has_them_once_they_are_published(
    make_training,
):
    trainer, engine, publish_weights = parts(make_training("taught", QLORA))
    ids = [(7 * i) % 300 + 5 for i in range(40)]
    in_loss = [False] * 4 + [True] * 36
    groups = [Group([Sample(ids, in_loss, [0.0] * 40, 1.0)], 4)]
    losses = [supervised_update(trainer, groups, 1e-2)["loss"] for _ in range(6)]
    assert losses == sorted(losses, reverse=True) and losses[-1] < losses[0] - 0.3

    def likelihood():
        (logprobs,) = engine.score([ids])
        return sum(logprobs[3:]) / 36

    assert likelihood() == pytest.approx(-losses[0], abs=1e-3)
    publish_weights()
    trainer.compute_first_logprobs(groups, 1.0)
    (sample,) = samples_in(groups)
    assert likelihood() == pytest.approx(sum(sample.first_logprobs) / 36, abs=1e-4)


@pytest.mark.slow
def test_stopped_and_resumed_it_ends_the_same(make_training):
    settings = QLORA | {"grpo.importance_cap": 2.0, "grpo.kl_coef": 0.1}
    whole = make_training("whole", settings)
    assert whole.train()
    stopped = make_training("stopped", settings, steps=3)
    assert not stopped.train()
    again = make_training("stopped", resume=True)
    assert again.train()
    assert steps_of(again) == steps_of(whole) and len(steps_of(whole)) == 4


def test_the_saved_model_has_the_adapters_merged_into_the_widened_base(make_training):
    run = make_training("saved", QLORA | {"grpo.steps": 2})
    assert run.train()
    model, trained = run.trainer.model, dict(named_hf_tensors(run.trainer.model))
    assert run.folder.summary()["parameters"] == run.trainer.parameters()
    loaded, _ = load_checkpoint(run.folder.path / "model")
    for name, tensor in named_hf_tensors(loaded):
        assert torch.equal(tensor, trained.pop(name)), name
    assert not trained
    _, module = adapters(model)[-1]
    expected = module.base.dequantise(torch.float32) + module.scale * module.lora_b @ module.lora_a
    torch.testing.assert_close(loaded.layers[-1].down_proj.weight, expected)
    assert (run.folder.path / "adapter" / "adapter_model.safetensors").is_file()


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"lora.base": "int4"}, "lora.base is int4 on 8 processes; .* start one, or"),
        ({"lora.base": "full"}, "lora.rank is 4 and 8 ranks shard .* at least 8, or the optimizer"),
        ({"grpo.optimizer": "muon", "warm_start.steps": 0}, "lora.rank is 4 and 8 ranks shard"),
        ({"warm_start.steps": 0}, "config.json: cannot be read"),
    ],
)
def test_adapters_that_several_ranks_cannot_train_are_refused_in_one_line(
    tmp_path, settings, message
):
    config = Config().replace(settings | {"lora.rank": 4, "model.path": str(tmp_path)})
    ranks = Ranks(world_size=8)
    ranks.mesh = {"shard": SimpleNamespace(size=lambda: 8)}
    with pytest.raises(UserError, match=message) as no:
        build.load_policy(config, ranks, torch.float32, tmp_path)
    assert "\n" not in str(no.value)
