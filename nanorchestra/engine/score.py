"""Log-probabilities of given ids: one forward pass a sequence, without pages."""

import torch
from torch import Tensor

from kernels.common import wide_product
from nanorchestra.engine.sampler import score_tokens
from nanorchestra.model.attention import PackedAttention, Segment
from nanorchestra.model.ops import by_kernel
from nanorchestra.model.quantise import QuantisedLinear
from nanorchestra.model.qwen3 import Qwen3

POSITIONS = 256  # whose logits are in memory at a time, several times: 155 MB each for Qwen3-8B


@torch.inference_mode()
def score(model: Qwen3, ids: list[int], vocab_size: int) -> list[float]:
    """Returns log p(ids[i + 1] | ids[: i + 1]) at temperature 1: n - 1 numbers for n ids.

    Normalised over the ids below vocab_size; minus infinity for others.
    """
    device = model.embed_tokens.weight.device
    tokens = torch.tensor(ids, device=device)
    positions = torch.arange(len(ids), device=device)
    hidden = model(tokens, positions, PackedAttention([Segment(0, len(ids))]))
    values = []
    for start in range(0, len(ids) - 1, POSITIONS):
        targets = tokens[start + 1 : start + 1 + POSITIONS]
        logits = output_logits(model, hidden[start : start + len(targets)])
        values += score_tokens(logits, vocab_size, targets)
    return values


def output_logits(model: Qwen3, hidden: Tensor, out: Tensor | None = None) -> Tensor:
    """Returns logits [R, vocab] of hidden states [R, hidden], in `out` (fp32) if that is given.

    On a GPU they are fp32: the trainer's are not rounded to 16 bits either.
    """
    if not by_kernel(hidden):
        logits = model.logits(hidden)
    elif isinstance(model.lm_head, QuantisedLinear):
        logits = model.lm_head.product(hidden, torch.float32)
    elif out is not None and hidden.is_cuda and hidden.dtype != out.dtype:
        return torch.mm(hidden, model.output_weight.T, out_dtype=out.dtype, out=out)
    else:
        logits = wide_product(hidden, model.output_weight.T)
    return logits if out is None else out.copy_(logits)
