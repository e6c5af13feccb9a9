"""Log-probabilities of given ids: one forward pass a sequence, without pages."""

import torch

from nanorchestra.engine.sampler import score_tokens
from nanorchestra.model import ops
from nanorchestra.model.attention import PackedAttention, Segment
from nanorchestra.model.qwen3 import Qwen3

POSITIONS = 256  # whose logits are in memory at a time, several times: 155 MB each for Qwen3-8B


@torch.inference_mode()
def score(model: Qwen3, ids: list[int], num_drawable: int) -> list[float]:
    """Returns log p(ids[i + 1] | ids[: i + 1]) at temperature 1: n - 1 numbers for n ids.

    Normalised over the ids below num_drawable; minus infinity for others.
    """
    device = model.embed_tokens.weight.device
    tokens = torch.tensor(ids, device=device)
    positions = torch.arange(len(ids), device=device)
    hidden = model(tokens, positions, PackedAttention([Segment(0, len(ids))]))
    values = []
    for start in range(0, len(ids) - 1, POSITIONS):
        targets = tokens[start + 1 : start + 1 + POSITIONS]
        rows = hidden[start : start + len(targets)]
        logits = model.wide_logits(rows) if ops.by_kernel(rows) else model.logits(rows)
        values += score_tokens(logits, num_drawable, targets)
    return values
