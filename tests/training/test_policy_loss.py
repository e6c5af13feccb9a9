"""The objectives against the papers' equations and their finite differences."""

from __future__ import annotations

import math
import random
from types import SimpleNamespace

import pytest
import torch

from nanorchestra.config import GrpoSection
from nanorchestra.training.grpo import OBJECTIVES, group_advantages
from nanorchestra.training.packing import pack
from train import policy_loss

DUAL = GrpoSection(objective="toolorchestra")  # which has a dual clip


def doubles(values, grad=False):
    return torch.tensor(values, dtype=torch.float64, requires_grad=grad)


def batch_of(lengths, advantages, sampler):
    """The tensors of a pack that the loss reads, in float64; one advantage per sequence."""
    lengths = torch.tensor(lengths)
    numbers = torch.arange(len(lengths)).repeat_interleave(lengths)
    return SimpleNamespace(
        sampler_logprobs=doubles(sampler),
        advantages=doubles(advantages)[numbers],
    )


def loss_of(logprobs, batch, grpo, first=None, kl=None):
    """The sum of the losses, and the sums of their terms.

    first: log-probabilities of the trainer before the step; None: those of now.
    """
    first = logprobs.detach() if first is None else first
    losses, terms = policy_loss(logprobs, first, torch.ones_like(logprobs), kl, batch, grpo)
    return losses.sum(), {name: values.sum().item() for name, values in terms.items()}


# The papers.


def attempts(seed):
    """Groups of attempts: (reward, log-probabilities, those of the old policy)."""
    rng = random.Random(seed)
    made = []
    for _ in range(3):
        group = []
        for _ in range(4):
            old = [rng.uniform(-3, -0.1) for _ in range(rng.randint(1, 9))]
            reward = rng.choice((0.0, 0.3, 1.0, 1.2)) + rng.random() / 10
            new = [x + rng.gauss(0, 0.4) for x in old]
            new[0] += 3 * rng.randint(0, 1)  # a ratio above the dual clip
            group.append((reward, new, old))
        made.append(group)
    return made


def flat(groups, at):
    return [x for group in groups for attempt in group for x in attempt[at]]


def mean(values):
    return sum(values) / len(values)


def std(values):
    return math.sqrt(sum((x - mean(values)) ** 2 for x in values) / (len(values) - 1))


def clip(value, low, high):
    return min(max(value, low), high)


def paper(name, groups, changed):
    """The objective to minimise from the equation of its paper, over Python floats.

    changed[g][i] replaces the log-probabilities of attempt i of group g, for finite differences.
    """
    total, ids = 0.0, len(flat(groups, 1))
    for group, present in zip(groups, changed, strict=True):
        rewards = [attempt[0] for attempt in group]
        for (reward, _, old), logprobs in zip(group, present, strict=True):
            z = (reward - mean(rewards)) / (std(rewards) + 1e-6)
            z += 0.1 * (name == "toolorchestra" and z >= 1)  # its published code
            ratios = [math.exp(a - b) for a, b in zip(logprobs, old, strict=True)]
            if name in ("grpo", "toolorchestra"):  # DAPO equation 8
                for r in ratios:
                    value = min(r * z, clip(r, 0.8, 1.28) * z)
                    dual = name == "toolorchestra" and z < 0  # arXiv 1912.09729, equation 5
                    total += (max(value, 10 * z) if dual else value) / ids
            else:
                raise NotImplementedError(f"write the equation of {name} here")
    return -total


def ours(name, groups, logprobs):
    advantages, lengths = [], []
    for group in groups:
        advantages += group_advantages([a[0] for a in group], 0.0, OBJECTIVES[name].boost)
        lengths += [len(attempt[1]) for attempt in group]
    batch = batch_of(lengths, advantages, flat(groups, 2))
    return loss_of(logprobs, batch, GrpoSection(objective=name))[0] / sum(lengths)


