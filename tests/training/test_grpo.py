"""Advantages, losses and the chunked head: against TRL's numbers, against finite differences, against the plain formulas."""

from __future__ import annotations

import importlib.util
import json
import math
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nanorchestra.training import logprobs as head_module
from nanorchestra.training.logprobs import full_kl, token_logprobs
from nanorchestra.training.objectives import group_advantages, policy_loss, supervised_loss

CASES = json.loads((Path(__file__).parents[1] / "data" / "trl_grpo.json").read_text())
REASONS = {None, "homogeneous", "invalid_format", "infrastructure"}


def doubles(values, grad=False):
    return torch.tensor(values, dtype=torch.float64, requires_grad=grad)


def options_of(case):
    """What policy_loss takes beside the numbers, for a case of the fixture."""
    lengths = torch.tensor(case["lengths"])
    sequences = torch.arange(len(lengths)).repeat_interleave(lengths)
    by_sequence = case["loss_type"] == "grpo" and case["normaliser"] == len(lengths)
    return dict(
        surrogate="cispo"
        if case["loss_type"] == "cispo"
        else "gspo"
        if case.get("level") == "sequence"
        else "clip",
        sequences=sequences,
        weights=1 / lengths[sequences].double() if by_sequence else None,
        importance_cap=case.get("importance_cap"),
        sampler_logprobs=doubles(case["sampler_logprobs"]) if "sampler_logprobs" in case else None,
    )


def run_case(case):
    """Our loss and gradient on one TRL case."""
    logprobs = doubles(case["logprobs"], grad=True)
    advantages = doubles(case["advantages"]).repeat_interleave(torch.tensor(case["lengths"]))
    loss, metrics = policy_loss(
        logprobs,
        doubles(case["old_logprobs"]),
        advantages,
        normaliser=case["normaliser"],
        clip_low=case["clip_low"],
        clip_high=case["clip_high"],
        dual_clip=case["dual_clip"],
        ref_logprobs=doubles(case["ref_logprobs"]),
        kl_coef=case["beta"],
        kl_estimator="k3",
        **options_of(case),
    )
    (gradient,) = torch.autograd.grad(loss, logprobs)
    return loss.item(), gradient, metrics


def case_name(case):
    return "-".join(
        str(case.get(key))
        for key in ("loss_type", "level", "clip_high", "dual_clip", "beta", "importance_cap")
    )


# ---- the policy loss ----


@pytest.mark.parametrize("case", CASES, ids=case_name)
def test_loss_and_gradient_equal_those_of_trl(case):
    loss, gradient, _ = run_case(case)
    assert loss == pytest.approx(case["loss"], abs=1e-9)
    theirs = doubles(case["gradient"])
    if case.get("level") == "sequence" and case.get(
        "importance_cap"
    ):  # each id's gradient has its own weight here, TRL's the mean of the sequence's
        gradient, theirs = (
            torch.stack([part.sum() for part in x.split(case["lengths"])])
            for x in (gradient, theirs)
        )
    assert torch.allclose(gradient, theirs, rtol=0, atol=1e-9)


def test_the_trl_cases_reach_every_branch():
    """A fixture in which nothing is clipped would prove nothing."""
    ratios = [
        (math.exp(new - old), advantage)
        for case in CASES
        for new, old, advantage in zip(
            case["logprobs"],
            case["old_logprobs"],
            [a for a, n in zip(case["advantages"], case["lengths"]) for _ in range(n)],
        )
    ]
    for low, high, sign in (
        (0, 0.8, -1),
        (0, 0.8, 1),
        (0.8, 1.28, -1),
        (0.8, 1.28, 1),
        (1.28, 9, -1),
        (1.28, 9, 1),
        (2, 9, -1),
    ):
        assert any(low < ratio < high and advantage * sign > 0 for ratio, advantage in ratios), (
            low,
            high,
            sign,
        )


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="trl is not installed")
def test_the_fixture_is_what_trl_computes_today():
    from make_trl_fixture import trl_loss

    for case in CASES:
        loss, gradient = trl_loss(case)
        assert loss == pytest.approx(case["loss"], abs=1e-12) and gradient == pytest.approx(
            case["gradient"], abs=1e-12
        )


