"""Packing and the update: a prompt shared by its samples, micro-batches, and the order of samples must not change the gradient."""

from __future__ import annotations

import random

import pytest
import torch

from nanorchestra.model.ops import Segment, packed_attention
from nanorchestra.training import objectives as grpo
from nanorchestra.training.plan import model_flops
from nanorchestra.training.trainer import Group, Sample, Schedule, Trainer, micro_batches, pack


def make_groups(seed=0, groups=3, samples=3):
    rng = random.Random(seed)

    def ids(n):
        return [rng.randrange(600) for _ in range(n)]

    made = []
    for _ in range(groups):
        members, thought = [], ids(20)
        for i in range(samples):  # alone; the thought and more; part of the thought and more
            said = (
                ids(rng.randint(2, 20))
                if i % 3 == 0
                else thought[: 20 - i % 2] + ids(rng.randint(0, 20))
            )
            sampled = [True] + [rng.random() < 0.7 for _ in said[1:]]
            members.append(
                Sample(said, sampled, [rng.uniform(-3, -0.1) for _ in said], rng.uniform(-2, 2))
            )
        made.append(Group([5, 6, 5, 7] + ids(rng.randint(3, 40)), members))  # prompts begin alike
    return made


def test_activation_checkpointing_gives_the_same_gradients_to_the_bit(nano_model):
    groups = make_groups(7)
    plain, recomputed = (
        gradients(nano_model, groups),
        gradients(nano_model, groups, activation_checkpointing=True),
    )
    assert all(torch.equal(plain[name], recomputed[name]) for name in plain) and len(plain) > 5
    assert len([1 for block in nano_model.layers if block.recompute]) == len(nano_model.layers)


def gradients(model, groups, vocab_limit=690, **options):
    trainer = Trainer(model, vocab_limit=vocab_limit, **options)
    taken = {}
    trainer._update = lambda rate: (
        taken.update({n: p.grad.clone() for n, p in model.named_parameters()})
        or model.zero_grad()
        or {}
    )
    trainer.policy_step(groups, 0.0)
    return taken


