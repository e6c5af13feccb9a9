"""What a trajectory is paid: right answers first, then what the user asked for (cheap, fast, this tool, not that tool).

Pure functions over numbers: costs in US dollars, latencies in seconds, counts of calls. Holds the one price registry. Never touches
a model, a network or a file.

The paper (ToolOrchestra, arXiv 2511.21689, section 3) describes an attempt tau in its group T by the features

    M(tau)  = [m_t1, ..., m_tn, r_out, r_cost, r_lat]      m_t = calls of tool t,  r_cost = -dollars,  r_lat = -seconds
    Mn[k]   = (M[k] - min_T M[k]) / (max_T M[k] - min_T M[k]),   0 where max = min
    R(tau)  = Mn(tau) . P  if r_out(tau) = 1,  else 0          P = the preference, 0 <= p <= 1

`group_rewards` is that. `task_reward` is the same projection with extrema that are known before anybody tries, so that it can be
compared across groups, steps and policies.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from nanorchestra.records import Preference, Price


def _check_amounts(**amounts: float) -> None:
    for name, value in amounts.items():
        if not (math.isfinite(value) and value >= 0):
            raise ValueError(f"{name} is {value}: it must be a finite number, 0 or more")


POLICY = "Qwen/Qwen3-8B"

# The table the published system accounts with. Tasks may quote other prices in their prompt; those then stand in the task.
PRICES: dict[str, Price] = {
    POLICY: Price(0.2, 0.2),
    "gpt-5": Price(1.25, 10.0),
    "gpt-5-mini": Price(0.25, 2.0),
    "o3-mini": Price(1.1, 4.4),
    "claude-opus": Price(15.0, 75.0),
    "claude-sonnet": Price(3.0, 15.0),
    "Qwen/Qwen3-32B": Price(0.8, 0.8),
    "Qwen/Qwen3-235B-A22B": Price(0.9, 0.9),
    "Qwen/Qwen2.5-Coder-32B-Instruct": Price(0.8, 0.8),
    "Qwen/Qwen2.5-Math-72B-Instruct": Price(0.9, 0.9),
    "Qwen/Qwen2.5-Math-7B-Instruct": Price(0.2, 0.2),
    "meta-llama/Llama-3.3-70B-Instruct": Price(0.9, 0.9),
    "nvidia/Llama-3_1-Nemotron-Ultra-253B-v1": Price(0.9, 0.9),
    "nvidia/Llama-3_3-Nemotron-Super-49B-v1": Price(0.9, 0.9),
}
SANDBOX_USD_PER_SECOND = 0.0000083
SEARCH_USD = 0.01  # one web search
SEARCH_USD_PER_PAGE = 0.002  # each page then extracted


class Outcome(Protocol):
    """What a reward needs to know of an attempt; types.Trajectory is one.

    `cost_usd` is all that was spent, the orchestrator's own tokens and the last call included; `calls` counts every call of every turn.
    """

    outcome: float
    cost_usd: float
    latency_s: float
    calls: Mapping[str, int]


@dataclass(frozen=True)
class Bounds:
    """The least and the most a task can cost (US dollars) and last (seconds), from its price list and limits, as (low, high)."""

    cost_usd: tuple[float, float]
    latency_s: tuple[float, float]

    def __post_init__(self) -> None:
        for name, (low, high) in (("cost_usd", self.cost_usd), ("latency_s", self.latency_s)):
            _check_amounts(**{name: low})
            _check_amounts(**{name: high})
            if high < low:
                raise ValueError(
                    f"Bounds.{name} is ({low}, {high}): the low end must not be above the high end"
                )


def sandbox_cost(seconds: float) -> float:
    """US dollars for `seconds` of wall time in the code sandbox."""
    _check_amounts(seconds=seconds)
    return seconds * SANDBOX_USD_PER_SECOND


def search_cost(pages: int) -> float:
    """US dollars for one web search that extracts `pages` pages."""
    _check_amounts(pages=pages)
    return SEARCH_USD + pages * SEARCH_USD_PER_PAGE


def group_rewards(
    members: Sequence[Outcome], preference: Preference, valid: Sequence[bool] | None = None
) -> list[float]:
    """The paper's reward of each attempt at one task (see the module's docstring).

    Extrema are taken over all valid members: wrong ones too, and a tool that an attempt did not use counts 0. A tool the
    preference does not name weighs 0. `valid[i] = False` (an infrastructure failure) keeps a member out of the extrema; it gets 0.

    The paper has no negative weights. Here a tool to avoid (p_t < 0) enters M as -m_t with the weight |p_t|, as cost and latency
    do. Between two right attempts this is the same difference as p_t * Mn[m_t]; but no right attempt falls below a wrong one's 0,
    so the policy never gains by failing. Hence 0 <= R <= sum of |p|.

    ValueError: an outcome other than 0 or 1; a cost, latency or count that is negative or not finite; a bad preference.
    """
    columns = reward_columns(members, preference, valid)
    scores = [0.0] * len(members)
    for weight, values in columns:
        for i, value in enumerate(values):
            scores[i] += weight * value
    return scores


def reward_columns(
    members: Sequence[Outcome],
    preference: Preference,
    valid: Sequence[bool] | None = None,
    bounds: Bounds | None = None,
) -> list[tuple[float, list[float]]]:
    """The parts of the rewards, (weight, one value a member) each: outcome, thrift, speed, and every tool the preference names.

    Their weighted sums are `group_rewards`; with `bounds` they are `task_reward` before its floor at 0. A wrong or invalid member has 0
    everywhere. ValueError as there.
    """
    _check_preference(preference)
    valid = [True] * len(members) if valid is None else list(valid)
    if len(valid) != len(members):
        raise ValueError(f"valid has {len(valid)} entries for {len(members)} members")
    counted = [member for member, ok in zip(members, valid) if ok]
    for member in counted:
        _check_attempt(member.outcome, member.cost_usd, member.latency_s, member.calls)

    if bounds is None:
        columns = [
            (preference.outcome, [m.outcome for m in counted]),
            (preference.cost, [-m.cost_usd for m in counted]),
            (preference.latency, [-m.latency_s for m in counted]),
        ]
        for tool, weight in preference.tools.items():
            columns.append(
                (abs(weight), [math.copysign(1.0, weight) * m.calls.get(tool, 0) for m in counted])
            )
        columns = [(weight, _min_max(values)) for weight, values in columns]
    else:
        scale = _perfect(preference)
        columns = [
            (preference.outcome / scale, [1.0] * len(counted)),
            (preference.cost / scale, [_thrift(m.cost_usd, bounds.cost_usd) for m in counted]),
            (preference.latency / scale, [_thrift(m.latency_s, bounds.latency_s) for m in counted]),
        ]
        for tool, weight in preference.tools.items():
            columns.append((weight / scale, [float(m.calls.get(tool, 0) > 0) for m in counted]))
    spread = []
    for weight, values in columns:
        paid = iter(value if member.outcome == 1 else 0.0 for value, member in zip(values, counted))
        spread.append((weight, [next(paid) if ok else 0.0 for ok in valid]))
    return spread


def task_reward(
    outcome: float,
    cost_usd: float,
    latency_s: float,
    calls: Mapping[str, int],
    preference: Preference,
    bounds: Bounds,
) -> float:
    """The reward in [0, 1] of one attempt on its own, comparable across groups, steps and policies.

        R = max(0, p_out + p_cost * cheap + p_lat * fast + sum_t p_t * [t was called]) / W   if outcome = 1, else 0
        cheap = clip((high - dollars) / (high - low), 0, 1), and 1 within bounds of no width;  fast likewise
        W = p_out + p_cost + p_lat + sum of the positive p_t                              (what a perfect attempt earns)

    A tool counts once however often it was called, so calling a favoured tool again earns nothing. A tool to avoid (p_t < 0)
    subtracts |p_t| if called; an attempt that owes more than it earned gets 0, as a wrong one does.

    ValueError as in `group_rewards`, and if no weight is positive.
    """
    _check_preference(preference)
    _check_attempt(outcome, cost_usd, latency_s, calls)
    scale = _perfect(preference)
    if outcome != 1:
        return 0.0
    earned = (
        preference.outcome
        + preference.cost * _thrift(cost_usd, bounds.cost_usd)
        + preference.latency * _thrift(latency_s, bounds.latency_s)
        + sum(weight for tool, weight in preference.tools.items() if calls.get(tool, 0))
    )
    return min(1.0, max(0.0, earned / scale))


def preference_score(
    cost_usd: float,
    latency_s: float,
    calls: Mapping[str, int],
    preference: Preference,
    bounds: Bounds,
) -> float:
    """The share in [0, 1] of the user's wishes that was honoured, whether the answer was right or not.

        S = sum_k |p_k| s_k / sum_k |p_k|      over cost, latency and the tools named, not the outcome
        s_cost = cheap, s_lat = fast (as in `task_reward`); s_t = [t was called] if p_t > 0, [t was not called] if p_t < 0

    1.0 if the user stated no wish. ValueError as in `group_rewards`.
    """
    _check_preference(preference)
    _check_attempt(0, cost_usd, latency_s, calls)
    wishes = [
        (preference.cost, _thrift(cost_usd, bounds.cost_usd)),
        (preference.latency, _thrift(latency_s, bounds.latency_s)),
    ]
    wishes += [
        (abs(weight), float((calls.get(tool, 0) > 0) == (weight > 0)))
        for tool, weight in preference.tools.items()
    ]
    total = sum(weight for weight, _ in wishes)
    return sum(weight * kept for weight, kept in wishes) / total if total > 0 else 1.0


def _perfect(preference: Preference) -> float:
    """What a perfect attempt earns: the sum of the positive weights."""
    scale = (
        preference.outcome
        + preference.cost
        + preference.latency
        + sum(w for w in preference.tools.values() if w > 0)
    )
    if scale <= 0:
        raise ValueError("the preference has no positive weight: nothing can be earned")
    return scale


def _min_max(values: list[float]) -> list[float]:
    """Mn of the paper for one feature. A spread within rounding of sums taken in another order is none."""
    if not values:
        return []
    low, high = min(values), max(values)
    if high - low <= 1e-12 * max(abs(low), abs(high)):
        return [0.0] * len(values)
    return [(value - low) / (high - low) for value in values]


def _thrift(spent: float, bounds: tuple[float, float]) -> float:
    low, high = bounds
    if high == low:
        return 1.0 if spent <= high else 0.0
    return min(1.0, max(0.0, (high - spent) / (high - low)))


def _check_attempt(
    outcome: float, cost_usd: float, latency_s: float, calls: Mapping[str, int]
) -> None:
    if outcome not in (0, 1):
        raise ValueError(f"outcome is {outcome}: it must be 0 or 1")
    _check_amounts(
        cost_usd=cost_usd,
        latency_s=latency_s,
        **{f"calls[{tool!r}]": count for tool, count in calls.items()},
    )


def _check_preference(preference: Preference) -> None:
    _check_amounts(
        **{
            f"preference.{name}": getattr(preference, name)
            for name in ("outcome", "cost", "latency")
        }
    )
    for tool, weight in preference.tools.items():
        if not math.isfinite(weight):
            raise ValueError(f"preference.tools[{tool!r}] is {weight}: it must be a finite number")
