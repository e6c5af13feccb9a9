"""Muon for matrices that are whole or sharded, the optimizers of a model, and the learning rate."""

import math
from collections.abc import Iterable

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
    so one learning rate serves both. The numbers are those of torch.optim.Muon, which takes sharded
    matrices too, but twice the time of this one: 291 ms a step against 150 (nano on two gloo ranks,
    torch 2.13). Momentum stays sharded; a matrix is gathered whole once and orthogonalised on every
    rank, which takes its rows.
    """

    def __init__(self, matrices: Iterable[Tensor]):
        super().__init__(matrices, {"lr": 0.0, "momentum": 0.95})

    @torch.no_grad()
    def step(self) -> None:
        """Updates the matrices by their gradients."""
        (group,) = self.param_groups
        momentum = group["momentum"]
        for p in group["params"]:
            state, values, grad = self.state[p], local(p), local(p.grad)
            if not state:
                state["momentum_buffer"] = torch.zeros_like(p)
            buffer = local(state["momentum_buffer"])
            buffer.lerp_(grad, 1 - momentum)
            direction = grad.lerp(buffer, momentum)
            if is_sharded(p):
                direction = whole(like(p, direction), torch.bfloat16)
            rows = orthogonalise(direction)[first_row(p) :][: len(values)].to(values.device)
            values.add_(rows, alpha=-group["lr"] * 0.2 * math.sqrt(max(p.shape)))


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


def scheduled(
    step: int,
    peak: float,
    steps: int,
    warmup_steps: int,
    final_fraction: float = 0.1,
    hold: float = 0.0,
) -> float:
    """Returns the learning rate of a step, the first of `steps` being 0.

    It rises over `warmup_steps`, stays at `peak` for the first `hold` of the steps, then falls
    linearly to `final_fraction` of the peak.
    """
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    start = max(warmup_steps, hold * steps)
    done = max(0.0, step - start) / max(1.0, steps - start)
    return peak * (1 - (1 - final_fraction) * min(1.0, done))
