"""The objectives against the papers' equations and their finite differences."""

from __future__ import annotations

import math
import random
from types import SimpleNamespace

import pytest
import torch

from nanorchestra.training.objectives import (
    OBJECTIVES,
    Objective,
    group_advantages,
    kl_estimate,
    loss_normaliser,
    overlong_punishment,
    policy_loss,
)
from nanorchestra.training.packing import Group, Sample, pack

LIMIT = 9  # the most ids of an attempt: the constant of Dr. GRPO


def doubles(values, grad=False):
    return torch.tensor(values, dtype=torch.float64, requires_grad=grad)


def batch_of(lengths, advantages, sampler):
    """The tensors of a pack that the loss reads, in float64; one advantage per sequence."""
    lengths = torch.tensor(lengths)
    numbers = torch.arange(len(lengths)).repeat_interleave(lengths)
    return SimpleNamespace(
        sampler_logprobs=doubles(sampler),
        advantages=doubles(advantages)[numbers],
        sequences=numbers,
        trajectory_ids=lengths[numbers],
    )


# The papers.


def attempts(seed):
    """Groups of attempts: (reward, log-probabilities, those of the old policy)."""
    rng = random.Random(seed)
    made = []
    for _ in range(3):
        group = []
        for _ in range(4):
            old = [rng.uniform(-3, -0.1) for _ in range(rng.randint(1, LIMIT))]
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
    count = sum(map(len, groups))
    for group, present in zip(groups, changed, strict=True):
        rewards = [attempt[0] for attempt in group]
        for (reward, first, old), logprobs in zip(group, present, strict=True):
            centred = reward - mean(rewards)
            z = centred / (std(rewards) + 1e-6)
            z += 0.1 * (name == "toolorchestra" and z >= 1)  # its published code
            ratios = [math.exp(a - b) for a, b in zip(logprobs, old, strict=True)]
            if name in ("grpo", "dapo", "toolorchestra"):  # DAPO equation 8
                for r in ratios:
                    value = min(r * z, clip(r, 0.8, 1.28) * z)
                    dual = name == "toolorchestra" and z < 0  # arXiv 1912.09729, equation 5
                    total += (max(value, 10 * z) if dual else value) / ids
            elif name == "dr_grpo":  # section 3.2
                values = [min(r * centred, clip(r, 0.8, 1.28) * centred) for r in ratios]
                total += sum(values) / LIMIT / count
            elif name == "gspo":  # equations 5 to 7
                s = math.exp(mean([a - b for a, b in zip(logprobs, old, strict=True)]))
                total += min(s * z, clip(s, 1 - 3e-4, 1 + 4e-4) * z) / count
            elif name == "cispo":  # MiniMax-M1 equations 4 and 5; the weights are constant
                weights = [math.exp(a - b) for a, b in zip(first, old, strict=True)]
                terms = zip(weights, logprobs, strict=True)
                total += sum(min(w, 5.0) * z * logprob for w, logprob in terms) / ids
    return -total


def ours(name, groups, logprobs):
    section = OBJECTIVES[name]
    advantages, samples = [], []
    for group in groups:
        rewards, fine = [attempt[0] for attempt in group], [True] * len(group)
        values, reasons = group_advantages(rewards, fine, fine, section, 0.0)
        assert reasons == [None] * len(group)
        advantages += values
        lengths = [len(a[1]) for a in group]
        samples += [Sample([1] * n, [True] * n, [0.0] * n) for n in lengths]
    batch = batch_of([sample.count for sample in samples], advantages, flat(groups, 2))
    normaliser = loss_normaliser([Group(samples, 0)], section.aggregation, LIMIT)
    old = batch.sampler_logprobs
    return policy_loss(logprobs, old, batch, section, normaliser=normaliser)[0]


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


@pytest.mark.parametrize("surrogate", ["clip", "gspo", "cispo"])
@pytest.mark.parametrize("cap", [0.9, 2.0])
def test_an_importance_cap_weighs_the_surrogate_but_not_the_kl(surrogate, cap):
    groups = attempts(4)
    new, old = doubles(flat(groups, 1)), doubles(flat(groups, 2))
    lengths = [len(attempt[1]) for group in groups for attempt in group]
    batch = batch_of(lengths, [0.3 * i - 2 for i in range(len(lengths))], (old - 0.2).tolist())
    objective = Objective(surrogate, importance_cap=cap, kl_coef=0.3)
    kl = kl_estimate(new, old)
    plain, _ = policy_loss(new, old, batch, Objective(surrogate), normaliser=1)
    loss, sums = policy_loss(new, old, batch, objective, normaliser=1, kl=kl)
    weight = min(math.exp(0.2), cap)
    assert loss.item() == pytest.approx((weight * plain + 0.3 * kl.sum()).item(), abs=1e-9)
    assert sums["importance"] == pytest.approx(weight * len(old))


