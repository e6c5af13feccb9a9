"""An update has the gradient of the formula, however it is packed and divided."""

from __future__ import annotations

import copy
import math
import random
from types import SimpleNamespace

import pytest
import torch
from groups import grouped

import train
from nanorchestra.config import GrpoSection
from nanorchestra.model.attention import PackedAttention, Segment
from nanorchestra.training.grpo import OBJECTIVES
from nanorchestra.training.packing import Sample, mini_batches, samples_in
from nanorchestra.training.trainer import Trainer, hidden_states, merge_updates
from train import policy_update, supervised_update


def make_groups(seed=0, groups=3, samples=3, vocab=600):
    """Prompts of one world; samples that share nothing, part of a thought, or all of it."""
    rng = random.Random(seed)

    def ids(n):
        return [rng.randrange(vocab) for _ in range(n)]

    made = []
    for _ in range(groups):
        members, thought = [], ids(20)
        for i in range(samples):
            turn = ids(rng.randint(2, 20))
            if i % 3:
                turn = thought[: 20 - i % 2] + ids(rng.randint(0, 20))
            in_loss = [True] + [rng.random() < 0.7 for _ in turn[1:]]
            logprobs = [rng.uniform(-7, -5) for _ in turn]
            members.append(Sample(turn, in_loss, logprobs, rng.uniform(-2, 2)))
        made.append(grouped([5, 6, 5, 7] + ids(rng.randint(3, 40)), members))
    return made


def test_the_gradient_of_hidden_states_has_the_same_bits_on_several_threads():
    """One position may predict many ids, whose gradients are added: in one order."""
    threads, generator = torch.get_num_threads(), torch.Generator().manual_seed(0)
    states = torch.randn(6000, 128, generator=generator, requires_grad=True)
    source = torch.randint(0, 100, (2500,), generator=generator)
    batch = SimpleNamespace(tokens=None, positions=None, attention=None, source=source)
    weights = torch.randn(2500, 128, generator=generator)
    torch.set_num_threads(2)
    try:
        seen = set()
        for _ in range(30):
            states.grad = None
            hidden_states(lambda *inputs: states, batch).backward(weights)
            seen.add(states.grad.numpy().tobytes())
    finally:
        torch.set_num_threads(threads)
    assert len(seen) == 1


PLAIN = GrpoSection()


def gradients(model, groups, grpo=PLAIN, vocab_limit=690, reference=None, **settings):
    """The gradients of one policy update by name, without its step."""
    trainer = Trainer(model, vocab_limit=vocab_limit, **settings)
    trainer.reference = reference
    taken = {}

    def take():
        taken.update({name: p.grad.clone() for name, p in model.named_parameters()})
        return float("nan")  # no step

    trainer.clip_gradients = take
    policy_update(trainer, groups, grpo, 0.0, 1.0)
    return taken


def alone(model, sample, limit=690, temperature=1.0):
    """Log-probabilities and entropies of a sample, alone in its sequence, from all logits."""
    tokens = torch.tensor(sample.ids)
    attention = PackedAttention([Segment(0, len(tokens))])
    hidden = model(tokens, torch.arange(len(tokens)), attention)
    logp = (model.logits(hidden)[:, :limit] / temperature).log_softmax(-1)
    at = [i for i, in_loss in enumerate(sample.loss_mask) if in_loss]
    before = logp[[i - 1 for i in at]]
    return before.gather(1, tokens[at, None])[:, 0], -(before.exp() * before).sum(1).detach()


def kl_alone(model, reference, sample, kind, limit=690):
    """The KL of the model from the reference at the ids in the loss, from all logits."""
    tokens = torch.tensor(sample.ids)
    at = [i for i, in_loss in enumerate(sample.loss_mask) if in_loss]
    logp, ref_logp = (
        each.logits(
            each(tokens, torch.arange(len(tokens)), PackedAttention([Segment(0, len(tokens))]))
        )[[i - 1 for i in at], :limit].log_softmax(-1)
        for each in (model, reference)
    )
    if kind == "full":
        return (logp.exp() * (logp - ref_logp.detach())).sum(1)
    return (logp - ref_logp.detach()).gather(1, tokens[at, None])[:, 0].square() / 2


def near(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-4, atol=3e-6)


def test_a_packed_step_has_the_gradient_of_the_samples_one_by_one(nano_model):
    groups = make_groups(samples=7)
    first, second = groups[0].samples[1:3]
    first.ids[:] = second.ids[: len(first.ids)]  # one sample is the beginning of another
    packed = gradients(nano_model, groups)
    count = sum(sample.loss_ids for group in groups for sample in group.samples)
    nano_model.zero_grad()
    for group in groups:
        for sample in group.samples:
            logprobs, _ = alone(nano_model, sample)
            old = [
                x
                for x, sampled in zip(sample.sampler_logprobs, sample.loss_mask, strict=True)
                if sampled
            ]
            ratio = (logprobs - torch.tensor(old)).exp()
            losses = (-sample.advantage * ratio, -sample.advantage * ratio.clamp(0.8, 1.28))
            (torch.maximum(*losses).sum() / count).backward()
    near(packed, {name: p.grad for name, p in nano_model.named_parameters()})


