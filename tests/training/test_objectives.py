"""Every objective against the paper's equation written out in plain loops over Python floats, from rewards to the loss and its gradient."""

from __future__ import annotations

import dataclasses
import math
import random

import pytest
import torch

from nanorchestra.config import OBJECTIVES, load_config
from nanorchestra.errors import UserError
from nanorchestra.records import Preference
from nanorchestra.training.objectives import (
    group_advantages,
    moments,
    over_batch,
    overlong_punishment,
    per_objective,
    policy_loss,
    turn_shares,
)
from nanorchestra.training.trainer import Group, Sample, Trainer, pack, step_counts
from reward import Bounds, group_rewards, reward_columns, task_reward

LIMIT = 9  # the constant of Dr. GRPO


def attempts(seed):
    """Groups of attempts: (reward, [log-probability], [old], [sampler's])."""
    rng = random.Random(seed)
    made = []
    for _ in range(3):
        group = []
        for _ in range(4):
            old = [rng.uniform(-3, -0.1) for _ in range(rng.randint(1, LIMIT))]
            group.append(
                (
                    rng.choice((0.0, 0.3, 1.0, 1.2)) + rng.random() / 10,
                    [x + rng.gauss(0, 0.4) for x in old],
                    old,
                    [x + rng.gauss(0, 0.3) for x in old],
                )
            )
        made.append(group)
    return made


def mean(xs):
    return sum(xs) / len(xs)


def std(xs):
    return math.sqrt(sum((x - mean(xs)) ** 2 for x in xs) / (len(xs) - 1))


def plain(name, groups, log=None):
    """The objective to be minimised, from the equation of its paper; `log[g][i][t]` replaces the log-probabilities."""
    terms, tokens, sequences = (
        0.0,
        sum(len(a[1]) for g in groups for a in g),
        sum(len(g) for g in groups),
    )
    for j, group in enumerate(groups):
        rewards = [a[0] for a in group]
        for i, (reward, logprobs, old, _) in enumerate(group):
            if log is not None:
                logprobs = log[j][i]
            z = (reward - mean(rewards)) / (std(rewards) + 1e-6)
            ratios = [math.exp(a - b) for a, b in zip(logprobs, old)]
            if name in (
                "grpo",
                "dapo",
                "toolorchestra",
            ):  # DAPO equation 8, with the dual clip of arXiv 1912.09729
                for r in ratios:
                    value = min(r * z, min(max(r, 0.8), 1.28) * z)
                    terms += (
                        max(value, 10 * z) if z < 0 and name == "toolorchestra" else value
                    ) / tokens
            elif name == "dr_grpo":  # Dr. GRPO, section 3.2
                for r in ratios:
                    terms += (
                        min(
                            r * (reward - mean(rewards)),
                            min(max(r, 0.8), 1.28) * (reward - mean(rewards)),
                        )
                        / LIMIT
                        / sequences
                    )
            elif name == "gspo":  # GSPO equations 5 to 7
                s = math.exp(mean([a - b for a, b in zip(logprobs, old)]))
                terms += min(s * z, min(max(s, 1 - 3e-4), 1 + 4e-4) * z) / sequences
            elif name == "cispo":  # MiniMax-M1 equations 4, 5; the weights are constants
                for r, lp in zip([math.exp(a - b) for a, b in zip(group[i][1], old)], logprobs):
                    terms += min(r, 5.0) * z * lp / tokens
            elif name == "rloo":  # baseline of the others, log-probability of the whole attempt
                others = [x for k, x in enumerate(rewards) if k != i]
                terms += (reward - mean(others)) * sum(logprobs) / LIMIT / sequences
    return -terms


