"""Writes tests/data/trl_grpo.json: losses and gradients of TRL's GRPO on fixed numbers.

    python tests/make_trl_fixture.py          needs: pip install trl

tests/training/test_objectives.py compares the objectives with them. TRL computes its loss in a
method of its trainer. That method is called here on a stand-in whose log-probabilities are given
numbers, so no model is involved. Last written with trl 1.16.0.
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import torch

FIXTURE = Path(__file__).parent / "data" / "trl_grpo.json"
LENGTHS = {"ragged": [5, 2, 4, 1], "even": [3, 3, 3, 3]}
MAX_LENGTH = 8
# Sequence means weigh ids equally only when the sequences are equally long, hence "even" for grpo.
CASES = [
    dict(
        loss_type=loss_type,
        lengths=lengths,
        clip_low=0.2,
        clip_high=high,
        dual_clip=dual,
        beta=beta,
    )
    for loss_type, lengths in (
        ("grpo", "even"),
        ("bnpo", "ragged"),
        ("dapo", "ragged"),
        ("dr_grpo", "ragged"),
    )
    for high, dual, beta in (
        (0.2, None, 0.0),
        (0.28, None, 0.0),
        (0.28, None, 0.04),
        (0.28, 2.0, 0.0),
        (0.28, 2.0, 0.1),
    )
]
# And: means over sequences, GSPO, CISPO, and truncated importance sampling with each.
CASES += [
    dict(
        loss_type=loss_type,
        lengths="ragged",
        clip_low=low,
        clip_high=high,
        dual_clip=None,
        beta=beta,
        level=level,
        importance_cap=cap,
    )
    for loss_type, level, low, high in (
        ("grpo", "token", 0.2, 0.28),
        ("grpo", "sequence", 0.05, 0.1),
        ("cispo", "token", 1.0, 0.5),
        ("dapo", "token", 0.2, 0.28),
    )
    for beta, cap in ((0.0, None), (0.0, 1.5), (0.04, 1.5))
]


def make_case(options: dict, seed: int) -> dict:
    """Draws ratios on both sides of both clips and advantages of both signs, by sampled id."""
    generator = torch.Generator().manual_seed(seed)
    lengths = LENGTHS[options["lengths"]]
    count = sum(lengths)
    old = -torch.rand(count, generator=generator, dtype=torch.float64) * 3 - 0.05
    logprobs = old + torch.randn(count, generator=generator, dtype=torch.float64) * 0.6
    ref = old + torch.randn(count, generator=generator, dtype=torch.float64) * 0.3
    advantages = torch.randn(len(lengths), generator=generator, dtype=torch.float64)
    advantages[0], advantages[1] = advantages[0].abs(), -advantages[1].abs()
    normaliser = {
        "dr_grpo": len(lengths) * MAX_LENGTH,
        "grpo": len(lengths) if options["lengths"] == "ragged" else count,
    }.get(options["loss_type"], count)
    case = dict(
        options,
        lengths=lengths,
        normaliser=normaliser,
        logprobs=logprobs.tolist(),
        old_logprobs=old.tolist(),
        ref_logprobs=ref.tolist(),
        advantages=advantages.tolist(),
    )
    if options.get("importance_cap"):
        case["sampler_logprobs"] = (
            old + torch.randn(count, generator=generator, dtype=torch.float64) * 0.6
        ).tolist()
    case["loss"], case["gradient"] = trl_loss(case)
    return case


def trl_loss(case: dict) -> tuple[float, list[float]]:
    """TRL's loss and its gradient by each sampled id's log-probability."""
    from trl import GRPOTrainer

    def padded(values: list[float]) -> torch.Tensor:
        rows = torch.tensor(values, dtype=torch.float64).split(case["lengths"])
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)

    logprobs = padded(case["logprobs"]).requires_grad_()
    mask = padded([1.0] * sum(case["lengths"])).long()
    same = SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, reduction=None: x)
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *args, **kwargs: (
            logprobs,
            torch.zeros_like(logprobs),
            None,
        ),
        args=SimpleNamespace(
            delta=case["dual_clip"], use_bias_correction_kl=False, steps_per_generation=1
        ),
        accelerator=same,
        model=SimpleNamespace(training=True),
        loss_type=case["loss_type"],
        beta=case["beta"],
        epsilon_low=case["clip_low"],
        # of CISPO it is the weight's bound itself
        epsilon_high=case["clip_high"] + (case["loss_type"] == "cispo"),
        max_completion_length=MAX_LENGTH,
        importance_sampling_level=case.get("level", "token"),
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        use_vllm=bool(case.get("importance_cap")),
        vllm_importance_sampling_correction=True,
        current_gradient_accumulation_steps=1,
        _entropy_bonus_enabled=False,
        _metrics={"train": defaultdict(list)},
    )
    inputs = dict(
        prompt_ids=mask[:, :1],
        prompt_mask=mask[:, :1],
        completion_ids=mask,
        completion_mask=mask,
        advantages=torch.tensor(case["advantages"], dtype=torch.float64),
        old_per_token_logps=padded(case["old_logprobs"]),
        ref_per_token_logps=padded(case["ref_logprobs"]),
        num_items_in_batch=mask.sum(),
    )
    if case.get(
        "importance_cap"
    ):  # computed by TRL in a method that generates; its "token_truncate" mode is this line
        difference = inputs["old_per_token_logps"] - padded(case["sampler_logprobs"])
        inputs["importance_sampling_ratio"] = difference.exp().clamp(max=case["importance_cap"])
    loss = GRPOTrainer._compute_loss(trainer, None, inputs)
    (gradient,) = torch.autograd.grad(loss, logprobs)
    return loss.item(), gradient[mask.bool()].tolist()


if __name__ == "__main__":
    FIXTURE.parent.mkdir(exist_ok=True)
    cases = [make_case(options, seed) for seed, options in enumerate(CASES)]
    FIXTURE.write_text("[\n" + ",\n".join(json.dumps(case) for case in cases) + "\n]\n")
    print(f"{len(cases)} cases written to {FIXTURE}")
