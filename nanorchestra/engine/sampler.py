"""Draws the next token of each row, and reports its log-probability, on any device.

Rows with any parameters, greedy ones too, mix in one batch. The noise of a row is one uniform
number, a hash of (seed, position): from the same logits a request draws the same token whatever its
neighbours, after a preemption and after a restart. The token is found by inverting the cumulative
distribution, first over buckets of the vocabulary, then within one. Only a row with a top-p and no
top-k is sorted. `draw_tokens` does not wait for a GPU; `score_tokens`, and the lists of what has
been drawn, do.
"""

from __future__ import annotations

from collections import abc
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from nanorchestra.engine.sequence import SamplingParams, TopLogprobs
from nanorchestra.engine.transfers import to_device

BUCKET = 64  # ids
# Of splitmix64.
STEP = np.uint64(0x9E3779B97F4A7C15)
SHIFTS = np.uint64(30), np.uint64(27), np.uint64(31)
FACTORS = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


class Draw(NamedTuple):
    """A token and its log-probability under the distribution drawn from (greedy: temperature 1)."""

    token: int
    logprob: float  # not finite if the row's logits are not
    top_logprobs: TopLogprobs = []  # noqa: RUF012 (never written to)


Result = Draw | Exception  # the error is that of a request that cannot be drawn


class Draws(NamedTuple):
    """The draws of R rows, on their device. S of the rows report their most probable ids."""

    tokens: Tensor  # int64 [R]
    logprobs: Tensor  # fp64 [R]
    top_ids: Tensor  # int64 [S, most], most probable first
    top_logprobs: Tensor  # fp64 [S, most]

    def to_host(self) -> Draws:
        """Returns the draws in memory of the host, which a GPU fills later.

        torch pins the memory of a copy that does not wait; `Runner.read` waits for an event.
        """
        return Draws(*[x.to("cpu", non_blocking=True) for x in self])

    def listed(self, params: abc.Sequence[SamplingParams]) -> list[Draw]:
        """Returns the draw of each row, once they are on the host."""
        draws = list(map(Draw, self.tokens.tolist(), self.logprobs.tolist()))
        reporting = [row for row, p in enumerate(params) if p.top_logprobs]
        reports = zip(reporting, self.top_ids.tolist(), self.top_logprobs.tolist(), strict=True)
        for row, ids, logprobs in reports:
            top = list(zip(ids, logprobs, strict=True))[: params[row].top_logprobs]
            draws[row] = draws[row]._replace(top_logprobs=top)
        return draws


def draw_tokens(
    logits: Tensor,
    num_drawable: int,
    params: abc.Sequence[SamplingParams],
    positions: abc.Sequence[int],
    allowed: abc.Sequence[np.ndarray | None],
) -> Draws:
    """Draws one token a row of logits [R, >= num_drawable].

    Ids from `num_drawable` on, the padding of an output matrix, are neither drawn nor normalised
    over. positions [R]: the index that the token will have in its sequence. allowed [R]: the ids
    that may be drawn, bool [num_drawable], or None for all.
    """
    device = logits.device

    # Temperature. A greedy row has 1: its log-probability is at temperature 1.
    greedy = [p.greedy for p in params]
    temperature = np.array([1.0 if p.greedy else p.temperature for p in params], np.float32)
    inverse = to_device(1.0 / temperature, device)[:, None]
    z = logits[:, :num_drawable].float() * inverse  # [R, vocab]

    # Masks.
    masked = [row for row, mask in enumerate(allowed) if mask is not None]
    if masked:
        forbidden = to_device(~np.stack([allowed[row] for row in masked]), device)
        rows = _index(masked, device)
        z.index_copy_(0, rows, z.index_select(0, rows).masked_fill_(forbidden, -torch.inf))

    # Softmax, but for its division, of the ids that top-k and top-p keep.
    z -= z.amax(1, keepdim=True)
    weights = _weights(z)  # [R, buckets * BUCKET]
    truncated = [row for row, p in enumerate(params) if p.truncated]
    by_top_k = [row for row in truncated if params[row].top_k]
    by_sort = [row for row in truncated if not params[row].top_k]
    for limited in (by_top_k, by_sort):
        if limited:
            rows = _index(limited, device)
            kept = _truncate(weights.index_select(0, rows), [params[row] for row in limited])
            weights.index_copy_(0, rows, kept)

    noise = to_device(uniforms([p.seed for p in params], positions), device)[:, None]  # [R, 1]
    tokens, total = _invert(weights, noise)
    if any(greedy):
        most_probable = z.argmax(1, keepdim=True)
        tokens = torch.where(to_device(np.array(greedy), device)[:, None], most_probable, tokens)

    # Log-probabilities.
    logprobs = z.gather(1, tokens).double() - total.log()
    top_ids, top_logprobs = tokens.new_empty(0, 0), logprobs.new_empty(0, 0)
    reporting = [row for row, p in enumerate(params) if p.top_logprobs]
    if reporting:
        rows = _index(reporting, device)
        most = min(max(p.top_logprobs for p in params), num_drawable)
        top_weights, top_ids = weights.index_select(0, rows)[:, :num_drawable].topk(most)
        top_logprobs = (top_weights.double() / total.index_select(0, rows)).log()
    return Draws(tokens[:, 0], logprobs[:, 0], top_ids, top_logprobs)