def ours(name, groups, logprobs):
    """The same through group_advantages, the trainer's counts and policy_loss, with the settings of config.OBJECTIVES."""
    section = load_config(None, ["--grpo.objective", name, "--grpo.min_std", "0"]).grpo
    samples = []
    for group in groups:
        advantages, reasons = group_advantages(
            [a[0] for a in group],
            [True] * len(group),
            std=section.normalise_std,
            leave_one_out=section.leave_one_out,
            min_std=section.min_std,
            clip=section.advantage_clip,
        )
        assert reasons == [None] * len(group)
        samples.append(
            [
                Sample([1] * len(a[1]), [True] * len(a[1]), a[2], x)
                for a, x in zip(group, advantages)
            ]
        )
    packed = pack([Group([0], group) for group in samples])
    count, normaliser = step_counts(
        [Group([0], group) for group in samples], section.aggregation, LIMIT
    )
    loss, _ = policy_loss(
        logprobs,
        torch.tensor([x for g in groups for a in g for x in a[2]], dtype=torch.float64),
        torch.tensor([x.advantage for g in samples for x in g for _ in x.ids], dtype=torch.float64),
        normaliser=normaliser,
        clip_low=section.clip_low,
        clip_high=section.clip_high,
        dual_clip=section.dual_clip or None,
        surrogate=section.surrogate,
        sequences=packed.sequences,
        count=count,
        weights=1 / packed.trajectory_ids.double() if section.aggregation == "sequence" else None,
    )
    return loss


def flat(groups, at=1):
    return torch.tensor(
        [x for g in groups for a in g for x in a[at]], dtype=torch.float64, requires_grad=True
    )


@pytest.mark.parametrize(
    "name", ["grpo", "toolorchestra", "dr_grpo", "dapo", "gspo", "cispo", "rloo"]
)
@pytest.mark.parametrize("seed", range(3))
def test_the_objective_and_its_gradient_are_those_of_the_paper(name, seed):
    groups = attempts(seed)
    logprobs = flat(groups)
    loss = ours(name, groups, logprobs)
    (gradient,) = torch.autograd.grad(loss, logprobs)
    assert loss.item() == pytest.approx(plain(name, groups), abs=1e-12)
    place = 0
    for j, group in enumerate(groups):
        for i, attempt in enumerate(group):
            for t in range(len(attempt[1])):
                sides = []
                for step in (1e-6, -1e-6):
                    log = [[list(a[1]) for a in g] for g in groups]
                    log[j][i][t] += step
                    sides.append(plain(name, groups, log))
                assert gradient[place].item() == pytest.approx(
                    (sides[0] - sides[1]) / 2e-6, abs=1e-7
                )
                place += 1
    assert place == len(logprobs)


def test_the_cases_reach_the_clip_from_both_sides():
    ratios = [
        (math.exp(a - b))
        for seed in range(3)
        for g in attempts(seed)
        for _, new, old, _ in g
        for a, b in zip(new, old)
    ]
    assert (
        sum(r < 0.8 for r in ratios) > 5
        and sum(r > 1.28 for r in ratios) > 5
        and sum(0.8 < r < 1.28 for r in ratios) > 5
    )


@pytest.mark.parametrize("surrogate", ["clip", "gspo", "cispo", "reinforce"])
@pytest.mark.parametrize("cap", [0.9, 2.0])
def test_truncated_importance_sampling_weighs_each_id(surrogate, cap):
    """By the ratio of the old policy to the sampler, at most the cap; the KL term is not weighed."""
    groups = attempts(4)
    old, sampler, n = flat(groups, 2).detach(), flat(groups, 3).detach(), len(flat(groups))
    advantages, sequences = torch.linspace(-2, 2, n, dtype=torch.float64), torch.arange(n) // 5
    per_id = []
    for i in range(n):  # one id's share: the others' advantages are 0
        only = torch.zeros(n, dtype=torch.float64).index_fill_(0, torch.tensor(i), 1.0) * advantages
        per_id.append(
            policy_loss(
                flat(groups), old, only, normaliser=1.0, surrogate=surrogate, sequences=sequences
            )[0].item()
        )
    expected = sum(
        value * min(math.exp(old[i] - sampler[i]), cap) for i, value in enumerate(per_id)
    )
    ref = old - 0.5
    expected += 0.3 * sum(((flat(groups) - ref) ** 2 / 2).tolist())
    loss, metrics = policy_loss(
        flat(groups),
        old,
        advantages,
        normaliser=1.0,
        surrogate=surrogate,
        sequences=sequences,
        sampler_logprobs=sampler,
        importance_cap=cap,
        ref_logprobs=ref,
        kl_coef=0.3,
        kl_estimator="k2",
        count=float(n),
    )
    assert loss.item() == pytest.approx(expected, abs=1e-10)
    weights = [math.exp(o - s) for o, s in zip(old, sampler)]
    assert metrics["importance"] == pytest.approx(mean([min(w, cap) for w in weights])) and metrics[
        "importance_capped"
    ] == pytest.approx(mean([w > cap for w in weights]))
    assert metrics["ratio"] == pytest.approx(
        mean([math.exp(x - s) for x, s in zip(flat(groups).tolist(), sampler)])
    )


