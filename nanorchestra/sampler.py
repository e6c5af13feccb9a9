"""Draws the next token of each row, and says with what log-probability. Temperature, top-k, top-p and greedy rows mix in one batch.

The noise is one uniform number a row, a hash of (seed, absolute position): the same request draws the same token whatever its
neighbours, after preemption and after a restart. The token is found by inverting the cumulative distribution in two steps, over blocks
of the vocabulary and then within one block, in float64, so that nothing of size [rows, vocab] is sorted or accumulated.
"""

from __future__ import annotations

from typing import Sequence

import numpy as np
import torch
from torch import Tensor

from .scheduler import SamplingParams

BLOCK = 64


class Sampler:
    """Samples ids below `vocab_size`, the tokenizer's size; the padding rows of the output matrix are neither drawn nor normalised over."""

    def __init__(self, vocab_size: int):
        self.vocab_size = vocab_size
        self._scratch = torch.empty(0)

    def __call__(self, logits: Tensor, params: Sequence[SamplingParams], positions: Sequence[int]) -> tuple[list[int], list[float]]:
        """logits [R, >= vocab_size], positions [R]: the index each drawn token will have in its sequence.

        Returns the tokens and their log-probabilities under the distribution they were drawn from (greedy: at temperature 1).
        FloatingPointError if a row's logits are not finite.
        """
        logits = logits[:, : self.vocab_size]
        device = logits.device
        temperature = np.array([p.temperature for p in params], np.float32)
        top_p, top_k = np.array([p.top_p for p in params]), np.array([p.top_k for p in params])
        greedy = temperature < 1e-5
        temperature[greedy] = 1.0
        scaled = self._padded(len(params), device)                                         # [R, blocks * BLOCK], fp32
        torch.mul(logits, torch.from_numpy(1.0 / temperature).to(device)[:, None], out=scaled[:, : self.vocab_size])
        weights = scaled.softmax(1)
        cut = ~greedy & ((top_p < 1.0) | (top_k > 0) & (top_k < self.vocab_size))
        if cut.any():
            index = torch.from_numpy(np.flatnonzero(cut)).to(device)
            weights[index] = _truncate(weights[index], top_k[cut], top_p[cut])
        uniform = torch.from_numpy(uniforms([p.seed for p in params], positions)).to(device)
        tokens, total = _draw(weights.view(len(params), -1, BLOCK), uniform)
        if greedy.any():
            index = torch.from_numpy(np.flatnonzero(greedy)).to(device)
            tokens[index] = logits[index].argmax(1)
        logprobs = weights.gather(1, tokens[:, None])[:, 0].double().div_(total).log_()
        if not torch.isfinite(logprobs).all():
            raise FloatingPointError("the model's logits are not finite: a weight is NaN or infinite, or an activation overflowed")
        return tokens.tolist(), logprobs.tolist()

    def _padded(self, rows: int, device: torch.device) -> Tensor:
        """Memory that is kept from step to step; behind the vocabulary it is filled to whole blocks with logits of minus infinity."""
        if self._scratch.shape[0] < rows or self._scratch.device != device:
            self._scratch = torch.full((rows, -(-self.vocab_size // BLOCK) * BLOCK), -torch.inf, device=device)
        return self._scratch[:rows]


def uniforms(seeds: Sequence[int], positions: Sequence[int]) -> np.ndarray:
    """float64 [R] in [0, 1): 53 bits of a 64-bit mix of seed and position (the finaliser of splitmix64, Steele et al. 2014)."""
    with np.errstate(over="ignore"):
        seeds = np.array([seed & 0xFFFFFFFFFFFFFFFF for seed in seeds], np.uint64)
        state = _mix(_mix(seeds + np.uint64(0x9E3779B97F4A7C15)) ^ np.asarray(positions, np.uint64))
        return (_mix(state) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _truncate(weights: Tensor, top_k: np.ndarray, top_p: np.ndarray) -> Tensor:
    """weights [R, V]: zero outside the top_k[r] largest (0: all), then outside the fewest of mass top_p[r] (Holtzman et al. 2020)."""
    width, device = weights.shape[1], weights.device
    top_k = torch.from_numpy(np.where(top_k > 0, top_k, width)).to(device)[:, None]
    top_p = torch.from_numpy(top_p).to(device)[:, None]
    ordered, order = weights.sort(dim=1, descending=True, stable=True)
    ordered[torch.arange(width, device=device) >= top_k] = 0.0
    below = ordered.double().cumsum(1)
    ordered[(below - ordered >= top_p * below[:, -1:]) & (top_p < 1)] = 0.0                # the first always stays: nothing is above it
    return torch.zeros_like(weights).scatter_(1, order, ordered)


def _draw(weights: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """weights [R, blocks, BLOCK] >= 0, uniform float64 [R] in [0, 1) -> token int64 [R], total weight float64 [R]."""
    sums = weights.sum(2).double()
    upto = sums.cumsum(1)
    total = upto[:, -1]
    block = _invert(upto, uniform * total)
    within = weights.gather(1, block[:, None, None].expand(-1, 1, weights.shape[2]))[:, 0].double().cumsum(1)
    rest = uniform * total - (upto - sums).gather(1, block[:, None])[:, 0]
    return block * weights.shape[2] + _invert(within, rest), total


def _invert(cumulative: Tensor, target: Tensor) -> Tensor:
    """The first index whose cumulative weight exceeds the target. Rounding leads to no index without weight: the target is kept inside."""
    inside = torch.minimum(target.clamp(min=0.0), cumulative[:, -1] * (1 - 1e-12))
    return torch.searchsorted(cumulative, inside[:, None], right=True)[:, 0].clamp_(max=cumulative.shape[1] - 1)
