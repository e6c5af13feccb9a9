"""Draws the next token of each row, and says with what log-probability. Rows with any parameters, greedy ones too, mix in one batch.

The noise is one uniform number a row, a hash of (seed, absolute position): the same request draws the same token whatever its
neighbours, after preemption and after a restart. The token is found by inverting the cumulative distribution in two steps, over blocks
of the vocabulary and then within one block, in float64, so that nothing of size [rows, vocab] is sorted or accumulated.
"""

from __future__ import annotations

from typing import NamedTuple, Sequence

import numpy as np
import torch
from torch import Tensor

from nanorchestra.engine.request import SamplingParams
from nanorchestra.errors import NotFiniteError

BLOCK = 64


class Draw(NamedTuple):
    """A drawn token, its log-probability under the distribution it was drawn from (greedy: at temperature 1), and the most probable ids."""

    token: int
    logprob: float
    top_logprobs: list[tuple[int, float]]


class Sampler:
    """Samples ids below `vocab_size`, the tokenizer's size; the padding rows of the output matrix are neither drawn nor normalised over."""

    def __init__(self, vocab_size: int):
        self.vocab_size = vocab_size
        self._scratch = torch.empty(0)

    def __call__(
        self,
        logits: Tensor,
        params: Sequence[SamplingParams],
        positions: Sequence[int],
        allowed: Sequence[np.ndarray | None] | None = None,
    ) -> list[Draw]:
        """logits [R, >= vocab_size], positions [R]: the index each drawn token will have in its sequence; allowed: for each row the ids that
        may be drawn, bool [vocab_size], or None for all. NotFiniteError if a row's logits are not finite.
        """
        logits = logits[:, : self.vocab_size]
        device = logits.device
        temperature = np.array([p.temperature for p in params], np.float32)
        top_p, top_k, min_p = (
            np.array([getattr(p, name) for p in params]) for name in ("top_p", "top_k", "min_p")
        )
        greedy = temperature < 1e-5
        temperature[greedy] = 1.0
        scaled = self._padded(len(params), device)  # [R, blocks * BLOCK], fp32
        torch.mul(
            logits,
            torch.from_numpy(1.0 / temperature).to(device)[:, None],
            out=scaled[:, : self.vocab_size],
        )
        for row, mask in enumerate(allowed or ()):
            if mask is not None:
                scaled[row, : self.vocab_size].masked_fill_(
                    torch.from_numpy(~mask[: self.vocab_size]).to(device), -torch.inf
                )
        weights = scaled.softmax(1)
        cut = ~greedy & ((top_p < 1.0) | (top_k > 0) & (top_k < self.vocab_size) | (min_p > 0))
        if cut.any():
            index = torch.from_numpy(np.flatnonzero(cut)).to(device)
            weights[index] = _truncate(weights[index], top_k[cut], top_p[cut], min_p[cut])
        uniform = torch.from_numpy(uniforms([p.seed for p in params], positions)).to(device)
        tokens, total = _draw(weights.view(len(params), -1, BLOCK), uniform)
        if greedy.any():
            index = torch.from_numpy(np.flatnonzero(greedy)).to(device)
            tokens[index] = scaled[index].argmax(1)
        logprobs = weights.gather(1, tokens[:, None])[:, 0].double().div_(total).log_()
        if not torch.isfinite(logprobs).all():
            raise NotFiniteError
        tops = self._tops(weights, total, [p.top_logprobs for p in params])
        return [Draw(*row) for row in zip(tokens.tolist(), logprobs.tolist(), tops)]

    def score(self, logits: Tensor, targets: Tensor) -> list[float]:
        """log-probabilities of the ids targets int64 [R] at temperature 1: the bits that a draw of them reports. Minus infinity for ids beyond
        the tokenizer's."""
        scaled = self._padded(len(targets), logits.device)
        scaled[:, : self.vocab_size] = logits[:, : self.vocab_size]
        weights, inside = scaled.softmax(1), targets.clamp(max=self.vocab_size - 1)[:, None]
        drawn = (
            weights.gather(1, inside)[:, 0]
            .double()
            .div_(_total(weights.unflatten(1, (-1, BLOCK))))
            .log_()
        )
        tiny = (
            scaled.gather(1, inside)[:, 0] - scaled.logsumexp(1)
        ).double()  # what fp32 has no softmax for
        values = torch.where(drawn > -80, drawn, tiny)
        return values.masked_fill_(targets >= self.vocab_size, -torch.inf).tolist()

    def _tops(
        self, weights: Tensor, total: Tensor, counts: list[int]
    ) -> list[list[tuple[int, float]]]:
        """For each row its counts[r] most probable ids, as far as they can be drawn, the lowest id first among equals."""
        if not any(counts):
            return [[] for _ in counts]
        ordered, ids = weights.sort(dim=1, descending=True, stable=True)
        rows = zip(ids.tolist(), ordered.double().div_(total[:, None]).log_().tolist(), counts)
        return [
            [(token, value) for token, value in zip(ids[:n], values[:n]) if value > float("-inf")]
            for ids, values, n in rows
        ]

    def _padded(self, rows: int, device: torch.device) -> Tensor:
        """Memory that is kept from step to step; behind the vocabulary it is filled to whole blocks with logits of minus infinity."""
        if self._scratch.shape[0] < rows or self._scratch.device != device:
            self._scratch = torch.full(
                (rows, -(-self.vocab_size // BLOCK) * BLOCK), -torch.inf, device=device
            )
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


def _truncate(weights: Tensor, top_k: np.ndarray, top_p: np.ndarray, min_p: np.ndarray) -> Tensor:
    """weights [R, V]: zero outside the top_k[r] largest (0: all), then outside the fewest of mass top_p[r] (Holtzman et al. 2020), then
    below the share min_p[r] of the largest (Nguyen et al. 2024)."""
    width, device = weights.shape[1], weights.device
    top_k, top_p, min_p = (
        torch.from_numpy(x).to(device)[:, None]
        for x in (np.where(top_k > 0, top_k, width), top_p, min_p)
    )
    ordered, order = weights.sort(dim=1, descending=True, stable=True)
    ordered[torch.arange(width, device=device) >= top_k] = 0.0
    below = ordered.double().cumsum(1)
    ordered[(below - ordered >= top_p * below[:, -1:]) & (top_p < 1)] = (
        0.0  # the first always stays: nothing is above it
    )
    ordered[ordered < min_p * ordered[:, :1]] = 0.0
    return torch.zeros_like(weights).scatter_(1, order, ordered)


def _draw(weights: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """weights [R, blocks, BLOCK] >= 0, uniform float64 [R] in [0, 1) -> token int64 [R], total weight float64 [R]."""
    sums = weights.sum(2).double()
    upto = sums.cumsum(1)
    total = upto[:, -1]
    block = _invert(upto, uniform * total)
    within = (
        weights.gather(1, block[:, None, None].expand(-1, 1, weights.shape[2]))[:, 0]
        .double()
        .cumsum(1)
    )
    rest = uniform * total - (upto - sums).gather(1, block[:, None])[:, 0]
    return block * weights.shape[2] + _invert(within, rest), total


def _total(weights: Tensor) -> Tensor:
    """The sum of weights [R, blocks, BLOCK] as `_draw` takes it, float64 [R]."""
    return weights.sum(2).double().cumsum(1)[:, -1]


def _invert(cumulative: Tensor, target: Tensor) -> Tensor:
    """The first index whose cumulative weight exceeds the target. Rounding leads to no index without weight: the target is kept inside."""
    inside = torch.minimum(target.clamp(min=0.0), cumulative[:, -1] * (1 - 1e-12))
    return torch.searchsorted(cumulative, inside[:, None], right=True)[:, 0].clamp_(
        max=cumulative.shape[1] - 1
    )