@pytest.mark.parametrize("objective", ["dr_grpo", "toolorchestra"])  # the exact KL, and k2
def test_with_a_least_entropy_only_the_ids_above_it_count(nano_model, objective):
    """Neither their advantage nor their KL from the reference counts, here another model."""
    groups = make_groups(4)
    samples = samples_in(groups)
    count = sum(sample.loss_ids for sample in samples)
    reference = copy.deepcopy(nano_model)
    with torch.no_grad():
        reference.layers[0].down_proj.weight.mul_(0.5)
    computed = [alone(nano_model, sample) for sample in samples]
    values = torch.cat([entropy for _, entropy in computed]).sort().values
    widest = values.diff()[count // 8 : -count // 8].argmax() + count // 8
    nats = values[widest : widest + 2].mean().item()  # where rounding moves no id over it
    for sample, (logprobs, entropy) in zip(samples, computed, strict=True):
        own = iter(logprobs.tolist())
        sample.sampler_logprobs[:] = [next(own) if in_loss else 0.0 for in_loss in sample.loss_mask]
        surrogate = -(logprobs - logprobs.detach()).exp() * sample.advantage
        kl = kl_alone(nano_model, reference, sample, OBJECTIVES[objective].kl)
        ((entropy >= nats) * (surrogate + 0.3 * kl)).sum().div(count).backward()
    expected = {name: p.grad.clone() for name, p in nano_model.named_parameters()}
    nano_model.zero_grad()
    grpo = GrpoSection(objective=objective, kl_coef=0.3, min_entropy=nats)
    near(gradients(nano_model, groups, grpo, reference=reference), expected)


def test_an_importance_cap_weights_the_policy_gradient(nano_model):
    """With one update a step the gradient is that of -A min(pi / sampler, cap) log pi."""
    groups = make_groups(2)
    samples = samples_in(groups)
    for sample in samples:
        logprobs, _ = alone(nano_model, sample)
        pairs = zip(sample.sampler_logprobs, sample.loss_mask, strict=True)
        drawn = torch.tensor([logprob for logprob, in_loss in pairs if in_loss])
        weights = (logprobs.detach() - drawn).exp().clamp(max=1.5) * sample.advantage
        (-weights * logprobs).sum().div(sum(s.loss_ids for s in samples)).backward()
    expected = {name: p.grad.clone() for name, p in nano_model.named_parameters()}
    nano_model.zero_grad()
    near(gradients(nano_model, groups, GrpoSection(importance_cap=1.5)), expected)


def test_the_ratio_of_later_updates_is_to_the_policy_before_the_first(nano_model, monkeypatch):
    groups, trainer = make_groups(3), Trainer(nano_model, vocab_limit=690)
    trainer.compute_first_logprobs(groups, 1.0)
    for sample in samples_in(groups):
        expected = alone(nano_model, sample)[0].tolist()
        assert sample.first_logprobs == pytest.approx(expected, abs=1e-4)
    for name in ("CLIP_LOW", "CLIP_HIGH"):
        monkeypatch.setattr(train, name, 1e-4)
    several = GrpoSection(mini_batch=100)
    stopped = []
    for _ in range(2):
        stopped.append(policy_update(trainer, groups, several, 1e-2, 1.0)["clip_fraction"])
    assert stopped[0] == 0 and stopped[1] > 0.2
    assert all(p.grad is None for p in nano_model.parameters()), "cleared after each"


def test_an_update_that_is_skipped_counts_in_no_mean_of_the_step():
    made = {"loss": 1.0, "logprob_gap_max": 0.5, "flops": 2.0, "skipped": 0.0}
    skipped = {"loss": math.nan, "logprob_gap_max": 0.9, "flops": 2.0, "skipped": 1.0}
    assert merge_updates([made, skipped]) == made | {"flops": 4.0, "skipped": 0.5}


def test_mini_batches_deal_out_every_sample_once():
    groups = make_groups(0, groups=4, samples=5)
    for size, sizes in ((7, [7, 7, 6]), (20, [20]), (0, [20])):
        parts = mini_batches(groups, size)
        dealt = [[id(s) for g in part for s in g.samples] for part in parts]
        assert [len(part) for part in dealt] == sizes
        assert sorted(sum(dealt, [])) == sorted(id(s) for g in groups for s in g.samples)
    assert all(len(part) == 4 for part in mini_batches(groups, 7)), "a part is of all groups"


def test_a_loss_or_gradient_that_is_not_finite_changes_nothing(nano_model):
    groups = make_groups(5)
    groups[0].samples[0].advantage = float("nan")
    trainer = Trainer(nano_model, vocab_limit=690)
    before = [p.clone() for p in nano_model.parameters()]
    assert policy_update(trainer, groups, PLAIN, 1e-2, 1.0)["skipped"] == 1
    groups = make_groups(5)
    first = groups[0].samples[0]
    first.sampler_logprobs[first.loss_mask.index(True)] = float("nan")  # the gradient stays finite
    assert policy_update(trainer, groups, PLAIN, 1e-2, 1.0)["skipped"] == 1
    nano_model.norm.register_hook(lambda gradient: gradient * float("nan"))
    assert supervised_update(trainer, make_groups(5), 1e-2)["skipped"] == 1
    assert all(torch.equal(a, b) for a, b in zip(before, nano_model.parameters(), strict=True))


@pytest.mark.parametrize("objective", ["grpo", "toolorchestra"], ids=["full", "k2"])
def test_the_kl_to_the_reference_is_zero_at_the_reference_and_pulls_back(nano_model, objective):
    groups = make_groups(6)
    for sample in samples_in(groups):
        sample.advantage = 0.0
    trainer = Trainer(nano_model, vocab_limit=690)
    grpo = GrpoSection(objective=objective, kl_coef=1.0)
    trainer.begin_grpo(grpo)

    def step(rate):
        return policy_update(trainer, groups, grpo, rate, 1.0)["kl"]

    assert step(0.0) == pytest.approx(0.0, abs=1e-9)
    with torch.no_grad():
        for p in nano_model.parameters():
            p.add_(0.05 * torch.randn(p.shape, generator=torch.Generator().manual_seed(0)))
    values = [step(1e-3) for _ in range(6)]
    assert values[0] > 0 and values[-1] < values[0]
