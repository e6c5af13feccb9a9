"""The objectives against the papers' equations and their finite differences."""

from __future__ import annotations

import math
import random
from types import SimpleNamespace

import pytest
import torch

from nanorchestra.config import GrpoSection
from nanorchestra.training.grpo import OBJECTIVES, group_advantages
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


def loss_of(logprobs, batch, grpo):
    """The sum of the losses at each id."""
    ones = torch.ones_like(logprobs)
    losses, _ = policy_loss(logprobs, logprobs.detach(), ones, None, batch, grpo)
    return losses.sum()


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
            z = reward - mean(rewards)
            if name != "dr_grpo":  # which does not divide
                z /= std(rewards) + 1e-6
            z += 0.1 * (name == "toolorchestra" and z >= 1)  # its published code
            ratios = [math.exp(a - b) for a, b in zip(logprobs, old, strict=True)]
            for r in ratios:  # DAPO equation 8
                value = min(r * z, clip(r, 0.8, 1.28) * z)
                dual = name == "toolorchestra" and z < 0  # arXiv 1912.09729, equation 5
                total += (max(value, 10 * z) if dual else value) / ids
    return -total


def ours(name, groups, logprobs):
    advantages, lengths = [], []
    for group in groups:
        advantages += group_advantages([a[0] for a in group], 0.0, OBJECTIVES[name])
        lengths += [len(attempt[1]) for attempt in group]
    batch = batch_of(lengths, advantages, flat(groups, 2))
    return loss_of(logprobs, batch, GrpoSection(objective=name)) / sum(lengths)


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


def test_extreme_ratios_give_finite_gradients():
    new = doubles([0.0, 0.0], grad=True)
    batch = batch_of([1, 1], [1.0, -1.0], [-200.0, -200.0])
    loss = loss_of(new, batch, DUAL)
    loss.backward()
    assert loss.isfinite() and new.grad.isfinite().all()