def test_a_packed_group_equals_its_samples_one_by_one(nano_model):
    groups = make_groups(samples=7)
    groups[0].samples[1].ids[:] = (
        groups[0].samples[2].ids[: len(groups[0].samples[1].ids)]
    )  # one sample is the beginning of another
    normaliser = float(sum(g.sampled for g in groups))
    packed = gradients(nano_model, groups)
    nano_model.zero_grad()
    for group in groups:
        for sample in group.samples:
            tokens = torch.tensor(group.prompt + sample.ids)
            hidden = nano_model(
                tokens, torch.arange(len(tokens)), packed_attention([Segment(0, len(tokens))])
            )
            logits = nano_model.logits(hidden)[:, :690]
            p = len(group.prompt)
            at = [p + i for i, s in enumerate(sample.sampled) if s]
            logprobs = logits.log_softmax(-1)[[i - 1 for i in at], tokens[at]]
            old = torch.tensor([sample.logprobs[i - p] for i in at])
            grpo.policy_loss(
                logprobs, old, torch.full_like(old, sample.advantage), normaliser=normaliser
            )[0].backward()
    for name, parameter in nano_model.named_parameters():
        torch.testing.assert_close(packed[name], parameter.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("budget", [1, 60, 10_000])
def test_micro_batches_do_not_change_the_gradient(nano_model, budget):
    groups = make_groups(1)
    whole, parts = (
        gradients(nano_model, groups),
        gradients(nano_model, groups[::-1], token_budget=budget),
    )
    for name in whole:
        torch.testing.assert_close(whole[name], parts[name], rtol=1e-4, atol=1e-6)


def test_given_ids_have_no_part_in_the_loss(nano_model):
    """Changing what follows the last sampled id, or an advantage of nothing, changes nothing."""
    group = make_groups(2, groups=1, samples=1)
    sample = group[0].samples[0]
    sample.ids, sample.logprobs, sample.sampled = [9] * 8, [-1.0] * 8, [True] * 5 + [False] * 3
    before = gradients(nano_model, group)
    sample.ids[-3:] = [5, 6, 7]
    after = gradients(nano_model, group)
    for name in before:
        torch.testing.assert_close(before[name], after[name])


def test_micro_batches_keep_every_group_once_and_within_budget():
    groups = make_groups(3, groups=7)
    batches = list(micro_batches(groups, 120))
    assert [g for batch in batches for g in batch] == groups
    assert all(sum(g.tokens for g in batch) <= 120 or len(batch) == 1 for batch in batches)


def test_the_first_sampled_id_is_predicted_from_the_end_of_the_prompt():
    packed = pack([Group([1, 2, 3], [Sample([4, 5], [True, True]), Sample([6], [True])])])
    assert packed.tokens.tolist() == [1, 2, 3, 4, 5, 6] and packed.positions.tolist() == [
        0,
        1,
        2,
        3,
        4,
        3,
    ]
    assert packed.source.tolist() == [2, 3, 2] and packed.targets.tolist() == [4, 5, 6]


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_the_update_lowers_the_loss_and_its_state_goes_on_exactly(nano_model, kind):
    groups = make_groups(4)
    trainer = Trainer(nano_model, vocab_limit=690, optimizer=kind)
    first = [trainer.supervised_step(groups, 3e-3)["loss"] for _ in range(4)]
    assert first[-1] < first[0]
    saved = {name: tensor.clone() for name, tensor in trainer.tensors().items()}
    straight = [trainer.supervised_step(groups, 3e-3)["loss"] for _ in range(3)]
    tensors = trainer.prepare(kind, False)
    assert tensors.keys() == saved.keys()
    for name, tensor in tensors.items():
        tensor.copy_(saved[name])
    assert [trainer.supervised_step(groups, 3e-3)["loss"] for _ in range(3)] == straight


def test_a_gradient_that_is_not_finite_changes_nothing(nano_model):
    groups = make_groups(5)
    groups[0].samples[0].advantage = float("nan")
    trainer = Trainer(nano_model, vocab_limit=690)
    before = [p.clone() for p in nano_model.parameters()]
    assert trainer.policy_step(groups, 1e-2)["skipped"] == 1
    assert all(torch.equal(a, b) for a, b in zip(before, nano_model.parameters()))


@pytest.mark.parametrize("kl", ["full", "k2", "k3"])
def test_the_kl_to_the_reference_is_zero_at_the_reference_and_pulls_back(nano_model, kl):
    groups = make_groups(6)
    for group in groups:
        for sample in group.samples:
            sample.advantage = 0.0
    trainer = Trainer(nano_model, vocab_limit=690)
    trainer.freeze_reference()
    assert trainer.policy_step(groups, 0.0, kl_coef=1.0, kl=kl)["kl"] == pytest.approx(
        0.0, abs=1e-9
    )
    with torch.no_grad():
        for p in nano_model.parameters():
            p.add_(0.05 * torch.randn(p.shape, generator=torch.Generator().manual_seed(0)))
    values = [trainer.policy_step(groups, 1e-3, kl_coef=1.0, kl=kl)["kl"] for _ in range(6)]
    assert values[0] > 0 and values[-1] < values[0]
    with pytest.raises(ValueError, match="freeze_reference"):
        Trainer(nano_model, vocab_limit=690).policy_step(groups, 0.0, kl_coef=1.0)


def test_schedule():
    schedule = Schedule(1.0, steps=100, warmup_steps=10, final_fraction=0.1)
    assert (
        schedule.at(0) == 0.1
        and schedule.at(9) == 1.0
        and schedule.at(100) == pytest.approx(0.1)
        and schedule.at(55) == pytest.approx(0.55)
    )
    held = Schedule(1.0, steps=100, warmup_steps=10, final_fraction=0.2, hold=0.5)
    assert (
        held.at(9) == held.at(30) == held.at(50) == 1.0
        and held.at(75) == pytest.approx(0.6)
        and held.at(100) == pytest.approx(0.2)
    )


@pytest.mark.parametrize("budget", [1, 10_000])
def test_a_policy_step_leaves_the_log_probabilities_of_before_it_with_every_sample(
    nano_model, budget
):
    groups = make_groups(8)
    groups[0].samples[0].sampled = [False] * len(groups[0].samples[0].ids)
    expected = []
    for group in groups:
        for sample in group.samples:
            tokens, p = torch.tensor(group.prompt + sample.ids), len(group.prompt)
            with torch.no_grad():
                logits = (
                    nano_model.logits(
                        nano_model(
                            tokens,
                            torch.arange(len(tokens)),
                            packed_attention([Segment(0, len(tokens))]),
                        )
                    )[:, :690]
                    / 0.7
                )
            expected.append(
                [
                    logits[p + i - 1].log_softmax(-1)[token].item()
                    for i, token in enumerate(sample.ids)
                    if sample.sampled[i]
                ]
            )
    metrics = Trainer(nano_model, vocab_limit=690, token_budget=budget).policy_step(
        groups, 1e-2, temperature=0.7
    )
    assert metrics["grad_norm"] > 0
    gaps = [
        abs(ours - theirs)
        for group in groups
        for sample in group.samples
        for ours, theirs in zip(
            sample.trainer_logprobs.tolist(),
            [logprob for logprob, sampled in zip(sample.logprobs, sample.sampled) if sampled],
        )
    ]
    assert metrics["logprob_gap"] == pytest.approx(sum(gaps) / len(gaps)) and metrics[
        "logprob_gap_max"
    ] == pytest.approx(max(gaps))
    for sample, logprobs in zip(
        (sample for group in groups for sample in group.samples), expected, strict=True
    ):
        assert sample.trainer_logprobs.tolist() == pytest.approx(logprobs, abs=1e-4)


def test_flops_count_every_id_of_a_pack_once_and_every_pair_that_is_attended(nano_model):
    groups = make_groups(9)
    packed = pack(groups)
    config = nano_model.config
    assert packed.pairs == sum(
        position + 1 for position in packed.positions.tolist()
    )  # each id sees its own past, whoever shares it
    metrics = Trainer(nano_model, vocab_limit=690).policy_step(groups, 0.0)
    assert metrics["flops"] == model_flops(
        config, len(packed.tokens), packed.pairs, len(packed.targets)
    )
    assert (
        Trainer(nano_model, vocab_limit=690).supervised_step(groups, 0.0)["flops"]
        == metrics["flops"]
    )
    trainer = Trainer(nano_model, vocab_limit=690)
    trainer.freeze_reference()
    assert trainer.policy_step(groups, 0.0, kl_coef=0.1)["flops"] == pytest.approx(
        4 / 3 * metrics["flops"]
    )