@pytest.mark.parametrize("surrogate", ["clip", "gspo", "reinforce"])
def test_gradients_equal_finite_differences(surrogate):
    """CISPO's weights are constants that finite differences would move; its gradient is in the test of the papers."""
    groups = attempts(5)
    old, sequences = (
        flat(groups, 2).detach(),
        torch.tensor([i for i, a in enumerate(a for g in groups for a in g) for _ in a[1]]),
    )
    advantages = torch.linspace(-2, 2, int(sequences.max()) + 1, dtype=torch.float64)[sequences]
    weights = 1 / torch.bincount(sequences)[sequences].double()
    assert torch.autograd.gradcheck(
        lambda x: policy_loss(
            x,
            old,
            advantages,
            normaliser=3.0,
            surrogate=surrogate,
            sequences=sequences,
            weights=weights,
            clip_low=0.05,
            clip_high=0.05,
        )[0],
        (flat(groups),),
    )


# ---- sums over micro-batches, ranks and samples ----


def fixed_groups(vocab=600):
    rng = random.Random(8)
    return [
        Group(
            [rng.randrange(vocab) for _ in range(7)],
            [
                Sample(
                    ids := [rng.randrange(vocab) for _ in range(n)],
                    [True] * (n - 4) + [False] * 2 + [True] * 2,
                    [rng.uniform(-7, -5) for _ in ids],
                    rng.uniform(-2, 2),
                )
                for n in (6, 19, 30)
            ],
        )
        for _ in range(3)
    ]


def gradients(model, groups, **options):
    trainer, taken = Trainer(model, vocab_limit=690, token_budget=options.pop("budget", 16384)), {}
    trainer._update = lambda rate: (
        taken.update({n: p.grad.clone() for n, p in model.named_parameters()})
        or model.zero_grad()
        or {}
    )
    metrics = trainer.policy_step(groups, 0.0, **options)
    return taken, metrics


