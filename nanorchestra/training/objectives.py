"""The objectives by name: what distinguishes GRPO from its relatives.

The loss of every objective is the sum over the ids in the loss of all micro-batches and ranks

    loss = sum_i (v_i L_i + kl_coef kl_i) / ids in the loss of the whole update

train.py's `policy_loss` computes it. L is the surrogate, v = min(pi_old / pi_sampler, cap) if there
is an importance cap (else 1). The divisor is a number of the whole update, so losses and gradients
of micro-batches and ranks add up. GRPO's paper has a mean by attempt.

| objective | advantage | L | paper |
|---|---|---|---|
| grpo | (R - mean) / std | clip | arXiv 2402.03300 |
| toolorchestra | as grpo, +0.1 from 1 on | clip, dual clip | arXiv 2511.21689 |

The upper bound of the clip, 0.28, is that of ToolOrchestra's script, which has it from DAPO (arXiv
2503.14476). GRPO as published has 0.2 on both sides.
"""

from dataclasses import dataclass, replace
from typing import Literal

from torch import Tensor

from nanorchestra.config import GrpoSection

MAX_LOG_RATIO = 20.0  # keeps exp finite, where a surrogate has no bound of its own


@dataclass(frozen=True)
class Objective:
    """Loss, KL term, advantages and filters of one objective."""

    clip_low: float = 0.2
    clip_high: float = 0.28
    dual_clip: float = 0.0  # bounds the loss where the advantage is negative; 0: no bound
    importance_cap: float = 0.0  # of the weight between trainer and sampler; 0: no weight
    kl_coef: float = 0.0
    kl: Literal["full", "k2"] = "full"  # exact over the vocabulary, or an estimate
    min_entropy: float = 0.0  # nats, below which an id has no part in the surrogate
    boost: float = 0.0  # added to advantages of at least 1
    drop_invalid_format: bool = False  # leave badly formed turns and attempts out of the loss


OBJECTIVES = {
    "grpo": Objective(),
    "toolorchestra": Objective(dual_clip=10.0, drop_invalid_format=True, kl="k2", boost=0.1),
}


def objective_of(settings: GrpoSection) -> Objective:
    """Returns the objective that [grpo] names, with its coefficients and importance_cap."""
    return replace(
        OBJECTIVES[settings.objective],
        importance_cap=settings.importance_cap,
        kl_coef=settings.kl_coef,
        min_entropy=settings.min_entropy,
    )


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """Returns exp(log_ratio), finite also for log-ratios beyond +-20."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def kl_estimate(trainer_logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Returns the estimate k2 of KL(policy || reference) at each id (Schulman 2020), [N].

    It is d^2 / 2 with d = trainer_logprobs - ref_logprobs. Its gradient on policy is that of the
    KL.
    """
    return (trainer_logprobs - ref_logprobs).square() / 2