@pytest.mark.parametrize("dual_clip", [None, 3.0])
@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_gradient_equals_finite_differences_around_and_outside_the_clip(dual_clip, estimator):
    ratios = [0.1, 0.7, 0.79, 0.81, 1.0, 1.27, 1.29, 1.4, 2.9, 3.1, 20.0]
    logprobs = doubles([math.log(r) - 4 for r in ratios] * 2, grad=True)
    advantages = doubles([1.5] * len(ratios) + [-0.7] * len(ratios))
    old, ref = (
        torch.full_like(logprobs, -4.0),
        torch.linspace(-5, -3, len(logprobs), dtype=torch.float64),
    )
    assert torch.autograd.gradcheck(
        lambda x: policy_loss(
            x,
            old,
            advantages,
            normaliser=7,
            dual_clip=dual_clip,
            ref_logprobs=ref,
            kl_coef=0.3,
            kl_estimator=estimator,
        )[0],
        (logprobs.detach().requires_grad_(),),
    )


def test_losses_at_each_side_of_the_clip_by_hand():
    """(ratio, advantage) -> loss with bounds 0.8, 1.28 and dual clip 10."""
    table = {
        (1.0, 2.0): -2.0,
        (2.0, 2.0): -2.56,
        (0.5, 2.0): -1.0,
        (0.5, -2.0): 1.6,
        (2.0, -2.0): 4.0,
        (50.0, -2.0): 20.0,
    }
    for (ratio, advantage), expected in table.items():
        loss, _ = policy_loss(
            doubles([math.log(ratio)]),
            doubles([0.0]),
            doubles([advantage]),
            normaliser=1,
            dual_clip=10.0,
        )
        assert loss.item() == pytest.approx(expected), (ratio, advantage)


def test_gradient_at_ratio_one_is_minus_advantage_over_n():
    """On policy the loss is REINFORCE: no silent zero gradient (torchforge#571)."""
    logprobs = doubles([-1.0, -2.0, -0.5], grad=True)
    advantages = doubles([1.0, -2.0, 0.5])
    loss, metrics = policy_loss(logprobs, logprobs.detach(), advantages, normaliser=12)
    loss.backward()
    assert torch.allclose(logprobs.grad, -advantages / 12)
    assert (
        metrics["ratio"] == pytest.approx(3 / 12)
        and metrics["clip_fraction"] == metrics["old_kl"] == metrics["ratio_outside"] == 0
    )


def test_micro_batches_add_up_to_the_whole_batch():
    """Loss, gradient and metrics: normalising each part by its own length would be off (trl#3021, prime-rl#2562)."""
    case = CASES[7]
    whole, gradient, metrics = run_case(case)
    logprobs = doubles(case["logprobs"], grad=True)
    advantages = doubles(case["advantages"]).repeat_interleave(torch.tensor(case["lengths"]))
    parts = [
        policy_loss(
            logprobs[part],
            doubles(case["old_logprobs"])[part],
            advantages[part],
            normaliser=case["normaliser"],
            ref_logprobs=doubles(case["ref_logprobs"])[part],
            kl_coef=case["beta"],
            kl_estimator="k3",
        )
        for part in (slice(0, 1), slice(1, 8), slice(8, None))
    ]
    sum(loss for loss, _ in parts).backward()
    assert sum(loss.item() for loss, _ in parts) == pytest.approx(whole, abs=1e-12)
    assert torch.allclose(logprobs.grad, gradient, rtol=0, atol=1e-12)
    for name, value in metrics.items():
        assert sum(part[name] for _, part in parts) == pytest.approx(value, abs=1e-12), name


