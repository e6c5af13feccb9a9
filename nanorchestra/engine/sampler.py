"""Draws the next token of each row on a CPU, and reports its log-probability.

Rows with any parameters, greedy ones too, mix in one batch. The noise of a row is one uniform
number, a hash of (seed, position): from the same logits a request draws the same token whatever its
neighbours, after a preemption and after a restart. The token is found by inverting the cumulative
distribution, first over blocks of the vocabulary, then within one block, so nothing of size
[rows, vocab] is sorted.
kernels/sample.py does the same on a GPU, but that ids with the very logit of the last one kept are
all kept there.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from nanorchestra.engine.sequence import SamplingParams, TopLogprobs

BLOCK = 64  # ids


class Draw(NamedTuple):
    """A token and its log-probability under the distribution drawn from (greedy: temperature 1)."""

    token: int
    logprob: float  # not finite if the row's logits are not
    top_logprobs: TopLogprobs = []  # noqa: RUF012 (never written to)


Result = Draw | Exception  # the error is that of a request that cannot be drawn


def draw_tokens(
    logits: Tensor,
    vocab_size: int,
    params: Sequence[SamplingParams],
    positions: Sequence[int],
    allowed: Sequence[np.ndarray | None],
) -> list[Draw]:
    """Draws one token a row of logits [R, >= vocab_size].

    Ids from `vocab_size` on, the padding of an output matrix, are neither drawn nor normalised
    over. positions [R]: the index that the token will have in its sequence. allowed [R]: the ids
    that may be drawn, bool [vocab_size], or None for all.
    """
    rows = np.arange(len(params))

    # Temperature.
    temperature = np.array([1.0 if p.greedy else p.temperature for p in params], np.float32)
    inverse = torch.from_numpy(1.0 / temperature)[:, None]
    z = logits[:, :vocab_size].float() * inverse  # [R, vocab]

    # Mask.
    for row, mask in enumerate(allowed):
        if mask is not None:
            z[row].masked_fill_(torch.from_numpy(~mask), -torch.inf)

    # Softmax, but for its division, of the ids that top-k and top-p keep.
    z -= z.amax(1, keepdim=True)
    weights = _weights(z)  # [R, blocks * BLOCK]
    truncated = [row for row, p in enumerate(params) if p.truncated]
    if truncated:
        weights[truncated] = _truncate(weights[truncated], [params[row] for row in truncated])

    # Cumulative sums of blocks, then of the ids in the block that the noise falls into.
    cumulative = _cumulative_blocks(weights)  # [R, blocks]
    total = cumulative[:, -1]
    target = uniforms([p.seed for p in params], positions) * total
    block = _first_above(cumulative, target)
    before = np.where(block > 0, cumulative[rows, block - 1], 0.0)
    in_block = weights.unflatten(1, (-1, BLOCK))[rows, block].double().numpy().cumsum(1)
    tokens = block * BLOCK + _first_above(in_block, target - before)
    greedy = [row for row, p in enumerate(params) if p.greedy]
    if greedy:
        tokens[greedy] = z[greedy].argmax(1).numpy()

    # Log-probability.
    log_total = np.log(total)
    logprobs = z[rows, tokens].double().numpy() - log_total
    draws = [Draw(*pair) for pair in zip(tokens.tolist(), logprobs.tolist(), strict=True)]
    for row, p in enumerate(params):
        if p.top_logprobs:
            most = min(p.top_logprobs, vocab_size)
            values, ids = weights[row, :vocab_size].topk(most)
            values = (values.double() / total[row]).log().tolist()
            top = list(zip(ids.tolist(), values, strict=True))
            draws[row] = draws[row]._replace(top_logprobs=top)
    return draws


def score_tokens(logits: Tensor, vocab_size: int, targets: Tensor) -> list[float]:
    """Returns log p(targets [R]) at temperature 1, in the bits that a draw of them reports.

    Minus infinity for ids from `vocab_size` on.
    """
    ids = targets.cpu().numpy()
    z = logits[:, :vocab_size].float()
    z = z - z.amax(1, keepdim=True)
    log_total = np.log(_cumulative_blocks(_weights(z))[:, -1])
    chosen = z[np.arange(len(ids)), ids.clip(max=vocab_size - 1)]
    values = chosen.double().cpu().numpy() - log_total
    values[ids >= vocab_size] = -np.inf
    return values.tolist()


def uniforms(seeds: Sequence[int], positions: Sequence[int]) -> np.ndarray:
    """Returns float64 [R] in [0, 1): 53 bits of a hash of seed and position.

    The hash is the finaliser of splitmix64 (Steele et al. 2014), applied three times.
    """
    with np.errstate(over="ignore"):
        seeds = np.array([seed & 0xFFFFFFFFFFFFFFFF for seed in seeds], np.uint64)
        state = _mix(_mix(seeds + np.uint64(0x9E3779B97F4A7C15)) ^ np.asarray(positions, np.uint64))
        return (_mix(state) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(x) -> np.ndarray:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _weights(z) -> Tensor:
    """Returns exp(z) [R, V], filled up to whole blocks with zeros."""
    return F.pad(z.exp(), (0, -z.shape[1] % BLOCK))


def _cumulative_blocks(weights) -> np.ndarray:
    """Returns the running sums of the blocks of weights [R, blocks * BLOCK], fp64 [R, blocks]."""
    return weights.unflatten(1, (-1, BLOCK)).sum(2).double().cpu().numpy().cumsum(1)


def _first_above(cumulative, target) -> np.ndarray:
    """Returns the first index of each row whose cumulative weight exceeds the target.

    The target is kept inside, so that rounding never leads to an index without weight.
    """
    inside = np.clip(target, 0.0, cumulative[:, -1] * (1 - 1e-12))
    return np.minimum((cumulative <= inside[:, None]).sum(1), cumulative.shape[1] - 1)


def _truncate(weights, params) -> Tensor:
    """Zeroes weights [R, V] outside the top-k, then outside the top-p (Holtzman et al. 2020)."""
    width = weights.shape[1]
    top_k = torch.tensor([[p.top_k or width] for p in params], dtype=torch.float64)
    top_p = torch.tensor([[p.top_p] for p in params], dtype=torch.float64)
    ordered, order = weights.sort(dim=1, descending=True, stable=True)
    ordered[torch.arange(width) >= top_k] = 0.0
    cumulative = ordered.double().cumsum(1)
    # An id stays if those before it have less than top_p of the total: so the first always does.
    ordered[(cumulative - ordered >= top_p * cumulative[:, -1:]) & (top_p < 1)] = 0.0
    return torch.zeros_like(weights).scatter_(1, order, ordered)
