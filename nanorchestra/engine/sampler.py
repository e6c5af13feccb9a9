"""Draws the next token of each row, and reports its log-probability, on any device.

Rows with any parameters, greedy ones too, mix in one batch. The noise of a row is one uniform
number, a hash of (seed, position): from the same logits a request draws the same token whatever its
neighbours, after a preemption and after a restart. The token is found by inverting the cumulative
distribution, first over buckets of the vocabulary, then within one; on a CPU in native/sampler.c.
Only a row with a top-p and no top-k is sorted. `draw_tokens` does not wait for a GPU;
`score_tokens`, and the lists of what has been drawn, do.
"""

from __future__ import annotations

import ctypes
from collections import abc
from functools import cache, lru_cache
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from nanorchestra.engine.sequence import SamplingParams, TopLogprobs
from nanorchestra.engine.transfers import to_device
from nanorchestra.model.compiler import address, compiled

BUCKET = 64  # ids
WORTH_THREADS = 2**18  # weights
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

    # Softmax, but for its division, of the ids that top-k and top-p keep. A greedy row has
    # temperature 1: so has its log-probability.
    greedy = [p.greedy for p in params]
    temperature = np.array([1.0 if p.greedy else p.temperature for p in params], np.float32)
    inverse = to_device(1.0 / temperature, device)[:, None]
    weights, peaks, peak_ids = _weigh(logits[:, :num_drawable], inverse, allowed, any(greedy))
    truncated = [row for row, p in enumerate(params) if p.truncated]
    by_top_k = [row for row in truncated if params[row].top_k]
    by_sort = [row for row in truncated if not params[row].top_k]
    for limited in (by_top_k, by_sort):
        if limited:
            rows = _index(limited, device)
            kept = _truncate(weights.index_select(0, rows), [params[row] for row in limited])
            weights.index_copy_(0, rows, kept)

    noise = to_device(uniforms([p.seed for p in params], positions), device)[:, None]
    tokens, total = _invert(weights, noise)
    if any(greedy):
        tokens = torch.where(to_device(np.array(greedy), device)[:, None], peak_ids, tokens)

    # Log-probabilities.
    logprobs = _logprobs(logits, inverse, tokens, peaks, total)
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
    one = logits.new_ones(len(logits), 1, dtype=torch.float32)
    weights, peaks, _ = _weigh(logits[:, :num_drawable], one, [None] * len(logits), False)
    _, total = _invert(weights, torch.zeros_like(one, dtype=torch.float64))  # sums as a draw does
    drawable = targets.clamp(max=num_drawable - 1)[:, None]
    values = _logprobs(logits, one, drawable, peaks, total)[:, 0]
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


def _weigh(logits, inverse, allowed, with_ids) -> tuple[Tensor, Tensor, Tensor | None]:
    """Returns exp(x - peak) of x = logits * inverse [R, V], filled up to whole buckets with zeros.

    With it the peak of each row [R, 1], and if `with_ids` its first id [R, 1]. Ids outside a row's
    mask have weight 0, and are no peaks.
    """
    rows, vocab = logits.shape
    weights = inverse.new_empty(rows, vocab + -vocab % BUCKET)
    if library := _library(logits.device.type):
        return weights, *_weigh_in_c(library, weights, logits, inverse, allowed, with_ids)
    x = logits.float() * inverse
    masked = [row for row, mask in enumerate(allowed) if mask is not None]
    if masked:
        forbidden = to_device(~np.stack([allowed[row] for row in masked]), x.device)
        index = _index(masked, x.device)
        x.index_copy_(0, index, x.index_select(0, index).masked_fill_(forbidden, -torch.inf))
    peaks = x.amax(1, keepdim=True)
    peak_ids = x.argmax(1, keepdim=True) if with_ids else None
    torch.exp(x.sub_(peaks), out=weights[:, :vocab])
    weights[:, vocab:] = 0.0
    return weights, peaks, peak_ids


def _weigh_in_c(library, weights, logits, inverse, allowed, with_ids):
    logits = logits.float()
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    rows, vocab = logits.shape
    peaks = torch.empty_like(inverse)
    peak_ids = torch.empty(rows, 1, dtype=torch.int64) if with_ids else None
    masks = (ctypes.c_void_p * rows)(*[None if m is None else m.ctypes.data for m in allowed])
    library.weigh(
        *(logits.data_ptr(), logits.stride(0), vocab, inverse.data_ptr(), masks),
        *(weights.data_ptr(), weights.shape[1], peaks.data_ptr()),
        *(address(peak_ids), rows, _threads(weights)),
    )
    return peaks, peak_ids


def _logprobs(logits, inverse, tokens, peaks, total) -> Tensor:
    """Returns the log-probabilities of tokens [R, 1], fp64 [R, 1], with what `_weigh` was given."""
    return (logits.gather(1, tokens).float() * inverse - peaks).double() - total.log()


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
    if library := _library(weights.device.type):
        tokens, total = torch.empty_like(noise, dtype=torch.int64), torch.empty_like(noise)
        library.invert(
            *(weights.data_ptr(), weights.shape[1], noise.data_ptr(), tokens.data_ptr()),
            *(total.data_ptr(), len(noise), _threads(weights)),
        )
        return tokens, total
    buckets = weights.view(len(weights), -1, BUCKET)
    cumulative = buckets.sum(2).cumsum(1, dtype=torch.float64)  # [R, buckets]
    total = cumulative[:, -1:]
    target = noise * total
    bucket = _first_above(cumulative, target)  # [R, 1]
    before = F.pad(cumulative, (1, 0)).gather(1, bucket)
    inside = buckets.gather(1, bucket[:, :, None].expand(-1, -1, BUCKET))[:, 0]
    cumulative_inside = inside.cumsum(1, dtype=torch.float64)  # [R, BUCKET]
    return _first_above(cumulative_inside, target - before).add_(bucket, alpha=BUCKET), total


def _first_above(cumulative, target) -> Tensor:
    """Returns the first index [R, 1] of each row whose cumulative weight exceeds the target [R, 1].

    The target is kept inside, so that rounding never leads to an index without weight. A target of
    NaN is exceeded nowhere: the index of its row is then 0.
    """
    target = target.minimum(cumulative[:, -1:] * (1 - 1e-12))
    index = torch.searchsorted(cumulative, target, right=True)
    return index.remainder_(cumulative.shape[1])  # the length, of NaN, becomes 0


def _threads(weights) -> int:
    """Returns how many threads weigh or invert: to wake one costs more than few weights do."""
    return torch.get_num_threads() if weights.numel() >= WORTH_THREADS else 1


@cache
def _library(device: str) -> ctypes.CDLL | None:
    """Returns sampler.c for tensors on a CPU, None for others or where it cannot be had."""
    library = compiled("sampler.c", f"-DBUCKET={BUCKET}") if device == "cpu" else None
    if library:
        pointer, size, number = ctypes.c_void_p, ctypes.c_long, ctypes.c_int
        matrix = pointer, size
        results = pointer, pointer, size, number
        library.weigh.argtypes = [*matrix, size, pointer, pointer, *matrix, *results]
        library.invert.argtypes = [*matrix, pointer, *results]
    return library