@pytest.mark.parametrize("name", sorted(OBJECTIVES))
@pytest.mark.parametrize("seed", range(2))
def test_an_objective_and_its_gradient_are_those_of_the_paper(name, seed):
    groups = attempts(seed)
    ratios = [math.exp(a - b) for a, b in zip(flat(groups, 1), flat(groups, 2), strict=True)]
    assert min(ratios) < 0.8 and max(ratios) > 10
    logprobs = doubles(flat(groups, 1), grad=True)
    loss = ours(name, groups, logprobs)
    (gradient,) = torch.autograd.grad(loss, logprobs)
    present = [[list(attempt[1]) for attempt in group] for group in groups]
    assert loss.item() == pytest.approx(paper(name, groups, present), abs=1e-12)
    differences = []
    for attempt in (attempt for group in present for attempt in group):
        for t, value in enumerate(attempt):
            sides = []
            for attempt[t] in (value + 1e-6, value - 1e-6):
                sides.append(paper(name, groups, present))
            attempt[t] = value
            differences.append((sides[0] - sides[1]) / 2e-6)
    assert gradient.tolist() == pytest.approx(differences, abs=1e-7)


@pytest.mark.parametrize("cap", [0.9, 2.0])
def test_an_importance_cap_weighs_the_surrogate_but_not_the_kl(cap):
    groups = attempts(4)
    new, old = doubles(flat(groups, 1)), doubles(flat(groups, 2))
    lengths = [len(attempt[1]) for group in groups for attempt in group]
    advantages = [0.3 * i - 2 for i in range(len(lengths))]
    batch = batch_of(lengths, advantages, (old - 0.2).tolist())
    kl = (new - old).square() / 2
    plain, _ = loss_of(new, batch, GrpoSection(mini_batch=9), old)
    grpo = GrpoSection(mini_batch=9, importance_cap=cap, kl_coef=0.3)
    loss, sums = loss_of(new, batch, grpo, old, kl)
    weight = min(math.exp(0.2), cap)
    assert loss.item() == pytest.approx((weight * plain + 0.3 * kl.sum()).item(), abs=1e-9)
    assert sums["importance"] == pytest.approx(weight * len(old))


def test_the_old_policy_is_one_of_three():
    """Before several updates; the trainer of now under a cap; else the sampler."""
    new, sampler = doubles([-1.0, -2.0], grad=True), [-1.3, -1.9]
    for cap, first, expected in (
        (0.0, [-1.1, -2.2], [-1.1, -2.2]),
        (9.0, [-1.1, -2.2], [-1.1, -2.2]),
        (9.0, None, [-1.0, -2.0]),
        (0.0, None, sampler),
    ):
        batch = batch_of([1, 1], [1.0, -1.0], sampler)
        grpo = GrpoSection(importance_cap=cap, mini_batch=9 if first else 0)
        loss, _ = loss_of(new, batch, grpo, doubles(first) if first else None)
        (gradient,) = torch.autograd.grad(loss, new)
        ratio = (new - doubles(expected)).exp()
        weight = (doubles(expected) - doubles(sampler)).exp()
        weight = weight if cap else torch.ones_like(weight)
        inside = torch.tensor([ratio[0] <= 1.28, ratio[1] >= 0.8])
        assert gradient.tolist() == pytest.approx(
            (-batch.advantages * ratio * weight * inside).tolist()
        )


def test_metrics_count_what_the_clip_stopped():
    ratios, advantages = [1.5, 1.5, 0.5, 0.5, 30.0, 1.0], [1.0, -1.0, 1.0, -1.0, -1.0, 1.0]
    batch = batch_of([1] * 6, advantages, [0.0] * 6)
    _, sums = loss_of(doubles([math.log(r) for r in ratios]), batch, DUAL)
    assert sums == {"clip_fraction": 2}


def test_extreme_ratios_and_empty_batches_give_finite_gradients():
    new = doubles([0.0, 0.0], grad=True)
    batch = batch_of([1, 1], [1.0, -1.0], [-200.0, -200.0])
    loss, _ = loss_of(new, batch, DUAL)
    loss.backward()
    assert loss.isfinite() and new.grad.isfinite().all()
    nothing = torch.zeros(0, requires_grad=True)
    loss, sums = loss_of(nothing, pack([]), DUAL)
    loss.backward()
    assert loss == 0 and set(sums.values()) == {0.0}