def test_metrics_count_what_the_clip_stopped():
    ratios, advantages = [1.5, 1.5, 0.5, 0.5, 30.0, 1.0], [1.0, -1.0, 1.0, -1.0, -1.0, 1.0]
    _, metrics = policy_loss(
        doubles([math.log(r) for r in ratios]),
        doubles([0.0] * 6),
        doubles(advantages),
        normaliser=6,
        dual_clip=10.0,
    )
    assert metrics["clip_fraction"] == pytest.approx(2 / 6) and metrics[
        "dual_clip_fraction"
    ] == pytest.approx(1 / 6)
    assert metrics["ratio_outside"] == pytest.approx(1 / 6) and metrics["ratio"] == pytest.approx(
        sum(ratios) / 6
    )
    assert metrics["old_kl"] == pytest.approx(sum(r - 1 - math.log(r) for r in ratios) / 6)


def test_kl_to_the_reference_estimates_the_kl():
    """The mean over samples of the policy is near the exact KL (k3: within sampling error; k2: to second order)."""
    generator = torch.Generator().manual_seed(0)
    policy = torch.randn(8, generator=generator, dtype=torch.float64).log_softmax(0)
    reference = (
        policy + 0.2 * torch.randn(8, generator=generator, dtype=torch.float64)
    ).log_softmax(0)
    exact = (policy.exp() * (policy - reference)).sum().item()
    ids = torch.multinomial(policy.exp(), 100_000, replacement=True, generator=generator)
    for estimator, tolerance in (("k3", 0.02), ("k2", 0.15)):
        _, metrics = policy_loss(
            policy[ids],
            policy[ids],
            torch.zeros(len(ids)),
            normaliser=len(ids),
            ref_logprobs=reference[ids],
            kl_coef=1.0,
            kl_estimator=estimator,
        )
        assert metrics["kl"] == pytest.approx(exact, rel=tolerance)


def test_an_overflowing_ratio_gives_no_nan():
    logprobs = torch.tensor([0.0, 0.0], requires_grad=True)
    loss, _ = policy_loss(
        logprobs,
        torch.tensor([-200.0, -200.0]),
        torch.tensor([1.0, -1.0]),
        normaliser=2,
        dual_clip=10.0,
    )
    loss.backward()
    assert loss.isfinite() and logprobs.grad.tolist() == [0.0, 0.0]


def test_no_sampled_ids_give_a_zero_loss_that_can_be_backpropagated():
    """A rank whose groups were all filtered must still take part in the backward pass."""
    hidden, weight = torch.zeros(0, 4, requires_grad=True), torch.randn(6, 4, requires_grad=True)
    logprobs, entropy = token_logprobs(hidden, weight, torch.zeros(0, dtype=torch.int64))
    kl = full_kl(hidden, hidden, weight, weight)
    loss, metrics = policy_loss(logprobs, logprobs, logprobs, normaliser=5)
    (loss + kl.sum()).backward()
    assert (
        loss.item() == 0
        and entropy.shape == (0,)
        and torch.equal(weight.grad, torch.zeros(6, 4))
        and set(metrics.values()) == {0.0}
    )


def test_bad_arguments_of_the_loss_are_refused():
    x = torch.zeros(3)
    for wrong in (
        dict(normaliser=0),
        dict(normaliser=float("nan")),
        dict(normaliser=3, clip_low=-0.1),
        dict(normaliser=3, dual_clip=1.1),
        dict(normaliser=3, kl_estimator="k1"),
        dict(normaliser=3, kl_coef=0.1),
    ):
        with pytest.raises(ValueError):
            policy_loss(x, x, x, **wrong)
    with pytest.raises(ValueError):
        policy_loss(x, x, torch.zeros(3, 1), normaliser=3)


def test_supervised_loss_is_the_mean_negative_log_likelihood():
    logprobs = doubles([-1.0, -3.0], grad=True)
    loss = supervised_loss(logprobs, normaliser=2)
    loss.backward()
    assert loss.item() == 2.0 and logprobs.grad.tolist() == [-0.5, -0.5]
    with pytest.raises(ValueError):
        supervised_loss(logprobs, normaliser=0)


