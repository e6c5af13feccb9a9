"""Draws the next token of each row and reports its log-probability.

Rows with any parameters, greedy ones too, mix in one batch. The noise of a row is one uniform
number, a hash of (seed, position): a request draws the same token whatever its neighbours, after a
preemption and after a restart. The token is found by inverting the cumulative distribution, first
over blocks of the vocabulary, then within one block, so nothing of size [rows, vocab] is sorted.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from nanorchestra.engine.request import SamplingParams

BLOCK = 64  # ids


class Draw(NamedTuple):
    """A token and its log-probability under the distribution drawn from (greedy: temperature 1)."""

    token: int
    logprob: float  # not finite if the row's logits are not
    top: Sequence[tuple[int, float]] = ()  # the most probable (id, logprob), best first


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
    device = logits.device
    temperature = np.array([1.0 if p.greedy else p.temperature for p in params], np.float32)
    scale = torch.from_numpy(1.0 / temperature).to(device)[:, None]
    z = logits[:, :vocab_size].float() * scale
    for row, mask in enumerate(allowed):
        if mask is not None:
            z[row].masked_fill_(torch.from_numpy(~mask[:vocab_size]).to(device), -torch.inf)
    z -= z.amax(1, keepdim=True)
    weights = _weights(z)
    cut = [i for i, p in enumerate(params) if p.truncated]
    if cut:
        weights[cut] = _truncate(weights[cut], [params[i] for i in cut])
    upto = _cumulative(weights)
    tokens = _draw(weights, upto, uniforms([p.seed for p in params], positions))
    if greedy := [i for i, p in enumerate(params) if p.greedy]:
        tokens[greedy] = z[greedy].argmax(1).cpu().numpy()
    draws = list(map(Draw, tokens.tolist(), _logprobs(z, upto, tokens).tolist()))
    for row, p in enumerate(params):
        if p.top_logprobs:
            values, ids = weights[row].topk(p.top_logprobs)
            values = values.double().div_(upto[row, -1]).log_().tolist()
            draws[row] = draws[row]._replace(top=list(zip(ids.tolist(), values, strict=True)))
    return draws


def score_tokens(logits: Tensor, vocab_size: int, targets: Tensor) -> list[float]:
    """Returns log p(targets [R]) at temperature 1, in the bits that a draw of them reports.

    Minus infinity for ids from `vocab_size` on.
    """
    z, ids = logits[:, :vocab_size].float(), targets.cpu().numpy()
    z = z - z.amax(1, keepdim=True)
    values = _logprobs(z, _cumulative(_weights(z)), ids.clip(max=vocab_size - 1))
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


def _truncate(weights, params) -> Tensor:
    """Zeroes weights [R, V] outside the top-k, then outside the top-p (Holtzman et al. 2020)."""
    width = weights.shape[1]
    limits = [(p.top_k or width, p.top_p) for p in params]
    limits = torch.tensor(limits, dtype=torch.float64, device=weights.device)
    top_k, top_p = limits.split(1, 1)
    ordered, order = weights.sort(dim=1, descending=True, stable=True)
    ordered[torch.arange(width, device=weights.device) >= top_k] = 0.0
    below = ordered.double().cumsum(1)
    ordered[(below - ordered >= top_p * below[:, -1:]) & (top_p < 1)] = 0.0  # never the first
    return torch.zeros_like(weights).scatter_(1, order, ordered)


def _weights(z) -> Tensor:
    """Returns exp(z) [R, V], filled up to whole blocks with zeros."""
    return F.pad(z.exp(), (0, -z.shape[1] % BLOCK))


def _cumulative(weights) -> np.ndarray:
    """Returns the running sums of the blocks of weights [R, blocks * BLOCK], fp64 [R, blocks]."""
    return weights.unflatten(1, (-1, BLOCK)).sum(2).double().cpu().numpy().cumsum(1)


def _draw(weights, upto, uniform) -> np.ndarray:
    """Returns int64 [R], drawn from weights >= 0 with uniform fp64 [R] in [0, 1)."""
    rows, target = np.arange(len(uniform)), uniform * upto[:, -1]
    block = _invert(upto, target)
    before = np.where(block > 0, upto[rows, block - 1], 0.0)
    chosen = weights.unflatten(1, (-1, BLOCK))[rows, block]
    within = chosen.double().cpu().numpy().cumsum(1)
    return block * BLOCK + _invert(within, target - before)


def _logprobs(z, upto, ids) -> np.ndarray:
    """Returns the log-probability fp64 [R] of an id in each row: z less the log of the weights."""
    return z[np.arange(len(ids)), ids].double().cpu().numpy() - np.log(upto[:, -1])


def _invert(cumulative, target) -> np.ndarray:
    """Returns the first index whose cumulative weight exceeds the target.

    The target is kept inside, so that rounding never leads to an index without weight.
    """
    inside = np.clip(target, 0.0, cumulative[:, -1] * (1 - 1e-12))
    return np.minimum((cumulative <= inside[:, None]).sum(1), cumulative.shape[1] - 1)