@pytest.mark.parametrize(
    "options",
    [
        dict(surrogate="gspo", aggregation="sequence", clip_low=0.1, clip_high=0.1),
        dict(surrogate="cispo", importance_cap=2.0),
        dict(surrogate="reinforce", aggregation="constant", length=40),
    ],
    ids=lambda o: o["surrogate"],
)
def test_micro_batches_add_up_for_every_aggregation(nano_model, options):
    groups = fixed_groups()
    whole, metrics = gradients(nano_model, groups, **options)
    parts, summed = gradients(nano_model, groups[::-1], budget=1, **options)
    for name in whole:
        torch.testing.assert_close(
            whole[name], parts[name], rtol=1e-4, atol=3e-5 * float(whole[name].abs().max())
        )
    for name, value in metrics.items():
        assert name == "flops" or summed[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name
    halves = [
        step_counts(groups[:1], options.get("aggregation", "token"), 40),
        step_counts(groups[1:], options.get("aggregation", "token"), 40),
    ]
    assert [sum(x) for x in zip(*halves)] == pytest.approx(
        step_counts(groups, options.get("aggregation", "token"), 40)
    )


@pytest.mark.parametrize("aggregation", ["token", "sequence", "constant"])
def test_every_turn_as_its_own_sample_gives_the_same_gradient(nano_model, aggregation):
    """Where the prompt of a turn is all that came before it, dividing an attempt into turns must change nothing: attempts are weighed, not samples."""
    groups = fixed_groups()
    turns = []
    for group in groups:
        for sample in group.samples:
            cut = (
                next(i for i, s in enumerate(sample.sampled) if not s) + 2
            )  # where the second turn begins
            common = dict(advantage=sample.advantage, trajectory_ids=sample.count)
            turns.append(
                Group(
                    group.prompt,
                    [
                        Sample(
                            sample.ids[:cut], sample.sampled[:cut], sample.logprobs[:cut], **common
                        )
                    ],
                )
            )
            turns.append(
                Group(
                    group.prompt + sample.ids[:cut],
                    [
                        Sample(
                            sample.ids[cut:], sample.sampled[cut:], sample.logprobs[cut:], **common
                        )
                    ],
                )
            )
    whole, _ = gradients(nano_model, groups, aggregation=aggregation, length=40)
    parts, _ = gradients(nano_model, turns, aggregation=aggregation, length=40)
    for name in whole:
        torch.testing.assert_close(
            whole[name], parts[name], rtol=1e-4, atol=3e-5 * float(whole[name].abs().max())
        )


def test_an_importance_cap_makes_stale_rollouts_a_weighted_policy_gradient(nano_model):
    """With one update a step the gradient is that of -A min(pi / sampler, cap) log pi, whatever the clip."""
    groups = fixed_groups()
    capped, metrics = gradients(nano_model, groups, importance_cap=1.5, clip_low=0.0, clip_high=0.0)
    as_cispo, _ = gradients(nano_model, groups, surrogate="cispo", clip_low=1.0, clip_high=0.5)
    for name in capped:
        torch.testing.assert_close(capped[name], as_cispo[name], rtol=1e-4, atol=3e-7)
    assert metrics["importance_capped"] > 0 and metrics["old_kl"] > 0


# ---- advantages ----


def test_leave_one_out_and_overlong_members():
    advantages, _ = group_advantages(
        [1.0, 0.0, 0.5, 0.25], [True] * 4, std=False, leave_one_out=True
    )
    assert advantages == pytest.approx([1 - 0.25, 0 - 1.75 / 3, 0.5 - 1.25 / 3, 0.25 - 0.5])
    filtered, reasons = group_advantages(
        [1.0, 0.0, 0.5, 9.0], [True] * 4, overlong=[False, False, False, True], std=False
    )
    assert reasons == [None, None, None, "overlong"] and filtered == pytest.approx(
        [0.5, -0.5, 0.0, 0.0]
    )  # outside the baseline too
    assert group_advantages([1.0, 0.0], [True] * 2, overlong=[False, True])[1] == [
        "homogeneous",
        "overlong",
    ]


def test_overlong_punishment_falls_from_zero_to_minus_one():
    values = {50: 0.0, 80: 0.0, 85: -0.25, 90: -0.5, 100: -1.0, 130: -1.0}
    assert {n: overlong_punishment(n, 100, 20) for n in values} == pytest.approx(values)
    assert overlong_punishment(100, 100, 0) == 0.0 and overlong_punishment(101, 100, 0) == -1.0


def test_gdpo_normalises_each_objective_and_then_the_batch():
    rng = random.Random(3)
    groups = [[(w, [rng.random() for _ in range(5)]) for w in (1.0, 0.5, 0.2)] for _ in range(4)]
    summed = []
    for parts in groups:
        for i in range(5):
            summed.append(
                sum(w * (values[i] - mean(values)) / (std(values) + 1e-6) for w, values in parts)
            )
    expected = [(x - mean(summed)) / (std(summed) + 1e-6) for x in summed]
    totals = [
        x
        for parts in groups
        for x in group_advantages(per_objective(parts, [True] * 5), [True] * 5, std=False)[0]
    ]
    assert over_batch(totals, moments(totals)) == pytest.approx(expected, abs=1e-9)
    halves = [moments(totals[:7]), moments(totals[7:])]  # two ranks
    assert over_batch(totals[:7], [sum(x) for x in zip(*halves)]) == pytest.approx(
        expected[:7], abs=1e-9
    )


def test_gdpo_tells_apart_what_the_sum_does_not():
    """(right and dear) and (wrong and cheap) earn the same sum, but not the same advantage where one of the parts varies less."""
    parts = [(1.0, [1.0, 0.0, 0.0, 0.0]), (1.0, [0.0, 1.0, 1.0, 0.0])]
    joint = [sum(w * v[i] for w, v in parts) for i in range(4)]
    assert joint[0] == joint[1]
    apart = per_objective(parts, [True] * 4)
    assert abs(apart[0] - apart[1]) > 0.2
    assert per_objective([(1.0, [1.0, float("nan"), 0.0])], [True, False, True])[1] == 0.0


@dataclasses.dataclass
class Attempt:
    outcome: float
    cost_usd: float
    latency_s: float
    calls: dict


def test_the_parts_of_a_reward_add_up_to_it():
    rng = random.Random(1)
    members = [
        Attempt(
            float(rng.random() < 0.6),
            rng.random(),
            rng.random() * 9,
            {"a": rng.randint(0, 2), "b": rng.randint(0, 1)},
        )
        for _ in range(8)
    ]
    wish, bounds = (
        Preference("", 1.0, 0.4, 0.3, {"a": 0.2, "b": -0.1}),
        Bounds((0.0, 1.0), (0.0, 9.0)),
    )
    valid = [True] * 7 + [False]
    parts = reward_columns(members, wish, valid)
    assert [sum(w * v[i] for w, v in parts) for i in range(8)] == pytest.approx(
        group_rewards(members, wish, valid)
    )
    parts = reward_columns(members, wish, bounds=bounds)
    assert [sum(w * v[i] for w, v in parts) for i in range(8)] == pytest.approx(
        [task_reward(m.outcome, m.cost_usd, m.latency_s, m.calls, wish, bounds) for m in members]
    )


def test_turns_share_a_trajectorys_credit_equally():
    shares = turn_shares(0.6, [10, 30, 0, 20])
    assert [share * n for share, n in zip(shares, [10, 30, 0, 20])] == pytest.approx(
        [12.0, 12.0, 0.0, 12.0]
    )  # 0.6 * 60 ids in three parts
    packed = pack(
        [Group([0], [Sample([1, 2, 3], [True, False, True], [-1.0] * 3, [0.5, 0.0, 0.25])])]
    )
    assert packed.advantages.tolist() == [0.5, 0.25]


# ---- configuration ----


def test_an_objective_brings_its_settings_and_what_stands_beside_it_wins(tmp_path):
    config = load_config(None, ["--grpo.clip_high", "0.9", "--grpo.objective", "gspo"])
    assert (
        config.grpo.surrogate,
        config.grpo.aggregation,
        config.grpo.clip_low,
        config.grpo.clip_high,
    ) == ("gspo", "sequence", 3e-4, 0.9)
    (tmp_path / "c.toml").write_text('[grpo]\nobjective = "gspo"\nkl_coef = 0.5\n')
    assert load_config(
        tmp_path / "c.toml", ["--grpo.objective", "grpo"]
    ).grpo == dataclasses.replace(load_config(None).grpo, kl_coef=0.5)
    assert all(settings["surrogate"] for settings in OBJECTIVES.values())


@pytest.mark.parametrize(
    "overrides, words",
    [
        (["--grpo.objective", "ppo"], "dr_grpo"),
        (["--grpo.clip_low", "1.5"], "0..1"),
        (["--grpo.dual_clip", "1.1"], "above 1"),
        (["--grpo.objective", "cispo", "--grpo.dual_clip", "10"], "grpo.surrogate"),
        (["--grpo.importance_cap", "0.5"], "at least 1"),
        (["--grpo.overlong_share", "2"], "0..1"),
        (["--grpo.credit", "id"], "trajectory, turn"),
    ],
)
def test_a_wrong_objective_is_refused_in_one_line(overrides, words):
    with pytest.raises(UserError, match=words):
        load_config(None, overrides)