# ---- the chunked head ----


def head(count=11, vocab=9, width=5, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    hidden, ref_hidden = torch.randn(2, count, width, generator=generator, dtype=torch.float64).to(
        dtype
    )
    weight, ref_weight = torch.randn(2, vocab, width, generator=generator, dtype=torch.float64).to(
        dtype
    )
    targets = torch.randint(0, vocab - 2, (count,), generator=generator)
    return hidden.requires_grad_(), weight.requires_grad_(), targets, ref_hidden, ref_weight


def plain_distribution(hidden, weight, temperature, limit):
    """Log-softmax the long way: all logits at once, ids from `limit` on at minus infinity."""
    logits = hidden @ weight.T / temperature
    masked = torch.arange(logits.shape[1]) >= limit
    return logits.masked_fill(masked, -math.inf).log_softmax(-1)


@pytest.mark.parametrize("chunk", [1, 4, 11, 100])
@pytest.mark.parametrize("temperature,limit", [(1.0, 9), (0.6, 7)])
def test_token_logprobs_and_entropy_equal_the_plain_formula(chunk, temperature, limit):
    hidden, weight, targets, _, _ = head()
    logprobs, entropy = token_logprobs(
        hidden, weight, targets, temperature=temperature, vocab_limit=limit, chunk=chunk
    )
    logp = plain_distribution(hidden, weight, temperature, limit)
    picked = logp.gather(1, targets[:, None])[:, 0]
    weights = torch.linspace(-1, 2, len(targets), dtype=torch.float64)
    ours = torch.autograd.grad((logprobs * weights).sum(), (hidden, weight))
    plain = torch.autograd.grad((picked * weights).sum(), (hidden, weight))
    assert torch.allclose(logprobs, picked, atol=1e-12) and not entropy.requires_grad
    assert torch.allclose(entropy, torch.special.entr(logp.exp()).sum(-1).detach(), atol=1e-12)
    assert all(torch.allclose(a, b, atol=1e-12) for a, b in zip(ours, plain))


@pytest.mark.parametrize("chunk", [1, 4, 100])
def test_full_kl_equals_the_plain_formula(chunk):
    hidden, weight, _, ref_hidden, ref_weight = head()
    kl = full_kl(
        hidden, ref_hidden, weight, ref_weight, temperature=0.6, vocab_limit=7, chunk=chunk
    )
    expected = torch.nn.functional.kl_div(
        plain_distribution(ref_hidden, ref_weight, 0.6, 7)[:, :7],
        plain_distribution(hidden, weight, 0.6, 7)[:, :7],
        reduction="none",
        log_target=True,
    ).sum(-1)
    assert torch.allclose(kl, expected, atol=1e-12) and (kl > 0).all()
    assert torch.allclose(
        full_kl(hidden, hidden, weight, weight), torch.zeros(11, dtype=torch.float64), atol=1e-12
    )


def test_head_gradients_equal_finite_differences():
    hidden, weight, targets, ref_hidden, ref_weight = head(count=5)
    assert torch.autograd.gradcheck(
        lambda h, w: token_logprobs(h, w, targets, temperature=0.7, vocab_limit=8, chunk=2)[0],
        (hidden, weight),
    )
    assert torch.autograd.gradcheck(
        lambda h, w: full_kl(h, ref_hidden, w, ref_weight, temperature=0.7, vocab_limit=8, chunk=2),
        (hidden, weight),
    )


def test_the_reference_gets_no_gradient():
    hidden, weight, _, ref_hidden, ref_weight = head()
    ref_hidden.requires_grad_(), ref_weight.requires_grad_()
    full_kl(hidden, ref_hidden, weight, ref_weight).sum().backward()
    assert ref_hidden.grad is None and ref_weight.grad is None and weight.grad.abs().sum() > 0


def test_ids_beyond_the_tokenizer_have_no_probability_and_no_gradient():
    """The padded rows of an embedding (151,936 against 151,669 real ids) are masked in the sampler, so also here."""
    hidden, weight, targets, ref_hidden, ref_weight = head()
    spoiled = weight.detach().clone()
    spoiled[7:] = 1e4
    spoiled.requires_grad_()
    same, _ = token_logprobs(hidden, weight, targets, vocab_limit=7)
    logprobs, entropy = token_logprobs(hidden, spoiled, targets, vocab_limit=7)
    kl = full_kl(hidden, ref_hidden, spoiled, ref_weight, vocab_limit=7)
    (logprobs.sum() + kl.sum()).backward()
    assert (
        torch.equal(logprobs, same)
        and entropy.isfinite().all()
        and spoiled.grad[7:].abs().sum() == 0
    )
    with pytest.raises(ValueError, match="targets"):
        token_logprobs(hidden, weight, targets + 7, vocab_limit=7)


class LargestTensor(TorchDispatchMode):
    """Remembers the most elements any operation returned."""

    largest = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for value in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(value, torch.Tensor):
                self.largest = max(self.largest, value.numel())
        return result


@pytest.mark.parametrize("what", ["logprobs", "kl"])
def test_never_more_than_one_chunk_of_logits(what):
    count, vocab, chunk = 64, 500, 8
    hidden, weight, targets, ref_hidden, ref_weight = head(
        count, vocab, width=4, dtype=torch.float32
    )
    with LargestTensor() as watch:
        if what == "logprobs":
            result, _ = token_logprobs(hidden, weight, targets, chunk=chunk)
        else:
            result = full_kl(hidden, ref_hidden, weight, ref_weight, chunk=chunk)
        torch.autograd.backward(result.sum())
    assert watch.largest == chunk * vocab


def test_half_precision_weights_give_fp32_logprobs():
    """The head is computed in fp32: bf16 logits would be off by about 1e-2."""
    hidden, weight, targets, ref_hidden, ref_weight = head(dtype=torch.bfloat16)
    logprobs, entropy = token_logprobs(hidden, weight, targets, chunk=4)
    exact = plain_distribution(hidden.double(), weight.double(), 1.0, 9).gather(
        1, targets[:, None]
    )[:, 0]
    assert logprobs.dtype == entropy.dtype == torch.float32 and torch.allclose(
        logprobs.double(), exact, atol=1e-5
    )
    (logprobs.sum() + full_kl(hidden, ref_hidden, weight, ref_weight).sum()).backward()
    assert hidden.grad.dtype == weight.grad.dtype == torch.bfloat16 and weight.grad.isfinite().all()


def test_bad_arguments_of_the_head_are_refused():
    hidden, weight, targets, ref_hidden, ref_weight = head()
    for wrong in (dict(temperature=0.0), dict(chunk=0), dict(vocab_limit=10), dict(vocab_limit=0)):
        with pytest.raises(ValueError):
            token_logprobs(hidden, weight, targets, **wrong)
        with pytest.raises(ValueError):
            full_kl(hidden, ref_hidden, weight, ref_weight, **wrong)
    with pytest.raises(ValueError):
        token_logprobs(hidden, weight[:, :3], targets)
    with pytest.raises(ValueError):
        token_logprobs(hidden, weight, targets[:3])
    with pytest.raises(ValueError):
        full_kl(hidden, ref_hidden[:3], weight, ref_weight)


# ---- the group ----


def test_advantages_are_z_scores_with_the_sample_deviation():
    advantages, reasons = group_advantages([1.0, 0.0, 0.0, 1.0], [True] * 4)
    expected = 0.5 / (math.sqrt(1 / 3) + 1e-6)
    assert (
        advantages == pytest.approx([expected, -expected, -expected, expected], abs=1e-12)
        and reasons == [None] * 4
    )
    advantages, _ = group_advantages([1.0, 0.0, 0.0, 1.0], [True] * 4, std=False)
    assert advantages == [0.5, -0.5, -0.5, 0.5]


def test_advantages_are_clipped():
    rewards = [1.0] + [0.0] * 15
    raw, _ = group_advantages(rewards, [True] * 16)
    clipped, _ = group_advantages(rewards, [True] * 16, clip=3.0)
    assert raw[0] > 3.7 and clipped[0] == 3.0 and clipped[1:] == raw[1:]


def test_a_homogeneous_group_is_dropped():
    assert group_advantages([0.7] * 4, [True] * 4, min_std=0.0)[1] == ["homogeneous"] * 4
    assert group_advantages([0.7] * 4, [True] * 4) == ([0.0] * 4, ["homogeneous"] * 4)
    assert group_advantages([0.1 + 0.2, 0.3], [True] * 2, min_std=0.0)[0] == pytest.approx(
        [0, 0], abs=1e-9
    )
    rewards = [1.0, 0.9]  # sample std 0.0707
    assert group_advantages(rewards, [True] * 2, min_std=0.1)[1] == ["homogeneous"] * 2
    assert group_advantages(rewards, [True] * 2, min_std=0.07)[1] == [None] * 2


def test_infrastructure_failures_do_not_move_the_baseline():
    """rllm#710: wall-clock kills counted as failures teach the policy to fear its tools."""
    with_failure, reasons = group_advantages(
        [1.0, float("nan"), 0.0, 0.5], [True, False, True, True]
    )
    alone, _ = group_advantages([1.0, 0.0, 0.5], [True] * 3)
    assert [with_failure[i] for i in (0, 2, 3)] == alone and with_failure[1] == 0.0
    assert reasons == [None, "infrastructure", None, None]


def test_a_group_with_fewer_than_two_valid_members_is_dropped():
    assert group_advantages([1.0, 0.0], [True, False]) == (
        [0.0, 0.0],
        ["homogeneous", "infrastructure"],
    )
    assert group_advantages([], []) == ([], [])


def test_malformed_members_count_in_the_baseline_and_leave_the_loss():
    well_formed = [True, False, True]
    dropped, reasons = group_advantages([1.0, 0.0, 0.5], [True] * 3, well_formed=well_formed)
    kept, none = group_advantages(
        [1.0, 0.0, 0.5], [True] * 3, well_formed=well_formed, drop_invalid_format=False
    )
    assert reasons == [None, "invalid_format", None] and none == [None] * 3
    assert dropped[1] == 0.0 and kept[1] < 0 and [dropped[0], dropped[2]] == [kept[0], kept[2]]


def test_advantages_follow_their_members_when_these_are_reordered():
    rewards, valid, formed = (
        [0.3, 1.0, 0.0, 0.8, 0.5],
        [True, True, True, False, True],
        [True, True, False, True, True],
    )
    order = [4, 2, 0, 3, 1]
    straight = list(zip(*group_advantages(rewards, valid, well_formed=formed, clip=1.0)))
    shuffled = list(
        zip(
            *group_advantages(
                *([x[i] for i in order] for x in (rewards, valid)),
                well_formed=[formed[i] for i in order],
                clip=1.0,
            )
        )
    )
    assert (
        shuffled == [straight[i] for i in order] and {reason for _, reason in straight} <= REASONS
    )


def test_bad_groups_are_refused():
    with pytest.raises(ValueError):
        group_advantages([1.0, 0.0], [True])
    with pytest.raises(ValueError):
        group_advantages([1.0, 0.0], [True, True], well_formed=[True])
    for wrong in (dict(min_std=-0.1), dict(clip=0.0)):
        with pytest.raises(ValueError, match="min_std"):
            group_advantages([1.0, 0.0], [True, True], **wrong)
    with pytest.raises(ValueError, match="finite"):
        group_advantages([1.0, float("nan")], [True, True])


# ---- memory ----


class LiveBytes(TorchDispatchMode):
    """The most bytes alive at once in tensors made under it; not those `given`. A storage counts from the operator that made it until it is freed."""

    def __init__(self, *given):
        super().__init__()
        self.alive, self.now, self.most = (
            {tensor.untyped_storage()._cdata: 0 for tensor in given},
            0,
            0,
        )

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            storage = tensor.untyped_storage() if isinstance(tensor, torch.Tensor) else None
            if storage is not None and storage._cdata not in self.alive:
                self.alive[storage._cdata] = storage.nbytes()
                weakref.finalize(storage, self._freed, storage._cdata)
                self.now += storage.nbytes()
                self.most = max(self.most, self.now)
        return result

    def _freed(self, key):
        self.now -= self.alive.pop(key, 0)


def peak_of_the_loss(monkeypatch, tokens, vocab, width, workspace, whole_kl=False):
    monkeypatch.setattr(head_module, "WORKSPACE", workspace)
    hidden, weight = (
        torch.randn(tokens, width, requires_grad=True),
        torch.randn(vocab, width, requires_grad=True),
    )
    targets = torch.randint(vocab, (tokens,))
    reference = hidden.detach() * 0.9
    with LiveBytes(hidden, weight, reference, targets) as live:
        value = (
            full_kl(hidden, reference, weight, weight.detach())
            if whole_kl
            else token_logprobs(hidden, weight, targets)[0]
        )
        gradients = torch.autograd.grad(value.sum(), (hidden, weight))
    assert len(gradients) == 2
    return live.most - 4 * (
        hidden.numel() + weight.numel()
    )  # without the gradients, which are results


@pytest.mark.parametrize("whole_kl", [False, True])
@pytest.mark.parametrize("tokens, vocab", [(512, 9496), (256, 18992)])
def test_the_loss_holds_its_workspace_and_no_more(monkeypatch, whole_kl, tokens, vocab):
    """A sixteenth of 8192 ids and a sixteenth of the vocabulary of Qwen3 with a 256th of the workspace; 650 MB is 1.21 times 512 MiB."""
    workspace = head_module.WORKSPACE // 256
    assert (
        0.3 * workspace
        < peak_of_the_loss(monkeypatch, tokens, vocab, 4, workspace, whole_kl)
        < 1.21 * workspace
    )


def test_a_gradient_wider_than_the_workspace_is_made_in_pieces(monkeypatch):
    """The product that is added to the gradient of the output matrix is as large as that matrix."""
    assert peak_of_the_loss(monkeypatch, 64, 4096, 256, 1 << 20) < 1.3 * (1 << 20)
    torch.manual_seed(0)
    hidden, weight, targets, *_ = head(count=11, vocab=9, width=5)
    whole = torch.autograd.grad(
        token_logprobs(hidden, weight, targets, chunk=11)[0].sum(), (hidden, weight)
    )
    monkeypatch.setattr(head_module, "WORKSPACE", 200)
    pieces = torch.autograd.grad(
        token_logprobs(hidden, weight, targets, chunk=11)[0].sum(), (hidden, weight)
    )
    assert all(torch.allclose(a, b, atol=1e-12) for a, b in zip(whole, pieces))


@pytest.mark.slow
@pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="the kernel's own high-water mark is Linux's"
)
def test_qwen3s_vocabulary_takes_less_than_650_mb():
    """By the process's resident memory, in a process of its own. 900 ids are two chunks and a rest; 8192 are twenty."""
    code = (
        "import torch; torch.set_num_threads(1)\n"
        "from nanorchestra.training.logprobs import token_logprobs\n"
        "status = lambda name: next(int(l.split()[1]) * 1024 for l in open('/proc/self/status') if l.startswith(name))\n"
        "h, w = torch.randn(900, 8, requires_grad=True), torch.randn(151936, 8, requires_grad=True)\n"
        "t = torch.randint(151936, (900,)); token_logprobs(h[:4], w, t[:4])[0].sum().backward()\n"
        "open('/proc/self/clear_refs', 'w').write('5'); before = status('VmRSS')\n"
        "token_logprobs(h, w, t)[0].sum().backward(); print(status('VmHWM') - before)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=400,
        cwd=Path(__file__).parents[2],
    )
    print(done.stdout, done.stderr)
    assert int(done.stdout) < 650e6
