"""The optimizers of a model, and the learning rate."""

import torch

FINAL = 0.1  # of the peak learning rate, which it has at the end


def build_optimizers(
    model: torch.nn.Module,
    kind: str,
    *,
    beta2: float = 0.95,
    weight_decay: float = 0.0,
    momentum: float = 0.95,
) -> list[torch.optim.Optimizer]:
    """Returns optimizers over all trained parameters.

    "adamw", or "muon": Muon for the matrices of the layers, with `momentum` and without weight
    decay, AdamW with the other settings for everything else. Muon's updates have the RMS of
    AdamW's, so one learning rate serves both (arXiv 2502.16982, equation 4).
    """
    layers = model.layers.parameters() if kind == "muon" else ()
    matrices = [p for p in layers if p.dim() == 2 and p.requires_grad]
    taken = {id(p) for p in matrices}
    others = [p for p in model.parameters() if p.requires_grad and id(p) not in taken]
    rest = [{"params": others}]  # none if only adapters are trained
    betas = (0.9, beta2)
    adamw = torch.optim.AdamW(rest, lr=0.0, betas=betas, weight_decay=weight_decay, fused=True)
    if not matrices:
        return [adamw]
    muon = torch.optim.Muon(
        matrices, lr=0.0, weight_decay=0.0, momentum=momentum, adjust_lr_fn="match_rms_adamw"
    )
    return [adamw, muon]


def scheduled(step: int, peak: float, steps: int, warmup_steps: int, hold: float) -> float:
    """Returns the learning rate of a step, the first of `steps` being 0.

    It rises over `warmup_steps`, stays at `peak` for the first `hold` of the steps, then falls
    linearly to FINAL of the peak.
    """
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    start = max(warmup_steps, hold * steps)
    done = max(0.0, step - start) / max(1.0, steps - start)
    return peak * (1 - (1 - FINAL) * min(1.0, done))
