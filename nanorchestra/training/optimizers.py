"""Muon (Jordan 2024, "Muon: an optimizer for hidden layers in neural networks") for matrices that are whole or sharded.

The momentum is per number and stays sharded; the orthogonalisation needs the whole matrix, so each is gathered, one rank of those that share
it computes, and all take their rows of the result. The numbers are torch.optim.Muon's, bit for bit, where nothing is sharded.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from nanorchestra.model.sharded import first_row, is_sharded, like, local, whole

NEWTON_SCHULZ = (
    3.4445,
    -4.7750,
    2.0315,
)  # a quintic that is steep at 0; five times it brings the singular values to 0.7 .. 1.2


def orthogonalise(matrix: Tensor, steps: int = 5, eps: float = 1e-7) -> Tensor:
    """U V^T, nearly, for matrix = U S V^T [m, n]; bfloat16. X <- a X + (b X X^T + c (X X^T)^2) X, on the shorter side."""
    a, b, c = NEWTON_SCHULZ
    x = matrix.to(torch.bfloat16, copy=True)
    if x.shape[0] > x.shape[1]:
        x = x.T
    x.div_(x.norm().clamp(min=eps))
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if matrix.shape[0] > matrix.shape[1] else x


class Muon(torch.optim.Optimizer):
    """Nesterov momentum, orthogonalised, with decoupled weight decay. The update is scaled to the RMS of AdamW's, 0.2 sqrt(max(m, n))
    (Liu et al. 2025, arXiv 2502.16982, eq. 4), so that one learning rate serves both."""

    def __init__(
        self,
        matrices: Iterable[Tensor],
        lr: float = 0.0,
        weight_decay: float = 0.0,
        momentum: float = 0.95,
    ):
        super().__init__(matrices, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            matrices = [p for p in group["params"] if p.grad is not None]
            owners = (
                matrices[0].device_mesh["shard"].size()
                if matrices and is_sharded(matrices[0])
                else 1
            )
            for start in range(
                0, len(matrices), owners
            ):  # as many at a time as there are ranks to compute
                turn = matrices[start : start + owners]
                directions = [self._direction(p, group["momentum"]) for p in turn]
                for p, update in zip(turn, _orthogonalised(directions)):
                    values = local(p)
                    values.mul_(1 - group["lr"] * group["weight_decay"])
                    values.add_(
                        update.to(values.device), alpha=-group["lr"] * 0.2 * math.sqrt(max(p.shape))
                    )

    def _direction(self, p: Tensor, momentum: float) -> Tensor:
        state = self.state[p]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(p)
        buffer, grad = state["momentum_buffer"], p.grad
        local(buffer).lerp_(local(grad), 1 - momentum)
        direction = local(grad).lerp(local(buffer), momentum)
        return like(p, direction.to(p.device_mesh.device_type)) if is_sharded(p) else direction


def _orthogonalised(directions: list[Tensor]) -> list[Tensor]:
    """This rank's rows of each matrix's orthogonalisation; the i-th of the ranks that shard them computes the i-th."""
    if not is_sharded(directions[0]):
        return [orthogonalise(direction) for direction in directions]
    shards = directions[0].device_mesh["shard"]
    matrices = [
        whole(direction, torch.bfloat16) for direction in directions
    ]  # all before anybody computes, or they would compute in turn
    results = [
        orthogonalise(m).contiguous() if owner == shards.get_local_rank() else m
        for owner, m in enumerate(matrices)
    ]
    rows = []
    for owner, (direction, result) in enumerate(zip(directions, results)):
        if shards.size() > 1:
            dist.broadcast(result, group=shards.get_group(), group_src=owner)
        start = first_row(direction)
        rows.append(result[start : start + len(local(direction))])
    return rows


def build_optimizers(
    model: torch.nn.Module, kind: str, weight_decay: float, betas: tuple[float, float]
) -> list[torch.optim.Optimizer]:
    """Returns optimizers over all trained parameters; weights alone decay, not norms or biases.

    "adamw", or "muon": Muon for the matrices of the layers, AdamW for everything else.
    """
    layers = model.layers.parameters() if kind == "muon" else ()
    matrices = [p for p in layers if p.dim() == 2 and p.requires_grad]
    taken = {id(p) for p in matrices}
    others = [p for p in model.parameters() if p.requires_grad and id(p) not in taken]
    groups = [
        {"params": [p for p in others if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in others if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(groups, lr=0.0, betas=betas, fused=True)
    ]
    if matrices:
        optimizers.append(Muon(matrices, weight_decay=weight_decay))
    return optimizers


@dataclass(frozen=True)
class Schedule:
    """Learning rate over `steps` steps.

    It rises over `warmup_steps`, stays at `peak` for the first `hold` of the steps, then falls
    linearly to `final_fraction` of the peak.
    """

    peak: float
    steps: int
    warmup_steps: int = 5
    final_fraction: float = 0.1
    hold: float = 0.0

    def at(self, step: int) -> float:
        """Returns the learning rate of a step, the first being 0."""
        if step < self.warmup_steps:
            return self.peak * (step + 1) / self.warmup_steps
        start = max(self.warmup_steps, self.hold * self.steps)
        done = max(0.0, step - start) / max(1.0, self.steps - start)
        return self.peak * (1 - (1 - self.final_fraction) * min(1.0, done))