def score_tokens(logits: Tensor, num_drawable: int, targets: Tensor) -> list[float]:
    """Returns log p(targets [R]) at temperature 1, in the bits that a draw of them reports.

    Minus infinity for ids from `num_drawable` on.
    """
    z = logits[:, :num_drawable].float()
    z = z - z.amax(1, keepdim=True)
    total = _cumulative(_weights(z).view(len(z), -1, BUCKET))[:, -1]
    chosen = z.gather(1, targets.clamp(max=num_drawable - 1)[:, None])[:, 0]
    values = chosen.double() - total.log()
    return values.masked_fill_(targets >= num_drawable, -torch.inf).tolist()


def uniforms(seeds: abc.Sequence[int], positions: abc.Sequence[int]) -> np.ndarray:
    """Returns float64 [R] in [0, 1): 53 bits of a hash of seed and position.

    The hash is the finaliser of splitmix64 (Steele et al. 2014), applied three times.
    """
    hashes = np.array([_hash_of_seed(seed) for seed in seeds], np.uint64)
    state = _mix(_mix(hashes ^ np.array(positions, np.uint64)))
    return (state >> np.uint64(11)).astype(np.float64) * 2.0**-53


@lru_cache(maxsize=4096)  # a request asks again for each of its tokens
def _hash_of_seed(seed: int) -> int:
    return int(_mix(np.array([seed & 0xFFFFFFFFFFFFFFFF], np.uint64) + STEP)[0])


def _mix(x) -> np.ndarray:
    x = (x ^ (x >> SHIFTS[0])) * FACTORS[0]
    x = (x ^ (x >> SHIFTS[1])) * FACTORS[1]
    return x ^ (x >> SHIFTS[2])


def _index(rows, device) -> Tensor:
    return to_device(np.array(rows, np.int64), device)


def _weights(z) -> Tensor:
    """Returns exp(z) [R, V], filled up to whole buckets with zeros."""
    rows, vocab = z.shape
    weights = z.new_zeros(rows, vocab + -vocab % BUCKET)
    torch.exp(z, out=weights[:, :vocab])
    return weights


def _truncate(weights, params) -> Tensor:
    """Zeroes weights [R, V] outside the top-k, then outside the top-p (Holtzman et al. 2020).

    All rows have a top-k, or none has. Ids with the very weight of the last one kept are kept too.
    """
    most = max(p.top_k for p in params)
    if most:
        most = min(most, weights.shape[1])
        ordered = weights.topk(most).values.double()  # [R, most], descending
        top_k = to_device(np.array([[p.top_k] for p in params]), weights.device)
        ordered.masked_fill_(torch.arange(most, device=weights.device) >= top_k, 0.0)
    else:
        ordered = weights.sort(descending=True).values.double()
    top_p = to_device(np.array([[p.top_p] for p in params]), weights.device)
    # An id stays if those before it have less than top_p of the total: so the first always does.
    cumulative = ordered.cumsum(1)
    goes = (cumulative - ordered >= top_p * cumulative[:, -1:]) & (top_p < 1)
    goes |= ordered == 0
    floor = ordered.masked_fill(goes, torch.inf).amin(1, keepdim=True)
    return weights.masked_fill_(weights < floor, 0.0)


def _invert(weights, noise) -> tuple[Tensor, Tensor]:
    """Returns the ids [R, 1] at which the cumulative weights pass noise [R, 1] * total, and totals.

    With buckets of two ids, weights 1, 3, 2, 2 and noise 0.6 look for 4.8 of 8. The running sums of
    the buckets, 4 and 8, pass it in bucket 1. Its own, 2 and 4, pass the 0.8 that is left at its
    first id: the token is 2.
    """
    buckets = weights.view(len(weights), -1, BUCKET)
    cumulative = _cumulative(buckets)  # [R, buckets]
    total = cumulative[:, -1:]
    target = noise * total
    bucket = _first_above(cumulative, target)  # [R, 1]
    before = F.pad(cumulative, (1, 0)).gather(1, bucket)
    inside = buckets.gather(1, bucket[:, :, None].expand(-1, -1, BUCKET))[:, 0]
    cumulative_inside = inside.cumsum(1, dtype=torch.float64)  # [R, BUCKET]
    return _first_above(cumulative_inside, target - before).add_(bucket, alpha=BUCKET), total


def _cumulative(buckets) -> Tensor:
    """Returns the running sums of buckets [R, buckets, BUCKET], fp64 [R, buckets]."""
    return buckets.sum(2).cumsum(1, dtype=torch.float64)


def _first_above(cumulative, target) -> Tensor:
    """Returns the first index [R, 1] of each row whose cumulative weight exceeds the target [R, 1].

    The target is kept inside, so that rounding never leads to an index without weight. A target of
    NaN is exceeded nowhere: the index of its row is then 0.
    """
    target = target.minimum(cumulative[:, -1:] * (1 - 1e-12))
    index = torch.searchsorted(cumulative, target, right=True)
    return index.remainder_(cumulative.shape[1])  # the length, of NaN, becomes 0
