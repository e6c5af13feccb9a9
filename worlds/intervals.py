"""Says how sure a figure is: bootstrap intervals over tasks, paired tests, pass^k."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from statistics import fmean

import numpy as np

DRAWS = 2000  # resamples of a bootstrap, and sign flips of a test
Interval = tuple[float, float, float]  # a mean, the ends of its 95% interval


def interval(values: Sequence[float]) -> Interval:
    """Returns the mean of one value per task and its 95% bootstrap interval (percentiles)."""
    if len(values) < 2:
        return (fmean(values or [math.nan]), -math.inf, math.inf)
    means = np.asarray(values, float)[_picks(len(values))].mean(1)
    return (fmean(values), *map(float, np.quantile(means, (0.025, 0.975))))


@lru_cache(maxsize=2)
def _picks(count):
    """The tasks of each resample, [DRAWS, count]."""
    return np.random.default_rng(0).integers(count, size=(DRAWS, count))


def p_value(differences: Sequence[float]) -> float:
    """Returns the p of a paired test: how often random signs give as large a mean difference."""
    values = np.asarray(differences, float)
    signs = np.random.default_rng(0).choice((-1.0, 1.0), size=(DRAWS, len(values)))
    extreme = np.abs(signs @ values) >= abs(values.sum()) - 1e-9
    return float((1 + extreme.sum()) / (1 + DRAWS))


def pass_hat(successes: Sequence[tuple[int, int]], k: int) -> float:
    """Returns pass^k: the probability that k attempts at a task are all right.

    `successes` are (right attempts, attempts) by task; the estimate is that of tau-bench (Yao et
    al. 2024, arXiv 2406.12045), the mean of C(right, k) / C(attempts, k).
    """
    return fmean(math.comb(c, k) / math.comb(n, k) for c, n in successes if n >= k)
