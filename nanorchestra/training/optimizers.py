"""Muon for matrices that are whole or sharded, the optimizers of a model, and the learning rate."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from nanorchestra.model.sharded import first_row, is_sharded, like, local, whole

# A quintic, steep at 0. Five applications bring singular values in (0, 1] to about 0.7 .. 1.2.
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)


def orthogonalise(matrix: Tensor) -> Tensor:
    """Returns nearly U V^T for matrix = U S V^T [m, n], in bfloat16 (Jordan 2024).

    Newton-Schulz: X <- a X + (b X X^T + c (X X^T)^2) X, five times, on the shorter side.
    """
    a, b, c = NEWTON_SCHULZ
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.to(torch.bfloat16, copy=True)
    x = x.T if tall else x
    x.div_(x.norm().clamp(min=1e-7))
    for _ in range(5):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


class Muon(torch.optim.Optimizer):
    """Muon (Jordan 2024): Nesterov momentum, orthogonalised.

    The update is scaled to the RMS of AdamW's, 0.2 sqrt(max(m, n)) (arXiv 2502.16982, equation 4),
    so one learning rate serves both. The numbers are those of torch.optim.Muon. Momentum stays
    sharded; a matrix is gathered and orthogonalised on every rank, which takes its rows.
    """

    def __init__(self, matrices: Iterable[Tensor], lr: float = 0.0):
        super().__init__(matrices, {"lr": lr, "momentum": 0.95})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Updates the matrices by their gradients."""
        for group in self.param_groups:
            for p in group["params"]:
                update, values = orthogonalise(self._direction(p, group["momentum"])), local(p)
                rows = update[first_row(p) :][: len(values)].to(values.device)
                values.add_(rows, alpha=-group["lr"] * 0.2 * math.sqrt(max(p.shape)))

    def _direction(self, p, momentum) -> Tensor:
        """Returns the whole matrix to orthogonalise."""
        state = self.state[p]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(p)
        buffer, grad = local(state["momentum_buffer"]), local(p.grad)
        buffer.lerp_(grad, 1 - momentum)
        direction = grad.lerp(buffer, momentum)
        return whole(like(p, direction), torch.bfloat16) if is_sharded(p) else direction


def build_optimizers(
    model: torch.nn.Module, kind: str, *, beta2: float = 0.95, weight_decay: float = 0.0
) -> list[torch.optim.Optimizer]:
    """Returns optimizers over all trained parameters.

    "adamw", or "muon": Muon for the matrices of the layers, without weight decay, AdamW with these
    settings for everything else.
    """
    layers = model.layers.parameters() if kind == "muon" else ()
    matrices = [p for p in layers if p.dim() == 2 and p.requires_grad]
    taken = {id(p) for p in matrices}
    others = [p for p in model.parameters() if p.requires_grad and id(p) not in taken]
    rest = [{"params": others}]  # none if only adapters are trained
    betas = (0.9, beta2)
    adamw = torch.optim.AdamW(rest, lr=0.0, betas=betas, weight_decay=weight_decay, fused=True)
    return [adamw, Muon(matrices)] if matrices else [adamw]


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