def test_metrics_count_what_the_clip_stopped():
    ratios, advantages = [1.5, 1.5, 0.5, 0.5, 30.0, 1.0], [1.0, -1.0, 1.0, -1.0, -1.0, 1.0]
    batch = batch_of([1] * 6, advantages, [0.0] * 6)
    new = doubles([math.log(r) for r in ratios])
    _, sums = policy_loss(
        new, batch.sampler_logprobs, batch, Objective(dual_clip=10.0), normaliser=6
    )
    assert sums == {"clip_fraction": 2, "kl": 0}


@pytest.mark.parametrize("surrogate", ["clip", "gspo", "cispo"])
def test_extreme_ratios_and_empty_batches_give_finite_gradients(surrogate):
    new = doubles([0.0, 0.0], grad=True)
    batch = batch_of([1, 1], [1.0, -1.0], [-200.0, -200.0])
    objective = Objective(surrogate, dual_clip=0.0 if surrogate == "cispo" else 10.0)
    loss, _ = policy_loss(new, batch.sampler_logprobs, batch, objective, normaliser=2)
    loss.backward()
    assert loss.isfinite() and new.grad.isfinite().all()
    nothing, empty = torch.zeros(0, requires_grad=True), pack([])
    loss, sums = policy_loss(nothing, empty.sampler_logprobs, empty, objective, normaliser=2)
    loss.backward()
    assert loss == 0 and set(sums.values()) == {0.0}


# Advantages.


def advantages_of(rewards, valid=None, formed=None, min_std=0.0, **settings):
    fine = [True] * len(rewards)
    return group_advantages(rewards, valid or fine, formed or fine, Objective(**settings), min_std)


def test_advantages_are_z_scores_with_the_sample_deviation():
    advantages, reasons = advantages_of([1.0, 0.0, 0.0, 1.0])
    expected, signs = 0.5 / (math.sqrt(1 / 3) + 1e-6), [1, -1, -1, 1]
    assert advantages == pytest.approx([sign * expected for sign in signs], abs=1e-12)
    assert reasons == [None] * 4
    centred, _ = advantages_of([1.0, 0.0, 0.0, 1.0], normalise_std=False)
    assert centred == [sign * 0.5 for sign in signs]
    assert advantages_of([1.0] + [0.0] * 15)[0][0] == 3.0
    noise, _ = advantages_of([0.80, 0.81, 0.82, 0.81])  # attempts that differ by a few tokens
    assert max(map(abs, noise)) < 0.25


def test_a_member_is_left_out_for_one_reason():
    """A tool's failure is outside the baseline, bad format inside."""
    for rewards, min_std, expected in (
        ([0.7] * 4, 0.0, "homogeneous"),
        ([1.0, 0.9], 0.1, "homogeneous"),  # sample std 0.0707
        ([1.0, 0.9], 0.07, None),
    ):
        assert advantages_of(rewards, min_std=min_std)[1] == [expected] * len(rewards)
    alone = advantages_of([1.0, 0.0], valid=[True, False])
    assert alone == ([0.0, 0.0], ["homogeneous", "infrastructure"])
    found, reasons = advantages_of([1.0, float("nan"), 0.0, 0.5], [True, False, True, True])
    alone, _ = advantages_of([1.0, 0.0, 0.5])
    assert found == [alone[0], 0.0, *alone[1:]]
    assert reasons == [None, "infrastructure", None, None]
    boosted, _ = advantages_of([1.0] + [0.0] * 15, boost=0.1)
    assert boosted[0] == 3.1 and boosted[1:] == advantages_of([1.0] + [0.0] * 15)[0][1:]
    bad_format = {"rewards": [1.0, 0.0, 0.5], "formed": [True, False, True]}
    dropped, reasons = advantages_of(**bad_format, drop_invalid_format=True)
    kept, none = advantages_of(**bad_format)
    assert reasons == [None, "invalid_format", None] and none == [None] * 3
    assert dropped == [kept[0], 0.0, kept[2]] and kept[1] < 0


def test_overlong_punishment_falls_from_zero_to_minus_one():
    values = {50: 0.0, 80: 0.0, 85: -0.25, 90: -0.5, 100: -1.0, 130: -1.0}
    assert {n: overlong_punishment(n, 100, 20) for n in values} == pytest.approx(values)
